"""Operating points of a manifest: its defaults, or what a request asks for instead."""

from dataclasses import dataclass

import numpy as np

from qualms.bundle.manifest import Guarantee, Manifest
from qualms.bundle.scores import as_uncertainty
from qualms.decisions.flag import FlagPoint, choose_flag_point
from qualms.decisions.trust import RiskEvidence, TrustPoint, choose_trust_point
from qualms.errors import OperatingPointError


@dataclass(frozen=True, slots=True)
class OperatingPoint:
    """What a request may select; None stands for the manifest's default."""

    score: str | None = None
    target_fpr: float | None = None
    guarantee: Guarantee | None = None
    target_risk: float | None = None


DEFAULT_OPERATING_POINT = OperatingPoint()


def flag_point(
    manifest: Manifest,
    score: str | None = None,
    target_fpr: float | None = None,
    guarantee: Guarantee | None = None,
) -> FlagPoint:
    """Where the flag goes up, for the manifest's own choice of whatever is not given."""
    name = manifest.operating.score if score is None else score
    if name not in manifest.scores:
        raise OperatingPointError(
            f"The score {name!r} is not one of this model's; accepted are {', '.join(manifest.scores)}."
        )
    direction = manifest.scores[name].direction
    return choose_flag_point(
        np.sort(as_uncertainty(manifest.calibration.scores[name], direction)),
        score=name,
        direction=direction,
        target_fpr=manifest.operating.target_fpr if target_fpr is None else target_fpr,
        guarantee=manifest.operating.guarantee if guarantee is None else guarantee,
    )


def trust_point(manifest: Manifest, target_risk: float | None = None) -> TrustPoint:
    """Below which doubt a prediction is trusted, for the manifest's own target risk if none is given."""
    trust, name = manifest.calibration.trust, manifest.operating.trust_score
    evidence = RiskEvidence(
        levels=trust.levels.astype(np.float64),
        thresholds=trust.thresholds.astype(np.float64),
        accepted=np.array(trust.accepted),
        errors=np.array(trust.errors),
        n=manifest.calibration.n,
    )
    return choose_trust_point(
        evidence,
        score=name,
        direction=manifest.scores[name].direction,
        target_risk=manifest.operating.target_risk if target_risk is None else target_risk,
    )
