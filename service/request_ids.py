"""One id a request, the caller's own where it has one, so that a reply, a log line and a complaint meet."""

import re
import secrets
from collections.abc import Mapping

_ACCEPTED = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def request_id_from(headers: Mapping[bytes, bytes]) -> str:
    """The value of X-Request-ID if it is fit for logs and headers, else a new random id of 32 hex digits."""
    given = headers.get(b"x-request-id")
    if given is not None and _ACCEPTED.fullmatch(given):
        return given.decode("ascii")
    return secrets.token_hex(16)
