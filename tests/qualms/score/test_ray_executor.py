"""A real cluster of two nodes: the output has the bytes of the local engine's, also if a node is killed in the middle."""

import os
import subprocess
import sys
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.qualms.cluster.ray_nodes import nodes

from qualms.bundle.file import Bundle
from qualms.cluster.connection import ClusterOptions
from qualms.score.chunks import MAX_CHUNK, Chunk
from qualms.score.items import Item, ScoreError
from qualms.score.ray_executor import RayExecutor, _Tasks
from qualms.score.run import score
from qualms.score.scorer import ScoreOptions

LIST = "list.txt"


def command(bundle: Bundle, out: str, *options: str) -> list[str]:
    return [sys.executable, "-m", "qualms", "score", str(bundle.path), LIST, "--out", out, *options]


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'qualms[ray]'")
@pytest.mark.slow
def test_the_output_of_two_nodes_equals_the_local_one_though_one_is_killed(
    bundle: Bundle, images: Path, tmp_path: Path
) -> None:
    paths = [path.relative_to(tmp_path) for path in sorted(images.rglob("*.png"))]
    (tmp_path / LIST).write_text("".join(f"{path}\n" for path in 30 * paths))
    local = subprocess.run(command(bundle, "local.csv"), cwd=tmp_path, check=False, capture_output=True, timeout=600)
    assert local.returncode == 1  # two files are broken
    parts = tmp_path / ".ray.csv.qualms" / "parts.jsonl"

    def with_parts() -> "subprocess.Popen[str]":
        """A run that has written parts."""
        run = subprocess.Popen(on_ray, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        while run.poll() is None and not (parts.exists() and parts.stat().st_size > 0):
            with suppress(subprocess.TimeoutExpired):
                run.wait(0.05)
        return run

    with nodes(2) as cluster:
        on_ray = command(bundle, "ray.csv", "--engine", "ray", "--address", cluster.address)
        stopped = with_parts()
        stopped.terminate()
        _, errors = stopped.communicate(timeout=600)
        assert stopped.returncode != 0
        assert "***" not in errors  # a stack trace of Ray
        run = with_parts()
        cluster.kill()
        _, errors = run.communicate(timeout=600)
    assert run.returncode == 1, errors
    assert "continuing after" in errors
    assert (tmp_path / "ray.csv").read_bytes() == (tmp_path / "local.csv").read_bytes()
    assert not parts.parent.exists()


def test_a_run_with_other_threads_is_not_continued(bundle: Bundle, images: Path, tmp_path: Path) -> None:
    class Stopped:
        def __init__(self, *_: object) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score(bundle, [str(images)], tmp_path / "out.csv", executor=Stopped)  # type: ignore[arg-type]
    executor = partial(RayExecutor, digest=bundle.digest, cluster=ClusterOptions(cpus=2))
    with pytest.raises(ScoreError, match=r"begun with another value of threads \(None, now 2\)"):
        score(bundle, [str(images)], tmp_path / "out.csv", ScoreOptions(threads=2), executor=executor)


def chunk(number: int, rows: int, kind: str = "file") -> Chunk:
    items = [Item(f"{number}-{row}.png", f"{number}-{row}.png", kind) for row in range(rows)]  # type: ignore[arg-type]
    return Chunk(number, items, [b"bytes" if kind == "stream" else None] * rows)


def test_chunks_of_small_images_share_tasks_and_their_paths_become_absolute() -> None:
    chunks = [chunk(number, MAX_CHUNK) for number in range(10)]
    tasks = list(_Tasks(chunks))
    assert [[one.number for one in task] for task in tasks] == [list(range(8)), [8, 9]]
    assert tasks[1][0].items[3] == Item("8-3.png", f"{os.getcwd()}/8-3.png", "file")  # noqa: PTH109


def test_chunks_of_large_images_or_with_bytes_are_tasks_of_their_own() -> None:
    streams = [chunk(0, MAX_CHUNK), chunk(1, MAX_CHUNK, "stream"), chunk(2, MAX_CHUNK, "stream"), chunk(3, MAX_CHUNK)]
    assert [[one.number for one in task] for task in _Tasks(streams)] == [[0], [1], [2], [3]]
    large = [chunk(number, 64) for number in range(3)]
    assert [[one.number for one in task] for task in _Tasks(large)] == [[0], [1], [2]]
    uri = Chunk(0, [Item("s3://bucket/1.png", "s3://bucket/1.png?region=x", "cloud")], [None])
    assert list(_Tasks([uri])) == [[uri]]
