"""Send drawn digits to a service at a limited rate, with a drift that rises and falls periodically."""

import http.client
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qualms.demo.digits import draw
from qualms.demo.drift import dose_at, drift
from qualms.errors import QualmsError
from qualms.images.encodings import Encoding

API_KEY_VARIABLE = "QUALMS_API_KEY"
_TIMEOUT_SECONDS = 10.0
_MAX_LAG_SECONDS = 1.0
"""if sending is late by more than this, the schedule restarts instead of catching up with a burst"""


class TrafficError(QualmsError):
    """The URL of the service is invalid, or the service did not reply."""


@dataclass
class Tally:
    """Numbers of images since the last report."""

    sent: int = 0
    flagged: int = 0
    failed: int = 0


def read_api_key(path: Path | None, environment: Mapping[str, str]) -> str | None:
    """The key in a file or in QUALMS_API_KEY. It is no option, because other users see the command line of a process."""
    if path is None:
        return environment.get(API_KEY_VARIABLE) or None
    try:
        lines = path.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = (getattr(error, "strerror", None) or "it is not text").lower()
        raise TrafficError(f"The file {path} of the API key cannot be read: {reason}.") from None
    if len(lines) != 1:
        raise TrafficError(f"The file {path} should contain one API key and nothing else.")
    return lines[0]


class Sender:
    """Posts images in one encoding to a service over one connection, which is reopened after a failure."""

    def __init__(self, url: str, encoding: Encoding, rng: np.random.Generator, api_key: str | None = None) -> None:
        """`rng` draws the parameters of the encoding, such as a JPEG's quality. `api_key` is one of the service's keys."""
        parts = urlsplit(url)
        try:
            port, valid = parts.port, parts.scheme in ("http", "https") and bool(parts.hostname)
        except ValueError:  # the port is not a number
            port, valid = None, False
        if not valid:
            raise TrafficError(f"The URL {url!r} is not accepted; it should be like http://127.0.0.1:8000.")
        self._path = parts.path.rstrip("/") + "/predict"
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._connection = kind(parts.hostname or "", port, timeout=_TIMEOUT_SECONDS)
        self._headers = {"content-type": "application/octet-stream"}
        if api_key is not None:
            self._headers["authorization"] = f"Bearer {api_key}"
        self._encoding, self._rng = encoding, rng
        self.reason = ""
        """the status of the last reply, in brackets; empty if there was no reply"""

    def __call__(self, image: NDArray[np.uint8]) -> bool | None:
        """Whether the service flagged the image; None if the request failed."""
        body = self._encoding.encode(Image.fromarray(image), self._rng)
        with suppress(OSError, http.client.HTTPException):
            self._connection.request("POST", self._path, body, self._headers)
            reply = self._connection.getresponse()
            text = reply.read()
            self.reason = f" (the last reply had status {reply.status})"
            if reply.status == 200:
                return bool(json.loads(text)["results"][0]["ood"]["flag"])
            return None
        self._connection.close()  # the next request reopens it
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
    """Send at most `rate` images per second, with one drift per `period`, for `seconds` or without end.

    `report` is called with the dose and the tally every `report_seconds` and at the end. Returns the number of replies.
    """
    rng = np.random.default_rng(seed)
    start = clock()
    due = reported = dose = 0.0
    replies, tally = 0, Tally()
    while seconds is None or due < seconds:
        now = clock() - start
        if now < due:
            sleep(due - now)
        elif now > due + _MAX_LAG_SECONDS:
            due = now
        dose = dose_at(due, period)
        flag = send(drift(draw(int(rng.integers(10)), rng), dose, rng))
        tally.sent += 1
        tally.flagged += flag is True
        tally.failed += flag is None
        replies += flag is not None
        due += 1 / rate
        if due >= reported + report_seconds:
            report(dose, tally)
            reported, tally = due, Tally()
    if tally.sent:
        report(dose, tally)
    return replies
