import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qualms.cli import app
from qualms.demo import traffic
from qualms.demo.traffic import TrafficError


def test_draw_says_what_it_wrote(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "draw", "--out", str(tmp_path / "drawn"), "--count", "10"])
    assert (result.exit_code, result.stdout) == (0, f"wrote 10 images to {tmp_path / 'drawn'}\n")
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == [str(digit) for digit in range(10)]


def test_traffic_without_a_service_goes_on_says_so_and_fails_at_the_end() -> None:
    arguments = ["--url", "http://127.0.0.1:1", "--rate", "200", "--seconds", "0.01"]
    result = CliRunner().invoke(app, ["demo", "traffic", *arguments])
    assert re.fullmatch(r"dose 0\.00: (\d) images, 0 flagged, \1 without an answer\n", result.stdout)
    assert isinstance(result.exception, TrafficError)
    assert str(result.exception) == (
        "http://127.0.0.1:1 answered none of the images; start a service there, or name another with --url."
    )


def test_traffic_that_is_answered_now_and_then_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([None, True])
    monkeypatch.setattr(traffic.Sender, "__call__", lambda *_: next(answers, None))
    result = CliRunner().invoke(app, ["demo", "traffic", "--rate", "200", "--seconds", "0.01"])
    assert result.exit_code == 0
    assert result.stdout.startswith("dose 0.00: ")
