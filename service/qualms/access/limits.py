"""Limits of one key on its requests per second and on its simultaneous requests."""

import math

BURST_SECONDS = 1.0
"""requests of this time may come at once"""
_SMOOTHING = 0.2
_MAX_WAIT = 60.0


class RateLimit:
    """At most `rate` requests per second on average, of which those of one second may come at once.

    This is the generic cell rate algorithm: one number, the time at which all requests so far would have been sent evenly.
    """

    __slots__ = ("_due", "_interval", "_tolerance")

    def __init__(self, rate: float) -> None:
        self._interval = 1.0 / rate
        burst = max(1.0, math.floor(rate * BURST_SECONDS))
        self._tolerance = (burst - 1.0) * self._interval
        self._due = -math.inf

    def wait(self, now: float) -> float:
        """Count a request and return 0, or return the seconds until one is accepted."""
        due = max(self._due, now)
        early = due - now - self._tolerance
        if early > 1e-9:
            return early
        self._due = due + self._interval
        return 0.0


class ConcurrencyLimit:
    """At most `maximum` requests at a time."""

    __slots__ = ("_ended", "_interval", "_maximum", "active")

    def __init__(self, maximum: int, active: int = 0) -> None:
        self._maximum = maximum
        self.active = active
        self._ended = -math.inf
        """when a request last ended while all places were taken"""
        self._interval = 0.0
        """mean time between such ends"""

    def wait(self) -> float:
        """Take a place and return 0, or return the seconds in which one is expected to be free."""
        if self.active < self._maximum:
            self.active += 1
            return 0.0
        return max(self._interval, 1e-3)

    def release(self, now: float) -> None:
        """Return a place."""
        if self.active >= self._maximum:
            elapsed = min(_MAX_WAIT, now - self._ended)
            self._interval += _SMOOTHING * (elapsed - self._interval) if self._interval else elapsed
            self._ended = now
        self.active -= 1
