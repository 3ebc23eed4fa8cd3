"""Logs on stdout: one JSON object per line, or short readable lines if stdout is a terminal.

Lines are formatted by the caller and written by a thread (`line_queue`); `logging` flushes them at exit. Extra fields
(`logger.info("…", extra={"request_id": …})`) become members of the object. Bytes and arrays are replaced by their type and
shape, so that logs never contain pixels.
"""

import json
import logging
import math
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import islice
from pathlib import PurePath
from typing import IO, Any

import numpy as np
import orjson

from qualms.telemetry.line_queue import LineQueue
from qualms.telemetry.terminal import TerminalLines

_STANDARD_ATTRIBUTES = len(logging.LogRecord("", 0, "", 0, None, None, None).__dict__)
"""number of attributes of every record; extra fields follow them in `__dict__`"""
_NOT_EXTRA = frozenset({"time", "level", "logger", "message", "asctime", "color_message"})
"""members of every line, attributes added by other formatters, and uvicorn's coloured copy of the message"""

_UVICORN = ("uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi")


def configure(level: str, stream: IO[Any] | None = None, terminal: bool | None = None) -> None:
    """Write the records of all loggers from `level` up to a file, by default stdout.

    `terminal`: write readable lines instead of JSON; by default if the file is a terminal. Start uvicorn with
    log_config=None to include its records.
    """
    root = logging.getLogger()
    for handler in root.handlers:
        if isinstance(handler, LineHandler):
            handler.close()
    descriptor = _descriptor(sys.stdout if stream is None else stream)
    if terminal is None:
        terminal = descriptor is not None and os.isatty(descriptor)
    root.handlers = [LineHandler(descriptor, TerminalLines(level.upper() == "DEBUG") if terminal else to_line)]
    root.setLevel(level.upper())
    for name in _UVICORN:
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)
    # Thread and process names are not logged, and looking them up is a third of the cost of a record.
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    # python_multipart warns about each malformed body; the client already gets an error reply for it.
    logging.getLogger("python_multipart").setLevel(logging.ERROR)
    # Pillow logs errors of some damaged files, for which the client gets an error reply as well.
    logging.getLogger("PIL").setLevel(logging.CRITICAL)


def _descriptor(stream: IO[Any] | None) -> int | None:
    """Return the descriptor of a file; None if the file is closed or has none."""
    try:
        return None if stream is None else stream.fileno()
    except (OSError, ValueError):
        return None


def dropped() -> int:
    """Return the number of log lines that were not written because stdout blocked or failed."""
    return sum(handler.dropped for handler in logging.getLogger().handlers if isinstance(handler, LineHandler))


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
    """Return a record as one line of JSON.

    Extra fields do not replace the record's own members of the same name. Names with a leading underscore are left out: libraries
    that replace the factory of records, such as Ray, add them to every record.
    """
    document: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC),
        "level": record.levelname.lower(),
        "logger": record.name,
        "message": record.getMessage(),
    }
    extra = islice(record.__dict__.items(), _STANDARD_ATTRIBUTES, None)
    document.update((name, value) for name, value in extra if name not in _NOT_EXTRA and not name.startswith("_"))
    if record.exc_info:
        document["exception"] = _FORMATTER.formatException(record.exc_info)
    if record.stack_info:
        document["stack"] = record.stack_info
    return _dumps(document)


_FORMATTER = logging.Formatter()


class LineHandler(logging.Handler):
    """Queues each record as a line that a thread writes. `to_line` returns no bytes for a record that is not shown."""

    def __init__(self, descriptor: int | None, to_line: Callable[[logging.LogRecord], bytes]) -> None:
        super().__init__()
        self._to_line = to_line
        self._queue = LineQueue(descriptor, self._dropped_line)

    @property
    def dropped(self) -> int:
        """Lines that were not written."""
        return self._queue.dropped

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record. If it cannot be formatted, logging reports the error on stderr."""
        try:
            line = self._to_line(record)
        except Exception:
            self.handleError(record)
        else:
            if line:
                self._queue.put(line)

    def close(self) -> None:
        """Write the queued lines, for at most about a second. `logging` calls this at exit."""
        self._queue.close()
        super().close()

    def _dropped_line(self, count: int) -> bytes:
        record = logging.LogRecord("qualms.logs", logging.WARNING, "", 0, "log lines dropped", None, None)
        record.__dict__["dropped"] = count
        return self._to_line(record)


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


class Throttles:
    """A `Throttle` for each reason. Reasons beyond the first `max_reasons` share one, so that memory is bounded."""

    def __init__(self, seconds: float, max_reasons: int = 64) -> None:
        self._seconds, self._max_reasons = seconds, max_reasons
        self._throttles: dict[str, Throttle] = {}
        self._others = Throttle(seconds)

    def due(self, reason: str, now: float) -> int:
        """Count an event. Return the number of events with this reason to log now, as `Throttle.due` does, or 0."""
        throttle = self._throttles.get(reason)
        if throttle is None:
            full = len(self._throttles) >= self._max_reasons
            throttle = self._others if full else self._throttles.setdefault(reason, Throttle(self._seconds))
        return throttle.due(now)


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
