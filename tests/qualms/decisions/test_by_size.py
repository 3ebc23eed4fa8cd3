"""Thresholds that depend on the size of an image relative to the model's input, in the form `by-size`."""

import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.calibration_data import AsSent
from qualms.bundle.manifest import Manifest
from qualms.bundle.scores import SCORES
from qualms.decisions.calibration import CalibrationSource, calibrate_worst, trust_grid
from qualms.decisions.calibration_set import CalibrationSet
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.decisions.verdicts import Decider, decide

Outputs = dict[str, NDArray[Any]]
POINTS = [
    DEFAULT_OPERATING_POINT,
    OperatingPoint(target_fpr=0.1, target_risk=0.1),
    OperatingPoint(target_fpr=0.1, guarantee="by-class"),
    OperatingPoint(target_fpr=0.05, guarantee="marginal"),
]


def only(manifest: Manifest, size: str) -> Manifest:
    """The manifest with the settings of one size alone, in the form `worst`."""
    calibration = manifest.calibration
    settings = [one.model_copy(update={"size": None}) for one in calibration.settings if one.size == size]
    names = ("fused", "predicted_error")
    envelopes = {name: np.max([np.sort(one.scores[name]) for one in settings], axis=0) for name in names}
    update = {
        "settings": settings,
        "scores": {**calibration.scores, **envelopes},
        "as_sent": AsSent(encodings=[one.encoding for one in settings], form="worst", seed=0),
    }
    return manifest.model_copy(update={"calibration": calibration.model_copy(update=update)})


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("size", ["same", "larger"])
def test_the_rule_of_a_size_is_that_of_a_calibration_with_its_settings_alone(
    sized_manifest: Manifest, size: str, point: OperatingPoint, outputs_as_sent: dict[str, Outputs]
) -> None:
    rule, expected = Decider(sized_manifest).rule(point, size), Decider(only(sized_manifest, size)).rule(point)
    assert (rule.flag, rule.trust, rule.refusal) == (expected.flag, expected.trust, expected.refusal)
    for outputs in outputs_as_sent.values():
        verdicts, reference = decide(rule, outputs), decide(expected, outputs)
        np.testing.assert_array_equal(verdicts.flags, reference.flags)
        np.testing.assert_array_equal(verdicts.p_values, reference.p_values)


@pytest.mark.parametrize("size", [None, "smaller", "unknown"])
def test_images_of_a_size_that_was_not_calibrated_have_the_rule_of_all_settings(
    sized_manifest: Manifest, worst_manifest: Manifest, size: str | None
) -> None:
    rule, expected = Decider(sized_manifest).rule(DEFAULT_OPERATING_POINT, size), Decider(worst_manifest).rule()
    assert (rule.flag, rule.trust) == (expected.flag, expected.trust)


def test_other_forms_have_one_rule_for_all_sizes(worst_manifest: Manifest, manifest: Manifest) -> None:
    for one in (worst_manifest, manifest):
        decider = Decider(one)
        assert not decider.sizes
        assert decider.rule(DEFAULT_OPERATING_POINT, "larger") is decider.rule()


def test_scores_that_the_settings_do_not_have_use_the_envelope_of_all_settings(
    sized_manifest: Manifest, worst_manifest: Manifest
) -> None:
    point = OperatingPoint(score="entropy")
    assert CalibrationSet(sized_manifest, "same").flag_point(point) == CalibrationSet(worst_manifest).flag_point(point)


def test_every_image_is_decided_by_the_rule_of_its_size(
    sized_manifest: Manifest, outputs_as_sent: dict[str, Outputs]
) -> None:
    decider, outputs = Decider(sized_manifest), outputs_as_sent["png"]
    count = len(outputs["prediction"])
    sizes = np.random.default_rng(0).choice(["same", "larger", "unknown"], count).tolist()
    point = OperatingPoint(target_fpr=0.1, target_risk=0.2)
    verdicts = decider.decide_by_size(point, outputs, sizes)
    for size in ("same", "larger", "unknown"):
        rows, expected = np.array(sizes) == size, decide(decider.rule(point, size), outputs)
        np.testing.assert_array_equal(verdicts.flags[rows], expected.flags[rows])
        np.testing.assert_array_equal(verdicts.p_values[rows], expected.p_values[rows])
        assert verdicts.accepts is not None
        assert expected.accepts is not None
        np.testing.assert_array_equal(verdicts.accepts[rows], expected.accepts[rows])
    assert decider.rule(point, "same").flag.threshold != decider.rule(point, "larger").flag.threshold


def test_the_guarantee_text_names_the_size(sized_manifest: Manifest) -> None:
    decider = Decider(sized_manifest)
    ending = ", with the threshold of images of a larger size than the model's input"
    assert decider.rule(size="larger").guarantee_text == decider.rule().guarantee_text + ending


def test_the_guarantee_text_of_a_score_without_thresholds_by_size_names_no_size(sized_manifest: Manifest) -> None:
    decider, point = Decider(sized_manifest), OperatingPoint(score="entropy")
    assert decider.rule(point, "larger").guarantee_text == decider.rule(point).guarantee_text


def test_no_images_have_no_verdicts(sized_manifest: Manifest, outputs_as_sent: dict[str, Outputs]) -> None:
    empty = {name: values[:0] for name, values in outputs_as_sent["png"].items()}
    assert len(Decider(sized_manifest).decide_by_size(DEFAULT_OPERATING_POINT, empty, []).flags) == 0


def test_p_values_of_calibration_images_are_those_of_the_rule_of_their_size(sized_manifest: Manifest) -> None:
    decider = Decider(sized_manifest)
    for values, setting in zip(decider.calibration_p_values(), sized_manifest.calibration.settings, strict=True):
        assert values.min() > 0
        alone = Decider(only(sized_manifest, setting.size or "")).calibration_p_values()
        assert any(np.array_equal(values, other) for other in alone)


def test_the_guarantee_holds_for_every_setting_and_detects_more_than_the_worst_form(manifest: Manifest) -> None:
    """Enlarged images have much higher scores: with one threshold, OOD images of the input size would not be detected."""
    rng, draws, target, n, size = np.random.default_rng(1), 300, 0.05, 1_000, 20_000
    shifts = {"png": 0.0, "jpeg:75": 0.3, "resize:2:bilinear": 3.0}
    sizes = {"png": "same", "jpeg:75": "same", "resize:2:bilinear": "larger"}
    hardness = rng.normal(size=size)
    scores = {
        name: (hardness + shift + 0.3 * rng.normal(size=size)).astype(np.float32) for name, shift in shifts.items()
    }
    ood = (4 + rng.normal(size=size)).astype(np.float32)
    specs = {name: SCORES[name] for name in ("fused", "predicted_error")}

    def outputs(values: NDArray[np.float32]) -> Outputs:
        return {"fused": values, "predicted_error": values, "prediction": np.zeros(len(values), np.int64)}

    rates, detected, detected_by_worst = np.zeros((draws, len(shifts))), np.zeros(draws), np.zeros(draws)
    for i in range(draws):
        rows = rng.integers(0, size, n)
        calibration = calibrate_worst(
            {name: outputs(values[rows]) for name, values in scores.items()},
            None,
            specs,
            trust_grid(scores["png"][:500]),
            paired=specs,
            sizes=sizes,
            source=CalibrationSource("x", "x", "0" * 64, AsSent(encodings=list(shifts), form="by-size", seed=0)),
        )
        decider = Decider(manifest.model_copy(update={"calibration": calibration}))
        point = OperatingPoint(target_fpr=target)
        for j, (name, values) in enumerate(scores.items()):
            rates[i, j] = decider.decide_by_size(point, outputs(values), [sizes[name]] * size).flags.mean()
        detected[i] = decide(decider.rule(point, "same"), outputs(ood)).flags.mean()
        detected_by_worst[i] = decide(decider.rule(point), outputs(ood)).flags.mean()
    for rate in rates.T:
        assert (rate > target).mean() <= 0.05 + 4 * math.sqrt(0.05 * 0.95 / draws)
    assert detected.mean() > 2 * detected_by_worst.mean()
