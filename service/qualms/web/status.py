"""`GET /status`: the recent flag rate of each model against its bound, in a few hundred bytes.

It needs no Prometheus, and it can be public where /metrics is not: it has no request counts, sizes or addresses.
"""

import time
from collections.abc import Callable
from typing import Annotated

from fastapi import FastAPI, Response
from pydantic import Field

from qualms.bundle.parts import Fraction
from qualms.decisions.binomial import binomial_cdf
from qualms.replies import NotNegative, Probability, ReplyPart
from qualms.telemetry.recent_flags import INTERVAL_SECONDS, INTERVALS
from qualms.web.served_model import ServedModel
from qualms.web.state import ServiceState

MAX_AGE_SECONDS = 1.0
"""the reply is made at most once in this time"""
ALARM_PROBABILITY = 0.001
"""the rate counts as above its bound if chance alone gives as many flags with a lower probability"""

Count = Annotated[int, Field(ge=0)]
PerInterval = Annotated[list[Count], Field(min_length=INTERVALS, max_length=INTERVALS)]


class RecentRate(ReplyPart):
    """Flags of one model in the last half hour, at its default operating point."""

    interval_seconds: NotNegative
    images: PerInterval
    """images in each interval, oldest first; the last interval is not over yet"""
    flagged: PerInterval
    """flagged images in each interval"""
    rate: Probability | None
    """share of flagged images; null without images"""
    above_bound: bool
    """whether in-distribution images alone would have as many flags with a probability of less than 0.1 %"""


class ModelStatus(ReplyPart):
    """One model: the rates that its flag guarantees, and the recent one."""

    name: str
    version: str
    target_fpr: Fraction
    """guaranteed false-alarm rate"""
    rate_bound: Probability
    """99.9 % quantile of the false-alarm rate over calibration sets; alerts use it"""
    recent: RecentRate


class ServiceStatus(ReplyPart):
    """The state of the service and of its models."""

    ready: bool
    reason: str | None
    """why the service is not ready"""
    models: list[ModelStatus]


def add_status(app: FastAPI, state: ServiceState, clock: Callable[[], float] = time.monotonic) -> None:
    """Add `GET /status` to `app`."""
    last: tuple[float, bytes] = (-MAX_AGE_SECONDS, b"")

    @app.get("/status", tags=["health"], summary="Recent flag rates and their bounds.", response_model=ServiceStatus)
    async def status() -> Response:
        nonlocal last
        now = clock()
        if not last[1] or now - last[0] >= MAX_AGE_SECONDS:
            last = now, service_status(state).model_dump_json().encode()
        return Response(last[1], media_type="application/json", headers={"cache-control": "no-store"})


def service_status(state: ServiceState) -> ServiceStatus:
    """The status of all models."""
    models = [] if state.model is None else [_model_status(state.model)]
    return ServiceStatus(ready=state.why_not_ready is None, reason=state.why_not_ready, models=models)


def _model_status(model: ServedModel) -> ModelStatus:
    manifest, flag = model.bundle.manifest, model.decider.rule().flag
    intervals = model.recent_flags.intervals()
    images, flagged = sum(one.images for one in intervals), sum(one.flagged for one in intervals)
    recent = RecentRate(
        interval_seconds=INTERVAL_SECONDS,
        images=[one.images for one in intervals],
        flagged=[one.flagged for one in intervals],
        rate=flagged / images if images else None,
        above_bound=is_above(flagged, images, flag.rate_bound),
    )
    return ModelStatus(
        name=manifest.name,
        version=manifest.version,
        target_fpr=flag.target_fpr,
        rate_bound=flag.rate_bound,
        recent=recent,
    )


def is_above(flagged: int, images: int, bound: float) -> bool:
    """Whether so many flags are improbable if the false-alarm rate is at its bound: P(Bin(images, bound) ≥ flagged) < 0.1 %."""
    return flagged > bound * images and binomial_cdf(flagged - 1, images, bound) > 1 - ALARM_PROBABILITY
