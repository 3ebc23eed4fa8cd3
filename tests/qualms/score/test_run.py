"""Runs: the rows are those of `Model.predict`, and a continued run equals one without interruption."""

import csv
import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qualms.bundle.file import Bundle
from qualms.decisions.operating_point import OperatingPoint
from qualms.errors import ExtraMissingError, OperatingPointError
from qualms.model import Model
from qualms.score.chunks import Chunk
from qualms.score.executor import LocalExecutor
from qualms.score.items import ScoreError
from qualms.score.run import Outcome, score
from qualms.score.scorer import ScoreOptions, open_scorer


class InProcess:
    """An executor in this process, which may stop after a number of parts."""

    stop_after: int | None = None
    scored = 0

    def __init__(self, model: str, options: ScoreOptions, processes: int) -> None:
        self._scorer = open_scorer(model, options)

    def __enter__(self) -> "InProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self._scorer.close()

    def map(self, chunks: Iterable[Chunk]) -> Iterator[bytes]:
        for number, chunk in enumerate(chunks):
            if number == self.stop_after:
                raise KeyboardInterrupt
            InProcess.scored += 1
            yield self._scorer.score(chunk).to_json()


class Interrupted(InProcess):
    stop_after = 1


@pytest.fixture
def run(bundle: Bundle, tmp_path: Path) -> Callable[..., Outcome]:
    """(inputs, name of the output, any option) → outcome."""

    def start(inputs: object, name: str = "out.csv", **options: Any) -> Outcome:
        InProcess.scored = 0
        arguments = [str(one) for one in inputs] if isinstance(inputs, list) else [str(inputs)]
        return score(bundle, arguments, tmp_path / name, **{"executor": InProcess, **options})

    return start


def rows_of(path: Path) -> list[dict[str, Any]]:
    if path.suffix == ".jsonl":
        return [json.loads(line) for line in path.read_text().splitlines()]
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def nested(document: Any, path: str) -> Any:
    for name in path.split("."):
        document = document[name]
    return document


@pytest.mark.parametrize(
    "point",
    [
        OperatingPoint(),
        OperatingPoint(score="entropy", target_fpr=0.2, guarantee="marginal", target_risk=0.1, coverage=0.9),
        OperatingPoint(guarantee="by-class", target_fpr=0.05),
    ],
)
def test_rows_equal_the_results_of_predict(
    run: Callable[..., Outcome], images: Path, tmp_path: Path, bundle: Bundle, point: OperatingPoint
) -> None:
    run(images, "out.jsonl", options=ScoreOptions(point, alpha=True))
    rows = rows_of(tmp_path / "out.jsonl")
    options = {name: getattr(point, name) for name in point.__slots__ if getattr(point, name) is not None}
    model = Model(bundle, threads=1)
    good = [row for row in rows if row["error"] is None]
    assert len(good) == 298
    for row, result in zip(good, model.predict([row["path"] for row in good], explain=True, **options), strict=True):
        document = result.model_dump()
        assert row["prediction_label"] == result.prediction.label
        assert row["dirichlet_alpha"] == pytest.approx(result.dirichlet.alpha, rel=1e-5)
        for path in ("prediction.index", "ood.flag", "ood.score", "ood.guarantee", "trust.accept", "trust.score"):
            assert row[path.replace(".", "_")] == nested(document, path), path
        for path in ("ood.value", "ood.p_value", "ood.threshold", "uncertainty.total.entropy", "trust.value"):
            assert row[path.replace(".", "_")] == pytest.approx(nested(document, path), rel=1e-4, abs=1e-6), path
        for term, value in result.explanation.flag_terms.items() if result.explanation else []:
            assert row[f"explanation_flag_terms_{term}"] == pytest.approx(value, rel=1e-4, abs=1e-5)
        if point.coverage is not None:
            assert row["prediction_set_labels"] == nested(document, "prediction_set.labels")
        if point.guarantee == "by-class":
            assert row["ood_group_n"] == nested(document, "ood.group.n")


def test_each_file_is_one_row_in_order_and_broken_files_have_their_error(
    run: Callable[..., Outcome], images: Path, tmp_path: Path
) -> None:
    outcome = run(images)
    rows = rows_of(tmp_path / "out.csv")
    assert (len(rows), outcome.files, outcome.unreadable, outcome.others) == (300, 300, 2, 1)
    assert [row["path"] for row in rows] == sorted(row["path"] for row in rows)
    broken = [row for row in rows if row["error"]]
    assert [Path(row["path"]).name for row in broken] == ["0250.png", "0007.png"]
    assert all(row["error"].startswith("The 6 bytes are not an image") for row in broken)
    assert all(value == "" for row in broken for name, value in row.items() if name not in ("path", "error"))
    assert outcome.first_error is not None
    assert "0250.png: The 6 bytes are not an image" in outcome.first_error
    assert {row["ood_flag"] for row in rows} <= {"", "true", "false"}
    assert [path.name for path in tmp_path.iterdir()] == ["images", "out.csv"] or len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("name", ["out.csv", "out.jsonl", "out.parquet"])
def test_an_interrupted_run_continues_and_writes_the_same_bytes(
    run: Callable[..., Outcome], images: Path, tmp_path: Path, name: str
) -> None:
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow", reason="the extra `parquet` is not installed")
    run(images, f"uncut-{name}")
    with pytest.raises(KeyboardInterrupt):
        run(images, name, executor=Interrupted)
    assert not (tmp_path / name).exists()
    outcome = run(images, name)
    assert (outcome.resumed, InProcess.scored) == (128, 2)
    assert (tmp_path / name).read_bytes() == (tmp_path / f"uncut-{name}").read_bytes()


def test_a_part_that_was_cut_off_is_scored_again(run: Callable[..., Outcome], images: Path, tmp_path: Path) -> None:
    run(images, "uncut.csv")
    with pytest.raises(KeyboardInterrupt):
        run(images, executor=Interrupted)
    parts = tmp_path / ".out.csv.qualms" / "parts.jsonl"
    with parts.open("ab") as file:
        file.write(parts.read_bytes()[:500])
    assert run(images).resumed == 128
    assert (tmp_path / "out.csv").read_bytes() == (tmp_path / "uncut.csv").read_bytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"options": ScoreOptions(alpha=True)}, "another value of alpha"),
        ({"options": ScoreOptions(OperatingPoint(target_fpr=0.2))}, r"another value of target_fpr \(None, now 0.2\)"),
        ({"target_fdr": 0.1}, "another value of target_fdr"),
        ({"inputs": "a"}, "another list of files"),
        ({"touch": "a/deeper/0000.png"}, "or files were changed"),
    ],
)
def test_another_run_is_not_continued(
    run: Callable[..., Outcome], images: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(images, executor=Interrupted)
    inputs = images / change.pop("inputs", "")
    if touched := change.pop("touch", None):
        os.utime(images / touched)
    with pytest.raises(ScoreError, match=f"holds an unfinished run that was begun with .*{message}.*--overwrite"):
        run(inputs, **change)
    assert run(inputs, overwrite=True, **change).resumed == 0


def test_another_model_does_not_continue_a_run(
    run: Callable[..., Outcome], images: Path, tmp_path: Path, many_classes_bundle: Bundle
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(images, executor=Interrupted)
    with pytest.raises(ScoreError, match="begun with another model"):
        score(many_classes_bundle, [str(images)], tmp_path / "out.csv", executor=InProcess)


def test_an_interrupted_overwriting_run_continues(run: Callable[..., Outcome], images: Path, tmp_path: Path) -> None:
    (tmp_path / "out.csv").write_text("old")
    with pytest.raises(ScoreError, match="out.csv exists; use --overwrite"):
        run(images)
    with pytest.raises(KeyboardInterrupt):
        run(images, overwrite=True, executor=Interrupted)
    assert (tmp_path / "out.csv").read_text() == "old"
    assert run(images, overwrite=True).resumed == 128


@pytest.mark.parametrize("kind", ["tar", "tar.gz"])
def test_an_archive_is_scored_like_its_files_and_continued_in_its_middle(
    run: Callable[..., Outcome], images: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with tarfile.open(f"photos.{kind}", "w:gz" if kind == "tar.gz" else "w") as tar:
        for path in sorted(images.rglob("*.png")):
            tar.add(path, path.relative_to(images))
    run("images", "files.jsonl")
    with pytest.raises(KeyboardInterrupt):
        run(f"photos.{kind}", "archive.jsonl", executor=Interrupted)
    run(f"photos.{kind}", "archive.jsonl")
    files, archive = rows_of(tmp_path / "files.jsonl"), rows_of(tmp_path / "archive.jsonl")
    for row in archive:
        row["path"] = row["path"].replace(f"photos.{kind}/", "images/")
    hidden = [row for row in archive if Path(row["path"]).name.startswith(".")]
    assert not hidden
    assert archive == files


def test_false_discoveries_are_controlled_by_a_second_flag(
    run: Callable[..., Outcome], images: Path, tmp_path: Path
) -> None:
    outcome = run(images, "out.jsonl", target_fdr=0.5)
    rejections = outcome.summary.rejections
    assert rejections is not None
    for row in rows_of(tmp_path / "out.jsonl"):
        p_value = row["ood_p_value"]
        assert row["flag_fdr"] == (None if p_value is None else p_value <= rejections.threshold)


def test_the_page_has_the_most_uncertain_images(run: Callable[..., Outcome], images: Path, tmp_path: Path) -> None:
    run(images, html=tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<img") == 48


@pytest.mark.parametrize("name", ["page", "page.png", "out.csv"])
def test_a_page_with_another_ending_is_refused(
    run: Callable[..., Outcome], images: Path, tmp_path: Path, name: str
) -> None:
    with pytest.raises(ScoreError, match=r"accepted are \.html, \.htm"):
        run(images, html=tmp_path / name)
    assert InProcess.scored == 0


def test_a_page_that_exists_is_replaced_with_overwrite_only(
    run: Callable[..., Outcome], images: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text("mine")
    with pytest.raises(ScoreError, match="The page .* exists; use --overwrite"):
        run(images, html=page)
    assert page.read_text() == "mine"
    run(images, html=page, overwrite=True)
    assert page.read_text().startswith("<!doctype html>")


def test_a_page_that_cannot_be_written_is_refused_before_files_are_scored(
    run: Callable[..., Outcome], images: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ScoreError, match=r"file/folder cannot be written to: Not a directory\.$"):
        run(images, html=tmp_path / "file/folder/page.html")
    assert InProcess.scored == 0


def test_a_disk_without_space_for_the_page_is_named_and_the_run_continues(
    run: Callable[..., Outcome], images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    page = tmp_path / "pages/page.html"
    with monkeypatch.context() as patch, pytest.raises(ScoreError, match=f"no space left to write to {page.parent};"):
        patch.setattr("qualms.score.report.html_report.write_page", full)
        run(images, html=page)
    assert run(images, html=page).resumed == 300


@pytest.mark.parametrize("line_break", ["\r", "\n", "\r\n"])
def test_names_with_line_breaks_are_quoted_in_csv(
    run: Callable[..., Outcome], images: Path, tmp_path: Path, line_break: str
) -> None:
    name = tmp_path / f'a,"{line_break}b.png'
    name.write_bytes((images / "b/0001.png").read_bytes())
    run([name, images / "b/0001.png"])
    assert [row["path"] for row in rows_of(tmp_path / "out.csv")] == [str(name), str(images / "b/0001.png")]


def test_no_more_processes_are_started_than_there_are_parts(
    run: Callable[..., Outcome], images: Path, tmp_path: Path
) -> None:
    started = []

    class Counting(InProcess):
        def __init__(self, model: str, options: ScoreOptions, processes: int) -> None:
            started.append(processes)
            super().__init__(model, options, processes)

    run(images, executor=Counting, processes=1000)
    run(images / "b/0001.png", "one.csv", executor=Counting, processes=1000)
    run(images, "two.csv", executor=Counting, processes=2)
    assert started == [3, 1, 2]


@pytest.mark.parametrize("name", ["out.xlsx", "out"])
def test_an_output_with_another_ending_is_refused(run: Callable[..., Outcome], images: Path, name: str) -> None:
    with pytest.raises(ScoreError, match="accepted are .csv, .jsonl, .ndjson, .parquet"):
        run(images, name)


def test_parquet_without_its_library_names_the_extra(
    run: Callable[..., Outcome], images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ExtraMissingError, match=r"pip install 'qualms\[parquet\]'"):
        run(images, "out.parquet")


def test_parquet_has_typed_columns(run: Callable[..., Outcome], images: Path, tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet", reason="the extra `parquet` is not installed")
    run(images, "out.parquet", options=ScoreOptions(alpha=True))
    run(images, "out.jsonl", options=ScoreOptions(alpha=True))
    table = parquet.read_table(tmp_path / "out.parquet")
    assert str(table.schema.field("ood_flag").type) == "bool"
    assert str(table.schema.field("prediction_index").type) == "int64"
    assert str(table.schema.field("dirichlet_alpha").type) in ("list<item: double>", "list<element: double>")
    assert table.to_pylist() == rows_of(tmp_path / "out.jsonl")


def test_no_images_and_an_unsupported_operating_point_are_errors_and_leave_nothing(
    run: Callable[..., Outcome], images: Path, tmp_path: Path
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(ScoreError, match="There are no images in .*empty"):
        run(tmp_path / "empty")
    with pytest.raises(OperatingPointError):
        run(images, options=ScoreOptions(OperatingPoint(target_fpr=1e-9)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "images"]


def test_a_second_run_with_the_same_output_is_refused(
    run: Callable[..., Outcome], images: Path, bundle: Bundle, tmp_path: Path
) -> None:
    class Nested(InProcess):
        def map(self, chunks: Iterable[Chunk]) -> Iterator[bytes]:
            score(bundle, [str(images)], tmp_path / "out.csv", executor=InProcess)
            yield b""

    with pytest.raises(ScoreError, match="Another run is writing to"):
        run(images, executor=Nested)


# Real processes


def command(bundle: Bundle, images: Path, out: Path, *options: str) -> list[str]:
    return [sys.executable, "-m", "qualms", "score", str(bundle.path), str(images), "--out", str(out), *options]


@pytest.mark.slow
def test_the_output_does_not_depend_on_the_number_of_processes(
    run: Callable[..., Outcome], images: Path, tmp_path: Path
) -> None:
    for processes in (1, 3):
        run(images, f"{processes}.csv", executor=LocalExecutor, processes=processes)
    run(images, "none.csv")
    assert (
        (tmp_path / "1.csv").read_bytes() == (tmp_path / "3.csv").read_bytes() == (tmp_path / "none.csv").read_bytes()
    )


@pytest.mark.slow
def test_a_killed_run_leaves_no_processes_and_continues_to_the_same_bytes(
    bundle: Bundle, images: Path, tmp_path: Path, until: Callable[[Callable[[], bool]], None]
) -> None:
    uncut = subprocess.run(command(bundle, images, tmp_path / "uncut.csv"), capture_output=True, text=True, check=False)
    assert uncut.returncode == 1
    assert "2 of 300 files could not be read, the first is" in uncut.stderr
    assert "300 files" in uncut.stderr
    out, parts = tmp_path / "out.csv", tmp_path / ".out.csv.qualms" / "parts.jsonl"
    process = subprocess.Popen(command(bundle, images, out, "--processes", "2"), start_new_session=True)
    until(lambda: (parts.exists() and parts.stat().st_size > 0) or process.poll() is not None)
    process.kill()
    process.wait()
    until(lambda: not _in_session(process.pid))
    if not out.exists():  # it was killed in time
        assert subprocess.run(command(bundle, images, out), capture_output=True, check=False).returncode == 1
    assert out.read_bytes() == (tmp_path / "uncut.csv").read_bytes()


@pytest.mark.slow
def test_ctrl_c_prints_how_to_continue(
    bundle: Bundle, images: Path, tmp_path: Path, until: Callable[[Callable[[], bool]], None]
) -> None:
    state = tmp_path / ".out.csv.qualms" / "run.json"
    process = subprocess.Popen(
        command(bundle, images, tmp_path / "out.csv"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    until(lambda: state.exists() or process.poll() is not None)
    os.killpg(process.pid, signal.SIGINT)
    errors = process.communicate(timeout=30)[1]
    assert process.returncode == 130, errors
    assert errors.endswith("qualms: interrupted; run the same command again to continue.\n")
    assert "Traceback" not in errors
    until(lambda: not _in_session(process.pid))
    assert (
        subprocess.run(command(bundle, images, tmp_path / "out.csv"), capture_output=True, check=False).returncode == 1
    )


@pytest.mark.slow
def test_a_full_disk_is_one_sentence_and_the_run_continues(bundle: Bundle, images: Path, tmp_path: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    out = tmp_path / "out.csv"
    full = subprocess.run(command(bundle, images, out), capture_output=True, text=True, check=False, preexec_fn=limit)
    assert full.returncode == 2
    last = full.stderr.splitlines()[-1]
    assert last.startswith(f"qualms: There is no space left to write to {tmp_path}")
    assert "Traceback" not in full.stderr
    assert subprocess.run(command(bundle, images, out), capture_output=True, check=False).returncode == 1


@pytest.mark.slow
def test_a_scoring_process_that_ends_is_one_sentence(bundle: Bundle, images: Path, tmp_path: Path) -> None:
    class Killing(LocalExecutor):
        def map(self, chunks: Iterable[Chunk]) -> Iterator[bytes]:
            for process in self._processes.values():
                process.kill()
                process.join()
            yield from super().map(chunks)

    with pytest.raises(ScoreError, match="A scoring process ended with exit code -9 while it scored the files from"):
        score(bundle, [str(images)], tmp_path / "out.csv", executor=Killing)


def _in_session(session: int) -> list[int]:
    """Processes of a session that are still alive."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(folder.name))
    return found
