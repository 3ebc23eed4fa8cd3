"""The pause of the event loop ends with the run, is bounded, happens once per iteration, and not while connections arrive."""

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import count

from qualms.inference.admission import LoopPause

TIMEOUT = 30.0

Scene = Callable[[LoopPause, asyncio.AbstractEventLoop], None]


def seconds(scene: Scene, connections: Callable[[], int] = lambda: 0, pause_seconds: float = TIMEOUT) -> float:
    """How long a scene blocks the loop."""

    async def whole() -> float:
        loop, begin = asyncio.get_running_loop(), time.monotonic()
        scene(LoopPause(connections, pause_seconds), loop)
        for _ in range(3):
            await asyncio.sleep(0)
        return time.monotonic() - begin

    return asyncio.run(whole())


def test_the_pause_ends_with_the_run() -> None:
    def scene(pause: LoopPause, loop: asyncio.AbstractEventLoop) -> None:
        pause.schedule(loop)
        threading.Timer(0.1, pause.run_ended).start()

    assert 0.09 < seconds(scene) < TIMEOUT / 2


def test_a_run_that_ended_before_the_pause_started_is_not_waited_for() -> None:
    def scene(pause: LoopPause, loop: asyncio.AbstractEventLoop) -> None:
        pause.schedule(loop)
        pause.run_ended()

    assert seconds(scene) < TIMEOUT / 2


def test_the_loop_does_not_pause_while_connections_arrive() -> None:
    connections = count(1)
    assert seconds(lambda pause, loop: pause.schedule(loop), lambda: next(connections)) < TIMEOUT / 2


def test_many_refusals_in_one_iteration_cause_one_bounded_pause() -> None:
    def scene(pause: LoopPause, loop: asyncio.AbstractEventLoop) -> None:
        for _ in range(1000):
            pause.schedule(loop)

    assert 0.04 < seconds(scene, pause_seconds=0.05) < 10
