"""The embedded default on real images: the figures in its manifest are those it gives."""

import os
from pathlib import Path

import pytest

from qualms.bundle.embedded import resolve
from qualms.bundle.file import open_bundle
from qualms_training.reporting.bundle_evaluation import evaluate_bundle

pytestmark = pytest.mark.skipif(
    not os.environ.get("QUALMS_DATA"), reason="QUALMS_DATA names no folder of real data sets"
)


def test_the_manifests_figures_come_out_again() -> None:
    recorded = open_bundle(resolve(None)).manifest.evaluation
    assert recorded is not None
    found = evaluate_bundle(resolve(None), Path(os.environ["QUALMS_DATA"]))
    assert found.accuracy == pytest.approx(recorded.accuracy, abs=0.02)
    for ours, theirs in zip(found.ood, recorded.ood, strict=True):
        assert (ours.data, ours.score) == (theirs.data, theirs.score)
        assert ours.auroc == pytest.approx(theirs.auroc, abs=0.05)


def test_in_distribution_against_itself_is_a_coin_toss() -> None:
    recorded = open_bundle(resolve(None)).manifest.evaluation
    assert recorded is not None
    itself = [row.auroc for row in recorded.ood if row.data == "mnist (itself)"]
    assert itself
    assert all(abs(auroc - 50) <= 2 for auroc in itself)
