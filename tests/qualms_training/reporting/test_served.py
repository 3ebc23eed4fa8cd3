"""Decisions at the served thresholds, against counts by hand."""

import numpy as np
import pytest

from qualms.bundle.embedded import resolve_model
from qualms.bundle.evaluation_results import ServedResult
from qualms.bundle.file import open_bundle
from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import GraphRunner, Outputs
from qualms.decisions.verdicts import Decider
from qualms.demo.digits import draw_many
from qualms.images.preprocess import preprocess_batch
from qualms_training.reporting.breakdown import Sent
from qualms_training.reporting.served import loosest_threshold, served_result

BUNDLE = open_bundle(resolve_model("demo"))


@pytest.mark.parametrize(
    ("uncertainty", "wrong", "rate", "threshold"),
    [
        ([0.1, 0.2, 0.3, 0.4], [0, 0, 1, 0], 0.25, 0.4),
        ([0.1, 0.2, 0.3, 0.4], [0, 0, 1, 1], 0.25, 0.2),
        ([0.4, 0.2, 0.3, 0.1], [1, 0, 1, 0], 0.34, 0.3),
        ([0.1, 0.2, 0.2, 0.4], [0, 0, 1, 1], 0.3, 0.1),
        ([0.1, 0.2], [1, 1], 0.5, -np.inf),
        ([0.1, 0.2], [0, 0], 0.0, 0.2),
    ],
    ids=["all", "first two", "unordered", "ties are accepted together", "none", "no errors"],
)
def test_the_loosest_threshold_of_the_softmax(
    uncertainty: list[float], wrong: list[int], rate: float, threshold: float
) -> None:
    assert loosest_threshold(np.array(uncertainty), np.array(wrong, bool), rate) == threshold


@pytest.fixture(scope="module")
def digits() -> tuple[Outputs, np.ndarray, Outputs]:
    labels, images = zip(*draw_many(400, seed=5), strict=True)
    runner, spec = GraphRunner(BUNDLE.graph), BUNDLE.manifest.input
    noise = np.random.default_rng(0).integers(0, 256, (50, *spec.shape), dtype=np.uint8)
    return runner(preprocess_batch(np.stack(images), spec)), np.array(labels), runner(noise)


def served(manifest: Manifest, digits: tuple[Outputs, np.ndarray, Outputs]) -> ServedResult:
    outputs, labels, noise = digits
    result = served_result(manifest, Sent(outputs), labels, {"noise": Sent(noise)})
    assert result is not None
    return result


def test_flagged_and_accepted_images_are_counted_at_the_served_thresholds(
    digits: tuple[Outputs, np.ndarray, Outputs],
) -> None:
    manifest, (outputs, labels, noise) = BUNDLE.manifest, digits
    result, rule = served(manifest, digits), Decider(BUNDLE.manifest).rule()
    assert rule.trust is not None
    assert (result.score, result.target_fpr, result.n) == (rule.flag.score, manifest.operating.target_fpr, 400)
    assert result.flagged == (outputs[rule.flag.score] > rule.flag.threshold).sum()
    accepts = (outputs[rule.flag.score] < rule.flag.threshold) & rule.trust.accepts(outputs[rule.trust_score])
    assert result.trust is not None
    assert (result.trust.accepted, result.trust.wrong) == (
        accepts.sum(),
        (outputs["prediction"] != labels)[accepts].sum(),
    )
    (row,) = result.ood
    assert (row.data, row.n) == ("noise", 50)
    assert row.flagged == (noise[rule.flag.score] > rule.flag.threshold).sum()


def test_the_softmax_accepts_no_larger_share_of_errors(digits: tuple[Outputs, np.ndarray, Outputs]) -> None:
    trust = served(BUNDLE.manifest, digits).trust
    assert trust is not None
    assert trust.softmax_accepted is not None
    assert trust.softmax_wrong is not None
    assert trust.softmax_wrong * trust.accepted <= trust.wrong * trust.softmax_accepted


def test_a_transfer_model_is_not_compared_with_its_base(digits: tuple[Outputs, np.ndarray, Outputs]) -> None:
    result = served(BUNDLE.manifest.model_copy(update={"prediction": "meta"}), digits)
    assert result.trust is not None
    assert (result.trust.softmax_accepted, result.ood[0].softmax_accepted) == (None, None)


def test_targets_that_are_not_supported_have_no_counts(digits: tuple[Outputs, np.ndarray, Outputs]) -> None:
    def changed(**targets: float) -> Manifest:
        operating = BUNDLE.manifest.operating.model_copy(update=targets)
        return BUNDLE.manifest.model_copy(update={"operating": operating})

    without_trust = served(changed(target_risk=1e-6), digits)
    assert (without_trust.trust, without_trust.ood[0].accepted) == (None, None)
    outputs, labels, _ = digits
    assert served_result(changed(target_fpr=1e-7), Sent(outputs), labels, {}) is None
