import io
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from qualms import cli
from qualms.bench import mixed_overload
from qualms.bench.load.open_loop import OpenLoopResult
from qualms.bench.mixed_overload import KindResult, MixedResult, mix_capacity, print_mixed, run_mixed_overload
from qualms.bench.overload import Poll
from qualms.bench.servers.processes import BenchError


def kind(name: str, capacity: float, sent: int, in_time: int, late: int = 0, deadline: float = 0.5) -> KindResult:
    """Ten seconds, in which all requests that were not answered were refused."""
    offered = OpenLoopResult(
        sent / 10,
        10.0,
        deadline,
        good=array("d", [0.9 * deadline] * in_time + [1.1 * deadline] * late),
        refusals=Counter({b"1": sent - in_time - late}),
        lags=array("d", [0.0] * sent),
        busy_seconds=10.0,
    )
    return KindResult(name, capacity, offered)


def mixed(**changes: Any) -> MixedResult:
    """A result that passes all checks, with some parts replaced."""
    parts = {
        "small": kind("small", 6000.0, 1000, 990),
        "photos": kind("photographs", 4.0, 120, 30, deadline=10.0),
        "polls": [Poll(True, 0.01, 3 * 10**8)],
    }
    return MixedResult(**{**parts, **changes})


def printed(result: MixedResult) -> str:
    file = io.StringIO()
    print_mixed(result, 0.1, Console(file=file, width=80))
    return file.getvalue()


def test_the_capacity_of_a_mix_adds_up_what_its_requests_cost() -> None:
    assert mix_capacity(1000.0, 10.0, 0.1) == pytest.approx(1 / (0.9 * 0.001 + 0.1 * 0.1))
    assert mix_capacity(50.0, 50.0, 0.3) == pytest.approx(50.0)


def test_a_good_result_passes_all_checks_and_fits_into_80_columns() -> None:
    result = mixed()
    assert all(result.checks.values())
    assert (result.small.goodput, result.small.share_of_sent) == (99.0, 0.99)
    assert (result.photos.goodput, result.photos.share_of_capacity) == (3.0, 0.75)
    lines = printed(result).splitlines()
    assert ["photographs", "4.0", "12.0", "3.0", "0.250", "0.750", "90", "0", "0", "9,000"] in map(str.split, lines)
    assert max(map(len, lines)) <= 80
    assert "…" not in printed(result)
    text = " ".join(printed(result).split())
    for words in ("112 requests/s for 10 s", "3 of 3 checks passed.", "99.0% of those sent", "at most 300 MB"):
        assert words in text


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"small": kind("small", 6000.0, 1000, 940)}, "small"),
        ({"small": kind("small", 6000.0, 1000, 940, late=60)}, "small"),
        ({"small": kind("small", 6000.0, 0, 0)}, "small"),
        ({"photos": kind("photographs", 4.0, 120, 19, deadline=10.0)}, "photographs"),
        ({"photos": kind("photographs", 4.0, 120, 19, late=50, deadline=10.0)}, "photographs"),
        ({"polls": [Poll(True, 0.01, 1), Poll(False, 1.0, 1)]}, "readiness"),
        ({"polls": []}, "readiness"),
    ],
)
def test_each_fault_fails_its_check(changes: dict[str, Any], word: str) -> None:
    result = mixed(**changes)
    (failed,) = [name for name, passed in result.checks.items() if not passed]
    assert word in failed
    assert f"2 of 3 checks passed. Failed: {failed}." in " ".join(printed(result).split())


def test_small_requests_keep_half_of_their_capacity_if_more_is_offered() -> None:
    # 200/s are sent, and alone 100/s could be answered: 50/s are what photographs leave.
    assert mixed(small=kind("small", 100.0, 2000, 500)).small_share == pytest.approx(1.0)
    assert mixed(small=kind("small", 100.0, 2000, 470)).small_share == pytest.approx(0.94)
    assert mixed(small=kind("small", 100.0, 400, 400)).small_share == pytest.approx(1.0)


def test_requests_that_the_generator_did_not_send_are_reported() -> None:
    result = mixed()
    result.photos.offered.skipped_no_connection = 7
    assert "did not send 7 requests (photographs) that were due" in " ".join(printed(result).split())


@pytest.mark.slow
def test_a_mixed_overload_of_the_real_service_counts_every_request(bundle_file: Path) -> None:
    console = Console(file=io.StringIO(), width=80)
    options: dict[str, Any] = {"seconds": 1.0, "photos": 0.5, "idle_seconds": 0.2, "capacity_photos": 4}
    result = run_mixed_overload(str(bundle_file), console=console, **options)
    for part in (result.small, result.photos):
        offered = part.offered
        replies = len(offered.good) + offered.refused + offered.other_statuses.total() + offered.unanswered
        assert replies == offered.sent > 0
        assert offered.sent + offered.skipped_late + offered.skipped_no_connection == max(1, round(offered.rate))
    total = result.small.offered.rate + result.photos.offered.rate
    assert total == pytest.approx(3 * mix_capacity(result.small.capacity, result.photos.capacity, 0.5))
    assert result.polls
    assert isinstance(console.file, io.StringIO)
    assert "of 3 checks passed" in console.file.getvalue()


def test_a_running_service_is_not_overloaded() -> None:
    with pytest.raises(BenchError, match="starts its own service"):
        run_mixed_overload("http://127.0.0.1:8000")


def test_the_command_passes_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        mixed_overload, "run_mixed_overload", lambda model, **options: given.update(options, model=model)
    )
    arguments = [
        "bench",
        "mnist",
        "--overload",
        "60",
        "--photos",
        "0.1",
        "--photo-deadline",
        "5",
        "--pictures",
        "colour",
    ]
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert given == {
        "model": "mnist",
        "seconds": 60.0,
        "photos": 0.1,
        "deadline": 0.5,
        "photo_deadline": 5.0,
        "pictures": "colour",
    }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--photos", "0.1"], "--photos is accepted only together with --overload"),
        (["--overload", "5", "--photo-deadline", "5"], "--photo-deadline is accepted only together with --photos"),
        (["--overload", "5", "--pictures", "photo-640"], "--pictures photo-640 and --overload cannot be combined"),
        (["--attack", "churn", "--photos", "0.1"], "--photos and --attack cannot be combined"),
    ],
)
def test_options_that_contradict_each_other_are_rejected(arguments: list[str], message: str) -> None:
    error = CliRunner().invoke(cli.app, ["bench", *arguments]).exception
    assert isinstance(error, BenchError)
    assert message in str(error)
