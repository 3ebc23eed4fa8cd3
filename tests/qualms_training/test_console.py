"""Progress on a terminal and in a file; the width of tables that are redirected."""

import io

import pytest
from rich.console import Console

from qualms_training.console import Display, ProgressLines, duration


class Clock:
    """A clock that only a test advances."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def redirected(clock: Clock) -> tuple[Display, io.StringIO]:
    file = io.StringIO()
    return Display(Console(file=file, width=30), clock), file


def test_redirected_output_has_lines_of_progress_at_most_every_ten_seconds() -> None:
    clock = Clock()
    display, file = redirected(clock)
    with display.bar("features of [train]", 5000) as advance:
        for second in range(1, 36):
            clock.now = second
            advance(100)
    assert file.getvalue().splitlines() == [
        "  features of [train]: 1,000 of 5,000, 10 s, 40 s left",
        "  features of [train]: 2,000 of 5,000, 20 s, 30 s left",
        "  features of [train]: 3,000 of 5,000, 30 s, 20 s left",
    ]


def test_short_steps_have_no_lines_of_progress() -> None:
    clock = Clock()
    display, file = redirected(clock)
    with display.bar("reading", 3) as advance:
        clock.now = 9.9
        advance(3)
    assert file.getvalue() == ""


def test_training_in_a_file_has_lines_with_the_loss() -> None:
    clock = Clock()
    display, file = redirected(clock)
    with display.training_bar("training small", 4) as step:
        for done in (1, 2, 3, 4):
            clock.now += 6
            step(done, 1 / done)
    assert file.getvalue() == (
        "  training small: 2 of 4, 12 s, 12 s left, loss 0.5000\n  training small: 4 of 4, 24 s, 0 s left, loss 0.2500\n"
    )


def test_lines_become_rarer_in_long_steps_but_come_every_minute() -> None:
    clock, lines = Clock(), list[str]()
    progress = ProgressLines("fitting", 20_000, lines.append, clock)
    times = []
    for second in range(20_000):
        clock.now, before = second, len(lines)
        progress.advance(1)
        times += [second] if len(lines) > before else []
    gaps = [later - earlier for earlier, later in zip(times, times[1:], strict=False)]
    assert gaps[0] == 10
    assert max(gaps) == gaps[-1] == 60
    assert gaps == sorted(gaps)


def test_a_terminal_has_a_bar_and_no_lines() -> None:
    clock, file = Clock(), io.StringIO()
    with Display(Console(file=file, width=120, force_terminal=True), clock).bar("reading", 3) as advance:
        clock.now = 100
        advance(2)
    assert "━" in file.getvalue()
    assert "2 of 3" not in file.getvalue()


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (119, "119 s"), (150, "2 min"), (7100, "118 min"), (11_100, "3 h 05 min")]
)
def test_durations_in_words(seconds: float, text: str) -> None:
    assert duration(seconds) == text
