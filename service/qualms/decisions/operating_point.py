"""Operating points: the thresholds of a manifest's defaults or of a request's parameters."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from qualms.bundle.manifest import Guarantee, Manifest
from qualms.bundle.scores import as_uncertainty
from qualms.decisions.flag import FlagPoint, choose_flag_point
from qualms.decisions.trust import RiskEvidence, TrustPoint, choose_trust_point, count_accepted
from qualms.errors import OperatingPointError


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The parameters a request may set; None means the manifest's default."""

    score: str | None = None
    target_fpr: float | None = None
    guarantee: Guarantee | None = None
    target_risk: float | None = None


DEFAULT_OPERATING_POINT = OperatingPoint()


class CalibrationSet:
    """A manifest's calibration images, sorted once, so that the thresholds of any operating point are chosen quickly."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        self._ascending: dict[str, npt.NDArray[np.float64]] = {}

    def ascending(self, score: str) -> npt.NDArray[np.float64]:
        """(n,) uncertainty of the calibration images, ascending."""
        if score not in self._ascending:
            self._ascending[score] = np.sort(self._uncertainty(score))
        return self._ascending[score]

    def flag_point(self, point: OperatingPoint = DEFAULT_OPERATING_POINT) -> FlagPoint:
        """The flag threshold of an operating point; OperatingPointError if the images cannot support it."""
        scores, defaults = self._manifest.scores, self._manifest.operating
        score = defaults.score if point.score is None else point.score
        if score not in scores:
            raise OperatingPointError(
                f"The score {score!r} is not one of this model's; accepted are {', '.join(scores)}."
            )
        return choose_flag_point(
            self.ascending(score),
            score=score,
            direction=scores[score].direction,
            target_fpr=defaults.target_fpr if point.target_fpr is None else point.target_fpr,
            guarantee=defaults.guarantee if point.guarantee is None else point.guarantee,
        )

    def trust_point(self, point: OperatingPoint = DEFAULT_OPERATING_POINT) -> TrustPoint:
        """The trust threshold of an operating point; OperatingPointError if the images cannot support it or its flag."""
        defaults = self._manifest.operating
        return choose_trust_point(
            self._evidence(self.flag_point(point)),
            score=defaults.trust_score,
            direction=self._manifest.scores[defaults.trust_score].direction,
            target_risk=defaults.target_risk if point.target_risk is None else point.target_risk,
        )

    def _evidence(self, flag: FlagPoint) -> RiskEvidence:
        """Counts of the calibration images strictly below the flag's threshold or, in earlier bundles, of all."""
        calibration, trust = self._manifest.calibration, self._manifest.calibration.trust
        expected = trust.levels.astype(np.float64) * calibration.n
        if calibration.wrong is None:
            accepted, errors, joint = np.array(trust.accepted), np.array(trust.errors), False
        else:
            order, uncertainty, wrong = self._in_trust_order
            below = flag.is_below(self._uncertainty(flag.score))[order]
            accepted, errors = count_accepted(uncertainty[below], wrong[below], trust.thresholds)
            expected, joint = expected * (1 - flag.target_fpr), True
        return RiskEvidence(expected, trust.thresholds.astype(np.float64), accepted, errors, calibration.n, joint)

    @cached_property
    def _in_trust_order(self) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
        """The order of the images by their trust score; and the score, ascending, and whether each is misclassified."""
        uncertainty = self._uncertainty(self._manifest.operating.trust_score)
        wrong = np.zeros(len(uncertainty), bool)
        wrong[self._manifest.calibration.wrong or []] = True
        order = np.argsort(uncertainty)
        return order, uncertainty[order], wrong[order]

    def _uncertainty(self, score: str) -> npt.NDArray[np.float64]:
        """(n,) uncertainty of the calibration images, in the order of the manifest."""
        return as_uncertainty(self._manifest.calibration.scores[score], self._manifest.scores[score].direction)
