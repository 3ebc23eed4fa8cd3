"""Operating points of a manifest: its defaults, or what a request asks for instead."""

import numpy as np

from qualms.bundle.manifest import Manifest
from qualms.bundle.scores import doubt
from qualms.decisions.flag import Guarantee, OperatingPoint, operating_point
from qualms.decisions.trust import RiskEvidence, TrustPoint, trust_point
from qualms.errors import OperatingPointError


def flag_point(
    manifest: Manifest,
    score: str | None = None,
    target_fpr: float | None = None,
    guarantee: Guarantee | None = None,
) -> OperatingPoint:
    """Where the flag goes up, for the manifest's own choice of whatever is not given."""
    name = manifest.operating.score if score is None else score
    if name not in manifest.scores:
        raise OperatingPointError(
            f"The score {name!r} is not one of this model's; accepted are {', '.join(manifest.scores)}."
        )
    direction = manifest.scores[name].direction
    return operating_point(
        np.sort(doubt(manifest.calibration.scores[name], direction)),
        score=name,
        direction=direction,
        target_fpr=manifest.operating.target_fpr if target_fpr is None else target_fpr,
        guarantee=manifest.operating.guarantee if guarantee is None else guarantee,
    )


def accept_point(manifest: Manifest, target_risk: float | None = None) -> TrustPoint:
    """Below which doubt a prediction is trusted, for the manifest's own target risk if none is given."""
    trust, name = manifest.calibration.trust, manifest.operating.trust_score
    evidence = RiskEvidence(
        levels=trust.levels.astype(np.float64),
        thresholds=trust.thresholds.astype(np.float64),
        accepted=np.array(trust.accepted),
        errors=np.array(trust.errors),
        n=manifest.calibration.n,
    )
    return trust_point(
        evidence,
        score=name,
        direction=manifest.scores[name].direction,
        target_risk=manifest.operating.target_risk if target_risk is None else target_risk,
    )
