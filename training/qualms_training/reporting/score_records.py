"""Read the scores of served images that the service has recorded (`qualms.telemetry.score_log`)."""

import json
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.manifest import Manifest
from qualms.images.observed import all_observed
from qualms_training.errors import DataError

_LARGEST = float(np.finfo(np.float32).max)
_ENCODINGS = frozenset(one.text for one in all_observed())


class ScoreRecords(NamedTuple):
    """Recorded scores of n different images."""

    outputs: dict[str, NDArray[Any]]
    """`prediction` and every score, (n,)"""
    fingerprints: NDArray[np.uint64]
    """(n,)"""
    observed: dict[str, int]
    """number of images by encoding, as far as it was recorded"""
    repeated: int
    """number of records left out because their image was recorded before: repetitions are not independent"""


def read_score_log(path: Path, manifest: Manifest) -> ScoreRecords:
    """The records of a file; DataError names the line that is malformed or belongs to another model."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise DataError(f"Score log {path} cannot be read: {reason}.") from None
    rows, images, observed = list[tuple[float, ...]](), dict[int, None](), Counter[str]()
    for number, line in enumerate(lines, start=1):
        where = f"Line {number} of the score log {path}"
        image, encoding, row = _parse(line, manifest, where)
        if image not in images:
            images[image] = None
            rows.append(row)
            observed.update([encoding] if encoding else [])
    if not rows:
        raise DataError(f"Score log {path} has no records; the service writes it if QUALMS_SCORE_LOG is set.")
    columns = np.array(rows).T
    outputs: dict[str, NDArray[Any]] = {"prediction": columns[0].astype(np.int64)}
    outputs |= {name: column.astype(np.float32) for name, column in zip(manifest.scores, columns[1:], strict=True)}
    fingerprints = np.array(list(images), np.uint64)
    return ScoreRecords(outputs, fingerprints, dict(observed.most_common()), len(lines) - len(rows))


def _parse(line: str, manifest: Manifest, where: str) -> tuple[int, str | None, tuple[float, ...]]:
    """Fingerprint and encoding, and prediction and scores."""
    try:
        record = json.loads(line)
        graph, image, prediction = record["graph"], int(record["image"], 16), int(record["prediction"])
        encoding = record.get("encoding")
        scores = tuple(float(record["scores"][name]) for name in manifest.scores)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise DataError(f"{where} is not a record of scores: {error!r}.") from None
    if graph != manifest.graph_sha256:
        raise DataError(f"{where} was written by another model: its graph is not that of {manifest.name}.")
    if (
        not 0 <= prediction < len(manifest.classes)
        or not all(abs(score) <= _LARGEST for score in scores)
        or not 0 <= image < 2**64
    ):
        raise DataError(f"{where} is not a record of scores: it has a value that is out of range.")
    known = isinstance(encoding, str) and encoding in _ENCODINGS
    return image, encoding if known else None, (prediction, *scores)
