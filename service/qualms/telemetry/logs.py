"""Structured logs on stdout, one JSON object per line.

Extra fields (`logger.info("…", extra={"request_id": …})`) become members of the object. Bytes and arrays are replaced by
their type and shape, so that logs never contain pixels.
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

_STANDARD_ATTRIBUTES = len(logging.makeLogRecord({}).__dict__)
"""number of attributes of every record; extra fields follow them in `__dict__`"""
_NOT_EXTRA = frozenset({"time", "level", "logger", "message", "asctime", "color_message"})
"""members of every line, attributes added by other formatters, and uvicorn's coloured copy of the message"""

_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


def configure(level: str, stream: BinaryIO | None = None) -> None:
    """Write the records of all loggers from `level` up as JSON. Start uvicorn with log_config=None to include its own."""
    root = logging.getLogger()
    root.handlers = [JsonHandler(sys.stdout.buffer if stream is None else stream)]
    root.setLevel(level.upper())
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    # Thread and process names are not logged, and looking them up is a third of the cost of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # python_multipart warns about each malformed body; the client already gets an error reply for it.
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
    """Log an answered request: a 5xx at WARNING, others at INFO. Does not look up the calling line, which saves time."""
    level = logging.INFO if status < 500 else logging.WARNING
    if not logger.isEnabledFor(level):
        return
    record = logging.LogRecord(logger.name, level, "", 0, "request", None, None)
    record.__dict__.update(
        fields, request_id=request_id, method=method, route=route, status=status, duration_ms=round(duration_ms, 3)
    )
    logger.handle(record)


def to_line(record: logging.LogRecord) -> bytes:
    """Return a record as one line of JSON. Extra fields do not replace the record's own members of the same name."""
    document: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    extra = islice(record.__dict__.items(), _STANDARD_ATTRIBUTES, None)
    document.update((name, value) for name, value in extra if name not in _NOT_EXTRA)
    if record.exc_info:
        document["exception"] = _FORMATTER.formatException(record.exc_info)
    if record.stack_info:
        document["stack"] = record.stack_info
    return _dumps(document)


_FORMATTER = logging.Formatter()


class JsonHandler(logging.Handler):
    """Writes each record as one line of JSON and flushes it."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Write and flush a record. If that fails, logging reports the error on stderr."""
        try:
            self._stream.write(to_line(record))
            self._stream.flush()
        except Exception:
            self.handleError(record)


class Throttle:
    """Limits how often a frequent event is logged, and counts the events in between."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._count = 0
        self._next = -math.inf

    def due(self, now: float) -> int:
        """Count an event. Return the number of events since the last logged one if another may be logged now, else 0."""
        self._count += 1
        if now < self._next:
            return 0
        count, self._count, self._next = self._count, 0, now + self._seconds
        return count


def _dumps(document: dict[str, object]) -> bytes:
    options = orjson.OPT_APPEND_NEWLINE | orjson.OPT_UTC_Z
    try:
        return orjson.dumps(document, default=_placeholder, option=options)
    except TypeError:  # orjson rejects lone surrogates, integers over 64 bits and keys that are not strings
        return json.dumps(document, default=_placeholder).encode() + b"\n"


def _placeholder(value: object) -> object:
    """Return a short JSON value for an object that JSON cannot represent, without the content of bytes and arrays."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, PurePath | BaseException):
        return str(value)
    if isinstance(value, np.ndarray):
        return f"<array of shape {value.shape}>"
    return f"<{type(value).__name__}>"
