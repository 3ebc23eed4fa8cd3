"""Log records as short readable lines for a terminal.

The records "listening" and "ready" become one line with the addresses of the service. Of the others, only warnings and errors
are shown, unless the log level is debug.
"""

import logging
import traceback
from collections.abc import Mapping
from datetime import datetime
from typing import Any

_STANDARD_ATTRIBUTES = frozenset(logging.LogRecord("", 0, "", 0, None, None, None).__dict__) | {
    "color_message",
    "message",
    "asctime",
}
_LOGGERS = ("qualms", "qualms.server")
"""the loggers of the records that are recognised by their message"""
_EVERY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""addresses that mean all addresses of the machine, and the one that a browser on it can open"""


class TerminalLines:
    """Formats records. It remembers the address in the record "listening" until the record "ready"."""

    def __init__(self, verbose: bool = False) -> None:
        self._verbose = verbose
        self._address: tuple[str, str, int] | None = None

    def __call__(self, record: logging.LogRecord) -> bytes:
        """Return a record as text; empty if the record is not shown."""
        extra = record.__dict__.items()
        fields = {name: value for name, value in extra if not (name in _STANDARD_ATTRIBUTES or name.startswith("_"))}
        if record.name in _LOGGERS:
            if record.msg == "listening":
                scheme = "https" if fields.get("tls") else "http"
                self._address = scheme, fields.get("host", ""), fields.get("port", 0)
            elif record.msg == "ready" and self._address is not None:
                return _encode(_serving(*self._address, fields))
            elif record.msg == "draining":
                return _encode("Stopping. Press Ctrl-C again to stop at once.")
        if record.levelno < logging.WARNING and not self._verbose:
            return b""
        return _encode(*self._lines(record, fields))

    def _lines(self, record: logging.LogRecord, fields: Mapping[str, Any]) -> list[str]:
        time = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        line = f"{time} {record.levelname.lower()}: {record.getMessage()}"
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            line += f": {_summary(error)}"
        if fields:
            line += f" ({', '.join(f'{name}={value}' for name, value in fields.items())})"
        details: list[str] = []
        if self._verbose and error is not None:
            details += "".join(traceback.format_exception(error)).splitlines()
        if self._verbose and record.stack_info:
            details += record.stack_info.splitlines()
        return [line, *details]


def _serving(scheme: str, host: str, port: int, fields: Mapping[str, Any]) -> str:
    name = " ".join(str(fields[key]) for key in ("model", "version") if key in fields)
    device = str(fields.get("provider", "unknown")).removesuffix("ExecutionProvider")
    shown = _EVERY_ADDRESS.get(host, host)
    url = f"{scheme}://[{shown}]:{port}" if ":" in shown else f"{scheme}://{shown}:{port}"
    everywhere = f" and on port {port} of all other addresses of this machine" if host in _EVERY_ADDRESS else ""
    return f"Serving {name} at {url}{everywhere} (API docs: {url}/docs, device: {device}). Press Ctrl-C to stop."


def _summary(error: BaseException) -> str:
    """Type, message and place of an exception, such as `KeyError: 'x' at engine.py:12`."""
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    return f"{text} at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else text


def _encode(*lines: str) -> bytes:
    """Encode lines with control characters escaped, because a terminal would interpret those that clients send."""
    return "".join(f"{''.join(map(_printable, line))}\n" for line in lines).encode()


def _printable(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
