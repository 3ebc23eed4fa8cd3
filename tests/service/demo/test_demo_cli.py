from pathlib import Path

from typer.testing import CliRunner

from service.cli import app


def test_draw_says_what_it_wrote(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "draw", "--out", str(tmp_path / "drawn"), "--count", "10"])
    assert (result.exit_code, result.stdout) == (0, f"wrote 10 images to {tmp_path / 'drawn'}\n")
    assert sorted(path.name for path in (tmp_path / "drawn").iterdir()) == [str(digit) for digit in range(10)]


def test_traffic_without_a_service_goes_on_and_says_so() -> None:
    arguments = ["--url", "http://127.0.0.1:1", "--rate", "200", "--seconds", "0.01"]
    result = CliRunner().invoke(app, ["demo", "traffic", *arguments])
    assert result.exit_code == 0
