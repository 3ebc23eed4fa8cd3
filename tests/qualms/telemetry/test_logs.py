import json
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest
import uvicorn

from qualms.telemetry import logs


@pytest.fixture
def stream(tmp_path: Path) -> Iterator[IO[bytes]]:
    """A file for logs.configure(). The configuration of logging is restored after the test."""
    names = ("", "uvicorn", "uvicorn.error", "uvicorn.access", "uvicorn.asgi", "python_multipart", "PIL")
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    flags = logging.logThreads, logging.logProcesses, logging.logMultiprocessing
    with (tmp_path / "log").open("w+b") as file:
        yield file
    flush()
    logging.logThreads, logging.logProcesses, logging.logMultiprocessing = flags
    for logger, handlers, level, propagate in before:
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def flush() -> None:
    """Write all queued lines; later ones are dropped."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logs.LineHandler):
            handler.close()


def text(stream: IO[bytes]) -> str:
    flush()
    return Path(stream.name).read_text("utf-8")


def lines(stream: IO[bytes]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text(stream).splitlines()]


def test_a_record_is_one_json_line_with_its_extra_fields(stream: IO[bytes]) -> None:
    logs.configure("info", stream)
    before = datetime.now(UTC)
    logging.getLogger("qualms.test").info("read %d\nlines", 2, extra={"request_id": "r1", "status": 200})
    (line,) = lines(stream)
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "qualms.test",
        "message": "read 2\nlines",
        "request_id": "r1",
        "status": 200,
    }
    assert before <= datetime.fromisoformat(lines(stream)[0]["time"]) <= datetime.now(UTC)


def test_records_below_the_level_are_not_written(stream: IO[bytes]) -> None:
    logs.configure("warning", stream)
    logger = logging.getLogger("qualms.test")
    logger.info("no")
    logs.access(logger, request_id="r1", method="POST", route="predict", status=200, duration_ms=1)
    logger.warning("yes")
    assert [line["message"] for line in lines(stream)] == ["yes"]


def test_configuring_twice_writes_each_record_once(stream: IO[bytes]) -> None:
    logs.configure("info", stream)
    logs.configure("info", stream)
    logging.getLogger("qualms.test").info("once")
    assert len(lines(stream)) == 1


def test_exception_and_stack_are_string_fields(stream: IO[bytes]) -> None:
    logs.configure("info", stream)
    try:
        1 / 0  # noqa: B018
    except ZeroDivisionError:
        logging.getLogger("qualms.test").exception("failed", stack_info=True)
    (line,) = lines(stream)
    assert line["exception"].startswith("Traceback")
    assert "ZeroDivisionError" in line["exception"]
    assert line["stack"].startswith("Stack")


def test_access_logs_a_5xx_as_warning_and_others_as_info(stream: IO[bytes]) -> None:
    logs.configure("info", stream)
    logger = logging.getLogger("qualms.access")
    for status in (200, 422, 503):
        logs.access(
            logger, request_id="r1", method="POST", route="predict", status=status, duration_ms=1.23456, images=3
        )
    first, second, third = lines(stream)
    assert first.pop("time")
    assert first == {
        "level": "info",
        "logger": "qualms.access",
        "message": "request",
        "images": 3,
        "request_id": "r1",
        "method": "POST",
        "route": "predict",
        "status": 200,
        "duration_ms": 1.235,
    }
    assert (second["level"], third["level"]) == ("info", "warning")


def test_access_records_work_with_other_handlers(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logs.access(
            logging.getLogger("qualms.access"),
            request_id="r1",
            method="POST",
            route="predict",
            status=200,
            duration_ms=1,
        )
    assert "request" in caplog.text


def test_bytes_and_arrays_are_logged_without_their_content(stream: IO[bytes]) -> None:
    logs.configure("info", stream)
    pixels = np.full((2, 3), 77, np.uint8)
    extra = {"body": pixels.tobytes(), "image": pixels, "nested": [{"image": pixels}]}
    logging.getLogger("qualms.test").info("image", extra=extra)
    (line,) = lines(stream)
    assert line["body"] == "<bytes>"
    assert line["image"] == "<array of shape (2, 3)>"
    assert b"77" not in json.dumps({**line, "time": None}).encode()


def test_values_that_are_not_json_are_logged(stream: IO[bytes]) -> None:
    logs.configure("info", stream)
    extra = {"path": Path("a/b"), "error": ValueError("odd"), "share": np.float32(0.5), "kind": object()}
    logging.getLogger("qualms.test").info("ordinary", extra=extra)
    logging.getLogger("qualms.test").info("lone \ud800", extra={"huge": 2**70, "keys": {1: 2}, **extra})
    ordinary, odd = lines(stream)
    for line in (ordinary, odd):
        assert (line["path"], line["error"], line["share"], line["kind"]) == ("a/b", "odd", 0.5, "<object>")
    assert (odd["message"], odd["huge"], odd["keys"]) == ("lone \ud800", 2**70, {"1": 2})
    assert datetime.fromisoformat(odd["time"]).tzinfo == UTC


@pytest.mark.parametrize("readable", [False, True])
def test_attributes_that_a_library_adds_to_every_record_are_not_logged(
    stream: IO[bytes], monkeypatch: pytest.MonkeyPatch, readable: bool
) -> None:
    def with_timestamp(*arguments: Any, **keywords: Any) -> logging.LogRecord:
        record = logging.LogRecord(*arguments, **keywords)
        record.__dict__["_library_timestamp"] = 1
        return record

    monkeypatch.setattr(logging, "_logRecordFactory", with_timestamp)
    logs.configure("info", stream, terminal=readable)
    logging.getLogger("qualms.test").warning("slow", extra={"seconds": 2})
    assert "timestamp" not in text(stream)
    assert "2" in text(stream)


def test_extra_fields_do_not_replace_the_records_own(stream: IO[bytes]) -> None:
    logs.configure("info", stream)
    logging.getLogger("qualms.test").info("own", extra={"level": "fake", "time": "fake", "color_message": "dye"})
    (line,) = lines(stream)
    assert line["level"] == "info"
    assert line["time"] != "fake"
    assert "color_message" not in line


def test_a_record_that_cannot_be_formatted_is_reported_on_stderr(
    stream: IO[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("info", stream)
    logging.getLogger("qualms.test").info("%d", "text")
    logging.getLogger("qualms.test").info("next")
    assert "TypeError" in capsys.readouterr().err
    assert [line["message"] for line in lines(stream)] == ["next"]


def test_uvicorns_records_are_written_as_json_and_errors_in_bodies_and_images_are_not(stream: IO[bytes]) -> None:
    uvicorn.Config("module:app")
    logs.configure("info", stream)
    logging.getLogger("uvicorn.error").info("Started", extra={"color_message": "\x1b[1mStarted"})
    logging.getLogger("uvicorn.access").info('%s - "%s %s HTTP/%s" %d', "::1", "GET", "/livez", "1.1", 200)
    logging.getLogger("python_multipart.multipart").warning("a malformed body")
    logging.getLogger("PIL.TiffImagePlugin").error("a malformed image")
    assert [line["message"] for line in lines(stream)] == ["Started", '::1 - "GET /livez HTTP/1.1" 200']


@pytest.mark.usefixtures("stream")
def test_logs_go_to_stdout_by_default(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    logs.configure("debug")
    logging.getLogger("qualms.test").debug("out")
    flush()
    assert json.loads(capfdbinary.readouterr().out)["message"] == "out"


def test_readable_lines_are_written_on_request(stream: IO[bytes]) -> None:
    logs.configure("info", stream, terminal=True)
    logging.getLogger("uvicorn.error").info("Started server process [%d]", 1)
    logging.getLogger("qualms.test").warning("overloaded", extra={"refused": 12})
    assert text(stream)[8:] == " warning: overloaded (refused=12)\n"


def test_readable_lines_include_all_records_at_level_debug(stream: IO[bytes]) -> None:
    logs.configure("debug", stream, terminal=True)
    logging.getLogger("uvicorn.error").info("Started server process [%d]", 1)
    assert text(stream)[8:] == " info: Started server process [1]\n"


def test_no_lines_are_dropped_while_the_file_can_be_written(stream: IO[bytes]) -> None:
    logs.configure("info", stream)
    logging.getLogger("qualms.test").info("written")
    assert len(lines(stream)) == 1
    assert logs.dropped() == 0


def test_throttle_counts_the_events_since_the_last_logged_one() -> None:
    throttle = logs.Throttle(1.0)
    assert [throttle.due(now) for now in (5.0, 5.1, 5.9, 6.0, 6.5, 9.0)] == [1, 0, 0, 3, 0, 2]


def test_throttles_count_the_events_of_each_reason() -> None:
    throttles = logs.Throttles(1.0)
    events = [("slow", 5.0), ("full", 5.1), ("slow", 5.2), ("slow", 6.0), ("full", 6.0), ("full", 6.1)]
    assert [throttles.due(*event) for event in events] == [1, 1, 0, 2, 0, 2]


def test_throttles_of_further_reasons_are_shared() -> None:
    throttles = logs.Throttles(1.0, max_reasons=2)
    assert [throttles.due(reason, 5.0) for reason in "abcdea"] == [1, 1, 1, 0, 0, 0]
    assert [throttles.due(reason, 6.0) for reason in "abf"] == [2, 1, 3]
