"""The overload's account adds up, its requests come when they are due, and a service that fails is said to."""

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
from qualms.bench import open_loop, overload, processes
from qualms.bench.load import Load
from qualms.bench.open_loop import Offered, offer
from qualms.bench.overload import Overload, measure, show
from qualms.bench.processes import BenchError, Started
from qualms.bench.watch import Look, watch

GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
LAST = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\nRetry-After: 3\r\n\r\n"
BARE = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"
UNAVAILABLE = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
HANG_UP = b""
NOT_HTTP = b"hello\r\n\r\n"

CALM = Load(100.0, 0.01, 0.02, 0)


class Stub:
    """A server that gives replies in turn; with `hold`, none before so many requests have come."""

    def __init__(self, *replies: bytes, hold: float = 0) -> None:
        self.replies, self.hold = replies, hold
        self.requests: list[bytes] = []
        self._enough = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                fields = dict(line.split(b": ", 1) for line in head.strip().split(b"\r\n")[1:])
                body = await reader.readexactly(int(fields.get(b"Content-Length", b"0")))
                reply = self.replies[len(self.requests) % len(self.replies)]
                self.requests.append(head + body)
                if len(self.requests) >= self.hold:
                    self._enough.set()
                await self._enough.wait()
                writer.write(reply)
                if reply in (HANG_UP, LAST, NOT_HTTP):
                    return
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def against(stub: Callable[[], Stub], do: Callable[[str, Stub], Awaitable[Any]]) -> tuple[Any, Stub]:
    """What `do` returns, given the URL of a stub that answers on the same event loop."""

    async def main() -> tuple[Any, Stub]:
        made = stub()
        async with await asyncio.start_server(made, processes.HOST, 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            try:
                return await do(f"http://{processes.HOST}:{port}", made), made
            finally:
                listener.close()
                made._enough.set()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


def offered_to(stub: Callable[[], Stub], count: int, **options: Any) -> tuple[Offered, Stub]:
    """`count` requests within half a second; however busy the machine, none is given up."""
    given: dict[str, Any] = {"deadline": 10.0, "most_lag": math.inf, **options}
    return against(stub, lambda url, _: offer(f"{url}/predict", [b"one", b"two"], count / 0.5, 0.5, **given))


def summed(found: Offered) -> int:
    return len(found.good) + found.refused + found.others.total() + found.unanswered


def printed(found: Overload) -> str:
    file = io.StringIO()
    show(found, Console(file=file, width=200))
    return file.getvalue()


# The account


def test_each_request_offered_is_in_one_column() -> None:
    replies = (GOOD, REFUSED, LAST, BARE, UNAVAILABLE, HANG_UP, GOOD, NOT_HTTP)
    found, stub = offered_to(lambda: Stub(*replies), 80)
    assert found.offered == len(stub.requests) == summed(found) == 80
    assert (len(found.good), found.unanswered) == (30, 20)
    assert found.refusals == {b"3": 10, None: 10}
    assert found.others == {503: 10}
    assert (found.too_late, found.no_connection) == (0, 0)
    assert 1 <= found.connections <= 80


def test_requests_carry_the_bodies_in_turn_and_the_deadline() -> None:
    _, stub = offered_to(lambda: Stub(GOOD), 10, deadline=2.5)
    assert sorted(request[-3:] for request in stub.requests) == [b"one"] * 5 + [b"two"] * 5
    assert all(b"\r\nX-Request-Timeout: 2.5\r\n" in request for request in stub.requests)


def test_requests_come_when_they_are_due_whatever_came_back() -> None:
    # A closed loop would wait for a reply for ever: there is none before the last request.
    found, _ = offered_to(lambda: Stub(GOOD, hold=50), 50)
    assert len(found.good) == found.connections == 50
    # The first was due 49/50 of half a second before the last one, and it is from then that it counts.
    assert max(found.good) >= 0.49
    assert found.busy_seconds >= 0.5


def test_a_request_that_finds_no_connection_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_loop, "_PATIENCE", 0.0)
    found, stub = offered_to(lambda: Stub(GOOD, hold=math.inf), 20, most_connections=3, deadline=0.1)
    assert (found.offered, found.unanswered, found.no_connection) == (3, 3, 17)
    assert len(stub.requests) == found.connections == 3


def test_a_generator_that_lags_behind_says_so_instead_of_sending_late() -> None:
    found, stub = offered_to(lambda: Stub(GOOD), 20, most_lag=-1.0)
    assert (found.too_late, found.offered, stub.requests) == (20, 0, [])
    text = printed(Overload(10.0, CALM, found, [], None))
    assert "could not keep the rate: 20 requests were not sent" in text
    assert "0 of 6 statements hold" not in text  # nothing was refused, so all refusals were right


def test_where_nobody_listens_nothing_is_answered() -> None:
    url = f"http://{processes.HOST}:{processes._free_port()}/predict"
    found = asyncio.run(offer(url, [b"x"], 40, 0.25, 0.1, most_lag=math.inf))
    assert found.offered == found.unanswered == 10


@pytest.mark.parametrize(
    ("refusals", "waits"),
    [
        ({}, []),
        ({b"1": 2, b"30": 1}, [1, 1, 30]),
        ({None: 4, b"0": 1, b"-1": 1, b"1.5": 1, b"soon": 1, b"Wed, 21 Oct 2015 07:28:00 GMT": 1, b"": 1}, []),
    ],
)
def test_a_retry_after_is_usable_if_it_is_whole_seconds_from_one(
    refusals: dict[bytes | None, int], waits: list[int]
) -> None:
    assert Offered(1.0, 1.0, 1.0, refusals=Counter(refusals)).waits == waits


# The statements


def overloaded(**changes: Any) -> Overload:
    """An overload through which the service does all it should, with changes."""
    offered: dict[str, Any] = {
        "good": array("d", [0.2] * 900),
        "refusals": Counter({b"1": 2000, b"2": 100}),
        "lags": array("d", [0.001] * 3000),
        "busy_seconds": 10.0,
    }
    looks = [Look(True, 0.01, 2**20 * (100 + place)) for place in range(4)]
    whole: dict[str, Any] = {"looks": looks, "after": Load(90.0, 0.012, 0.02, 0)}
    for name, value in changes.items():
        (whole if name in whole else offered)[name] = value
    return Overload(100.0, CALM, Offered(300.0, 10.0, 0.5, **offered), whole["looks"], whole["after"])


def test_all_statements_hold_where_all_is_well() -> None:
    found = overloaded()
    assert all(found.statements.values())
    assert (found.goodput, found.of_capacity, found.admitted_in_time) == (90.0, 0.9, 1.0)
    text = printed(found)
    for words in ("6 of 6 statements hold", "0.90 of capacity", "1 to 2 s", "0.40 of the deadline", "4 of 4 polls"):
        assert words in text
    assert "could not keep" not in text
    assert "Not so" not in text


@pytest.mark.parametrize(
    ("changes", "broken"),
    [
        ({"good": array("d", [0.6] * 900)}, ["p99", "goodput"]),
        ({"good": array("d", [0.2] * 880 + [0.6] * 20)}, ["p99"]),
        ({"others": Counter({504: 10})}, ["429"]),
        ({"good": array("d", [0.2] * 880), "others": Counter({504: 20})}, ["p99", "429"]),
        ({"unanswered": 1}, ["429"]),
        ({"refusals": Counter({b"1": 2099, None: 1})}, ["429"]),
        ({"refusals": Counter({b"1": 2099, b"0": 1})}, ["429"]),
        ({"good": array("d", [0.2] * 700), "lags": array("d", [0.001] * 2800)}, ["goodput"]),
        ({"looks": [Look(True, 0.01, 2**20), Look(True, 0.01, 2**21)]}, ["memory"]),
        ({"looks": [Look(True, 0.01, None)]}, ["memory"]),
        ({"looks": [Look(True, 0.01, 1), Look(False, 1.0, 1)]}, ["readiness"]),
        ({"looks": []}, ["memory", "readiness"]),
        ({"after": None}, ["latency"]),
        ({"after": Load(90.0, 0.016, 0.02, 0)}, ["latency"]),
        ({"after": Load(90.0, 0.01, 0.02, 1)}, ["latency"]),
    ],
)
def test_what_goes_wrong_breaks_its_statement(changes: dict[str, Any], broken: list[str]) -> None:
    found = overloaded(**changes)
    fails = [name for name, true in found.statements.items() if not true]
    assert len(fails) == len(broken)
    assert all(word in name for word, name in zip(broken, fails, strict=True))
    assert f"{6 - len(broken)} of 6 statements hold" in printed(found)


def test_a_server_that_answers_everything_late_is_found_out() -> None:
    # No reply before the last request, which is more than the deadline after all but a few.
    offered, _ = offered_to(lambda: Stub(GOOD, hold=100), 100, deadline=0.02)
    found = Overload(100.0, CALM, offered, [Look(True, 0.01, 1)], CALM)
    assert len(offered.good) == 100
    assert offered.in_time <= 5
    assert not found.statements["admitted requests' p99 is within the deadline"]
    assert not found.statements["goodput is at least 0.8 of capacity"]


# Looking on


@pytest.mark.parametrize(("reply", "ready"), [(GOOD, True), (UNAVAILABLE, False), (HANG_UP, False), (NOT_HTTP, False)])
def test_a_service_is_ready_only_if_it_says_so(reply: bytes, ready: bool) -> None:
    looks: list[Look] = []

    async def look_on(url: str, stub: Stub) -> None:
        enough = asyncio.Event()

        def memory() -> int:
            if len(looks) == 2:
                enough.set()
            return 7

        watching = asyncio.create_task(watch(url, memory, 0.01, looks))
        await enough.wait()
        watching.cancel()

    _, stub = against(lambda: Stub(reply), look_on)
    assert [(look.ready, look.memory) for look in looks] == [(ready, 7)] * len(looks)
    assert len(looks) >= 2
    assert stub.requests[0].startswith(b"GET /readyz HTTP/1.1\r\n")


def test_a_service_that_does_not_answer_in_time_or_at_all_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qualms.bench.watch._PROBE_SECONDS", 0.05)
    looks: list[Look] = []

    async def look_on(url: str, stub: Stub) -> None:
        for where in (url, f"http://{processes.HOST}:{processes._free_port()}"):
            looked = asyncio.Event()

            def memory(looked: asyncio.Event = looked) -> None:
                looked.set()

            watching = asyncio.create_task(watch(where, memory, 10.0, looks))
            await looked.wait()
            watching.cancel()

    against(lambda: Stub(GOOD, hold=math.inf), look_on)
    assert [look.ready for look in looks] == [False, False]


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_memory_is_that_of_the_process_and_of_none_that_ended() -> None:
    assert (Started("", os.getpid()).memory() or 0) > 2**20
    assert Started("", 2**30).memory() is None


# The whole


def test_a_short_overload_of_the_real_service_adds_up_and_leaves_nothing_behind(
    bundle_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services: list[Started] = []

    def recorded(service: Started, *arguments: Any) -> Overload:
        services.append(service)
        return measure(service, *arguments)

    monkeypatch.setattr(overload, "measure", recorded)
    console = Console(file=io.StringIO(), width=80)
    found = overload.overload(str(bundle_file), seconds=1.0, calm_seconds=0.2, console=console)
    offered = found.offered
    assert summed(offered) == offered.offered > 0
    assert offered.offered + offered.too_late + offered.no_connection == round(offered.rate * offered.seconds)
    assert offered.rate == pytest.approx(3 * found.capacity)
    assert len(offered.waits) == offered.refused
    assert found.looks
    assert isinstance(console.file, io.StringIO)
    assert "of 6 statements hold" in " ".join(console.file.getvalue().split())
    with pytest.raises(ProcessLookupError):
        os.kill(services[0].pid, 0)


def test_only_a_service_of_its_own_is_overloaded() -> None:
    with pytest.raises(BenchError, match="of the benchmark's own"):
        overload.overload("http://127.0.0.1:8000")


def test_the_command_hands_over_what_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(overload, "overload", lambda model, **options: given.update(options, model=model))
    assert CliRunner().invoke(cli.app, ["bench", "mnist", "--overload", "60", "--deadline", "0.25"]).exit_code == 0
    assert given == {"model": "mnist", "seconds": 60.0, "deadline": 0.25}
