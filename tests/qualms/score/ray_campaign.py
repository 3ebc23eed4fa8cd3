"""Compare `qualms score --engine ray` with the local engine on real clusters of this machine, and print a table.

    python -m tests.qualms.score.ray_campaign --images 50000 --nodes 2 4 --rounds 0
    python -m tests.qualms.score.ray_campaign --images 40000 --nodes --rounds 3
    python -m qualms_training.bench.large_bundles --out models
    python -m tests.qualms.score.ray_campaign --nodes --rounds 0 --slow models/resnet50.onnx --slow-images 512 --slow-rounds 2

The first command compares the outputs of two and four nodes with the local one row by row, also if a node is killed in the middle.
The second one compares the speed of one node with that of one local process. The last one compares two nodes with one, each pinned
to a core, with a model of at least 40 ms; it needs two cores, which the nodes share with the command and the head of the cluster.
Rates leave out the time to start: they count the images between the first tenth and the end of the state folder's parts. The
engines are run in turn.
"""

import argparse
import io
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

from PIL import Image
from tests.qualms.cluster.ray_nodes import ROOT, Nodes, nodes

from qualms.demo.digits import draw_many


def write_archive(path: Path, count: int) -> None:
    """Drawn digits as PNG files in a tar file."""
    with tarfile.open(path, "w") as archive:
        for number, (_, pixels) in enumerate(draw_many(count, seed=0)):
            file = io.BytesIO()
            Image.fromarray(pixels).save(file, "PNG")
            entry = tarfile.TarInfo(f"{number:06}.png")
            entry.size = file.tell()
            file.seek(0)
            archive.addfile(entry, file)


def command(model: str, archive: Path, out: Path, address: str | None) -> list[str]:
    """`qualms score` on a cluster, or with one local process."""
    where = ["--processes", "1"] if address is None else ["--engine", "ray", "--address", address]
    return [sys.executable, "-m", "qualms", "score", model, str(archive), "--out", str(out), "--overwrite", *where]


def seconds(model: str, archive: Path, out: Path, address: str | None) -> float:
    """How long a run takes, with its start."""
    started = time.monotonic()
    subprocess.run(command(model, archive, out, address), check=True, capture_output=True, cwd=ROOT)
    return time.monotonic() - started


def compare(name: str, out: Path, expected: Path) -> None:
    """Print whether all rows are there, once and equal."""
    rows, others = out.read_bytes().splitlines(), expected.read_bytes().splitlines()
    paths = [row.partition(b",")[0] for row in rows]
    twice, lost = len(paths) - len(set(paths)), len({row.partition(b",")[0] for row in others} - set(paths))
    print(
        f"{name}: {len(rows) - 1:,} rows, {twice} twice, {lost} lost, equal to the local run: {rows == others}",
        flush=True,
    )


def killed(model: str, archive: Path, out: Path, cluster: Nodes) -> None:
    """A run in which a node is killed when a quarter of the output is there."""
    parts = out.parent / f".{out.name}.qualms" / "parts.jsonl"
    run = subprocess.Popen(command(model, archive, out, cluster.address), cwd=ROOT, stdout=subprocess.DEVNULL)
    while run.poll() is None and not (parts.exists() and parts.read_bytes().count(b"\n") >= 100):
        time.sleep(0.05)
    print(f"killing a node: the run {'goes on' if run.poll() is None else 'has ended already'}", flush=True)
    cluster.kill()
    run.wait()


def rate(model: str, archive: Path, count: int, out: Path, address: str | None) -> float:
    """Images per second, from the first tenth of the parts on."""
    path = out.parent / f".{out.name}.qualms" / "parts.jsonl"
    times: list[tuple[float, int]] = []
    """when the number of parts grew, and to what"""
    with subprocess.Popen(
        command(model, archive, out, address), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        while run.poll() is None and not path.exists():
            time.sleep(0.01)
        with path.open("rb") as parts:
            number = 0
            while run.poll() is None:
                if grown := parts.read().count(b"\n"):
                    number += grown
                    times.append((time.monotonic(), number))
                time.sleep(0.01)
            number += parts.read().count(b"\n")
    if run.returncode:
        raise SystemExit(f"{' '.join(run.args)} ended with {run.returncode}")  # type: ignore[arg-type]
    (started, first), (ended, last) = next(entry for entry in times if entry[1] * 10 >= number), times[-1]
    return count * (last - first) / number / (ended - started)


def rates(model: str, folder: Path, count: int, rounds: int, engines: dict[str, str | None]) -> None:
    """Print the rate of each engine in each round, and ratios to the first."""
    archive = folder / f"rate-{count}.tar"
    write_archive(archive, count)
    for number in range(rounds):
        measured = {
            name: rate(model, archive, count, folder / "rate.csv", address) for name, address in engines.items()
        }
        first = next(iter(measured.values()))
        texts = [f"{name} {value:,.1f}/s ({value / first:.2f})" for name, value in measured.items()]
        print(f"{Path(model).stem}, round {number + 1}: {', '.join(texts)}", flush=True)


def main() -> None:
    """Run everything that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="mnist")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--nodes", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=3, help="of the comparison with the local engine; 0: none")
    parser.add_argument("--slow", help="bundle of a model of at least 40 ms")
    parser.add_argument("--slow-images", type=int, default=512)
    parser.add_argument("--slow-rounds", type=int, default=2)
    given = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", flush=True)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        archive, local = folder / "digits.tar", folder / "local.csv"
        if given.nodes:
            write_archive(archive, given.images)
            seconds(given.model, archive, local, None)
        for number in given.nodes:
            with nodes(number) as cluster:
                out = folder / "ray.csv"
                seconds(given.model, archive, out, cluster.address)
                compare(f"{number} nodes", out, local)
                killed(given.model, archive, out, cluster)
                compare(f"{number} nodes, one killed", out, local)
        if given.rounds:
            with nodes(1) as one:
                rates(given.model, folder, given.images, given.rounds, {"local": None, "one node": one.address})
        if given.slow:
            with nodes(1, pinned=True) as one, nodes(2, pinned=True) as two:
                engines: dict[str, str | None] = {"one node": one.address, "two nodes": two.address}
                rates(given.slow, folder, given.slow_images, given.slow_rounds, engines)


if __name__ == "__main__":
    main()
