"""Run attacks one by one, each against a newly started service, while a well-behaved client measures it."""

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
from qualms.bench.attacks.memory import peak, reset_peak, resident
from qualms.bench.attacks.registry import find_attacks
from qualms.bench.attacks.report import AttackResult, print_attacks
from qualms.bench.attacks.well_behaved import ClientResult, run_client
from qualms.bench.processes import (
    BenchError,
    ServerProcess,
    choose_cores,
    exit_on_sigterm,
    get,
    pinned,
    server,
    service_command,
)
from qualms.bench.sample_images import Pictures, sample_files
from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle

_WARM_UP_SECONDS = 1.0
_RECOVERY_SECONDS = 1.0
"""time from the end of an attack until readiness and memory are checked"""
_END_SECONDS = 20.0
"""time in which the attacker must end after the attack"""


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
    with server(service_command(path), server_cores) as service, pinned(load_cores):
        run_client(service.url, files, _WARM_UP_SECONDS)
        yield service


def _measure(
    attack: Attack, service: ServerProcess, files: list[bytes], seconds: float, alone: ClientResult
) -> AttackResult:
    """Run the client and one attack at the same time."""
    port = str(urlsplit(service.url).port)
    command = [sys.executable, "-P", "-m", "qualms.bench.attacks.attacker", port, attack.name, str(seconds)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as attacker:
        try:
            assert attacker.stdin
            assert attacker.stdout
            if attacker.stdout.readline() != b"ready\n":
                raise BenchError(f"The attacker of {attack.name} did not start.")
            reset_peak(service.pid)
            attacker.stdin.write(b"\n")
            attacker.stdin.flush()
            client = run_client(service.url, files, seconds)
            counts = _counts(attacker, attack)
        finally:
            attacker.kill()  # does nothing if the process has ended
    highest = peak(service.pid)
    time.sleep(_RECOVERY_SECONDS)
    return AttackResult(
        attack=attack,
        client=client,
        alone=alone,
        peak=highest,
        after=resident(service.pid),
        recovered=_is_ready(service.url),
        counts=counts,
    )


def _counts(attacker: "subprocess.Popen[bytes]", attack: Attack) -> AttackCounts:
    try:
        output, _ = attacker.communicate(timeout=_END_SECONDS)
        return AttackCounts.from_json(output)
    except (subprocess.TimeoutExpired, ValueError):
        raise BenchError(f"The attacker of {attack.name} failed.") from None


def _is_ready(url: str) -> bool:
    try:
        get(f"{url}/readyz")
    except BenchError:
        return False
    return True


def failed(results: Sequence[AttackResult]) -> bool:
    """Whether an attack has succeeded."""
    return any(result.faults for result in results)
