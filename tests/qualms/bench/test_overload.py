import asyncio
import io
import math
import os
import sys
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop
from rich.console import Console
from typer.testing import CliRunner

from qualms import cli
from qualms.bench import overload
from qualms.bench.load.closed_loop import LoadResult
from qualms.bench.load.open_loop import OpenLoopResult, run_open_loop
from qualms.bench.overload import OverloadResult, Poll, measure, poll_service, print_overload, run_overload
from qualms.bench.servers.processes import HOST, BenchError, ServerProcess, free_port

GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
CLOSING = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nRetry-After: 3\r\n\r\n"
REFUSED_WITHOUT_RETRY_AFTER = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
DISCONNECT = b""
NOT_HTTP = b"hello\r\n\r\n"

IDLE = LoadResult(100.0, 0.01, 0.02, 0, 100)


class Stub:
    """A server that sends the replies in rotation; it sends none before `hold` requests have arrived."""

    def __init__(self, *replies: bytes, hold: float = 0) -> None:
        self.replies, self.hold = replies, hold
        self.requests: list[bytes] = []
        self.release = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.split(b": ", 1) for line in head.strip().split(b"\r\n")[1:])
                body = await reader.readexactly(int(fields.get(b"Content-Length", b"0")))
                reply = self.replies[len(self.requests) % len(self.replies)]
                self.requests.append(head + body)
                if len(self.requests) >= self.hold:
                    self.release.set()
                await self.release.wait()
                writer.write(reply)
                if reply in (DISCONNECT, CLOSING, NOT_HTTP):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def run_against(create: Callable[[], Stub], function: Callable[[str], Awaitable[Any]]) -> tuple[Any, Stub]:
    """The result of `function`, called with the URL of a stub that runs in the same event loop."""

    async def main() -> tuple[Any, Stub]:
        stub = create()
        async with await asyncio.start_server(stub, HOST, 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            try:
                return await function(f"http://{HOST}:{port}"), stub
            finally:
                listener.close()
                stub.release.set()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def send_to(create: Callable[[], Stub], count: int, **options: Any) -> tuple[OpenLoopResult, Stub]:
    """Send `count` requests within half a second; `max_lag` is infinite, so that a busy machine skips none."""
    given: dict[str, Any] = {"deadline": 10.0, "max_lag": math.inf, **options}
    return run_against(create, lambda url: run_open_loop(f"{url}/predict", [b"one", b"two"], count / 0.5, 0.5, **given))


def total(result: OpenLoopResult) -> int:
    return len(result.good) + result.refused + result.other_statuses.total() + result.unanswered


def printed(result: OverloadResult) -> str:
    file = io.StringIO()
    print_overload(result, Console(file=file, width=200))
    return file.getvalue()


# Open loop


def test_each_request_sent_is_counted_once() -> None:
    replies = (GOOD, REFUSED, CLOSING, REFUSED_WITHOUT_RETRY_AFTER, UNAVAILABLE, DISCONNECT, GOOD, NOT_HTTP)
    result, stub = send_to(lambda: Stub(*replies), 80)
    assert result.sent == len(stub.requests) == total(result) == 80
    assert (len(result.good), result.unanswered) == (30, 20)
    assert result.refusals == {b"3": 10, None: 10}
    assert result.other_statuses == {503: 10}
    assert (result.skipped_late, result.skipped_no_connection) == (0, 0)
    assert 1 <= result.peak_connections <= 80


def test_requests_contain_the_bodies_in_rotation_and_the_deadline() -> None:
    _, stub = send_to(lambda: Stub(GOOD), 10, deadline=2.5)
    assert sorted(request[-3:] for request in stub.requests) == [b"one"] * 5 + [b"two"] * 5
    assert all(b"\r\nX-Request-Timeout: 2.5\r\n" in request for request in stub.requests)


def test_requests_are_sent_when_due_without_waiting_for_replies() -> None:
    # The stub sends no reply before the last request, so a closed loop would wait for ever.
    result, _ = send_to(lambda: Stub(GOOD, hold=50), 50)
    assert len(result.good) == result.peak_connections == 50
    # The first request was due 0.49 seconds before the last one, and its latency is measured from then.
    assert max(result.good) >= 0.49
    assert result.busy_seconds >= 0.5


def test_requests_are_skipped_while_all_connections_are_busy() -> None:
    result, stub = send_to(lambda: Stub(GOOD, hold=math.inf), 20, max_connections=3, deadline=0.1, extra_wait=0.0)
    assert (result.sent, result.unanswered, result.skipped_no_connection) == (3, 3, 17)
    assert len(stub.requests) == result.peak_connections == 3


def test_every_second_request_can_have_a_connection_of_its_own() -> None:
    shared, _ = send_to(lambda: Stub(GOOD), 20)
    result, _ = send_to(lambda: Stub(GOOD), 20, single_use_every=1)
    assert len(result.good) == len(shared.good) == 20
    assert shared.opened < result.opened == 20


def test_a_generator_that_is_too_late_skips_requests_and_reports_it() -> None:
    result, stub = send_to(lambda: Stub(GOOD), 20, max_lag=-1.0)
    assert (result.skipped_late, result.sent, stub.requests) == (20, 0, [])
    text = printed(OverloadResult(10.0, IDLE, result, [], None))
    assert "could not keep the rate: 20 requests were not sent" in text
    assert "1 of 6 checks passed: all other requests get 429" in text  # there were no other requests


def test_requests_to_a_closed_port_are_unanswered() -> None:
    url = f"http://{HOST}:{free_port()}/predict"
    result = asyncio.run(run_open_loop(url, [b"x"], 40, 0.25, 0.1, max_lag=math.inf))
    assert result.sent == result.unanswered == 10


@pytest.mark.parametrize(
    ("refusals", "usable"),
    [
        ({}, []),
        ({b"1": 2, b"30": 1}, [1, 1, 30]),
        ({None: 4, b"0": 1, b"-1": 1, b"1.5": 1, b"soon": 1, b"Wed, 21 Oct 2015 07:28:00 GMT": 1, b"": 1}, []),
    ],
)
def test_a_retry_after_is_usable_if_it_is_at_least_one_whole_second(
    refusals: dict[bytes | None, int], usable: list[int]
) -> None:
    assert OpenLoopResult(1.0, 1.0, 1.0, refusals=Counter(refusals)).retry_after_seconds == usable


# Checks


def overloaded(**changes: Any) -> OverloadResult:
    """A result that passes all checks, with some fields replaced."""
    offered: dict[str, Any] = {
        "good": array("d", [0.2] * 900),
        "refusals": Counter({b"1": 2000, b"2": 100}),
        "lags": array("d", [0.001] * 3000),
        "busy_seconds": 10.0,
    }
    polls = [Poll(True, 0.01, 2**20 * (100 + index)) for index in range(4)]
    whole: dict[str, Any] = {"polls": polls, "after": LoadResult(90.0, 0.012, 0.02, 0, 100)}
    for name, value in changes.items():
        (whole if name in whole else offered)[name] = value
    return OverloadResult(100.0, IDLE, OpenLoopResult(300.0, 10.0, 0.5, **offered), whole["polls"], whole["after"])


def test_all_checks_pass_for_a_good_result() -> None:
    result = overloaded()
    assert all(result.checks.values())
    assert (result.goodput, result.share_of_capacity, result.admitted_in_time) == (90.0, 0.9, 1.0)
    text = printed(result)
    for words in ("6 of 6 checks passed", "0.90 of capacity", "1 to 2 s", "0.40 of the deadline", "4 of 4 polls"):
        assert words in text
    assert "could not keep" not in text
    assert "Failed" not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"good": array("d", [0.6] * 900)}, ["p99", "goodput"]),
        ({"good": array("d", [0.2] * 880 + [0.6] * 20)}, ["p99"]),
        ({"other_statuses": Counter({504: 10})}, ["429"]),
        ({"good": array("d", [0.2] * 880), "other_statuses": Counter({504: 20})}, ["p99", "429"]),
        ({"unanswered": 1}, ["429"]),
        ({"refusals": Counter({b"1": 2099, None: 1})}, ["429"]),
        ({"refusals": Counter({b"1": 2099, b"0": 1})}, ["429"]),
        ({"good": array("d", [0.2] * 700), "lags": array("d", [0.001] * 2800)}, ["goodput"]),
        ({"polls": [Poll(True, 0.01, 2**20), Poll(True, 0.01, 2**21)]}, ["memory"]),
        ({"polls": [Poll(True, 0.01, None)]}, ["memory"]),
        ({"polls": [Poll(True, 0.01, 1), Poll(False, 1.0, 1)]}, ["readiness"]),
        ({"polls": []}, ["memory", "readiness"]),
        ({"after": None}, ["latency"]),
        ({"after": LoadResult(90.0, 0.016, 0.02, 0, 100)}, ["latency"]),
        ({"after": LoadResult(90.0, 0.01, 0.02, 1, 100)}, ["latency"]),
    ],
)
def test_each_fault_fails_its_check(changes: dict[str, Any], words: list[str]) -> None:
    result = overloaded(**changes)
    failed = [name for name, passed in result.checks.items() if not passed]
    assert len(failed) == len(words)
    assert all(word in name for word, name in zip(words, failed, strict=True))
    assert f"{6 - len(words)} of 6 checks passed" in printed(result)


def test_a_server_that_always_replies_late_fails_the_checks() -> None:
    # The stub sends no reply before the last request, when the deadline of nearly all others has passed.
    offered, _ = send_to(lambda: Stub(GOOD, hold=100), 100, deadline=0.02)
    result = OverloadResult(100.0, IDLE, offered, [Poll(True, 0.01, 1)], IDLE)
    assert len(offered.good) == 100
    assert offered.in_time <= 5
    assert not result.checks["admitted requests' p99 is within the deadline"]
    assert not result.checks["goodput is at least 0.8 of capacity"]


# Polling


@pytest.mark.parametrize(
    ("reply", "ready"), [(GOOD, True), (UNAVAILABLE, False), (DISCONNECT, False), (NOT_HTTP, False)]
)
def test_a_service_is_ready_only_if_readyz_returns_200(reply: bytes, ready: bool) -> None:
    polls: list[Poll] = []

    async def poll(url: str) -> None:
        enough = asyncio.Event()

        def memory() -> int:
            if len(polls) == 2:
                enough.set()
            return 7

        polling = asyncio.create_task(poll_service(url, memory, 0.01, polls))
        await enough.wait()
        polling.cancel()

    _, stub = run_against(lambda: Stub(reply), poll)
    assert [(poll.ready, poll.memory) for poll in polls] == [(ready, 7)] * len(polls)
    assert len(polls) >= 2
    assert stub.requests[0].startswith(b"GET /readyz HTTP/1.1\r\n")


def test_a_service_that_does_not_reply_or_does_not_listen_is_not_ready() -> None:
    polls: list[Poll] = []

    async def poll(url: str) -> None:
        for target in (url, f"http://{HOST}:{free_port()}"):
            polled = asyncio.Event()

            def memory(polled: asyncio.Event = polled) -> None:
                polled.set()

            polling = asyncio.create_task(poll_service(target, memory, 10.0, polls, timeout=0.05))
            await polled.wait()
            polling.cancel()

    run_against(lambda: Stub(GOOD, hold=math.inf), poll)
    assert [poll.ready for poll in polls] == [False, False]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_is_read_for_a_running_process_and_none_for_an_ended_one() -> None:
    assert (ServerProcess("", os.getpid()).memory() or 0) > 2**20
    assert ServerProcess("", 2**30).memory() is None


# Whole runs


@pytest.mark.slow
def test_an_overload_of_the_real_service_counts_every_request_and_ends_its_process(
    bundle_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: list[ServerProcess] = []

    def recorded(service: ServerProcess, *arguments: Any) -> OverloadResult:
        services.append(service)
        return measure(service, *arguments)

    monkeypatch.setattr(overload, "measure", recorded)
    console = Console(file=io.StringIO(), width=80)
    result = run_overload(str(bundle_file), seconds=1.0, idle_seconds=0.2, console=console)
    offered = result.offered
    assert total(offered) == offered.sent > 0
    assert offered.sent + offered.skipped_late + offered.skipped_no_connection == round(offered.rate * offered.seconds)
    assert offered.rate == pytest.approx(3 * result.capacity)
    assert len(offered.retry_after_seconds) == offered.refused
    assert result.polls
    assert isinstance(console.file, io.StringIO)
    assert "of 6 checks passed" in " ".join(console.file.getvalue().split())
    with pytest.raises(ProcessLookupError):
        os.kill(services[0].pid, 0)


def test_a_running_service_is_not_overloaded() -> None:
    with pytest.raises(BenchError, match="starts its own service"):
        run_overload("http://127.0.0.1:8000")


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(overload, "run_overload", lambda model, **options: given.update(options, model=model))
    assert CliRunner().invoke(cli.app, ["bench", "mnist", "--overload", "60", "--deadline", "0.25"]).exit_code == 0
    assert given == {"model": "mnist", "seconds": 60.0, "deadline": 0.25, "pictures": "digits"}
