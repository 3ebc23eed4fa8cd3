import logging
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from qualms.bundle.file import Bundle
from qualms.telemetry.terminal import TerminalLines

TIMEOUT = 30.0


def record(name: str, level: int, message: str, **fields: Any) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": name, "levelno": level, "levelname": logging.getLevelName(level), "msg": message} | fields
    )


def listening(host: str = "127.0.0.1", port: int = 8000) -> logging.LogRecord:
    return record("qualms.server", logging.INFO, "listening", host=host, port=port)


def ready(**fields: Any) -> logging.LogRecord:
    defaults = {"model": "mnist", "version": "1.0", "provider": "CPUExecutionProvider", "digest": "ab", "seconds": 0.2}
    return record("qualms", logging.INFO, "ready", **(defaults | fields))


def test_address_and_model_are_one_line_once_the_service_is_ready() -> None:
    lines = TerminalLines()
    assert lines(listening()) == b""
    assert lines(ready()) == (
        b"Serving mnist 1.0 at http://127.0.0.1:8000 "
        b"(API docs: http://127.0.0.1:8000/docs, device: CPU). Press Ctrl-C to stop.\n"
    )


def test_the_url_of_a_service_with_tls_begins_with_https() -> None:
    lines = TerminalLines()
    lines(record("qualms.server", logging.INFO, "listening", host="127.0.0.1", port=8443, tls=True))
    assert lines(ready()).startswith(
        b"Serving mnist 1.0 at https://127.0.0.1:8443 (API docs: https://127.0.0.1:8443/docs"
    )


@pytest.mark.parametrize(
    ("host", "start"),
    [
        ("10.1.2.3", "http://10.1.2.3:80 (API docs: http://10.1.2.3:80/docs"),
        ("fe80::1", "http://[fe80::1]:80 (API docs: http://[fe80::1]:80/docs"),
        ("0.0.0.0", "http://127.0.0.1:80 and on port 80 of all other addresses of this machine (API docs: http://127.0.0.1:80/"),
        ("::", "http://[::1]:80 and on port 80 of all other addresses of this machine (API docs: http://[::1]:80/docs"),
    ],
)  # fmt: skip
def test_the_url_can_be_opened_in_a_browser(host: str, start: str) -> None:
    lines = TerminalLines()
    lines(listening(host, 80))
    assert lines(ready(provider="CUDAExecutionProvider")).decode().startswith(f"Serving mnist 1.0 at {start}")


def test_other_records_are_shown_from_warning_up() -> None:
    lines = TerminalLines()
    assert lines(record("qualms.predict", logging.INFO, "request", status=422)) == b""
    assert lines(record("uvicorn.error", logging.INFO, "Started server process")) == b""
    shown = lines(record("qualms.predict", logging.ERROR, "failed", status=500, request_id="r1")).decode()
    assert re.fullmatch(r"\d\d:\d\d:\d\d error: failed \(status=500, request_id=r1\)\n", shown)


def test_an_exception_is_one_line_with_its_place_and_has_a_traceback_at_level_debug() -> None:
    empty: dict[str, int] = {}
    with pytest.raises(KeyError) as caught:
        empty["input"]
    exception = (caught.type, caught.value, caught.tb)
    failed = record("qualms", logging.ERROR, "a route failed", exc_info=exception)
    (line,) = TerminalLines()(failed).decode().splitlines()
    assert re.fullmatch(r".{8} error: a route failed: KeyError: 'input' at test_terminal\.py:\d+", line)
    first, second, *_, last = TerminalLines(verbose=True)(failed).decode().splitlines()
    assert (first, second, last) == (line, "Traceback (most recent call last):", "KeyError: 'input'")


def test_control_characters_are_escaped() -> None:
    shown = TerminalLines()(record("qualms", logging.WARNING, "a\x1b[2Jb\nc\ud800 α", id="\r\x07")).decode()
    assert shown[8:] == " warning: a\\x1b[2Jb\\nc\\ud800 α (id=\\r\\x07)\n"


@pytest.mark.slow
def test_serve_on_a_terminal_prints_the_address_and_stops_on_ctrl_c(
    bundle: Bundle, free_port: Callable[[], int]
) -> None:
    controller, terminal = pty.openpty()
    port = free_port()
    variables = {name: value for name, value in os.environ.items() if not name.startswith("QUALMS_")}
    variables |= {"QUALMS_PORT": str(port), "QUALMS_DEVICE": "cpu", "QUALMS_THREADS": "1"}
    command = [sys.executable, "-m", "qualms", "serve", str(bundle.path)]
    with subprocess.Popen(command, env=variables, stdout=terminal, stderr=subprocess.PIPE) as process:
        os.close(terminal)
        try:
            url = f"http://127.0.0.1:{port}"
            line = read_line(controller)
            assert line.startswith("Serving tiny")
            assert line.endswith(f" at {url} (API docs: {url}/docs, device: CPU). Press Ctrl-C to stop.\r\n")
            assert httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
            process.send_signal(signal.SIGINT)
            _, stderr = process.communicate(timeout=TIMEOUT)
            assert (process.returncode, stderr) == (0, b"")
            assert read_line(controller) == "Stopping. Press Ctrl-C again to stop at once.\r\n"
        finally:
            process.kill()
            os.close(controller)


def read_line(descriptor: int) -> str:
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(descriptor, 1)
    return line.decode()
