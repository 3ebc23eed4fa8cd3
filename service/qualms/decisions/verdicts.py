"""Verdicts: flags, p-values and trust for a batch of images."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.manifest import Manifest
from qualms.bundle.scores import Direction, as_uncertainty
from qualms.decisions.flag import FlagPoint, p_values_from_ranks
from qualms.decisions.operating_point import (
    DEFAULT_OPERATING_POINT,
    CalibrationSet,
    OperatingPoint,
)
from qualms.decisions.trust import TrustPoint
from qualms.errors import OperatingPointError

_CACHED_RULES = 256
"""Maximum number of cached rules; clients can request any number of operating points."""


@dataclass(frozen=True)
class Rule:
    """The thresholds of one operating point."""

    flag: FlagPoint
    calibration: NDArray[np.float64]
    """(n,) uncertainty of the calibration images, ascending"""
    trust: TrustPoint | None
    """None if the calibration set cannot support the default target risk"""
    trust_score: str
    trust_direction: Direction
    target_risk: float
    refusal: str | None
    """reason why `trust` is None"""


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
        self.rule = lru_cache(maxsize=_CACHED_RULES)(self._rule)
        self._calibration = CalibrationSet(manifest)

    def _rule(self, point: OperatingPoint = DEFAULT_OPERATING_POINT) -> Rule:
        """The rule of an operating point; OperatingPointError if the calibration set cannot support a requested rate.

        If the default target risk is not supported, the rule has no trust threshold and gives the reason in `refusal`.
        """
        flag = self._calibration.flag_point(point)
        defaults = self.manifest.operating
        trust, refusal = None, None
        try:
            trust = self._calibration.trust_point(point)
        except OperatingPointError as error:
            if point.target_risk is not None:
                raise
            refusal = str(error)
        return Rule(
            flag=flag,
            calibration=self._calibration.ascending(flag.score),
            trust=trust,
            trust_score=defaults.trust_score,
            trust_direction=self.manifest.scores[defaults.trust_score].direction,
            target_risk=defaults.target_risk if point.target_risk is None else point.target_risk,
            refusal=refusal,
        )

    def refused_parameter(self, point: OperatingPoint) -> str:
        """Name of the query parameter for which `rule(point)` raises OperatingPointError."""
        if point.score is not None and point.score not in self.manifest.scores:
            return "score"
        try:
            self._calibration.flag_point(point)
        except OperatingPointError:
            return "target_fpr"
        return "target_risk"


def decide(rule: Rule, outputs: dict[str, NDArray[Any]]) -> Verdicts:
    """Apply a rule to the graph's outputs."""
    values = outputs[rule.flag.score]
    trust_values = outputs[rule.trust_score]
    uncertainty = as_uncertainty(values, rule.flag.direction)
    ranks = rule.calibration.searchsorted(uncertainty)
    return Verdicts(
        flags=rule.flag.flags_from_ranks(ranks),
        p_values=p_values_from_ranks(ranks, rule.flag.n),
        values=values,
        accepts=None if rule.trust is None else rule.trust.accepts(trust_values) & rule.flag.is_below(uncertainty),
        trust_values=trust_values,
    )
