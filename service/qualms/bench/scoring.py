"""`qualms score` beside the limit of this process: rate, speed-up with two cores, peak memory, and a killed run continued.

The limit is a plain loop in one process on one core that reads, decodes and runs the same files in the same batches, and writes
nothing. The rate of `qualms score` is that of nine tenths of the files: the time of a run with all files minus that of a run with a
tenth of them, so that the time to start is not counted; it is printed as well. The share in CPU time, of all processes, does
not depend on what else the machine does.
"""

import filecmp
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from qualms.bench.load.sample_images import Pictures, sample_files
from qualms.bench.servers.process_tree import PeakMemory
from qualms.bench.servers.processes import BenchError, Cores, choose_cores, exit_on_sigterm, pinned
from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import Bundle, open_bundle
from qualms.bundle.runtime import GraphRunner
from qualms.errors import ImageError
from qualms.images.preprocess import preprocess
from qualms.score.chunks import chunk_rows

BROKEN_EVERY = 100
_BROKEN = b"\x89PNG\r\n\x1a\nbroken"
_FOLDER_FILES = 1000
_POLL_SECONDS = 0.01
_RUN_SECONDS = 3600.0


@dataclass(frozen=True)
class ScoreRun:
    """One run of the command."""

    seconds: float
    cpu: float
    """CPU seconds of all its processes"""
    peak: int | None
    """memory of all its processes in bytes, as in `PeakMemory`"""
    rows: int


@dataclass(frozen=True)
class Scoring:
    """All measurements."""

    files: int
    limit: float
    """images/s of the plain loop"""
    limit_cpu: float
    """images per CPU second of the plain loop"""
    runs: dict[int, tuple[ScoreRun, ScoreRun]]
    """by number of cores: with a tenth of the files, and with all"""
    resumed_equal: bool
    """whether a killed and continued run wrote the same bytes"""

    def rate(self, cores: int) -> float:
        """Files/s without the time to start."""
        few, all_files = self.runs[cores]
        return (self.files - self.files // 10) / (all_files.seconds - few.seconds)

    def cpu_rate(self, cores: int) -> float:
        """Files per CPU second without the time to start."""
        few, all_files = self.runs[cores]
        return (self.files - self.files // 10) / (all_files.cpu - few.cpu)


def run_scoring(
    target: str | None = None, *, files: int = 10_000, pictures: Pictures = "digits", console: Console | None = None
) -> Scoring:
    """Measure and print; `target` is a bundle's path or an embedded model's name."""
    if target and "://" in target:
        raise BenchError(f"--score needs a bundle or a model's name, not {target!r}.")
    console, bundle = console or Console(), open_bundle(resolve_model(target))
    one, _ = choose_cores()
    with tempfile.TemporaryDirectory(prefix="qualms-score-") as folder, exit_on_sigterm():
        root = Path(folder)
        _write_files(root / "few", sample_files(pictures, bundle.manifest.input), files // 10)
        _write_files(root / "all", sample_files(pictures, bundle.manifest.input), files)
        with pinned(one):
            limit = _limit(bundle, root / "all")
        runs = {1: _pair(bundle, root, one)}
        if len(cores := _two_cores()) == 2:
            runs[2] = _pair(bundle, root, cores)
        result = Scoring(files, *limit, runs, _resumed_equal(bundle, root, files))
    _print(result, pictures, bundle, console)
    return result


def _two_cores() -> Cores:
    try:
        return choose_cores(2)[0]
    except BenchError:
        return ()


def _write_files(folder: Path, samples: list[bytes], count: int) -> None:
    for index in range(count):
        below = folder / f"{index // _FOLDER_FILES:03}"
        below.mkdir(parents=True, exist_ok=True)
        data = _BROKEN if index % BROKEN_EVERY == BROKEN_EVERY - 1 else samples[index % len(samples)]
        (below / f"{index:06}.png").write_bytes(data)


def _limit(bundle: Bundle, folder: Path) -> tuple[float, float]:
    """Images/s and images per CPU second of a plain loop over the files."""
    runner, spec = GraphRunner(bundle.graph, threads=1), bundle.manifest.input
    paths = sorted(folder.rglob("*.png"))
    size = chunk_rows(spec)
    runner(np.zeros((size, *spec.shape), np.uint8))
    started, cpu = time.perf_counter(), time.process_time()
    for start in range(0, len(paths), size):
        images = []
        for path in paths[start : start + size]:
            with path.open("rb") as file:
                data = file.read()
            try:
                images.append(preprocess(data, spec))
            except ImageError:
                continue
        runner(np.stack(images))
    return len(paths) / (time.perf_counter() - started), len(paths) / (time.process_time() - cpu)


def _command(bundle: Bundle, folder: Path, output: Path) -> list[str]:
    # -P: a folder named qualms in the working directory must not shadow this package.
    model = str(bundle.path.resolve())
    return [sys.executable, "-P", "-m", "qualms", "score", model, str(folder), "--out", str(output), "--overwrite"]


def _pair(bundle: Bundle, root: Path, cores: Cores) -> tuple[ScoreRun, ScoreRun]:
    few, every = (_run(bundle, root / name, root / f"{name}.csv", cores) for name in ("few", "all"))
    return few, every


def _run(bundle: Bundle, folder: Path, output: Path, cores: Cores) -> ScoreRun:
    started, cpu = time.perf_counter(), _children_cpu()
    with pinned(cores):
        process = subprocess.Popen(
            _command(bundle, folder, output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
    memory, peak = PeakMemory(process.pid), None
    with memory.sampled():
        while process.poll() is None:
            peak = memory.value or peak
            time.sleep(_POLL_SECONDS)
    if process.returncode != 1:  # some files are broken
        raise BenchError(f"qualms score ended with exit code {process.returncode}; expected 1.")
    seconds = time.perf_counter() - started
    with output.open("rb") as lines:
        return ScoreRun(seconds, _children_cpu() - cpu, peak, sum(1 for _ in lines) - 1)


def _children_cpu() -> float:
    """CPU seconds of all processes that were started here and have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _resumed_equal(bundle: Bundle, root: Path, files: int) -> bool:
    """Kill a run in the middle, continue it, and compare its output with that of the run before."""
    output = root / "killed.csv"
    command, parts = _command(bundle, root / "all", output), root / f".{output.name}.qualms" / "parts.jsonl"
    wanted = files // chunk_rows(bundle.manifest.input) // 2
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and _lines(parts) < wanted:
        time.sleep(_POLL_SECONDS)
    process.kill()
    process.wait()
    if output.exists() or not parts.exists():
        raise BenchError("The run ended before it could be killed; use more files.")
    subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False, timeout=_RUN_SECONDS)
    return filecmp.cmp(root / "all.csv", output, shallow=False)


def _lines(path: Path) -> int:
    try:
        return path.read_bytes().count(b"\n")
    except OSError:
        return 0


def _print(result: Scoring, pictures: str, bundle: Bundle, console: Console) -> None:
    console.print(
        f"{result.files:,} files ({pictures}, one of {BROKEN_EVERY} broken), {bundle.manifest.name}; the limit of one core is "
        f"{result.limit:,.0f} images/s.",
        highlight=False,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for header in (
        "cores",
        "files/s",
        "of limit",
        "in CPU time",
        "speed-up",
        "seconds",
        "rows",
        "peak MB, a tenth",
        "peak MB, all",
        "ratio",
    ):
        table.add_column(header, justify="right")
    for cores, (few, every) in result.runs.items():
        rate = result.rate(cores)
        peaks = [None if run.peak is None else run.peak / 1e6 for run in (few, every)]
        ratio = "" if peaks[0] is None or peaks[1] is None else f"{peaks[1] / peaks[0]:.3f}"
        table.add_row(
            *(
                str(cores),
                f"{rate:,.0f}",
                f"{rate / result.limit:.2f}",
                f"{result.cpu_rate(cores) / result.limit_cpu:.2f}",
                f"{rate / result.rate(1):.2f}",
            ),
            *(f"{every.seconds:.2f}", f"{every.rows:,}", *(f"{peak or 0:,.0f}" for peak in peaks), ratio),
        )
    console.print(table)
    verdict = "the same bytes as" if result.resumed_equal else "OTHER bytes than"
    console.print(f"A run that was killed and continued wrote {verdict} one without interruption.", highlight=False)
