from pathlib import Path
from typing import Any

import pytest

from qualms.bundle.file import open_bundle, write_bundle
from qualms_training.errors import DataError
from qualms_training.reporting.evaluation import evaluate_bundle


def test_the_file_alone_gives_the_figures_in_its_manifest_again(tiny_bundle: Path) -> None:
    recorded = open_bundle(tiny_bundle).manifest.evaluation
    assert recorded is not None
    found = evaluate_bundle(tiny_bundle, None)
    for ours, theirs in zip(found.ood, recorded.ood, strict=True):
        assert (ours.data, ours.score) == (theirs.data, theirs.score)
        assert ours.auroc == pytest.approx(theirs.auroc, abs=0.01)
    assert found.accuracy == pytest.approx(recorded.accuracy)


def test_other_strangers_can_be_asked_for(tiny_bundle: Path) -> None:
    found = evaluate_bundle(tiny_bundle, None, ["strokes"])
    assert {row.data for row in found.ood} == {"strokes", "corrupted", "shapes (itself)"}


def with_record(bundle: Path, change: dict[str, Any]) -> None:
    """Let a bundle record other data than it was made with."""
    found = open_bundle(bundle)
    origin = found.manifest.provenance
    other = origin.model_copy(update={"data": {**origin.data, **change}})
    write_bundle(bundle, found.graph, found.manifest.model_copy(update={"provenance": other}))


@pytest.mark.parametrize("split", ["train", "test"])
def test_data_that_have_changed_since_are_named(split: str, tiny_bundle: Path) -> None:
    recorded = open_bundle(tiny_bundle).manifest.provenance.data["sha256"]
    with_record(tiny_bundle, {"sha256": {**recorded, split: "0" * 64}})
    with pytest.raises(DataError, match=rf"'shapes' \(split '{split}'\) is not the one that the bundle was made with"):
        evaluate_bundle(tiny_bundle, None)


def test_data_that_are_split_otherwise_are_refused(tiny_bundle: Path) -> None:
    with_record(tiny_bundle, {"splits": []})
    with pytest.raises(DataError, match="'shapes' is not split as it was"):
        evaluate_bundle(tiny_bundle, None)
