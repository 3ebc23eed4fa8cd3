import asyncio
import io
import math
import os
import subprocess
import sys
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import uvloop
from rich.console import Console
from typer.testing import CliRunner

from qualms import cli
from qualms.bench.attacks import attacker, run
from qualms.bench.attacks.attacker import AttackCounts, run_attack
from qualms.bench.attacks.definition import Attack, Script, Wait, head, post
from qualms.bench.attacks.payloads import MAX_BODY, in_pieces, noise_png
from qualms.bench.attacks.registry import find_attacks
from qualms.bench.attacks.report import AttackResult, Stop, describe, print_attacks
from qualms.bench.attacks.run import failed, run_attacks, terminate
from qualms.bench.attacks.well_behaved import ClientResult
from qualms.bench.load.open_loop import OpenLoopResult
from qualms.bench.servers.processes import HOST, BenchError

GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
REFUSED = b"HTTP/1.1 431 Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"

linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")


def an_attack(script: Callable[[bytes], Script], **changes: Any) -> Attack:
    """An attack by one connection that reads replies."""
    return replace(Attack("test", "a test", script, bytes, 1, True, False, 0.01), **changes)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def attack_stub(attack: Attack, handler: Handler, seconds: float = 0.3, payload: bytes = b"") -> AttackCounts:
    """The counts of an attack on a stub that handles each connection with `handler`."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def main() -> AttackCounts:
        async with await asyncio.start_server(handle, HOST, 0) as listener:
            port = listener.sockets[0].getsockname()[1]
            counts = await run_attack(attack, port, seconds, payload)
            listener.close()
            await asyncio.sleep(0.02)  # the handlers notice that their connections are closed
            return counts

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main())


async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.readuntil(b"\r\n\r\n"):
        writer.write(GOOD)


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read(10)
    writer.write(REFUSED)


# Definitions


@pytest.mark.parametrize("attack", find_attacks(["all"]), ids=lambda attack: attack.name)
def test_each_attack_is_described_bounded_and_yields_steps(attack: Attack) -> None:
    assert attack.description
    assert 1 <= attack.connections <= 2000
    steps = list(islice(attack.script(b"payload"), 3))
    assert steps
    assert all(isinstance(step, bytes | memoryview | float | Wait) for step in steps)
    assert Wait.REPLY not in steps or attack.reads


def test_attacks_are_found_by_name() -> None:
    assert len(find_attacks(["all"])) >= 30
    assert [attack.name for attack in find_attacks(["churn", "slow-heads", "churn"])] == ["churn", "slow-heads"]
    with pytest.raises(BenchError, match="no attack 'slow-head'; the most similar one is 'slow-heads'"):
        find_attacks(["slow-head"])


def test_requests_are_built_from_parts() -> None:
    assert head("GET /a", X_B=1) == b"GET /a HTTP/1.1\r\nHost: 127.0.0.1\r\nX-B: 1\r\n\r\n"
    assert post(b"abc").endswith(b"Content-Type: image/png\r\nContent-Length: 3\r\n\r\nabc")
    assert b"".join(in_pieces(bytes(600_000))) == bytes(600_000)


def test_large_payloads_are_within_the_limit_of_bodies() -> None:
    assert 0.9 * MAX_BODY < len(noise_png()) <= MAX_BODY
    for name in ("json-floats", "json-nested", "json-arrays", "json-base64", "multipart-parts", "multipart-headers"):
        (attack,) = find_attacks([name])
        _, _, body = attack.payload().partition(b"\r\n\r\n")
        assert 0.9 * MAX_BODY < len(body) <= MAX_BODY, name


# The attacker


def test_replies_are_awaited_and_counted() -> None:
    def script(payload: bytes) -> Script:
        for _ in range(5):
            yield head("GET /") + payload
            yield Wait.REPLY
        yield Wait.CLOSE

    counts = attack_stub(an_attack(script, connections=3), answer)
    assert counts.statuses == {200: 15}
    assert (counts.opened, counts.closed, counts.not_opened) == (3, 0, 0)


def test_connections_that_the_service_closes_are_counted_and_opened_again() -> None:
    def endless(_: bytes) -> Script:
        while True:
            yield b"x" * 1000

    def silent(_: bytes) -> Script:
        yield b"x"
        yield Wait.CLOSE

    for script in (endless, silent):
        counts = attack_stub(an_attack(script), refuse)
        assert counts.closed > 1
        assert counts.closed <= counts.opened <= counts.closed + 1
        assert set(counts.statuses) == {431}


def test_pipelined_replies_are_not_read_if_the_attack_does_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def script(_: bytes) -> Script:
        while True:
            yield head("GET /") * 100

    counts = attack_stub(an_attack(script, reads=False), answer)
    assert counts.statuses == {}
    assert counts.bytes_sent > 0
    assert attack_stub(an_attack(script), answer).statuses[200] >= 100
    monkeypatch.setattr(attacker, "_MAX_BYTES", 10_000)
    assert attack_stub(an_attack(script), answer).bytes_sent <= 20_000


def test_invalid_http_and_closed_ports_are_counted() -> None:
    async def hello(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"hello\r\n\r\n")
        await reader.read()

    def silent(_: bytes) -> Script:
        yield Wait.CLOSE

    assert attack_stub(an_attack(silent), hello).invalid >= 1
    counts = asyncio.run(run_attack(an_attack(silent), 1, 0.05, b""))
    assert (counts.opened, counts.not_opened) == (0, 1)


def test_connections_can_be_reset() -> None:
    lost: list[type[BaseException]] = []

    async def read(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readexactly(10)
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            lost.append(type(error))

    def script(_: bytes) -> Script:
        yield b"G"
        yield 0.02

    for resets, kind in ((True, ConnectionResetError), (False, asyncio.IncompleteReadError)):
        lost.clear()
        attack_stub(an_attack(script, resets=resets), read)
        assert set(lost) == {kind}


def test_counts_are_passed_on_as_json() -> None:
    counts = AttackCounts(3, 1, 2, 0, 2_000_000, Counter({200: 5, 431: 1}))
    assert AttackCounts.from_json(counts.to_json()) == counts
    assert describe(counts) == "200 × 5, 431 × 1, not connected × 1, 2 of 3 connections closed, 2 MB sent"
    assert describe(AttackCounts(invalid=2)) == "invalid HTTP × 2, 0 of 0 connections closed"


# Results

ALONE = ClientResult(400, 0, 0.002, 0.004)


def a_result(**changes: Any) -> AttackResult:
    """A result without faults, with some fields replaced."""
    (attack,) = find_attacks(["churn"])
    client = ClientResult(400, 0, 0.003, 0.024)
    return replace(AttackResult(attack, client, ALONE, 2**28, 2**27, True, Stop(0.9, 0), AttackCounts()), **changes)


@pytest.mark.parametrize(
    ("changes", "faults"),
    [
        ({}, []),
        ({"client": ClientResult(400, 1, 0.003, 0.024)}, ["failures"]),
        ({"client": ClientResult(400, 0, 0.003, 0.026)}, ["p99"]),
        ({"client": ClientResult(400, 0, 0.003, 0.026), "alone": ClientResult(400, 0, 0.002, 0.006)}, []),
        ({"client": ClientResult(400, 400, math.inf, math.inf)}, ["failures", "p99"]),
        ({"peak": 600_000_000}, ["memory"]),
        ({"peak": None, "after": None, "recovered": False}, ["memory", "not ready"]),
        ({"stop": None}, ["does not stop"]),
        ({"stop": Stop(30.5, 0)}, []),
        ({"stop": Stop(31.5, 0)}, ["does not stop"]),
        ({"stop": Stop(0.9, -9)}, ["exit code"]),
    ],
)
def test_each_fault_fails_its_check(changes: dict[str, Any], faults: list[str]) -> None:
    result = a_result(**changes)
    assert result.faults == faults
    assert failed([a_result(), result]) is bool(faults)
    file = io.StringIO()
    print_attacks(ALONE, [result], Console(file=file, width=130))
    assert (f"FAIL: {', '.join(faults)}" if faults else "pass") in file.getvalue()
    assert f"{int(not faults)} of 1 attacks passed" in file.getvalue()


def test_all_requests_without_status_200_are_failures_of_the_client() -> None:
    result = OpenLoopResult(
        50.0,
        1.0,
        5.0,
        good=array("d", [0.01] * 90),
        refusals=Counter({b"1": 3}),
        other_statuses=Counter({503: 2}),
        unanswered=4,
        lags=array("d", [0.0] * 99),
        skipped_no_connection=1,
    )
    assert ClientResult.of(result) == ClientResult(100, 10, 0.01, 0.01)
    assert ClientResult.of(OpenLoopResult(50.0, 1.0, 5.0, unanswered=1, lags=array("d", [0.0]))).p99 == math.inf


# Stopping


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))", 3),
        ("signal.signal(signal.SIGTERM, signal.SIG_DFL)", -15),
        ("signal.signal(signal.SIGTERM, signal.SIG_IGN)", None),
    ],
)
def test_the_end_of_a_terminated_process_is_reported_and_left_to_its_owner(program: str, code: int | None) -> None:
    command = [sys.executable, "-c", f"import signal, sys; {program}; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        process.stdout.readline()
        stop = terminate(process.pid, 0.1 if code is None else 30.0)
        assert (None if stop is None else stop.code) == code
        process.kill()
        assert process.wait() == (-9 if code is None else code)


# The command


def test_the_command_runs_attacks_and_exits_with_1_if_one_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    results = [a_result()]

    def record(names: list[str], model: str | None, **options: Any) -> list[AttackResult]:
        given.update(options, names=names, model=model)
        return results

    monkeypatch.setattr(run, "run_attacks", record)
    arguments = ["bench", "mnist", "--attack", "churn", "--attack", "slow-heads", "--attack-seconds", "3"]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert given == {"names": ["churn", "slow-heads"], "model": "mnist", "seconds": 3.0, "pictures": "digits"}
    results.append(a_result(recovered=False))
    assert CliRunner().invoke(cli.app, arguments).exit_code == 1


def test_the_command_lists_all_attacks() -> None:
    result = CliRunner().invoke(cli.app, ["bench", "--attack", "list"])
    assert result.exit_code == 0
    assert all(attack.name in result.output for attack in find_attacks(["all"]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--attack", "churn", "--profile"], "--profile and --attack cannot be combined"),
        (["--attack", "churn", "--overload", "2"], "--attack and --overload cannot be combined"),
        (["--attack-seconds", "2"], "--attack-seconds is accepted only together with --attack"),
        (["http://127.0.0.1:8000", "--attack", "churn"], "--attack starts its own service"),
    ],
)
def test_options_that_contradict_each_other_are_rejected(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(cli.app, ["bench", *arguments]).exception
    assert isinstance(error, BenchError)
    assert message in str(error)


@linux
@pytest.mark.slow
def test_attacks_on_the_real_service_are_measured_and_all_processes_end(
    bundle_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Recorded(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Recorded)
    file = io.StringIO()
    results = run_attacks(
        ["invalid-requests", "metrics-flood"], str(bundle_file), seconds=1.0, console=Console(file=file, width=150)
    )
    assert [result.attack.name for result in results] == ["invalid-requests", "metrics-flood"]
    for result in results:
        assert result.client.sent == 50
        assert (result.peak or 0) >= 10**7
        assert (result.after or 0) >= 10**7
        assert result.counts.opened > 0
        assert result.stop is not None
        assert result.stop.code == 0
    assert results[1].counts.statuses[200] > 0
    rows = [line.split() for line in file.getvalue().splitlines()]
    assert [row[0] for row in rows if row and row[0] in {"none", "invalid-requests", "metrics-flood"}] == [
        "none",
        "invalid-requests",
        "metrics-flood",
    ]
    assert "of 2 attacks passed" in file.getvalue()
    assert len(started) == 5  # three services and two attackers
    for pid in started:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
