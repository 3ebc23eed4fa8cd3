"""Requests and connections that the HTTP server refuses by itself: their replies, metrics and log lines."""

import logging
import time

from qualms.http1.messages import STOPPING, Refusal, Reply
from qualms.telemetry.logs import Throttles
from qualms.telemetry.metrics import ServiceMetrics
from qualms.web.parameters import parse_request_id
from qualms.web.problems import Problem

_LOG_SECONDS = 1.0
"""at most one line per reason in this time, with the number of refusals"""
_log = logging.getLogger("qualms.server")


class Refusals:
    """Answers and counts what `qualms.http1` refuses."""

    def __init__(self, metrics: ServiceMetrics) -> None:
        self._metrics = metrics
        self._throttles = Throttles(_LOG_SECONDS)

    def refuse(self, refusal: Refusal) -> Reply:
        """The reply to a refused request."""
        request_id = parse_request_id({})
        self._metrics.answered("protocol", refusal.status, 0.0)
        self._count(refusal.reason, request_id=request_id, status=refusal.status, detail=refusal.detail)
        return Problem.from_refusal(refusal).reply(request_id)

    def closed(self, reason: str) -> None:
        """Count a connection that was closed without a reply."""
        self._count(reason)

    def _count(self, reason: str, **fields: object) -> None:
        self._metrics.refused_by_protocol(reason)
        if count := self._throttles.due(reason, time.monotonic()):
            level = logging.INFO if reason == STOPPING else logging.WARNING
            _log.log(level, "refused by the protocol", extra={"reason": reason, "count": count, **fields})
