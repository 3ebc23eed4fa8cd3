"""Short campaigns against a real service, and the parts of a campaign: cases, oracle, rules, judge, report."""

import io
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image
from tests.qualms.fuzz.body_cases import MAKERS as BODY_MAKERS
from tests.qualms.fuzz.body_cases import MAX_BODY_BYTES, body_case
from tests.qualms.fuzz.campaign import SETTINGS, main, run
from tests.qualms.fuzz.case import Case, sentinel, sentinel_id
from tests.qualms.fuzz.exchange import Outcome
from tests.qualms.fuzz.http_cases import MAKERS, http_case
from tests.qualms.fuzz.image_cases import MUTATIONS, image_case, repair_checksums, saved_file
from tests.qualms.fuzz.judge import Judge
from tests.qualms.fuzz.oracle import read_requests
from tests.qualms.fuzz.replies import Reply, ReplyReader, problem_with_error
from tests.qualms.fuzz.report import Results, to_markdown
from tests.qualms.fuzz.rules import STRICTER
from tests.qualms.fuzz.service import Service, running_service

from qualms.bundle.file import Bundle

GET = b"GET /livez HTTP/1.1\r\nHost: x\r\n"
PROBLEM = (
    b'{"type":"/problems/malformed","title":"The request cannot be read","status":400,"detail":"No.","request_id":"a"}'
)


@pytest.fixture(scope="module")
def service(bundle: Bundle) -> Iterator[Service]:
    with running_service(bundle.path, **SETTINGS) as process:
        yield process


# Campaigns


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "cases"), [("http", 3000), ("bodies", 600), ("images", 1500)])
def test_a_short_campaign_finds_no_violation(service: Service, kind: str, cases: int) -> None:
    results = run(service, kind, cases, seed=1)
    assert not results.violations, to_markdown(kind, results)
    assert results.cases == cases
    assert {200, 400, 415} <= {code for _, code in results.answered}


@pytest.mark.slow
def test_the_command_writes_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.md"
    assert main(["--kind", "bodies", "--cases", "40", "--report", str(report)]) == 0
    assert "40 cases in" in report.read_text()
    assert "| predict | 200 |" in report.read_text()


# Cases


def test_cases_follow_from_seed_and_number() -> None:
    for make in (http_case, body_case, image_case):
        cases = [make(0, number) for number in range(40)]
        assert cases == [make(0, number) for number in range(40)]
        assert cases != [make(1, number) for number in range(40)]
        assert all(b"".join(case.pieces()) == case.data for case in cases)


def test_all_kinds_of_cases_occur() -> None:
    assert {http_case(0, number).kind for number in range(3000)} == set(MAKERS)
    assert {body_case(0, number).kind for number in range(len(BODY_MAKERS))} == {
        maker.__name__ for maker in BODY_MAKERS
    }


def test_image_cases_have_all_formats_mutations_and_hostile_files() -> None:
    kinds = {image_case(0, number).kind for number in range(6000)}
    for name in ("png", "jpeg", "webp", "bmp", "gif", "tiff"):
        assert {f"{name}, {mutation.__name__}" for mutation in MUTATIONS} < kinds
        assert {f"{name}, complete", f"{name}, hostile, complete", f"{name}, hostile, bits"} < kinds


def test_checksums_of_changed_png_files_are_repaired() -> None:
    kind, data = saved_file(4)
    changed = bytearray(data)
    changed[18] ^= 1  # a byte of the width
    repair_checksums(changed)
    assert kind == "png"
    assert Image.open(io.BytesIO(changed)).width == Image.open(io.BytesIO(data)).width ^ 256
    repair_checksums(changed[:-1])


def test_h11_accepts_some_cases_of_most_kinds_and_refuses_others() -> None:
    ends = Counter(
        (case.kind, read_requests(case.data).end) for case in (http_case(0, number) for number in range(3000))
    )
    assert ends["valid", "refused"] == 0
    for kind in ("request_lines", "fields", "framing", "chunks", "pipelines", "flipped", "white_space", "injected"):
        assert ends[kind, "idle"] > 3
        assert ends[kind, "refused"] > 3


# Oracle


def test_requests_are_read_with_their_framing() -> None:
    chunked = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n2;a=b\r\nhi\r\n0\r\nX: y\r\n\r\n"
    stream = read_requests(b"\r\n" + chunked + GET + b"\r\n")
    assert (stream.end, stream.complete) == ("idle", 2)
    assert stream.messages[0].empty_lines == 1
    assert stream.messages[0].framing == b"2;a=b\r\n\r\n0\r\nX: y\r\n\r\n"
    assert stream.messages[1].head == GET + b"\r\n"


@pytest.mark.parametrize(
    ("data", "end", "complete"),
    [
        (GET, "incomplete", 0),
        (GET + b"Content-Length: 5\r\n\r\nhell", "incomplete", 0),
        (GET + b"Connection: close\r\n\r\n" + GET, "closed", 1),
        (b"GET /livez HTTP/1.0\r\n\r\nrest", "closed", 1),
        (b"GET /livez HTTP/1.0\r\nConnection: keep-alive\r\n\r\n", "idle", 1),
        (GET + b"\r\n" + b"GET /livez\r\n\r\n", "refused", 1),
        (GET + b"Transfer-Encoding: chunked\r\n\r\nx\r\n", "refused", 0),
        (GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX\r\n\r\n", "refused", 0),
        (GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\nContent-Length: x\r\n\r\n" + GET + b"\r\n", "idle", 2),
    ],
)
def test_a_stream_ends_as_h11_reads_it(data: bytes, end: str, complete: int) -> None:
    stream = read_requests(data)
    assert (stream.end, stream.complete) == (end, complete)


EXAMPLES = {
    "bare LF": b"GET /livez HTTP/1.1\nHost: x\r\n\r\n",
    "folded line": GET + b"X: y\r\n z\r\n\r\n",
    "control character": GET + b"X: \x01\r\n\r\n",
    "Host with other characters": b"GET / HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "Host of another form": b"GET / HTTP/1.1\r\nHost: x:y\r\n\r\n",
    "Transfer-Encoding and Content-Length": GET + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "several Content-Length": GET + b"Content-Length: 0, 0\r\n\r\n",
    "Transfer-Encoding in HTTP/1.0": b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "another version": b"GET / HTTP/1.2\r\nHost: x\r\n\r\n",
    "Content-Length of more than 18 digits": GET + b"Content-Length: 1000000000000000000\r\n\r\n",
    "unknown method": b"BREW / HTTP/1.1\r\nHost: x\r\n\r\n",
    "trailer that is part of the framing": GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\nHost: y\r\n\r\n",
    "target too long": b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % (b"a" * 70_000),
    "head too long": GET + b"X: %b\r\n\r\n" % (b"a" * 70_000),
    "many header fields": GET + b"X: y\r\n" * 300 + b"\r\n",
    "trailers too long": GET + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: %b\r\n\r\n" % (b"a" * 70_000),
    "target of another form": b"GET x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
    "target with other characters": b"GET /# HTTP/1.1\r\nHost: x\r\n\r\n",
    "chunk line of another form": GET + b"Transfer-Encoding: chunked\r\n\r\n0 \r\n\r\n",
    "many empty lines": b"\r\n" * 5 + GET + b"\r\n",
    "Expect of another value": GET + b"Expect: x\r\n\r\n",
}


@pytest.mark.parametrize("rule", STRICTER, ids=lambda rule: rule.name)
def test_each_rule_applies_to_a_request_that_h11_accepts_and_to_no_valid_one(rule: object) -> None:
    (found,) = (one for one in STRICTER if one is rule)
    assert found.applies(read_requests(EXAMPLES[found.name]).messages[0])
    for number in range(300):
        case = http_case(0, number)
        if case.kind == "valid":
            assert not any(map(found.applies, read_requests(case.data).messages))


# Judge


def outcome(data: bytes, *replies: Reply, **state: bool) -> tuple[Case, Outcome]:
    return Case(7, "test", data), Outcome(read_requests(data + sentinel(7)), list(replies), **state)  # type: ignore[arg-type]


def reply(status: int = 200, request_id: bytes = b"a", *, closes: bool = False, body: bytes = PROBLEM) -> Reply:
    headers = {b"content-type": b"application/problem+json", b"x-request-id": request_id}
    return Reply(status, headers | ({b"connection": b"close"} if closes else {}), body)


def violations(data: bytes, *replies: Reply, **state: bool) -> list[str]:
    return Judge(MAX_BODY_BYTES)(*outcome(data, *replies, **state)).violations


LAST = reply(request_id=sentinel_id(7))
BROKEN = b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n"
WITH_ID = GET + b"X-Request-ID: a\r\n\r\n"


def test_correct_replies_are_no_violations() -> None:
    assert violations(WITH_ID, reply(), LAST) == []
    assert violations(b"GET /livez\r\n\r\n", reply(400, closes=True), closed=True) == []
    assert violations(GET + b"X: \x01\r\n\r\n", reply(400, closes=True), closed=True) == []
    assert violations(GET + b"Connection: close\r\n\r\n", reply(closes=True), closed=True) == []


@pytest.mark.parametrize(
    ("data", "replies", "state", "expected"),
    [
        (WITH_ID, [reply(), LAST, reply()], {}, "more replies than requests: 200"),
        (WITH_ID, [LAST], {"closed": True}, "the sentinel is answered out of place"),
        (WITH_ID, [reply(request_id=b"b"), LAST], {}, "the reply has the id of another request"),
        (WITH_ID, [reply(500), LAST], {}, "status 500"),
        (WITH_ID, [reply(404), LAST], {}, "404 on route health, expected [200]"),
        (WITH_ID, [reply(closes=True)], {"closed": True}, "closed after a 200 without need"),
        (WITH_ID, [], {"closed": True}, "close instead of a reply to a complete request"),
        (WITH_ID, [], {"overdue": True}, "no reply and no close (h11: idle)"),
        (GET + b"X: \x01\r\n\r\n", [reply(), LAST], {}, "accepted with 200: control character"),
        (GET + b"X: \x01\r\n\r\n", [reply(400)], {}, "refused without closing the connection: control character"),
        (BROKEN, [reply(closes=True)], {"closed": True}, "a prediction for an incomplete or broken body"),
        (BROKEN, [reply(415)], {"closed": True}, "415 without a close after an incomplete or broken body"),
        (b"GET /livez\r\n\r\n", [reply(), LAST], {"closed": True}, "accepted with 200; h11: illegal request line"),
        (
            b"GET /livez\r\n\r\n",
            [reply(400, closes=True, body=b"{}")],
            {"closed": True},
            "the body of a 400 is not a problem with all members",
        ),
    ],
)
def test_wrong_replies_are_violations(data: bytes, replies: list[Reply], state: dict[str, bool], expected: str) -> None:
    assert expected in violations(data, *replies, **state)


def test_the_parts_of_a_reply_are_read_in_any_pieces() -> None:
    whole = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 400 Bad\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}rest"
    reader = ReplyReader(b"GET")
    assert reader.feed(whole[:50]) is None
    result = reader.feed(whole[50:])
    assert result is not None
    assert (result.status, result.before, result.body, result.closes, reader.rest) == (400, [100], b"{}", True, b"rest")
    assert problem_with_error(result) == "the content type of a 400 is None"


def test_counters_that_differ_from_the_replies_are_violations() -> None:
    results = Results(memory=[1, 1])
    results.answered.update({("health", 200): 3, ("protocol", 400): 2})
    results.counted.update({("health", 200): 5, ("protocol", 400): 1})
    results.unread = 2
    results.compare_counters()
    assert list(results.violations) == ["qualms_requests_total{route='protocol', code=400} is too small"]
    results.unread = 1
    results.compare_counters()
    assert "qualms_requests_total is too large" in results.violations
    assert "| health | 200 | 3 | 5 |" in to_markdown("title", results)


def test_memory_that_grows_after_the_second_tenth_is_a_leak() -> None:
    assert Results(memory=[1, *[100] * 10, 300, *[100] * 8]).leak == 0
    assert Results(memory=[1, *range(100, 290, 10)]).leak == 160
    results = Results(memory=[1, 1], killed_workers=Counter(cpu=2, memory=0), library_lines=7)
    assert "Worker processes killed: 2 (cpu). Messages of C libraries: 7." in to_markdown("title", results)


# Service


def test_messages_of_libraries_are_counted_and_tracebacks_are_errors(tmp_path: Path) -> None:
    log, stderr = tmp_path / "log", tmp_path / "stderr"
    log.write_text('{"level":"info"}\n{"level":"error"}\nnot JSON\n')
    stderr.write_text("ZIPDecode: ZLib error: .\nTraceback (most recent call last):\n")
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    service = Service(process, 0, log, stderr)
    assert service.library_lines() == 2
    assert service.log_errors() == ["Traceback (most recent call last):", '{"level":"error"}', "not JSON"]
    assert service.memory() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_includes_that_of_workers(tmp_path: Path) -> None:
    program = "import subprocess, sys; " + (
        "subprocess.run([sys.executable, '-c', 'x = b\"x\" * 50_000_000; print(flush=True); input()'])"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin
        assert process.stdout
        process.stdout.readline()
        assert Service(process, 0, tmp_path, tmp_path).memory() > 50_000_000
        process.stdin.write(b"\n")
