"""From a batch of scores to verdicts: flags, p-values and trust, once for a whole batch."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.manifest import Manifest
from qualms.bundle.scores import Direction, as_uncertainty
from qualms.decisions.flag import FlagPoint, p_values_ranks
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint, flag_point, trust_point
from qualms.decisions.trust import TrustPoint
from qualms.errors import OperatingPointError

_REMEMBERED = 256
"""how many operating points that requests asked for are kept"""


@dataclass(frozen=True)
class Rule:
    """One operating point, ready to be applied."""

    flag: FlagPoint
    calibration: NDArray[np.float64]
    """(n,) doubts of the calibration images, ascending"""
    trust: TrustPoint | None
    trust_score: str
    trust_direction: Direction
    target_risk: float
    refusal: str | None
    """why there is no trust threshold, where there is none"""


@dataclass(slots=True)
class Verdicts:
    """What a rule says about N images; every array is (N,)."""

    flags: NDArray[np.bool_]
    p_values: NDArray[np.float64]
    values: NDArray[np.float32]
    accepts: NDArray[np.bool_] | None
    trust_values: NDArray[np.float32]


class Decider:
    """The rules of one model, worked out when they are first asked for."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.rule = lru_cache(maxsize=_REMEMBERED)(self._rule)
        self._sorted = {
            name: np.sort(as_uncertainty(values, manifest.scores[name].direction))
            for name, values in manifest.calibration.scores.items()
        }

    def _rule(self, asked: OperatingPoint = DEFAULT_OPERATING_POINT) -> Rule:
        """The rule for what a request asked; OperatingPointError where the calibration cannot support the flag.

        A risk that was asked for in so many words is refused likewise; the default one is refused in the reply.
        """
        point = flag_point(self.manifest, asked.score, asked.target_fpr, asked.guarantee)
        operating = self.manifest.operating
        trust, refusal = None, None
        try:
            trust = trust_point(self.manifest, asked.target_risk)
        except OperatingPointError as error:
            if asked.target_risk is not None:
                raise
            refusal = str(error)
        return Rule(
            flag=point,
            calibration=self._sorted[point.score],
            trust=trust,
            trust_score=operating.trust_score,
            trust_direction=self.manifest.scores[operating.trust_score].direction,
            target_risk=operating.target_risk if asked.target_risk is None else asked.target_risk,
            refusal=refusal,
        )

    def blamed(self, asked: OperatingPoint) -> str:
        """Which parameter of what was asked is refused."""
        if asked.score is not None and asked.score not in self.manifest.scores:
            return "score"
        try:
            flag_point(self.manifest, asked.score, asked.target_fpr, asked.guarantee)
        except OperatingPointError:
            return "target_fpr"
        return "target_risk"


def decide(rule: Rule, outputs: dict[str, NDArray[Any]]) -> Verdicts:
    """Apply a rule to the graph's outputs."""
    values = outputs[rule.flag.score]
    trusted = outputs[rule.trust_score]
    ranks = rule.calibration.searchsorted(as_uncertainty(values, rule.flag.direction))
    return Verdicts(
        flags=rule.flag.flags_ranks(ranks),
        p_values=p_values_ranks(ranks, rule.flag.n),
        values=values,
        accepts=None if rule.trust is None else rule.trust.accepts(trusted),
        trust_values=trusted,
    )
