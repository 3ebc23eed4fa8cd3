"""The file of scores: its lines, its limit, and that it never delays or stops a prediction."""

import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.errors import QualmsError
from qualms.images.fingerprints import fingerprints
from qualms.images.observed import ObservedEncoding
from qualms.telemetry.score_log import ScoreLog, ScoreLogError

GRAPH = "ab" * 32
SCORES = ["entropy", "fused"]
TIMEOUT = 30.0


def draw(count: int, seed: int = 0) -> tuple[NDArray[np.uint8], dict[str, NDArray[Any]]]:
    """Images (count, 2, 2, 3) and the outputs of a graph."""
    rng = np.random.default_rng(seed)
    outputs: dict[str, NDArray[Any]] = {name: rng.random(count, np.float32) for name in (*SCORES, "other")}
    outputs["prediction"] = rng.integers(0, 3, count)
    return rng.integers(0, 256, (count, 2, 2, 3), np.uint8), outputs


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_all(path: Path, *counts: int, max_images: int = 1000) -> ScoreLog:
    """A closed log to which batches of these sizes were written."""
    log = ScoreLog(path, max_images, GRAPH, SCORES)
    for seed, count in enumerate(counts):
        log.write(*draw(count, seed))
    log.close()
    return log


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "scores.jsonl"


class Blocked(Mapping[str, NDArray[Any]]):
    """Outputs that block the thread which reads them until `release` is set; `reached` is set when it does."""

    def __init__(self, outputs: dict[str, NDArray[Any]]) -> None:
        self.reached, self.release, self._outputs = threading.Event(), threading.Event(), outputs

    def __getitem__(self, name: str) -> NDArray[Any]:
        self.reached.set()
        assert self.release.wait(TIMEOUT)
        return self._outputs[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._outputs)

    def __len__(self) -> int:
        return len(self._outputs)


# Lines


def test_a_line_has_graph_fingerprint_class_and_all_scores(path: Path) -> None:
    write_all(path, 3)
    images, outputs = draw(3)
    for row, line in enumerate(lines(path)):
        assert line == {
            "graph": GRAPH,
            "image": f"{int(fingerprints(images)[row]):016x}",
            "encoding": None,
            "prediction": int(outputs["prediction"][row]),
            "scores": {name: pytest.approx(outputs[name][row], rel=1e-7) for name in SCORES},
        }


def test_scores_are_read_back_unchanged(path: Path) -> None:
    write_all(path, 50)
    _, outputs = draw(50)
    for name in SCORES:
        assert np.array([line["scores"][name] for line in lines(path)], np.float32).tolist() == outputs[name].tolist()


def test_every_line_ends_with_a_newline(path: Path) -> None:
    write_all(path, 2, 3)
    assert path.read_bytes().endswith(b"}\n")
    assert len(lines(path)) == 5


def test_batches_are_written_in_their_order(path: Path) -> None:
    log = write_all(path, *range(1, 11))
    expected = [f"{one:016x}" for seed in range(10) for one in fingerprints(draw(seed + 1, seed)[0]).tolist()]
    assert [line["image"] for line in lines(path)] == expected
    assert log.dropped == 0


def test_a_missing_folder_is_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "scores.jsonl"
    write_all(path, 1)
    assert len(lines(path)) == 1


def test_lines_are_readable_before_the_log_is_closed(path: Path, until: Callable[[Callable[[], bool]], None]) -> None:
    log = ScoreLog(path, 1000, GRAPH, SCORES)
    log.write(*draw(2))
    until(lambda: path.read_bytes().count(b"\n") == 2)
    log.close()


# The limit


@pytest.mark.parametrize("counts", [(5,), (3, 2), (3, 3), (6,), (1, 1, 1, 1, 1, 1, 1), (2, 64)])
def test_no_more_images_than_the_limit_are_written(path: Path, counts: tuple[int, ...]) -> None:
    log = write_all(path, *counts, max_images=5)
    assert len(lines(path)) == 5
    assert log.dropped == 0


def test_the_limit_counts_the_lines_of_earlier_processes(path: Path) -> None:
    for expected in (4, 8, 10, 10):
        write_all(path, 4, max_images=10)
        assert len(lines(path)) == expected


def test_a_full_log_is_reported_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        write_all(path, 2, 2, 2, 2, max_images=4)
    assert [(record.message, record.__dict__["path"]) for record in caplog.records] == [("score log full", str(path))]


# A slow or failing disk


def test_while_the_thread_is_blocked_writing_returns_at_once_and_drops_and_counts_batches(path: Path) -> None:
    log = ScoreLog(path, 10_000, GRAPH, SCORES)
    images, outputs = draw(2)
    blocked = Blocked(outputs)
    log.write(images, blocked)
    assert blocked.reached.wait(TIMEOUT)
    for _ in range(100):
        log.write(images, outputs)
    queued = 100 - log.dropped // 2
    assert 0 < log.dropped < 200
    blocked.release.set()
    log.close()
    assert len(lines(path)) == 2 * (1 + queued)


def test_dropped_images_do_not_count_towards_the_limit(path: Path, until: Callable[[Callable[[], bool]], None]) -> None:
    log = ScoreLog(path, 300, GRAPH, SCORES)
    images, outputs = draw(2)
    blocked = Blocked(outputs)
    log.write(images, blocked)
    assert blocked.reached.wait(TIMEOUT)
    for _ in range(200):
        log.write(images, outputs)
    written = 402 - log.dropped
    assert written < 200
    blocked.release.set()
    until(lambda: path.read_bytes().count(b"\n") == written)
    for _ in range(10):
        log.write(images, outputs)
    log.close()
    assert len(lines(path)) == written + 20


def test_closing_writes_everything_that_is_queued(path: Path) -> None:
    log = ScoreLog(path, 10_000, GRAPH, SCORES)
    images, outputs = draw(2)
    blocked = Blocked(outputs)
    log.write(images, blocked)
    for _ in range(30):
        log.write(images, outputs)
    closing = threading.Thread(target=log.close)
    closing.start()
    blocked.release.set()
    closing.join(TIMEOUT)
    assert not closing.is_alive()
    assert len(lines(path)) == 62


def test_a_path_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    below = tmp_path / "file" / "scores.jsonl"
    for path, reason in ((tmp_path, "is not a file; give another path"), (below, "cannot be written: File exists")):
        with pytest.raises(ScoreLogError) as caught:
            ScoreLog(path, 10, GRAPH, SCORES)
        assert str(caught.value) == f"The score log {path} {reason}."
        assert isinstance(caught.value, QualmsError)


FULL_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from qualms.telemetry.score_log import ScoreLog
log = ScoreLog(Path(sys.argv[1]), 1000, "ab" * 32, ["fused"])
resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))
outputs = {"fused": np.ones(2, np.float32), "prediction": np.zeros(2, int)}
for _ in range(10):
    log.write(np.zeros((2, 2, 2, 3), np.uint8), outputs)
log.close()
print(log.dropped)
"""


def test_if_the_disk_fails_images_are_counted_as_dropped_and_closing_does_not_raise(path: Path) -> None:
    """A limit on the size of files stands for a full disk."""
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert 0 < int(done.stdout) <= 20


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"a": 1}', "is not a score log"),
        ("some text\n", "is not a score log"),
        (f'{{"graph":"{"0" * 64}","image":"00"}}\n', "has scores of another model"),
    ],
)
def test_a_file_that_is_no_score_log_of_this_model_is_refused_and_left_alone(
    path: Path, content: str, reason: str
) -> None:
    path.write_text(content)
    with pytest.raises(ScoreLogError) as caught:
        ScoreLog(path, 10, GRAPH, SCORES)
    assert str(caught.value) == f"The file {path} {reason}; give another path."
    assert path.read_text() == content


def test_an_unfinished_last_line_is_removed(path: Path) -> None:
    log = ScoreLog(path, 10, GRAPH, SCORES)
    log.write(*draw(2))
    log.close()
    finished = path.read_bytes()
    path.write_bytes(finished + finished[:40])
    ScoreLog(path, 10, GRAPH, SCORES).close()
    assert path.read_bytes() == finished


def test_the_encodings_of_images_are_logged(path: Path) -> None:
    log = ScoreLog(path, 10, GRAPH, SCORES)
    log.write(*draw(2), {1: ObservedEncoding("jpeg", "70-79", "same")})
    log.close()
    assert [line["encoding"] for line in lines(path)] == [None, "jpeg 70-79, same size"]
