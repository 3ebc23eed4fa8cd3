"""Files that are read again when they change."""

import asyncio
import logging
from pathlib import Path

import pytest

from qualms.access.reloading import ReloadedFiles, watch
from qualms.errors import QualmsError


class Number:
    """A file with a number."""

    def __init__(self, path: Path) -> None:
        self.path, self.reads, self.values, self.results = path, 0, list[int](), list[bool]()
        self.written_in_pause: list[str] = []
        """what another process writes while the file is expected to stay as it is"""
        self.file = ReloadedFiles("number", [path], self._read, self.values.append, self.results.append, self._pause)

    def _pause(self) -> None:
        if self.written_in_pause:
            self.path.write_text(self.written_in_pause.pop(0))

    def _read(self) -> int:
        self.reads += 1
        try:
            return int(self.path.read_text())
        except (OSError, ValueError):
            raise QualmsError("It is not a number.") from None

    def check(self) -> None:
        asyncio.run(self.file.check())


@pytest.fixture
def number(tmp_path: Path) -> Number:
    (tmp_path / "number").write_text("1")
    return Number(tmp_path / "number")


def replace(path: Path, text: str) -> None:
    other = path.with_suffix(".new")
    other.write_text(text)
    other.replace(path)


def test_a_file_is_read_only_if_it_has_changed(number: Number) -> None:
    assert number.file.load() == 1
    number.check()
    assert (number.reads, number.values) == (1, [])
    replace(number.path, "2")
    number.check()
    number.check()
    assert (number.reads, number.values, number.results) == (2, [2], [True])


def test_a_file_that_is_not_accepted_is_logged_once_and_changes_nothing(
    number: Number, caplog: pytest.LogCaptureFixture
) -> None:
    number.file.load()
    replace(number.path, "two")
    with caplog.at_level(logging.ERROR):
        number.check()
        number.check()
    assert (number.values, number.results, len(caplog.records)) == ([], [False], 1)
    replace(number.path, "3")
    number.check()
    assert number.values == [3]


def test_a_file_that_is_being_written_is_read_when_it_is_complete(number: Number) -> None:
    number.file.load()
    number.path.write_text("")
    number.written_in_pause = ["4", "42"]
    number.check()
    number.check()
    assert (number.values, number.results) == ([], [])
    number.check()
    assert (number.values, number.results) == ([42], [True])


def test_a_missing_file_keeps_the_old_content_until_it_is_back(number: Number) -> None:
    number.file.load()
    number.path.unlink()
    number.check()
    assert number.results == [False]
    number.path.write_text("4")
    number.check()
    assert number.values == [4]


def test_an_invalid_first_content_is_an_error(number: Number) -> None:
    replace(number.path, "x")
    with pytest.raises(QualmsError):
        number.file.load()


def test_files_are_checked_until_the_watch_is_cancelled(number: Number) -> None:
    number.file.load()
    replace(number.path, "5")

    async def run() -> None:
        task = asyncio.create_task(watch([number.file], seconds=0.001))
        while not number.values:
            await asyncio.sleep(0.001)
        replace(number.path, "6")
        while len(number.values) < 2:
            await asyncio.sleep(0.001)
        task.cancel()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert number.values == [5, 6]
