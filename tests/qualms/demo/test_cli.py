import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qualms.cli import app, main
from qualms.demo import traffic
from qualms.demo.traffic import TrafficError


def test_draw_writes_one_folder_per_digit_and_reports_it(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "draw", "--out", str(tmp_path / "drawn"), "--count", "10"])
    assert (result.exit_code, result.stdout) == (0, f"wrote 10 images to {tmp_path / 'drawn'}\n")
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == [str(digit) for digit in range(10)]


def test_traffic_without_a_service_continues_and_fails_at_the_end() -> None:
    arguments = ["--url", "http://127.0.0.1:1", "--rate", "200", "--seconds", "0.01"]
    result = CliRunner().invoke(app, ["demo", "traffic", *arguments])
    assert re.fullmatch(r"dose 0\.00: (\d) images, 0 flagged, \1 failed\n", result.stdout)
    assert isinstance(result.exception, TrafficError)
    assert str(result.exception) == (
        "http://127.0.0.1:1 returned no prediction for any image; start a service there, or give another URL with --url."
    )


@pytest.mark.parametrize(
    ("as_sent", "message"),
    [
        ("heic", "The encoding 'heic' is unknown: 'heic' is not one of png, "),
        ("jpeg:0", "The encoding 'jpeg:0' is not accepted: jpeg takes a whole number from 1 to 100, "),
    ],
)
def test_traffic_in_an_encoding_that_does_not_exist_is_refused(
    as_sent: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["qualms", "demo", "traffic", "--as-sent", as_sent, "--seconds", "0"])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert message in capsys.readouterr().err


def test_traffic_succeeds_if_some_images_get_a_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = iter([None, True])
    monkeypatch.setattr(traffic.Sender, "__call__", lambda *_: next(flags, None))
    result = CliRunner().invoke(app, ["demo", "traffic", "--rate", "200", "--seconds", "0.01"])
    assert result.exit_code == 0
    assert result.stdout.startswith("dose 0.00: ")
