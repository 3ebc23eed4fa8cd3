"""When a request is sent again: after replies and errors that may pass, never beyond the deadline.

This is logic without sockets or sleeping, so that the two clients share it.
"""

import random
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

import httpx

from qualms.client.errors import ClientError, DeadlineError, ProblemError, UnreachableError

RETRIED = frozenset({408, 429, 502, 503})
"""too slow or closed while stopping, overloaded, a proxy without a server, not ready"""
_FIRST_WAIT, _LONGEST_WAIT = 0.05, 2.0
_JITTER = 0.25
"""a Retry-After is lengthened by up to this share of it and of a second, so that clients do not return together"""


def retry_after(value: str | None, now: datetime) -> float | None:
    """Seconds of a Retry-After header, which is a number of seconds or a date; None if there is none or it is neither."""
    if value is None:
        return None
    if value.strip().isdecimal():
        return float(value)
    try:
        date = parsedate_to_datetime(value)
    except (ValueError, TypeError, OverflowError):
        return None
    return max(0.0, (date.replace(tzinfo=date.tzinfo or UTC) - now).total_seconds())


def utc_now() -> datetime:
    """The wall clock, for Retry-After as a date."""
    return datetime.now(UTC)


@dataclass
class Attempts:
    """The attempts of one request, which must be over at `deadline` by `clock`; `budget` is the seconds it had."""

    deadline: float
    budget: float
    max_retries: int | None
    clock: Callable[[], float]
    random: Callable[[], float] = random.random
    _failed: int = 0
    _last: ClientError | None = field(default=None)

    def remaining(self) -> float:
        """Seconds until the deadline; DeadlineError if it has passed."""
        seconds = self.deadline - self.clock()
        if seconds <= 0:
            raise self.expired()
        return seconds

    def expired(self) -> DeadlineError:
        """The error of a request whose deadline has passed."""
        message = f"There was no result within {self.budget:.3g} s."
        if self._last is not None:
            message = f"{message[:-1]}; the last attempt failed: {self._last}"
        return DeadlineError(message, self._last)

    def wait_before_retry(self, error: ClientError) -> float:
        """Seconds to wait after this error; raises the error if it is final, or if the deadline is earlier."""
        after = error.retry_after if isinstance(error, ProblemError) else None
        passing = error.status in RETRIED if isinstance(error, ProblemError) else isinstance(error, UnreachableError)
        if isinstance(error, ProblemError) and error.status == 504:
            raise DeadlineError(f"There was no result in time: {error}", error) from error
        if not passing or (self.max_retries is not None and self._failed >= self.max_retries):
            raise error
        if after is None:
            wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2.0 ** min(self._failed, 16)) * (0.5 + 0.5 * self.random())
        else:
            wait = after + _JITTER * min(1.0, max(after, _FIRST_WAIT)) * self.random()
        if self.clock() + wait >= self.deadline:
            raise error
        self._failed, self._last = self._failed + 1, error
        return wait

    def transport_error(self, error: httpx.TransportError, url: str) -> ClientError:
        """The client's error for one of httpx; raises it if another attempt cannot succeed."""
        if isinstance(error, httpx.TimeoutException):
            raise self.expired() from error
        unreachable = UnreachableError(f"There is no connection to {url}: {error or type(error).__name__}.")
        unreachable.__cause__ = error
        if isinstance(error, httpx.UnsupportedProtocol) or _is_untrusted(error):
            raise unreachable from error
        return unreachable


def _is_untrusted(error: BaseException | None) -> bool:
    """Whether the server's certificate was refused."""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False
