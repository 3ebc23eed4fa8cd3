"""Verdicts: flags, p-values and trust for a batch of images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.calibration_data import Calibration
from qualms.bundle.manifest import Manifest
from qualms.bundle.scores import Direction, as_uncertainty
from qualms.decisions.by_class import ClassFlags
from qualms.decisions.calibration_set import CalibrationSet
from qualms.decisions.flag import FlagPoint, p_values, p_values_from_ranks
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.decisions.prediction_sets import SetPoint
from qualms.decisions.trust import TrustPoint
from qualms.errors import OperatingPointError

SIZE_TEXTS = {
    "same": "the model's input size",
    "larger": "a larger size than the model's input",
    "smaller": "a smaller size than the model's input",
    "unknown": "an unknown size",
}
_CACHED_RULES = 256
"""Maximum number of cached rules; clients can request any number of operating points."""


@dataclass(frozen=True)
class Rule:
    """The thresholds of one operating point."""

    flag: FlagPoint
    classes: ClassFlags | None
    """thresholds by predicted class, with the guarantee by-class"""
    calibration: NDArray[np.float64]
    """(n,) uncertainty of the calibration images, ascending"""
    guarantee_text: str
    """the guarantee of the flag in words"""
    trust: TrustPoint | None
    """None if the calibration set cannot support the default target risk"""
    trust_score: str
    trust_direction: Direction
    target_risk: float
    refusal: str | None
    """reason why `trust` is None"""
    sets: SetPoint | None
    """None if the operating point has no coverage"""


@dataclass(slots=True)
class Verdicts:
    """The decisions of a rule on N images; every array is (N,)."""

    flags: NDArray[np.bool_]
    p_values: NDArray[np.float64]
    values: NDArray[np.float32]
    accepts: NDArray[np.bool_] | None
    """never true for a flagged image"""
    trust_values: NDArray[np.float32]


class Decider:
    """Computes and caches the rules of one model."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.sizes = frozenset(manifest.calibration.sizes)
        """sizes of images that have rules of their own; empty if all images have the same rule"""
        self._cached_rule = lru_cache(maxsize=_CACHED_RULES)(self._rule)
        self._calibrations = {size: CalibrationSet(manifest, size) for size in (None, *self.sizes)}

    def rule(self, point: OperatingPoint = DEFAULT_OPERATING_POINT, size: str | None = None) -> Rule:
        """The rule of an operating point; OperatingPointError if the calibration set cannot support a requested rate.

        `size` is the size of the image relative to the model's input (`qualms.images.observed.SIZES`); without it, or if
        no calibration image had that size, the rule is that of all settings. If the default target risk is not supported, the rule
        has no trust threshold and gives the reason in `refusal`.
        """
        return self._cached_rule(point, size if size in self.sizes else None)

    def _rule(self, point: OperatingPoint, size: str | None) -> Rule:
        calibration = self._calibrations[size]
        flag, classes = calibration.flag_point(point), calibration.class_flags(point)
        defaults = self.manifest.operating
        trust, refusal = None, None
        try:
            trust = calibration.trust_point(point)
        except OperatingPointError as error:
            if point.target_risk is not None:
                raise
            refusal = str(error)
        return Rule(
            flag=flag,
            classes=classes,
            calibration=calibration.ascending(flag.score),
            guarantee_text=guarantee_text(
                flag, self.manifest.calibration, size if calibration.has_own(flag.score) else None
            ),
            trust=trust,
            trust_score=defaults.trust_score,
            trust_direction=self.manifest.scores[defaults.trust_score].direction,
            target_risk=defaults.target_risk if point.target_risk is None else point.target_risk,
            refusal=refusal,
            sets=None if point.coverage is None else calibration.set_point(point.coverage),
        )

    def decide_by_size(
        self, point: OperatingPoint, outputs: dict[str, NDArray[Any]], sizes: Sequence[str | None]
    ) -> Verdicts:
        """The verdicts on N images, each by the rule of its size (N,)."""
        kinds = np.array([size if size in self.sizes else "" for size in sizes])
        result = decide(self.rule(point), outputs)
        for kind in np.unique(kinds[kinds != ""]):
            result = _where(kinds == kind, decide(self.rule(point, str(kind)), outputs), result)
        return result

    def calibration_p_values(self) -> list[NDArray[np.float64]]:
        """p-values (n,) of the calibration images at the default operating point, by setting."""
        result = []
        for sample in self._calibrations[None].samples:
            rule = self.rule(size=sample.size)
            uncertainty = sample.uncertainty[rule.flag.score]
            if rule.classes is None or sample.predictions is None:
                result.append(p_values(uncertainty, rule.calibration))
            else:
                result.append(rule.classes.p_values(uncertainty, sample.predictions))
        return result


def _where(rows: NDArray[np.bool_], chosen: Verdicts, others: Verdicts) -> Verdicts:
    """Verdicts with the rows (N,) of `chosen`, and all others; a refused trust verdict counts as not accepted."""
    nothing = np.zeros(len(rows), bool)
    pair = (nothing if one.accepts is None else one.accepts for one in (chosen, others))
    accepts = np.where(rows, *pair)
    return Verdicts(
        flags=np.where(rows, chosen.flags, others.flags),
        p_values=np.where(rows, chosen.p_values, others.p_values),
        values=others.values,
        accepts=accepts,
        trust_values=others.trust_values,
    )


def guarantee_text(flag: FlagPoint, calibration: Calibration, size: str | None = None) -> str:
    """The guarantee of a flag in one sentence, with the images that it is for."""
    by_class = flag.guarantee == "by-class"
    whom = "images predicted as one class (or sharing a threshold)" if by_class else "in-distribution images"
    sets = "on average over calibration sets" if flag.guarantee == "marginal" else "for 95 % of calibration sets"
    like = "images like the calibration images" if calibration.as_sent is None else calibration.as_sent.text
    sized = "" if size is None else f", with the threshold of images of {SIZE_TEXTS[size]}"
    trimmed = ""
    if calibration.trimmed:
        bound = 100 * (flag.target_fpr + calibration.trimmed)
        trimmed = (
            f", if the {100 * calibration.trimmed:g} % that were trimmed were all OOD (else up to about {bound:g} %)"
        )
    return f"at most {100 * flag.target_fpr:g} % of {whom} are flagged, {sets}, for {like}{sized}{trimmed}"


def decide(rule: Rule, outputs: dict[str, NDArray[Any]]) -> Verdicts:
    """Apply a rule to the graph's outputs."""
    values = outputs[rule.flag.score]
    trust_values = outputs[rule.trust_score]
    uncertainty = as_uncertainty(values, rule.flag.direction)
    if rule.classes is None:
        ranks = rule.calibration.searchsorted(uncertainty)
        flags, values_p = rule.flag.flags_from_ranks(ranks), p_values_from_ranks(ranks, rule.flag.n)
        below = rule.flag.is_below(uncertainty)
    else:
        limits = rule.classes.limits(outputs["prediction"])
        flags, below = uncertainty > limits, uncertainty < limits
        values_p = rule.classes.p_values(uncertainty, outputs["prediction"])
    return Verdicts(
        flags=flags,
        p_values=values_p,
        values=values,
        accepts=None if rule.trust is None else rule.trust.accepts(trust_values) & below,
        trust_values=trust_values,
    )
