"""Whether a request may be answered: its key, what that may be used for, and its limits.

Both entrances of the application call this before the body is read: the direct one for predictions, and ASGI for all other
routes. Every path needs a key unless it is listed as public, so that a new route is never open by mistake.
"""

import logging
import math
import time
from collections.abc import Mapping

from qualms.access.key_ring import KeyHolder, KeyRing
from qualms.access.keys import METRICS, PREDICT, READ
from qualms.http1.exchange import Exchange
from qualms.http1.messages import Reply
from qualms.telemetry.access_metrics import AccessMetrics
from qualms.telemetry.callers import Callers
from qualms.telemetry.logs import Throttles
from qualms.telemetry.metrics import ServiceMetrics
from qualms.web.parameters import parse_request_id
from qualms.web.predict import PATH as PREDICT_PATH
from qualms.web.problems import Kind, Problem
from qualms.web.routes import HEALTH

REASONS = ("missing", "unknown", "forbidden", "rate", "concurrency")
_PUBLIC = frozenset(("/", *HEALTH))
_PAGE = "/page/"
_LOG_SECONDS = 1.0
"""at most one line per reason in this time, with the number of refusals"""
_MAX_TOKEN_BYTES = 512
_CHALLENGE = 'Bearer realm="qualms"'
_ACCEPTED = "Authorization: Bearer KEY, or X-API-Key: KEY"
_log = logging.getLogger("qualms.access")


def scope_of(path: str) -> str | None:
    """The use that a key must allow for this path; None if no key is needed."""
    if path == PREDICT_PATH:
        return PREDICT
    if path in _PUBLIC or (path.startswith(_PAGE) and "/" not in path[len(_PAGE) :]):
        return None
    if path == "/metrics":
        return METRICS
    return PREDICT if path.startswith("/models/") and path.endswith(PREDICT_PATH) else READ


class _RefusedError(Exception):
    """A request that is not let in."""

    def __init__(self, reason: str, problem: Problem, holder: KeyHolder | None = None) -> None:
        super().__init__(reason)
        self.reason, self.problem, self.holder = reason, problem, holder


class Gate:
    """Checks the keys of requests."""

    def __init__(self, keys: KeyRing, service: ServiceMetrics, metrics: AccessMetrics, callers: Callers) -> None:
        self._keys, self._service, self._metrics, self._callers = keys, service, metrics, callers
        self._throttles = Throttles(_LOG_SECONDS)

    def refuses(self, exchange: Exchange) -> bool:
        """Answer a request that is not let in, and return True; else note whose it is."""
        head = exchange.head
        try:
            exchange.caller = self._admit(head.path, head.fields)
        except _RefusedError as refused:
            exchange.reply(self._reply(refused, head.fields, exchange.peer))
            return True
        return False

    def check(self, path: str, headers: Mapping[bytes, bytes], peer: str) -> KeyHolder | Reply | None:
        """The same for other servers: the holder of the key, None if none is needed, or the reply to a refused request."""
        try:
            return self._admit(path, headers)
        except _RefusedError as refused:
            return self._reply(refused, headers, peer)

    def _admit(self, path: str, headers: Mapping[bytes, bytes]) -> KeyHolder | None:
        scope = scope_of(path)
        if scope is None:
            return None
        token = _token(headers)
        if token is None:
            detail = f"This request needs an API key; accepted: {_ACCEPTED}."
            raise _RefusedError("missing", _unauthorized(detail, _CHALLENGE))
        holder = self._keys.find(token)
        if holder is None:
            detail = f"The API key is not one of this service's keys; accepted: {_ACCEPTED}."
            raise _RefusedError("unknown", _unauthorized(detail, f'{_CHALLENGE}, error="invalid_token"'))
        if scope not in holder.only:
            allowed = ", ".join(holder.key.only)
            problem = Problem.refused(Kind.FORBIDDEN, None, f"The API key may not be used for {scope}", allowed)
            raise _RefusedError("forbidden", problem, holder)
        exceeded = holder.acquire()
        if exceeded is not None:
            raise _RefusedError(exceeded[0], _limited(holder, *exceeded), holder)
        return holder

    def _reply(self, refused: _RefusedError, headers: Mapping[bytes, bytes], peer: str) -> Reply:
        request_id = parse_request_id(headers)
        status = refused.problem.status
        self._service.answered("access", status, 0.0)
        self._metrics.refused(refused.reason)
        if refused.holder is not None:
            refused.holder.count(status)
        if count := self._throttles.due(refused.reason, time.monotonic()):
            fields = {"reason": refused.reason, "count": count, "status": status, "request_id": request_id}
            _log.warning(
                "refused because of its API key",
                extra={**fields, **self._callers.fields(peer, headers, refused.holder)},
            )
        return refused.problem.reply(request_id)


def _token(headers: Mapping[bytes, bytes]) -> bytes | None:
    """The token of X-API-Key or, without it, of a bearer Authorization; None if there is none, or it cannot be one."""
    token = headers.get(b"x-api-key")
    if token is None:
        value = headers.get(b"authorization", b"")
        if value[:7].lower() != b"bearer ":
            return None
        token = value[7:].strip(b" ")
    return token if 0 < len(token) <= _MAX_TOKEN_BYTES else None


def _unauthorized(detail: str, challenge: str) -> Problem:
    return Problem(Kind.UNAUTHORIZED, detail, accepted=_ACCEPTED, headers={"www-authenticate": challenge})


def _limited(holder: KeyHolder, limit: str, wait: float) -> Problem:
    """429, with Retry-After in whole seconds, rounded up."""
    seconds = max(1, math.ceil(wait))
    key = holder.key
    accepted = f"{key.rate:g} requests per second" if limit == "rate" else f"{key.concurrency} requests at a time"
    detail = f"The API key allows {accepted}; try again in {seconds} s."
    return Problem(Kind.RATE_LIMITED, detail, accepted=accepted, headers={"retry-after": str(seconds)})
