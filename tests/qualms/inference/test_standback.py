"""Standing back ends with the run, or soon; happens once a pass; and not while connections come."""

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import count

import pytest

from qualms.inference import standback
from qualms.inference.standback import StandBack

PATIENCE = 30.0


def seconds(scene: Callable[[StandBack, asyncio.AbstractEventLoop], None], connections: Callable[[], int]) -> float:
    """How long the loop is held up by what a scene has it do."""

    async def whole() -> float:
        loop, begin = asyncio.get_running_loop(), time.monotonic()
        scene(StandBack(connections), loop)
        for _ in range(3):
            await asyncio.sleep(0)
        return time.monotonic() - begin

    return asyncio.run(whole())


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standback, "STAND_BACK_SECONDS", PATIENCE)


@pytest.mark.usefixtures("patient")
def test_it_ends_with_the_run() -> None:
    def scene(back: StandBack, loop: asyncio.AbstractEventLoop) -> None:
        back.soon(loop)
        threading.Timer(0.1, back.run_ended).start()

    assert 0.09 < seconds(scene, lambda: 0) < PATIENCE / 2


@pytest.mark.usefixtures("patient")
def test_a_run_that_ended_before_the_pass_did_is_not_waited_for() -> None:
    def scene(back: StandBack, loop: asyncio.AbstractEventLoop) -> None:
        back.soon(loop)
        back.run_ended()

    assert seconds(scene, lambda: 0) < PATIENCE / 2


@pytest.mark.usefixtures("patient")
def test_the_loop_goes_on_while_connections_come() -> None:
    connections = count(1)
    assert seconds(lambda back, loop: back.soon(loop), lambda: next(connections)) < PATIENCE / 2


def test_many_refusals_of_one_pass_cause_one_bounded_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standback, "STAND_BACK_SECONDS", 0.05)

    def scene(back: StandBack, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(1000):
            back.soon(loop)

    assert 0.04 < seconds(scene, lambda: 0) < 10
