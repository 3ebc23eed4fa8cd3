"""Recorded scores are read as they were written; every line that cannot be used is named."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle
from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import Outputs
from qualms.images.fingerprints import fingerprints
from qualms.telemetry.score_log import ScoreLog
from qualms_training.errors import DataError
from qualms_training.reporting.score_records import read_score_log


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return open_bundle(resolve_model("demo")).manifest


def record(manifest: Manifest, index: int = 0, **changes: Any) -> dict[str, Any]:
    """A line as the service writes it."""
    scores = dict.fromkeys(manifest.scores, 0.5 + index)
    line = {"graph": manifest.graph_sha256, "image": f"{index:016x}", "prediction": index % 10, "scores": scores}
    return {**line, **changes}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join((one if isinstance(one, str) else json.dumps(one)) + "\n" for one in lines))
    return path


def test_records_are_read_as_the_service_wrote_them(manifest: Manifest, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (20, 4, 4, 3), dtype=np.uint8)
    outputs: Outputs = {name: rng.normal(size=20).astype(np.float32) for name in manifest.scores}
    outputs["prediction"] = rng.integers(10, size=20)
    log = ScoreLog(tmp_path / "scores.jsonl", 100, manifest.graph_sha256, list(manifest.scores))
    log.write(images[:12], {name: values[:12] for name, values in outputs.items()})
    log.write(images[12:], {name: values[12:] for name, values in outputs.items()})
    log.close()
    records = read_score_log(tmp_path / "scores.jsonl", manifest)
    assert set(records.outputs) == set(outputs)
    for name, values in outputs.items():
        np.testing.assert_array_equal(records.outputs[name], values)
    np.testing.assert_array_equal(records.fingerprints, fingerprints(images))
    assert records.repeated == 0


def test_an_image_counts_once_with_its_first_scores(manifest: Manifest, tmp_path: Path) -> None:
    later = record(manifest, 0, scores=dict.fromkeys(manifest.scores, 9.0))
    path = write(tmp_path / "log", record(manifest, 0), record(manifest, 1), later, later)
    records = read_score_log(path, manifest)
    assert records.outputs["fused"].tolist() == [0.5, 1.5]
    assert records.fingerprints.tolist() == [0, 1]
    assert records.repeated == 2


def test_recorded_encodings_are_counted_once_per_image(manifest: Manifest, tmp_path: Path) -> None:
    lines = [
        *(record(manifest, i, encoding="jpeg 70-79, same size") for i in (0, 1, 1)),
        record(manifest, 2, encoding="lossless, larger size"),
        record(manifest, 3, encoding="unheard of"),
        record(manifest, 4, encoding=None),
        record(manifest, 5),
    ]
    records = read_score_log(write(tmp_path / "log", *lines), manifest)
    assert records.observed == {"jpeg 70-79, same size": 2, "lossless, larger size": 1}
    assert (len(records.fingerprints), records.repeated) == (6, 1)


@pytest.mark.parametrize("encoding", [3, ["jpeg"], {}])
def test_an_encoding_that_is_not_a_text_is_not_counted(encoding: Any, manifest: Manifest, tmp_path: Path) -> None:
    path = write(tmp_path / "log", record(manifest, encoding=encoding))
    assert read_score_log(path, manifest).observed == {}


def test_the_largest_fingerprint_is_read(manifest: Manifest, tmp_path: Path) -> None:
    path = write(tmp_path / "log", record(manifest, image="f" * 16))
    assert read_score_log(path, manifest).fingerprints.tolist() == [2**64 - 1]


def test_further_fields_and_scores_are_ignored(manifest: Manifest, tmp_path: Path) -> None:
    line = record(manifest, time="later")
    line["scores"]["another"] = 3
    assert len(read_score_log(write(tmp_path / "log", line), manifest).fingerprints) == 1


@pytest.mark.parametrize(
    "line",
    [
        "",
        "not json",
        "{}",
        "[1, 2]",
        "3",
        "null",
        '{"graph": "x"',
        "[" * 100_000,
    ],
    ids=["empty", "text", "no fields", "list", "number", "null", "cut off", "nested"],
)
def test_a_line_that_is_not_a_record_is_named(line: str, manifest: Manifest, tmp_path: Path) -> None:
    path = write(tmp_path / "scores.jsonl", record(manifest), line)
    with pytest.raises(
        DataError, match=r"Line 2 of the score log .*scores\.jsonl is not a record of scores: "
    ) as caught:
        read_score_log(path, manifest)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"image": "xyz"},
        {"image": "1" + "0" * 16},
        {"image": "-1"},
        {"image": None},
        {"image": 7},
        {"prediction": 10},
        {"prediction": -1},
        {"prediction": "seven"},
        {"prediction": float("nan")},
        {"prediction": float("inf")},
        {"scores": {}},
        {"scores": None},
    ],
    ids=str,
)
def test_a_field_that_is_out_of_range_is_an_error_that_names_the_line(
    changes: dict[str, Any], manifest: Manifest, tmp_path: Path
) -> None:
    path = write(tmp_path / "scores.jsonl", record(manifest), record(manifest, 1, **changes))
    with pytest.raises(DataError, match=r"Line 2 of the score log .* is not a record of scores: "):
        read_score_log(path, manifest)


@pytest.mark.parametrize(
    "value",
    [float("nan"), float("inf"), -float("inf"), None, "high", 1e300, 10**400],
    ids=["nan", "inf", "-inf", "none", "text", "beyond float32", "beyond float64"],
)
def test_a_score_that_is_not_a_finite_number_is_an_error_that_names_the_line(
    value: Any, manifest: Manifest, tmp_path: Path
) -> None:
    line = record(manifest, 1)
    line["scores"]["fused"] = value
    path = write(tmp_path / "scores.jsonl", record(manifest), line)
    with pytest.raises(DataError, match=r"Line 2 of the score log .* is not a record of scores: "):
        read_score_log(path, manifest)


def test_a_missing_score_is_an_error(manifest: Manifest, tmp_path: Path) -> None:
    line = record(manifest)
    del line["scores"]["fused"]
    with pytest.raises(DataError, match=r"Line 1 .* is not a record of scores: KeyError\('fused'\)\.$"):
        read_score_log(write(tmp_path / "log", line), manifest)


def test_a_record_of_another_graph_is_an_error(manifest: Manifest, tmp_path: Path) -> None:
    path = write(tmp_path / "log", record(manifest), record(manifest, 1, graph="0" * 64))
    with pytest.raises(DataError, match=r"Line 2 of .* was written by another model: its graph is not that of demo"):
        read_score_log(path, manifest)


def test_files_without_records_are_named(manifest: Manifest, tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with pytest.raises(DataError, match=r"empty has no records; the service writes it if QUALMS_SCORE_LOG is set"):
        read_score_log(tmp_path / "empty", manifest)
    with pytest.raises(DataError, match=r"nowhere cannot be read: No such file"):
        read_score_log(tmp_path / "nowhere", manifest)
    with pytest.raises(DataError, match=r"cannot be read: Is a directory"):
        read_score_log(tmp_path, manifest)
    (tmp_path / "binary").write_bytes(b"\x89PNG\r\n\x1a\n\xff\xfe")
    with pytest.raises(DataError, match=r"binary cannot be read: it is not a text file"):
        read_score_log(tmp_path / "binary", manifest)
