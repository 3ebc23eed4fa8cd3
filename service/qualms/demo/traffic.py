"""A modest, endless stream of drawn digits to a service, with a drift that grows and fades."""

import http.client
import io
import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qualms.demo.digits import draw
from qualms.demo.drift import dose_at, drift
from qualms.errors import QualmsError

_TIMEOUT_SECONDS = 10.0
_BEHIND_SECONDS = 1.0
"""a stream that falls further behind than this does not try to catch up: the rate stays bounded"""


class TrafficError(QualmsError):
    """The address to send to makes no sense, or nobody answers there."""


@dataclass
class Tally:
    """What was sent since the last report."""

    sent: int = 0
    flagged: int = 0
    failed: int = 0


class Sender:
    """Posts images to a service over one connection, which is made anew after a failure."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        try:
            port, sensible = parts.port, parts.scheme == "http" and bool(parts.hostname)
        except ValueError:  # a port that is no number
            port, sensible = None, False
        if not sensible:
            raise TrafficError(f"{url!r} cannot be sent to; an address like http://127.0.0.1:8000 is accepted.")
        self._path = parts.path.rstrip("/") + "/predict"
        self._connection = http.client.HTTPConnection(parts.hostname or "", port, _TIMEOUT_SECONDS)

    def __call__(self, image: NDArray[np.uint8]) -> bool | None:
        """Whether the service flagged the image, or None if it gave no answer."""
        with suppress(OSError, http.client.HTTPException):
            self._connection.request("POST", self._path, _png(image), {"content-type": "image/png"})
            reply = self._connection.getresponse()
            body = reply.read()
            if reply.status == 200:
                return bool(json.loads(body)["results"][0]["ood"]["flag"])
            return None
        self._connection.close()  # the next request opens it again
        return None


def stream(
    send: Callable[[NDArray[np.uint8]], bool | None],
    *,
    rate: float,
    period: float,
    seconds: float | None = None,
    seed: int = 0,
    report: Callable[[float, Tally], None],
    report_seconds: float = 10.0,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Send at most `rate` images a second, drifting once a `period`, for `seconds` or for ever.

    `report` hears of the dose and of what was sent, every `report_seconds` and at the end. Returns how many were answered.
    """
    rng = np.random.default_rng(seed)
    start = clock()
    due = reported = dose = 0.0
    answered, tally = 0, Tally()
    while seconds is None or due < seconds:
        now = clock() - start
        if now < due:
            sleep(due - now)
        elif now > due + _BEHIND_SECONDS:
            due = now
        dose = dose_at(due, period)
        flag = send(drift(draw(int(rng.integers(10)), rng), dose, rng))
        tally.sent += 1
        tally.flagged += flag is True
        tally.failed += flag is None
        answered += flag is not None
        due += 1 / rate
        if due >= reported + report_seconds:
            report(dose, tally)
            reported, tally = due, Tally()
    if tally.sent:
        report(dose, tally)
    return answered


def _png(image: NDArray[np.uint8]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "PNG")
    return file.getvalue()
