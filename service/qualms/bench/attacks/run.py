"""Run attacks one by one, each against a newly started service, while a well-behaved client measures it.

After the attack, the service must become ready again. Then the attack is repeated, and SIGTERM must end the service while
connections of the attack are open and sending.
"""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from rich.console import Console
from rich.progress import Progress

from qualms.bench.attacks.attacker import AttackCounts
from qualms.bench.attacks.definition import Attack
from qualms.bench.attacks.registry import find_attacks
from qualms.bench.attacks.report import GRACE_SECONDS, AttackResult, Stop, print_attacks
from qualms.bench.attacks.well_behaved import ClientResult, run_client
from qualms.bench.load.sample_images import Pictures, sample_files
from qualms.bench.servers.process_tree import PeakMemory
from qualms.bench.servers.processes import (
    BenchError,
    ServerProcess,
    choose_cores,
    exit_on_sigterm,
    get,
    pinned,
    server,
    service_command,
)
from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle

_WARM_UP_SECONDS = 1.0
_RECOVERY_SECONDS = 1.0
"""time from the end of an attack until readiness and memory are checked"""
_END_SECONDS = 20.0
"""time in which the attacker must print its counts after the attack"""
_BEFORE_SIGTERM_SECONDS = 1.0
"""time for which the repeated attack runs before SIGTERM is sent"""
_MAX_STOP_SECONDS = GRACE_SECONDS + 5.0
"""time after which a service that has not ended is killed"""
_POLL_SECONDS = 0.01
_SETTINGS = {"QUALMS_DRAIN_SECONDS": "0.5", "QUALMS_GRACE_SECONDS": f"{GRACE_SECONDS:g}"}
"""the default grace period, and a shorter time in which requests are accepted, so that a run takes less time"""


def run_attacks(
    names: list[str],
    model: str | None = None,
    *,
    seconds: float = 8.0,
    pictures: Pictures = "digits",
    console: Console | None = None,
) -> list[AttackResult]:
    """Run the attacks with these names, `all` for all of them, for `seconds` each, and print the results.

    The client is first measured without an attack, for the same time.
    """
    if model is not None and "://" in model:
        raise BenchError(f"--attack starts its own service; it accepts a bundle or a model's name, not {model!r}.")
    attacks, console = find_attacks(names), console or Console()
    bundle = open_bundle(resolve_model(model))
    path, files = str(bundle.path.resolve()), sample_files(pictures, bundle.manifest.input)
    results: list[AttackResult] = []
    with exit_on_sigterm(), Progress(console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("alone", total=1 + len(attacks))
        progress.refresh()
        with _service(path, files) as service:
            alone = run_client(service.url, files, seconds)
        try:
            for attack in attacks:
                progress.update(task, advance=1, description=attack.name, refresh=True)
                with _service(path, files) as service:
                    results.append(_measure(attack, service, files, seconds, alone))
        finally:  # an interrupted run shows what it has measured
            print_attacks(alone, results, console)
    return results


@contextmanager
def _service(path: str, files: list[bytes]) -> Iterator[ServerProcess]:
    """A new service that has answered requests; this process and those it starts run on the other core."""
    server_cores, load_cores = choose_cores()
    with server(service_command(path), server_cores, variables=_SETTINGS) as service, pinned(load_cores):
        run_client(service.url, files, _WARM_UP_SECONDS)
        yield service


def _measure(
    attack: Attack, service: ServerProcess, files: list[bytes], seconds: float, alone: ClientResult
) -> AttackResult:
    """Run the client and one attack at the same time, and then stop the service during a second attack."""
    port = str(urlsplit(service.url).port)
    command = [sys.executable, "-P", "-m", "qualms.bench.attacks.attacker", port, attack.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as attacker:
        try:
            assert attacker.stdout
            if attacker.stdout.readline() != b"ready\n":
                raise BenchError(f"The attacker of {attack.name} did not start.")
            memory = PeakMemory(service.pid)
            with memory.sampled():
                _start(attacker, seconds)
                client = run_client(service.url, files, seconds)
                counts = _counts(attacker, attack)
            highest = memory.value
            time.sleep(_RECOVERY_SECONDS)
            after, recovered = service.memory(), _is_ready(service.url)
            _start(attacker, _BEFORE_SIGTERM_SECONDS + _MAX_STOP_SECONDS)
            time.sleep(_BEFORE_SIGTERM_SECONDS)
            stop = terminate(service.pid, _MAX_STOP_SECONDS)
        finally:
            attacker.kill()
    return AttackResult(
        attack=attack,
        client=client,
        alone=alone,
        peak=highest,
        after=after,
        recovered=recovered,
        stop=stop,
        counts=counts,
    )


def terminate(pid: int, timeout: float) -> Stop | None:
    """Send SIGTERM to a child process and wait until it ends; None if it does not within `timeout` seconds.

    The process is not reaped, so that its owner can still wait for it.
    """
    start = time.perf_counter()
    os.kill(pid, signal.SIGTERM)
    while (elapsed := time.perf_counter() - start) < timeout:
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
        if ended is not None:
            return Stop(elapsed, ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
        time.sleep(_POLL_SECONDS)
    return None


def _start(attacker: "subprocess.Popen[bytes]", seconds: float) -> None:
    assert attacker.stdin
    attacker.stdin.write(f"{seconds}\n".encode())
    attacker.stdin.flush()


def _counts(attacker: "subprocess.Popen[bytes]", attack: Attack) -> AttackCounts:
    assert attacker.stdout
    try:
        if select.select([attacker.stdout], [], [], _END_SECONDS)[0]:
            return AttackCounts.from_json(attacker.stdout.readline())
    except ValueError:
        pass
    raise BenchError(f"The attacker of {attack.name} failed.")


def _is_ready(url: str) -> bool:
    try:
        get(f"{url}/readyz")
    except BenchError:
        return False
    return True


def failed(results: Sequence[AttackResult]) -> bool:
    """Whether an attack has succeeded."""
    return any(result.faults for result in results)
