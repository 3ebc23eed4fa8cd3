"""Structured logs on stdout, one JSON object a line, so that machines read them and requests can be followed.

Extra fields (`logger.info("…", extra={"request_id": …})`) become members of the object. Bytes and arrays are
named, not written out: pixels never reach a log.
"""

import json
import logging
import math
import sys
from datetime import UTC, datetime
from itertools import islice
from pathlib import PurePath
from typing import BinaryIO

import numpy as np
import orjson

_STANDARD = len(logging.makeLogRecord({}).__dict__)
"""how many attributes every record has; they come first, and the extra fields after them"""
_NOT_EXTRA = frozenset({"time", "level", "logger", "message", "asctime", "color_message"})
"""what is written anyway, what other formatters leave behind, and uvicorn's copy of its message in colour"""

_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


def configure(level: str, stream: BinaryIO | None = None) -> None:
    """Send every logger's records of at least `level` through one JSON handler; uvicorn gets log_config=None."""
    root = logging.getLogger()
    root.handlers = [JsonHandler(sys.stdout.buffer if stream is None else stream)]
    root.setLevel(level.upper())
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    # Nothing reads the names of threads and processes, and looking them up is a third of a record's cost.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # It warns about each malformed body, which is the caller's mistake and is answered as such.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)


def access(
    logger: logging.Logger,
    *,
    request_id: str,
    method: str,
    route: str,
    status: int,
    duration_ms: float,
    **fields: str | float,
) -> None:
    """Log an answered request, at INFO or for a 5xx at WARNING; cheap, as it does not look up its caller."""
    level = logging.INFO if status < 500 else logging.WARNING
    if not logger.isEnabledFor(level):
        return
    record = logging.LogRecord(logger.name, level, "", 0, "request", None, None)
    record.__dict__.update(
        fields, request_id=request_id, method=method, route=route, status=status, duration_ms=round(duration_ms, 3)
    )
    logger.handle(record)


def to_line(record: logging.LogRecord) -> bytes:
    """A record as one line of JSON; the record's own members win over extra fields of the same name."""
    document: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    extra = islice(record.__dict__.items(), _STANDARD, None)
    document.update((name, value) for name, value in extra if name not in _NOT_EXTRA)
    if record.exc_info:
        document["exception"] = _FORMATTER.formatException(record.exc_info)
    if record.stack_info:
        document["stack"] = record.stack_info
    return _dumps(document)


_FORMATTER = logging.Formatter()


class JsonHandler(logging.Handler):
    """Writes each record as a line of JSON, at once."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write and flush; a record that cannot be written is reported on stderr, as logging does."""
        try:
            self._stream.write(to_line(record))
            self._stream.flush()
        except Exception:
            self.handleError(record)


class Rarely:
    """Counts what happens often, and says when a line about it is due."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._count = 0
        self._next = -math.inf

    def due(self, now: float) -> int:
        """Count one more; how many there were since the last line if it is time for another, else 0."""
        self._count += 1
        if now < self._next:
            return 0
        count, self._count, self._next = self._count, 0, now + self._seconds
        return count


def _dumps(document: dict[str, object]) -> bytes:
    options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z
    try:
        return orjson.dumps(document, default=_named, option=options)
    except TypeError:  # lone surrogates, integers past 64 bits, keys that are not strings: still one line
        return json.dumps(document, default=_named).encode() + b"\n"


def _named(value: object) -> object:
    """What stands in a log for a value that is not JSON: never its content, unless that is short by nature."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, PurePath | BaseException):
        return str(value)
    if isinstance(value, np.ndarray):
        return f"<array of shape {value.shape}>"
    return f"<{type(value).__name__}>"
