"""`GET /models/{name}/calibration`: the distribution of each score on the calibration images, and the supported operating points.

A manifest has every score of every calibration image; quantiles are enough to place a score among them.
"""

import math
from typing import Annotated, get_args

import numpy as np
import orjson
from fastapi import FastAPI, Response
from numpy.typing import NDArray
from pydantic import Field
from starlette.concurrency import run_in_threadpool

from qualms.bundle.parts import Fraction, Guarantee
from qualms.bundle.scores import Direction, ScoreKind, as_uncertainty
from qualms.decisions.flag import rank
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.verdicts import Decider
from qualms.errors import OperatingPointError
from qualms.replies import ReplyPart
from qualms.web.openapi import problem_response
from qualms.web.problems import Kind, Problem, quoted
from qualms.web.state import ServiceState

LEVELS = (0.0, 0.001, 0.0025, 0.005, *(round(0.01 * step, 2) for step in range(1, 100)), 0.995, 0.9975, 0.999, 1.0)
RATES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5)
"""false-alarm rates that are offered if the calibration supports them, with the model's default"""
_DIGITS = 6


class ScoreDistribution(ReplyPart):
    """The values of one score on the calibration images."""

    direction: Direction
    """the end of the range that means more uncertainty"""
    kind: ScoreKind
    quantiles: list[float | None]
    """at `levels`, ascending; null where the score is not finite"""


class SupportedPoint(ReplyPart):
    """An operating point that `/predict` accepts."""

    guarantee: Guarantee
    target_fpr: Fraction
    thresholds: dict[str, float | None]
    """by score; empty for by-class, whose thresholds depend on the predicted class, and null where one is not finite"""


class ScoreCalibration(ReplyPart):
    """The calibration images of one model, as far as a display needs them."""

    n: Annotated[int, Field(ge=1)]
    score: str
    """the default flag score"""
    target_fpr: Fraction
    guarantee: Guarantee
    levels: list[float]
    scores: dict[str, ScoreDistribution]
    operating_points: list[SupportedPoint]
    """by guarantee and ascending rate"""


def add_calibration(app: FastAPI, state: ServiceState) -> None:
    """Add the route to `app`."""
    made: dict[str, bytes] = {}
    """the reply of the served model, by its digest"""

    @app.get(
        "/models/{name}/calibration",
        tags=["models"],
        summary="Distributions of a model's scores, and the operating points that its calibration supports.",
        response_model=ScoreCalibration,
        responses={404: problem_response("No such model.")},
    )
    async def calibration(name: str) -> Response:
        model = state.model
        if model is None or model.bundle.manifest.name != name:
            raise Problem(Kind.NOT_FOUND, f"There is no model {quoted(name)} here.")
        if model.bundle.digest not in made:
            document = await run_in_threadpool(summarise, model.decider)
            made.clear()
            made[model.bundle.digest] = orjson.dumps(document.model_dump())
        return Response(made[model.bundle.digest], media_type="application/json")


def summarise(decider: Decider) -> ScoreCalibration:
    """Quantiles of all scores, and the thresholds of all supported operating points."""
    manifest = decider.manifest
    points = _points(decider)
    distributions = {}
    for name, spec in manifest.scores.items():
        # One score at a time: all scores as sorted float64 would take several times the manifest's memory.
        uncertainty = np.sort(as_uncertainty(manifest.calibration.scores[name], spec.direction))
        for point in points:
            if point.guarantee != "by-class":
                k = rank(len(uncertainty), point.target_fpr, point.guarantee)
                threshold = as_uncertainty(uncertainty[len(uncertainty) - k], spec.direction)
                point.thresholds[name] = _number(float(threshold))
        distributions[name] = ScoreDistribution(
            direction=spec.direction, kind=spec.kind, quantiles=_quantiles(uncertainty, spec.direction)
        )
    defaults = manifest.operating
    return ScoreCalibration(
        n=manifest.calibration.n,
        score=defaults.score,
        target_fpr=defaults.target_fpr,
        guarantee=defaults.guarantee,
        levels=list(LEVELS),
        scores=distributions,
        operating_points=points,
    )


def _points(decider: Decider) -> list[SupportedPoint]:
    rates = sorted({*RATES, decider.manifest.operating.target_fpr})
    return [
        SupportedPoint(guarantee=guarantee, target_fpr=rate, thresholds={})
        for guarantee in get_args(Guarantee)
        for rate in rates
        if _is_supported(decider, OperatingPoint(target_fpr=rate, guarantee=guarantee))
    ]


def _is_supported(decider: Decider, point: OperatingPoint) -> bool:
    """Whether images of every size have a threshold."""
    try:
        for size in (None, *decider.sizes):
            decider.rule(point, size)
    except OperatingPointError:
        return False
    return True


def _quantiles(uncertainty: NDArray[np.float64], direction: Direction) -> list[float | None]:
    """Raw values of the calibration images at LEVELS; without interpolation, which fails between infinities."""
    ascending = np.sort(as_uncertainty(uncertainty, direction))
    indices = np.rint(np.array(LEVELS) * (len(ascending) - 1)).astype(int)
    return [_number(float(value)) for value in ascending[indices]]


def _number(value: float) -> float | None:
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
