"""Every error reply, as RFC 9457 problem details: what was wrong with which field, and what is accepted.

A Problem is raised where the error is detected and sent by the code that owns the connection.
"""

import math
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from typing import Final, Self

import orjson
from starlette.types import Send

from qualms.errors import ExplanationError, ImageError, OperatingPointError
from qualms.http1.messages import CLOSE, Refusal, Reply
from qualms.replies import ProblemReply

MEDIA_TYPE: Final = "application/problem+json"


class Kind(Enum):
    """The kinds of problem: status, last part of the stable `type` URI, title, and reason in `qualms_rejected_total`."""

    MALFORMED = 400, "malformed", "The request cannot be read", "malformed"
    UNAUTHORIZED = 401, "unauthorized", "A valid API key is needed", None
    FORBIDDEN = 403, "forbidden", "The API key does not allow this", None
    NOT_FOUND = 404, "not-found", "There is nothing here", None
    WRONG_METHOD = 405, "wrong-method", "The method is not allowed here", None
    TOO_SLOW = 408, "too-slow", "The request did not arrive in time", "slow"
    TOO_LARGE = 413, "too-large", "The request is too large", "too_large"
    URL_TOO_LONG = 414, "url-too-long", "The URL is too long", None
    UNSUPPORTED = 415, "unsupported", "The content is not an accepted image or type", "unsupported"
    INVALID = 422, "invalid", "A value is not accepted", "invalid"
    WRONG_SHAPE = 422, "wrong-shape", "An image has the wrong shape", "invalid"
    OPERATING_POINT = 422, "operating-point", "The calibration does not support this operating point", "invalid"
    OVERLOADED = 429, "overloaded", "There are more requests than can be answered in time", "overload"
    RATE_LIMITED = 429, "rate-limited", "The API key has reached its limit", None
    HEAD_TOO_LARGE = 431, "head-too-large", "The head of the request is too large", None
    INTERNAL = 500, "internal", "The service failed", None
    NOT_IMPLEMENTED = 501, "not-implemented", "The service does not support what the request needs", None
    UNAVAILABLE = 503, "unavailable", "The service is not ready", None
    TOO_LATE = 504, "too-late", "The deadline has passed", "expired"

    def __init__(self, status: int, slug: str, title: str, reason: str | None) -> None:
        self.status = status
        self.slug = slug
        self.title = title
        self.reason = reason


_OTHER_KINDS = (Kind.NOT_FOUND, Kind.WRONG_METHOD, Kind.URL_TOO_LONG, Kind.HEAD_TOO_LARGE, Kind.NOT_IMPLEMENTED)
"""problems of other routes, and of requests that reach no route"""
PREDICT_KINDS = tuple(kind for kind in Kind if kind not in _OTHER_KINDS)
"""the problems that POST /predict may answer with"""


class Problem(Exception):  # noqa: N818  # RFC 9457's term
    """An error reply. Make a new one each time: a raised exception holds its traceback."""

    def __init__(
        self,
        kind: Kind,
        detail: str,
        *,
        field: str | None = None,
        accepted: str | None = None,
        headers: Mapping[str, str] | None = None,
        close: bool = False,
    ) -> None:
        """`close`: whether the connection is closed after the reply, because the rest of the request is not read."""
        super().__init__(detail)
        self.kind: Final = kind
        self.detail: Final = detail
        self.field: Final = None if field is None else _shorten(field)
        self.accepted: Final = accepted
        self.headers: Final = dict(headers or {})
        self.close: Final = close

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.kind.status

    def body(self, request_id: str) -> bytes:
        """The problem details as JSON, without members that have no value."""
        reply = ProblemReply(
            type=f"/problems/{self.kind.slug}",
            title=self.kind.title,
            status=self.kind.status,
            detail=self.detail,
            instance=f"/requests/{request_id}",
            request_id=request_id,
            field=self.field,
            accepted=self.accepted,
        )
        return orjson.dumps(reply.model_dump(exclude_none=True))

    def reply(self, request_id: str) -> Reply:
        """The whole HTTP reply."""
        body = self.body(request_id)
        headers = [
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", str(len(body)).encode()),
            (b"x-request-id", request_id.encode()),
            *((name.encode(), value.encode()) for name, value in self.headers.items()),
        ]
        return Reply(self.status, headers, body, self.close)

    @classmethod
    def refused(cls, kind: Kind, field: str | None, what: str, accepted: str) -> Self:
        """Any kind, as one sentence: what is wrong, then what is accepted."""
        return cls(kind, f"{what}; accepted: {accepted}.", field=field, accepted=accepted)

    @classmethod
    def invalid(cls, field: str, value: str, accepted: str) -> Self:
        """422: a field has a value that is not accepted."""
        return cls.refused(Kind.INVALID, field, f"{field} is {quoted(value)}", accepted)

    @classmethod
    def wrong_method(cls, method: str, allowed: str) -> Self:
        """405, with the Allow header that RFC 9110 requires."""
        what = f"The method {quoted(method)} is not allowed here"
        return cls(Kind.WRONG_METHOD, f"{what}; accepted: {allowed}.", accepted=allowed, headers={"allow": allowed})

    @classmethod
    def overloaded(cls, retry_after: float) -> Self:
        """429, with Retry-After in whole seconds, rounded up, at least 1."""
        seconds = max(1, math.ceil(retry_after))
        return cls(
            Kind.OVERLOADED,
            f"The queue is too long to answer before the deadline; try again in {seconds} s.",
            headers={"retry-after": str(seconds)},
        )

    @classmethod
    def too_little_time(cls, seconds: float, needed: float) -> Self:
        """422: the deadline is shorter than what the request needs on an idle service, so retrying cannot help."""
        accepted = f"X-Request-Timeout of at least {math.ceil(1e3 * needed) / 1e3:g}, or fewer images"
        what = f"The request has {seconds:g} s, and its images alone take longer"
        return cls.refused(Kind.INVALID, "X-Request-Timeout", what, accepted)

    @classmethod
    def from_refusal(cls, refusal: Refusal) -> Self:
        """The problem for a request that the protocol refuses; the connection is closed."""
        kind = next(kind for kind in Kind if kind.status == refusal.status)
        headers = {"retry-after": "1"} if refusal.status in (429, 503) else None
        return cls(kind, refusal.detail, accepted=refusal.accepted, headers=headers, close=True)

    @classmethod
    def too_slow(cls, seconds: float) -> Self:
        """408: the body did not arrive within the request's timeout; the rest of it is not read."""
        return cls(Kind.TOO_SLOW, f"The body did not arrive within the request's {seconds:g} s.", close=True)

    @classmethod
    def too_late(cls, seconds: float) -> Self:
        """504: admitted, but not answered within the request's timeout."""
        return cls(Kind.TOO_LATE, f"The request was not answered within its {seconds:g} s.")

    @classmethod
    def from_status(cls, status: int, detail: str) -> Self:
        """The problem for a status that the framework chose; an unknown status becomes 400 or 500."""
        general = Kind.MALFORMED if 400 <= status < 500 else Kind.INTERNAL
        return cls(next((kind for kind in Kind if kind.status == status), general), detail)


_IMAGE_KINDS = {
    "malformed": Kind.MALFORMED,
    "unsupported": Kind.UNSUPPORTED,
    "too_large": Kind.TOO_LARGE,
    "failed": Kind.INVALID,
    "shape": Kind.WRONG_SHAPE,
}


def from_error(error: BaseException, field: str | None = None) -> Problem:
    """The problem for an error: its sentence if the client can act on it, else a 500 without internals."""
    if isinstance(error, Problem):
        return error
    if isinstance(error, ImageError):
        return Problem(_IMAGE_KINDS[error.reason], str(error), field=field)
    if isinstance(error, OperatingPointError):
        return Problem(Kind.OPERATING_POINT, str(error), field=field)
    if isinstance(error, ExplanationError):
        return Problem(Kind.INVALID, str(error), field=field)
    return Problem(Kind.INTERNAL, "The service failed to answer; its log has the reason under this request id.")


async def send_reply(send: Send, reply: Reply) -> None:
    """Send a whole reply over ASGI."""
    headers = [*reply.headers, CLOSE] if reply.close else reply.headers
    await send({"type": "http.response.start", "status": reply.status, "headers": headers})
    await send({"type": "http.response.body", "body": reply.body})


def overloaded_reply(retry_after: int, request_id: str) -> Reply:
    """The reply of `Problem.overloaded`, from a template: a refusal must cost much less than an answer."""
    head, template, fixed_length = _overloaded_template(retry_after)
    given = request_id.encode()
    body = template.replace(_ID_PLACEHOLDER, given)
    length = (b"content-length", b"%d" % (fixed_length + 2 * len(given)))
    return Reply(Kind.OVERLOADED.status, [*head, length, (b"x-request-id", given)], body)


_ID_PLACEHOLDER = b"<id>"


@lru_cache(maxsize=64)
def _overloaded_template(retry_after: int) -> tuple[list[tuple[bytes, bytes]], bytes, int]:
    """Headers that do not depend on the request id, the body with a placeholder, and its length without the two ids."""
    reply = Problem.overloaded(retry_after).reply(_ID_PLACEHOLDER.decode())
    head = [header for header in reply.headers if header[0] not in (b"content-length", b"x-request-id")]
    return head, reply.body, len(reply.body) - 2 * len(_ID_PLACEHOLDER)


def quoted(text: str) -> str:
    """A client's text for an error sentence: quoted, shortened and without control characters."""
    return repr(_shorten(text))


def _shorten(text: str) -> str:
    return text if len(text) <= 64 else text[:61] + "..."
