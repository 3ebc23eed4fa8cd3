"""One id a request, the caller's own where it has one, so that a reply, a log line and a complaint meet."""

import re
import secrets
from collections.abc import Mapping
from itertools import count

_ACCEPTED = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_PROCESS = secrets.token_hex(8)
_NUMBERS = count(secrets.randbits(32))
"""a new random number each time would be a system call each time"""


def request_id_from(headers: Mapping[bytes, bytes]) -> str:
    """The value of X-Request-ID if it is fit for logs and headers, else a new id of 32 hex digits.

    Half of them are this process's, drawn at random; the other half counts.
    """
    given = headers.get(b"x-request-id")
    if given is not None and _ACCEPTED.fullmatch(given):
        return given.decode("ascii")
    return f"{_PROCESS}{next(_NUMBERS):016x}"
