"""Every error reply, as RFC 9457 problem details: what was wrong with which field, and what is accepted.

A problem is raised where it is found and sent by whoever owns the connection; nothing else makes error bodies.
"""

import math
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import Final, Self

import orjson
from starlette.types import Send

from qualms.errors import ImageError, OperatingPointError

MEDIA_TYPE: Final = "application/problem+json"


class Kind(Enum):
    """The kinds of problem: status, last part of the stable `type` URI, and title."""

    MALFORMED = 400, "malformed", "The request cannot be read"
    NOT_FOUND = 404, "not-found", "There is nothing here"
    WRONG_METHOD = 405, "wrong-method", "The method is not allowed here"
    TOO_SLOW = 408, "too-slow", "The body did not arrive in time"
    TOO_LARGE = 413, "too-large", "The request is too large"
    UNSUPPORTED = 415, "unsupported", "This is not an image that is taken"
    INVALID = 422, "invalid", "A value is not accepted"
    WRONG_SHAPE = 422, "wrong-shape", "An image has the wrong shape"
    OPERATING_POINT = 422, "operating-point", "The calibration does not support this operating point"
    OVERLOADED = 429, "overloaded", "There are more requests than can be answered in time"
    INTERNAL = 500, "internal", "The service failed"
    UNAVAILABLE = 503, "unavailable", "The service is not ready"
    TOO_LATE = 504, "too-late", "The deadline has passed"

    def __init__(self, status: int, slug: str, title: str) -> None:
        self.status = status
        self.slug = slug
        self.title = title


class Problem(Exception):  # noqa: N818  # RFC 9457 calls it that
    """An error reply; a new one each time, since a raised exception gathers its traceback."""

    def __init__(
        self,
        kind: Kind,
        detail: str,
        *,
        field: str | None = None,
        accepted: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(detail)
        self.kind: Final = kind
        self.detail: Final = detail
        self.field: Final = None if field is None else _cut(field)
        self.accepted: Final = accepted
        self.headers: Final = dict(headers or {})

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self.kind.status

    @property
    def title(self) -> str:
        """What this kind of problem is called, the same for every occurrence."""
        return self.kind.title

    def body(self, request_id: str | None) -> bytes:
        """The problem details as JSON; members that say nothing are left out."""
        members = {
            "type": f"/problems/{self.kind.slug}",
            "title": self.kind.title,
            "status": self.kind.status,
            "detail": self.detail,
            "instance": None if request_id is None else f"/requests/{request_id}",
            "request_id": request_id,
            "field": self.field,
            "accepted": self.accepted,
        }
        return orjson.dumps({name: value for name, value in members.items() if value is not None})

    @classmethod
    def refused(cls, kind: Kind, field: str | None, what: str, accepted: str) -> Self:
        """Any kind, in the usual form of a sentence: what is wrong, then what is accepted."""
        return cls(kind, f"{what}; accepted: {accepted}.", field=field, accepted=accepted)

    @classmethod
    def invalid(cls, field: str, value: str, accepted: str) -> Self:
        """422: a field has a value that is not accepted."""
        return cls.refused(Kind.INVALID, field, f"{field} is {shown(value)}", accepted)

    @classmethod
    def not_found(cls, detail: str) -> Self:
        """404."""
        return cls(Kind.NOT_FOUND, detail)

    @classmethod
    def wrong_method(cls, method: str, allowed: str) -> Self:
        """405, with the Allow header that it must have."""
        what = f"The method {shown(method)} is not allowed here"
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
        """422: a deadline that an idle service could not meet either, so that to try again is of no use."""
        accepted = f"X-Request-Timeout of at least {math.ceil(1e3 * needed) / 1e3:g}, or fewer images"
        what = f"The request has {seconds:g} s, and its images alone take longer"
        return cls.refused(Kind.INVALID, "X-Request-Timeout", what, accepted)

    @classmethod
    def too_many_uploads(cls) -> Self:
        """429: bodies that are on their way take all the memory there is for them; what is left of this one is not read."""
        return cls(
            Kind.OVERLOADED,
            "Too many bodies are being sent at once; try again in 1 s.",
            headers={"retry-after": "1", "connection": "close"},
        )

    @classmethod
    def unavailable(cls, detail: str) -> Self:
        """503: loading, draining, or without a usable model."""
        return cls(Kind.UNAVAILABLE, detail)

    @classmethod
    def too_slow(cls, seconds: float) -> Self:
        """408: the body was not there within the request's `seconds`; what is left of it is not waited for."""
        return cls(
            Kind.TOO_SLOW,
            f"The body did not arrive within the request's {seconds:g} s.",
            headers={"connection": "close"},
        )

    @classmethod
    def too_late(cls, seconds: float) -> Self:
        """504: admitted, but not answered within its `seconds`."""
        return cls(Kind.TOO_LATE, f"The request was not answered within its {seconds:g} s.")

    @classmethod
    def from_status(cls, status: int, detail: str) -> Self:
        """What a framework says with a bare status; one that is not ours counts as the general one of its class."""
        general = Kind.MALFORMED if 400 <= status < 500 else Kind.INTERNAL
        return cls(next((kind for kind in Kind if kind.status == status), general), detail)


_IMAGE_KINDS = {
    "malformed": Kind.MALFORMED,
    "unsupported": Kind.UNSUPPORTED,
    "too_large": Kind.TOO_LARGE,
    "shape": Kind.WRONG_SHAPE,
}


def from_error(error: Exception, field: str | None = None) -> Problem:
    """The reply to an error: our sentence where the caller can act on it, else a 500 without internals."""
    if isinstance(error, ImageError):
        return Problem(_IMAGE_KINDS[error.reason], str(error), field=field)
    if isinstance(error, OperatingPointError):
        return Problem(Kind.OPERATING_POINT, str(error), field=field)
    return Problem(Kind.INTERNAL, "The service failed to answer; its log says why, under this request id.")


async def send_problem(
    send: Send, problem: Problem, request_id: str, extra_headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """Send the whole reply over ASGI."""
    body = problem.body(request_id)
    headers = [*problem_headers(problem, body, request_id), *extra_headers]
    await send({"type": "http.response.start", "status": problem.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def problem_headers(problem: Problem, body: bytes, request_id: str) -> list[tuple[bytes, bytes]]:
    """The headers of such a reply."""
    return [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"x-request-id", request_id.encode()),
        *((name.encode(), value.encode()) for name, value in problem.headers.items()),
    ]


def overloaded_reply(retry_after: int, request_id: str) -> tuple[bytes, bytes]:
    """Head lines and body of a 429, as `Problem.overloaded` has them, for a small part of what making one costs."""
    head, body = _overloaded_form(retry_after)
    given = request_id.encode()
    body = body.replace(_ANY_ID, given)
    return head.replace(_ANY_ID, given).replace(_ANY_LENGTH, b"%d" % len(body)), body


_ANY_ID, _ANY_LENGTH = b"<id>", b"<length>"


@lru_cache(maxsize=64)
def _overloaded_form(retry_after: int) -> tuple[bytes, bytes]:
    problem, any_id = Problem.overloaded(retry_after), _ANY_ID.decode()
    body = problem.body(any_id)
    head = [
        (name, _ANY_LENGTH if name == b"content-length" else value)
        for name, value in problem_headers(problem, body, any_id)
    ]
    return head_lines(head), body


def head_lines(headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Headers as HTTP/1.1 has them."""
    return b"".join(b"%b: %b\r\n" % header for header in headers)


def shown(text: str) -> str:
    """A stranger's text for a sentence: quoted, cut, and without control characters."""
    return repr(_cut(text))


def _cut(text: str) -> str:
    return text if len(text) <= 64 else text[:61] + "..."
