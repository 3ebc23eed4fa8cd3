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

    __slots__ = ("_interval", "_maximum", "_taken", "active")

    def __init__(self, maximum: int, active: int = 0) -> None:
        self._maximum = maximum
        self.active = active
        self._taken: float | None = None
        """when a place was last taken: if none is free, since when; None if that is unknown"""
        self._interval = 0.0
        """mean time until one of them is free"""

    def wait(self) -> float:
        """0 if a place is free, else the seconds in which one is expected to be free."""
        return 0.0 if self.active < self._maximum else max(self._interval, 1e-3)

    def take(self, now: float) -> None:
        """Take a place that is free."""
        self.active += 1
        self._taken = now

    def release(self, now: float) -> None:
        """Return a place."""
        if self.active >= self._maximum and self._taken is not None:
            elapsed = min(_MAX_WAIT, now - self._taken)
            self._interval += _SMOOTHING * (elapsed - self._interval) if self._interval else elapsed
        self.active -= 1
