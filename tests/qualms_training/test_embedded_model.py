"""The embedded default model, evaluated again on real images."""

import os
from pathlib import Path

import pytest

from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle
from qualms_training.reporting.evaluation import evaluate_bundle

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not os.environ.get("QUALMS_DATA"), reason="QUALMS_DATA is not set")]


def test_evaluation_reproduces_the_figures_in_the_manifest() -> None:
    recorded = open_bundle(resolve_model(None)).manifest.evaluation
    assert recorded is not None
    result = evaluate_bundle(resolve_model(None), Path(os.environ["QUALMS_DATA"]))
    assert result.accuracy == pytest.approx(recorded.accuracy, abs=0.02)
    for row, expected in zip(result.ood, recorded.ood, strict=True):
        assert (row.data, row.score) == (expected.data, expected.score)
        assert row.auroc == pytest.approx(expected.auroc, abs=0.05)


def test_auroc_of_the_in_distribution_set_against_itself_is_50() -> None:
    recorded = open_bundle(resolve_model(None)).manifest.evaluation
    assert recorded is not None
    itself = [row.auroc for row in recorded.ood if row.data == "mnist (itself)"]
    assert itself
    assert all(abs(auroc - 50) <= 2 for auroc in itself)
