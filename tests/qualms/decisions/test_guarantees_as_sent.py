"""Simulations of the guarantees for images in several encodings, by class, for prediction sets and without labels.

As in `test_guarantees`: many calibration sets are drawn with replacement from one known population, so the true rates of a rule are
exact averages over the population. The seeds are fixed; four standard errors are allowed.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.calibration_data import AsSent, Calibration, CalibrationForm
from qualms.bundle.manifest import Manifest, SetMethod
from qualms.bundle.parts import Guarantee
from qualms.bundle.scores import SCORES
from qualms.decisions.calibration import CalibrationSource, calibrate, calibrate_worst, trust_grid
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.verdicts import Decider, decide
from qualms.errors import OperatingPointError

FLAG, TRUST = "fused", "predicted_error"
SPECS = {name: SCORES[name] for name in (FLAG, TRUST)}
ENCODINGS = ["png", "jpeg:75", "webp:80"]
SHIFTS = (0.0, 0.5, 1.0)
"""by encoding: how much it raises the flag score of an image, on average"""
CLASSES = 3
N, FIT, SIZE = 1_000, 500, 20_000
Outputs = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class Population:
    """The same images in every encoding: the graph's outputs by encoding, and the labels (M,)."""

    outputs: list[Outputs]
    labels: NDArray[np.int64]

    def draw(self, rng: np.random.Generator, count: int) -> "Population":
        rows = rng.integers(0, len(self.labels), count)
        return Population([{name: one[name][rows] for name in one} for one in self.outputs], self.labels[rows])

    def mixed(self, rng: np.random.Generator) -> Outputs:
        """Every image in one encoding, drawn at random."""
        choice = rng.integers(len(self.outputs), size=len(self.labels))
        rows = np.arange(len(choice))
        return {name: np.stack([one[name] for one in self.outputs])[choice, rows] for name in self.outputs[0]}


def population(rng: np.random.Generator, size: int = SIZE) -> Population:
    """Images whose encodings raise flag score, trust score and errors by different amounts for each image."""
    hardness = rng.normal(size=size)
    sensitivity = rng.gamma(2.0, 0.5, size)
    labels = rng.choice(CLASSES, size, p=[0.5, 0.3, 0.2])
    outputs = []
    for shift in SHIFTS:
        flag = hardness + shift * sensitivity + 0.3 * rng.normal(size=size) + 0.4 * labels
        trust = 0.7 * hardness + 0.6 * shift * sensitivity + 0.7 * rng.normal(size=size)
        wrong = rng.random(size) < 1 / (1 + np.exp(4.2 - 1.5 * trust))
        prediction = np.where(wrong, (labels + 1) % CLASSES, labels)
        logits = rng.normal(size=(size, CLASSES)) - trust[:, None] * 0.2
        logits[np.arange(size), prediction] += 3 - 0.8 * trust - 0.3 * prediction
        exponentials = np.exp(logits)
        outputs.append(
            {
                FLAG: flag.astype(np.float32),
                TRUST: trust.astype(np.float32),
                "prediction": prediction,
                "probabilities": (exponentials / exponentials.sum(axis=1, keepdims=True)).astype(np.float32),
            }
        )
    return Population(outputs, labels)


Make = Callable[[Calibration], Decider]


@pytest.fixture
def make(manifest: Manifest) -> Make:
    """calibration → the decisions of a bundle with it"""
    return lambda calibration: Decider(manifest.model_copy(update={"calibration": calibration}))


def source(form: CalibrationForm | None = None) -> CalibrationSource:
    as_sent = None if form is None else AsSent(encodings=ENCODINGS, form=form, seed=0)
    return CalibrationSource("calibration", "drawn", "0" * 64, as_sent=as_sent)


def worst_calibration(fit: Population, images: Population, sets: SetMethod | None = None) -> Calibration:
    return calibrate_worst(
        dict(zip(ENCODINGS, images.outputs, strict=True)),
        images.labels,
        SPECS,
        trust_grid(fit.outputs[0][TRUST]),
        paired=SPECS,
        source=source("worst"),
        sets=sets or SetMethod(),
    )


def noise(share: float, draws: int) -> float:
    return 4 * math.sqrt(share * (1 - share) / draws)


def risks(images: Population, decider: Decider, point: OperatingPoint) -> list[float]:
    """The true error rate of accepted predictions in each encoding; 0 if the risk is refused, which accepts nothing."""
    try:
        rule = decider.rule(point)
    except OperatingPointError:
        return [0.0] * len(images.outputs)
    result = []
    for outputs in images.outputs:
        accepted = decide(rule, outputs).accepts
        assert accepted is not None
        wrong = outputs["prediction"] != images.labels
        result.append(float(wrong[accepted].mean()) if accepted.any() else 0.0)
    return result


@pytest.mark.parametrize("guarantee", ["marginal", "confident"])
def test_a_mixture_holds_for_the_stated_shares_and_not_for_each_encoding(make: Make, guarantee: Guarantee) -> None:
    rng, draws, target = np.random.default_rng(1), 300, 0.05
    images = population(rng)
    rates = np.zeros((draws, len(SHIFTS)))
    for i in range(draws):
        drawn = images.draw(rng, N)
        fit = trust_grid(images.draw(rng, FIT).outputs[0][TRUST])
        decider = make(calibrate(drawn.mixed(rng), drawn.labels, SPECS, fit, source=source("mixture")))
        flag = decider.rule(OperatingPoint(FLAG, target, guarantee)).flag
        rates[i] = [flag.flags(outputs[FLAG]).mean() for outputs in images.outputs]
    mixture = rates.mean(axis=1)
    if guarantee == "marginal":
        assert mixture.mean() <= target + 4 * mixture.std() / math.sqrt(draws)
    else:
        assert (mixture > target).mean() <= 0.05 + noise(0.05, draws)
    assert mixture.mean() > 0.6 * target
    assert rates[:, -1].mean() > 1.5 * target, "the hardest encoding alone has more false alarms than promised"


@pytest.mark.parametrize("guarantee", ["marginal", "confident"])
def test_the_worst_form_holds_for_each_encoding_and_every_mixture(make: Make, guarantee: Guarantee) -> None:
    rng, draws, target, target_risk = np.random.default_rng(2), 300, 0.05, 0.05
    images = population(rng)
    rates, errors = np.zeros((draws, len(SHIFTS))), np.zeros((draws, len(SHIFTS)))
    for i in range(draws):
        decider = make(worst_calibration(images.draw(rng, FIT), images.draw(rng, N)))
        flag = decider.rule(OperatingPoint(FLAG, target, guarantee)).flag
        rates[i] = [flag.flags(outputs[FLAG]).mean() for outputs in images.outputs]
        errors[i] = risks(images, decider, OperatingPoint(FLAG, target, guarantee, target_risk))
    shares = rng.dirichlet(np.ones(len(SHIFTS)), 50)
    for one in (*rates.T, *(rates @ shares.T).T):
        if guarantee == "marginal":
            assert one.mean() <= target + 4 * one.std() / math.sqrt(draws)
        else:
            assert (one > target).mean() <= 0.05 + noise(0.05, draws)
    assert rates[:, -1].mean() > 0.6 * target, "the threshold is not laxer than the hardest encoding needs"
    for risk in errors.T:
        assert (risk > target_risk).mean() <= 0.05 + noise(0.05, draws)
    assert (errors[:, 0] > 0).mean() > 0.9, "the risk must not be safe merely because nothing is accepted"


def test_the_risk_holds_if_the_candidate_thresholds_come_from_other_images(make: Make) -> None:
    """Candidates from images as stored accept hardly any image as sent, so the first tested level follows the counts."""
    rng, draws, target_risk = np.random.default_rng(3), 400, 0.03
    images = population(rng)
    errors, refused = np.zeros((draws, len(SHIFTS))), 0
    for i in range(draws):
        fit = Population([{TRUST: one[TRUST] - 1.2} for one in images.outputs], images.labels).draw(rng, FIT)
        decider = make(worst_calibration(fit, images.draw(rng, N)))
        errors[i] = risks(images, decider, OperatingPoint(target_fpr=0.01, target_risk=target_risk))
        refused += errors[i].max() == 0
    for risk in errors.T:
        assert (risk > target_risk).mean() <= 0.05 + noise(0.05, draws)
    assert refused < 0.2 * draws


def test_by_class_holds_for_every_predicted_class_where_one_threshold_does_not(make: Make) -> None:
    rng, draws, target, target_risk = np.random.default_rng(4), 300, 0.1, 0.03
    images = population(rng)
    outputs = images.outputs[0]
    rates = {name: np.zeros((draws, CLASSES)) for name in ("confident", "by-class")}
    errors = np.zeros(draws)
    for i in range(draws):
        drawn = images.draw(rng, N)
        fit = trust_grid(images.draw(rng, FIT).outputs[0][TRUST])
        decider = make(calibrate(drawn.outputs[0], drawn.labels, SPECS, fit, source=source()))
        for name, values in rates.items():
            flags = decide(decider.rule(OperatingPoint(target_fpr=target, guarantee=name)), outputs).flags  # type: ignore[arg-type]
            values[i] = [flags[outputs["prediction"] == index].mean() for index in range(CLASSES)]
        point = OperatingPoint(target_fpr=target, guarantee="by-class", target_risk=target_risk)
        errors[i] = risks(Population([outputs], images.labels), decider, point)[0]
    assert ((rates["by-class"] > target).mean(axis=0) <= 0.05 + noise(0.05, draws)).all()
    assert rates["by-class"].mean() > 0.6 * target
    assert (rates["confident"] > target).mean(axis=0).max() > 0.9
    assert (errors > target_risk).mean() <= 0.05 + noise(0.05, draws)
    assert (errors > 0).mean() > 0.9


def test_by_class_holds_for_every_class_in_every_encoding_and_for_the_pool(make: Make) -> None:
    """At 1 %, a class needs 299 images: the two smaller classes are pooled."""
    rng, draws, target = np.random.default_rng(5), 300, 0.01
    images = population(rng)
    pooled = np.zeros((draws, len(SHIFTS)))
    alone = np.zeros((draws, len(SHIFTS)))
    for i in range(draws):
        decider = make(worst_calibration(images.draw(rng, FIT), images.draw(rng, N)))
        rule = decider.rule(OperatingPoint(target_fpr=target, guarantee="by-class"))
        assert rule.classes is not None
        group = next(one for one in rule.classes.groups if 2 in one.classes)
        assert len(group.classes) > 1
        for j, outputs in enumerate(images.outputs):
            flags, inside = decide(rule, outputs).flags, np.isin(outputs["prediction"], group.classes)
            pooled[i, j], alone[i, j] = flags[inside].mean(), flags[~inside].mean()
    for rates in (*pooled.T, *alone.T):
        assert (rates > target).mean() <= 0.05 + noise(0.05, draws)


def top_class_accuracy(images: Population) -> float:
    """The accuracy of the most probable class in the hardest encoding, the least coverage of sets that are never empty."""
    return float((images.outputs[-1]["probabilities"].argmax(axis=1) == images.labels).mean())


@pytest.mark.parametrize("method", ["lac", "raps"])
@pytest.mark.parametrize("coverage", [0.8, 0.95])
def test_prediction_sets_have_their_coverage_overall_and_not_by_class(
    make: Make, manifest: Manifest, method: str, coverage: float
) -> None:
    rng, draws = np.random.default_rng(6), 200
    images = population(rng)
    sets = SetMethod.model_validate({"method": method})
    covered = np.zeros((draws, len(SHIFTS)))
    by_class = np.zeros((draws, CLASSES))
    for i in range(draws):
        decider = Decider(
            manifest.model_copy(
                update={
                    "calibration": worst_calibration(images.draw(rng, FIT), images.draw(rng, N), sets),
                    "sets": sets,
                }
            )
        )
        point = decider.rule(OperatingPoint(coverage=coverage)).sets
        assert point is not None
        for j, outputs in enumerate(images.outputs):
            inside = point.contains(outputs["probabilities"])[np.arange(SIZE), images.labels]
            covered[i, j] = inside.mean()
            by_class[i] = [inside[images.labels == index].mean() for index in range(CLASSES)]
    for one in covered.T:
        assert one.mean() >= coverage - 4 * one.std() / math.sqrt(draws)
    tight = max(coverage, top_class_accuracy(images)) if method == "raps" else coverage
    assert covered[:, -1].mean() <= tight + 0.01, "the hardest encoding has no more than the promised coverage"
    assert by_class.mean(axis=0).min() < tight - 0.002, "the coverage of single classes is not guaranteed"


def test_a_calibration_without_labels_holds_for_the_flag_and_guarantees_no_errors(make: Make) -> None:
    rng, draws, target = np.random.default_rng(7), 300, 0.05
    images = population(rng)
    rates = np.zeros(draws)
    for i in range(draws):
        fit = trust_grid(images.draw(rng, FIT).outputs[0][TRUST])
        decider = make(calibrate(images.draw(rng, N).outputs[1], None, SPECS, fit, source=source()))
        rule = decider.rule(OperatingPoint(target_fpr=target))
        assert rule.trust is None
        assert rule.refusal is not None
        rates[i] = decide(rule, images.outputs[1]).flags.mean()
    assert (rates > target).mean() <= 0.05 + noise(0.05, draws)
    assert rates.mean() > 0.6 * target


def test_a_kept_guarantee_on_errors_holds_for_images_like_the_labelled_ones(manifest: Manifest) -> None:
    """The flag follows new images without labels, in the hardest encoding; trust is tested on the labelled ones, as stored."""
    rng, draws, target_risk = np.random.default_rng(8), 300, 0.03
    images = population(rng)
    errors = np.zeros(draws)
    for i in range(draws):
        fit = trust_grid(images.draw(rng, FIT).outputs[0][TRUST])
        labelled = images.draw(rng, N)
        update = {
            "calibration": calibrate(images.draw(rng, N).outputs[2], None, SPECS, fit, source=source()),
            "labelled_calibration": calibrate(labelled.outputs[0], labelled.labels, SPECS, fit, source=source()),
        }
        decider = Decider(manifest.model_copy(update=update))
        errors[i] = risks(
            Population(images.outputs[:1], images.labels), decider, OperatingPoint(target_risk=target_risk)
        )[0]
    assert (errors > target_risk).mean() <= 0.05 + noise(0.05, draws)
    assert (errors > 0).mean() > 0.9
