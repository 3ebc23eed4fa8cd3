from pathlib import Path

import pytest

from service.bundle.file import open_bundle
from training.evaluate_bundle import evaluate_bundle


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
