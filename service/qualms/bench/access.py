"""The cost of access control: the service with keys, with limited keys and with TLS, against the service without, in one run.

It also checks that the time of looking up a key does not depend on how much of a token is right.
"""

import secrets
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from qualms.access.key_ring import KeyRing
from qualms.access.keys import Key, new_token, token_digest
from qualms.access.keys_file import add_key
from qualms.bench.load.closed_loop import Wrk
from qualms.bench.load.sample_images import Pictures, sample_files
from qualms.bench.servers.process_tree import cpu_seconds
from qualms.bench.servers.processes import (
    HOST,
    BenchError,
    choose_cores,
    exit_on_sigterm,
    free_port,
    pinned,
    server,
    service_command,
)
from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle

CONCURRENCY = 64
_LOOKUPS = 200_000
_BATCH = 100
_OTHER_KEYS = 100


@dataclass(frozen=True)
class AccessCost:
    """Medians over the rounds; ratios are those of the same round."""

    name: str
    requests_per_second: float
    rate_ratio: float
    """requests per second by those of the service without access control"""
    cpu_ratio: float
    """CPU time per request, likewise"""


@dataclass(frozen=True)
class LookupTimes:
    """Seconds to look up tokens, in medians of batches, and how far apart two kinds of wrong tokens are."""

    right: float
    wrong: float
    nearly_right: float
    """a right token with six other characters at its end"""
    statistic: float
    """paired t of the difference between `nearly_right` and `wrong`, without the outermost tenths of the differences"""


def run_access(
    target: str | None = None,
    *,
    seconds: float = 5.0,
    rounds: int = 3,
    pictures: Pictures = "digits",
    console: Console | None = None,
) -> tuple[list[AccessCost], LookupTimes]:
    """Measure and print; `target` is a bundle's path or an embedded model's name."""
    wrk, openssl, console = shutil.which("wrk"), shutil.which("openssl"), console or Console()
    if wrk is None or openssl is None:
        raise BenchError("--access needs wrk, which sends requests over TLS, and openssl, which makes a certificate.")
    bundle = open_bundle(resolve_model(target))
    files, command = sample_files(pictures, bundle.manifest.input), service_command(str(bundle.path.resolve()))
    server_cores, load_cores = choose_cores()
    with ExitStack() as stack:
        stack.enter_context(exit_on_sigterm())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        free = add_key(folder / "keys", lambda digest: Key("free", digest))
        limited = add_key(folder / "keys", lambda digest: Key("limited", digest, rate=1e6, concurrency=1_000_000))
        certificate, key = _certificate(openssl, folder)
        keys = {"QUALMS_KEYS_FILE": str(folder / "keys")}
        tls = {"QUALMS_TLS_CERT": str(certificate), "QUALMS_TLS_KEY": str(key)}
        variants = [
            ("without", {}, None),
            ("keys", keys, free),
            ("keys with limits", keys, limited),
            ("TLS", tls, None),
            ("TLS and keys", keys | tls, free),
        ]
        running = []
        for name, variables, token in variants:
            port = free_port()
            management = {"QUALMS_MANAGEMENT_PORT": str(port)}
            process = stack.enter_context(
                server(command, server_cores, variables=variables | management, ready_url=f"http://{HOST}:{port}")
            )
            url = process.url.replace("http:", "https:") if "QUALMS_TLS_CERT" in variables else process.url
            running.append((name, url, process.pid, Wrk(wrk, None if token is None else f"Bearer {token}")))
        stack.enter_context(pinned(load_cores))
        measured: dict[str, list[tuple[float, float]]] = {name: [] for name, *_ in running}
        for round_number in range(rounds + 1):  # the first one warms up
            for name, url, pid, generator in running:
                before = cpu_seconds(pid) or 0.0
                load = generator(f"{url}/predict", files, seconds if round_number else 1.0, CONCURRENCY)
                if load.errors:
                    raise BenchError(f"The service {name} had {load.errors:,} errors.")
                if round_number:
                    cpu = ((cpu_seconds(pid) or 0.0) - before) / load.replies
                    measured[name].append((load.requests_per_second, cpu))
    costs = _summarise(measured)
    lookups = measure_lookups()
    _print(costs, lookups, console)
    return costs, lookups


def _summarise(measured: dict[str, list[tuple[float, float]]]) -> list[AccessCost]:
    baseline = np.array(measured["without"])
    costs = []
    for name, values in measured.items():
        array = np.array(values)
        rate, cpu = np.median(array / baseline, axis=0).tolist()
        costs.append(AccessCost(name, float(np.median(array[:, 0])), rate, cpu))
    return costs


def _certificate(openssl: str, folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate and its key."""
    certificate, key = folder / "cert.pem", folder / "key.pem"
    options = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", "/CN=localhost"]
    command = [openssl, "req", "-x509", *options, "-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return certificate, key


def measure_lookups(lookups: int = _LOOKUPS) -> LookupTimes:
    """Look up right, wrong and nearly right tokens in turn."""
    token = new_token()
    others = [Key(f"other-{number}", token_digest(new_token().encode())) for number in range(_OTHER_KEYS)]
    ring = KeyRing([Key("right", token_digest(token.encode())), *others])
    # New tokens for every batch, so that the places of few objects in memory do not matter.
    make: dict[str, Callable[[], str]] = {
        "right": lambda: token,
        "wrong": new_token,
        "nearly_right": lambda: token[:-6] + new_token()[-6:],
    }
    times: dict[str, list[float]] = {kind: [] for kind in make}
    find = ring.find
    for _ in range(lookups // _BATCH):
        for kind in sorted(make, key=lambda _: secrets.randbits(32)):
            tokens = [make[kind]().encode() for _ in range(_BATCH)]
            started = time.perf_counter()
            for one in tokens:
                find(one)
            times[kind].append((time.perf_counter() - started) / _BATCH)
    right, wrong, nearly = (np.array(times[kind]) for kind in ("right", "wrong", "nearly_right"))
    differences = np.sort(nearly - wrong)
    kept = differences[len(differences) // 10 : -(len(differences) // 10) or None]  # without interruptions by others
    statistic = float(kept.mean() / (kept.std(ddof=1) / np.sqrt(len(kept))))
    return LookupTimes(float(np.median(right)), float(np.median(wrong)), float(np.median(nearly)), statistic)


def _print(costs: list[AccessCost], lookups: LookupTimes, console: Console) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("", "requests/s", "÷ without", "CPU time ÷ without's"):
        table.add_column(header, justify="right" if header else "left", no_wrap=True)
    for row in costs:
        table.add_row(row.name, f"{row.requests_per_second:,.0f}", f"{row.rate_ratio:.3f}", f"{row.cpu_ratio:.3f}")
    console.print(f"Load by wrk over {CONCURRENCY} connections.")
    console.print(table)
    console.print(
        f"Looking up a token: right {1e9 * lookups.right:.0f} ns, wrong {1e9 * lookups.wrong:.0f} ns, "
        f"nearly right {1e9 * lookups.nearly_right:.0f} ns; wrong against nearly right: t = {lookups.statistic:.1f}."
    )
