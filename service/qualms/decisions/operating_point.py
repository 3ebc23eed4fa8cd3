"""Operating points: the thresholds of a manifest's defaults or of a request's parameters."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qualms.bundle.manifest import Guarantee, Manifest
from qualms.bundle.scores import as_uncertainty
from qualms.decisions.flag import FlagPoint, choose_flag_point
from qualms.decisions.trust import RiskEvidence, TrustPoint, choose_trust_point
from qualms.errors import OperatingPointError


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """The parameters a request may set; None means the manifest's default."""

    score: str | None = None
    target_fpr: float | None = None
    guarantee: Guarantee | None = None
    target_risk: float | None = None


DEFAULT_OPERATING_POINT = OperatingPoint()


def flag_point(manifest: Manifest, point: OperatingPoint = DEFAULT_OPERATING_POINT) -> FlagPoint:
    """The flag threshold of an operating point; OperatingPointError if the calibration set cannot support it."""
    defaults = manifest.operating
    score = defaults.score if point.score is None else point.score
    if score not in manifest.scores:
        raise OperatingPointError(
            f"The score {score!r} is not one of this model's; accepted are {', '.join(manifest.scores)}."
        )
    return choose_flag_point(
        calibration_uncertainty(manifest, score),
        score=score,
        direction=manifest.scores[score].direction,
        target_fpr=defaults.target_fpr if point.target_fpr is None else point.target_fpr,
        guarantee=defaults.guarantee if point.guarantee is None else point.guarantee,
    )


def trust_point(manifest: Manifest, point: OperatingPoint = DEFAULT_OPERATING_POINT) -> TrustPoint:
    """The trust threshold of an operating point; OperatingPointError if the calibration set cannot support it."""
    trust, score = manifest.calibration.trust, manifest.operating.trust_score
    evidence = RiskEvidence(
        levels=trust.levels.astype(np.float64),
        thresholds=trust.thresholds.astype(np.float64),
        accepted=np.array(trust.accepted),
        errors=np.array(trust.errors),
        n=manifest.calibration.n,
    )
    return choose_trust_point(
        evidence,
        score=score,
        direction=manifest.scores[score].direction,
        target_risk=manifest.operating.target_risk if point.target_risk is None else point.target_risk,
    )


def calibration_uncertainty(manifest: Manifest, score: str) -> npt.NDArray[np.float64]:
    """(n,) uncertainty of the calibration images, ascending."""
    return np.sort(as_uncertainty(manifest.calibration.scores[score], manifest.scores[score].direction))
