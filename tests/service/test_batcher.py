import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from service import batcher as module
from service.batcher import Answer, Batch, Batcher, Draining, Expired, Left, Overloaded
from service.engine import CostCurve

PATIENCE = 30.0
FAR = 1000.0
"""a deadline that nothing here comes near"""


class Clock:
    """Stands still until it is told to move."""

    def __init__(self) -> None:
        self.now = 1.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=found.monotonic))
    return found


class Engine:
    """Notes each batch, and ends a run only when it is allowed to; an image's first pixel is its name."""

    def __init__(self, seconds: float = 0.001, max_batch: int = 8) -> None:
        self.cost = CostCurve((1, max_batch), (seconds, seconds * max_batch))
        self.max_batch = max_batch
        self.batches: list[list[int]] = []
        self.error: Exception | None = None
        self._begun = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def run(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        self.batches.append(images[:, 0].tolist())
        self._begun.release()
        assert self._go.acquire(timeout=PATIENCE)
        if self.error is not None:
            raise self.error
        return [images[:, 0].astype(np.int64)]

    def allow(self, runs: int = 1) -> None:
        self._go.release(runs)

    async def begun(self) -> None:
        """Wait until one more run has begun."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=PATIENCE)


def images(*names: int) -> list[NDArray[np.uint8]]:
    return [np.array([name, 0], np.uint8) for name in names]


def names(answer: Answer) -> list[int]:
    """The images an answer is about."""
    found: list[int] = answer.batch.outputs[0][answer.start : answer.start + answer.count].tolist()
    return found


def stays() -> bool:
    return False


def play(engine: Engine, scene: Callable[[Batcher], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a scene with a started batcher, and stop it in any case."""

    async def whole() -> None:
        batcher = Batcher(engine, **options)
        batcher.start()
        try:
            await asyncio.wait_for(scene(batcher), PATIENCE)
        finally:
            engine.allow(1000)
            await batcher.stop()

    asyncio.run(whole())


# Gathering


def test_an_idle_runner_takes_one_request_at_once_and_the_rest_gather() -> None:
    engine = Engine()

    async def scene(batcher: Batcher) -> None:
        first = batcher.submit(images(1), FAR, stays)
        await engine.begun()
        rest = [batcher.submit(images(name), FAR, stays) for name in (2, 3, 4)]
        assert batcher.depth == 3
        engine.allow(2)
        answers = await asyncio.gather(first, *rest)
        assert engine.batches == [[1], [2, 3, 4]]
        assert [names(answer) for answer in answers] == [[1], [2], [3], [4]]
        assert batcher.depth == 0

    play(engine, scene)


def test_a_batch_is_capped_by_rows_and_keeps_the_order() -> None:
    engine = Engine(max_batch=8)

    async def scene(batcher: Batcher) -> None:
        waiting = [batcher.submit(images(0), FAR, stays)]
        await engine.begun()
        for start in (10, 20, 30):
            waiting.append(batcher.submit(images(start, start + 1, start + 2), FAR, stays))
        waiting.append(batcher.submit(images(40), FAR, stays))
        engine.allow(3)
        answers = await asyncio.gather(*waiting)
        assert engine.batches == [[0], [10, 11, 12, 20, 21, 22], [30, 31, 32, 40]]
        assert [names(answer) for answer in answers] == [[0], [10, 11, 12], [20, 21, 22], [30, 31, 32], [40]]

    play(engine, scene)


def test_a_request_larger_than_the_cap_runs_alone() -> None:
    engine = Engine(max_batch=4)

    async def scene(batcher: Batcher) -> None:
        waiting = [batcher.submit(images(0), FAR, stays)]
        await engine.begun()
        waiting.append(batcher.submit(images(*range(10, 19)), FAR, stays))
        waiting.append(batcher.submit(images(20), FAR, stays))
        engine.allow(3)
        await asyncio.gather(*waiting)
        assert engine.batches == [[0], list(range(10, 19)), [20]]

    play(engine, scene)


def test_a_batch_says_how_long_it_took_and_how_long_each_request_waited(clock: Clock) -> None:
    engine, heard = Engine(), list[Batch]()

    async def scene(batcher: Batcher) -> None:
        first = batcher.submit(images(1), FAR, stays)
        await engine.begun()
        second = batcher.submit(images(2, 3), FAR, stays)
        clock.now += 0.5
        engine.allow()
        assert (await first).waited == 0.0
        await engine.begun()
        engine.allow()
        assert (await second).waited == 0.5

    play(engine, scene, on_batch=heard.append)
    assert [(batch.rows, batch.seconds) for batch in heard] == [(1, 0.5), (2, 0.0)]


# What never reaches the engine


def test_what_expired_or_left_while_it_waited_is_not_run(clock: Clock) -> None:
    engine, left = Engine(), list[bool]()

    async def scene(batcher: Batcher) -> None:
        first = batcher.submit(images(1), FAR, stays)
        await engine.begun()
        expired = batcher.submit(images(2, 3), clock.now + 5, stays)
        gone = batcher.submit(images(4), FAR, lambda: bool(left))
        cancelled = batcher.submit(images(5), FAR, stays)
        in_time = batcher.submit(images(6), clock.now + 20, stays)
        left.append(True)
        cancelled.cancel()
        clock.now += 10
        engine.allow(2)
        assert names(await first) == [1]
        with pytest.raises(Expired):
            await expired
        with pytest.raises(Left):
            await gone
        assert names(await in_time) == [6]
        assert engine.batches == [[1], [6]]
        assert batcher.depth == 0

    play(engine, scene)


def test_dead_requests_do_not_count_towards_the_cap(clock: Clock) -> None:
    engine = Engine(max_batch=4)

    async def scene(batcher: Batcher) -> None:
        first = batcher.submit(images(1), FAR, stays)
        await engine.begun()
        dead = batcher.submit(images(2, 3, 4), clock.now + 5, stays)
        alive = [batcher.submit(images(5, 6), FAR, stays), batcher.submit(images(7, 8), FAR, stays)]
        clock.now += 10
        engine.allow(2)
        await asyncio.gather(first, *alive)
        assert engine.batches == [[1], [5, 6, 7, 8]]
        assert isinstance(dead.exception(), Expired)

    play(engine, scene)


# Admission


@pytest.mark.parametrize(("deadline", "retry_after"), [(0.001, 1), (0.99, 1), (-1.5, 3), (-99.0, 100)])
def test_a_deadline_that_cannot_be_met_is_refused_with_a_time_to_come_back(
    clock: Clock, deadline: float, retry_after: int
) -> None:
    batcher = Batcher(Engine(seconds=1.0))
    batcher.admit(1, clock.now + 1.0)
    with pytest.raises(Overloaded, match=f"retry after {retry_after} s") as caught:
        batcher.admit(1, clock.now + deadline)
    assert caught.value.retry_after == retry_after


def test_what_runs_and_waits_and_is_being_decoded_counts_against_the_deadline(clock: Clock) -> None:
    engine = Engine(seconds=1.0, max_batch=4)

    async def scene(batcher: Batcher) -> None:
        assert batcher.predicted_wait(1) == 1.0
        running = batcher.submit(images(1), FAR, stays)
        await engine.begun()
        assert batcher.predicted_wait(1) == 1.0 + 1.0
        clock.now += 0.25
        assert batcher.predicted_wait(1) == 0.75 + 1.0
        waiting = batcher.submit(images(2, 3, 4), FAR, stays)
        assert batcher.predicted_wait(1) == 0.75 + 4.0
        with batcher.decoding(2):
            assert batcher.predicted_wait(1) == 0.75 + 4.0 + 2.0
        with pytest.raises(Overloaded):
            batcher.submit(images(5), clock.now + 4.7, stays)
        engine.allow(2)
        await asyncio.gather(running, waiting)
        assert batcher.predicted_wait(1) == 1.0
        assert engine.batches == [[1], [2, 3, 4]]

    play(engine, scene)


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=6),
    st.integers(0, 100),
    st.lists(st.integers(1, 200), min_size=2, max_size=5),
)
def test_more_rows_never_wait_less(seconds: list[float], decoding: int, rows: list[int]) -> None:
    engine = Engine(max_batch=2 ** (len(seconds) - 1))
    engine.cost = CostCurve(tuple(2**power for power in range(len(seconds))), tuple(sorted(seconds)))
    batcher = Batcher(engine)
    with batcher.decoding(decoding):
        waits = [batcher.predicted_wait(count) for count in sorted(rows)]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in zip(waits, waits[1:], strict=False))
    assert waits[-1] >= batcher.predicted_wait(max(rows)) * (1 - 1e-12)


async def run_slowly(engine: Engine, batcher: Batcher, clock: Clock, runs: int) -> None:
    """Let some runs take a hundred times as long as they should."""
    for name in range(runs):
        waiting = batcher.submit(images(name), FAR, stays)
        await engine.begun()
        clock.now += 100 * engine.cost(1)
        engine.allow()
        await waiting


def test_admission_follows_runs_that_are_slower_than_at_warm_up(clock: Clock) -> None:
    engine = Engine(seconds=0.01)

    async def scene(batcher: Batcher) -> None:
        await run_slowly(engine, batcher, clock, 40)
        running = batcher.submit(images(99), FAR, stays)
        await engine.begun()
        assert batcher.predicted_wait(1) > 10 * 2 * engine.cost(1)
        engine.allow()
        await running

    play(engine, scene)


def test_past_slowness_never_closes_the_door_to_what_would_run_alone(clock: Clock) -> None:
    """Only runs can tell that it has passed: refused on its account, requests would be refused for ever."""
    engine = Engine(seconds=0.01)

    async def scene(batcher: Batcher) -> None:
        await run_slowly(engine, batcher, clock, 40)
        for name in range(60):
            waiting = batcher.submit(images(name), clock.now + 0.05, stays)
            await engine.begun()
            engine.allow()
            await waiting
        running = batcher.submit(images(99), FAR, stays)
        await engine.begun()
        assert batcher.predicted_wait(1) < 1.1 * 2 * engine.cost(1)
        engine.allow()
        await running

    play(engine, scene)


def test_time_without_work_is_not_slowness(clock: Clock) -> None:
    engine, left = Engine(seconds=0.01), list[bool]()

    async def scene(batcher: Batcher) -> None:
        first = batcher.submit(images(1), FAR, stays)
        await engine.begun()
        gone = batcher.submit(images(2), FAR, lambda: bool(left))
        left.append(True)
        engine.allow()
        await first
        with pytest.raises(Left):
            await gone
        clock.now += 100.0
        second = batcher.submit(images(3), FAR, stays)
        await engine.begun()
        engine.allow()
        await second
        third = batcher.submit(images(4), FAR, stays)
        await engine.begun()
        assert batcher.predicted_wait(1) == pytest.approx(2 * engine.cost(1))
        engine.allow()
        await third

    play(engine, scene)


# What goes wrong


def test_an_engines_error_reaches_every_request_of_its_batch_and_no_other() -> None:
    engine = Engine()

    async def scene(batcher: Batcher) -> None:
        first = batcher.submit(images(1), FAR, stays)
        await engine.begun()
        rest = [batcher.submit(images(name), FAR, stays) for name in (2, 3)]
        engine.allow()
        await first
        await engine.begun()
        engine.error = RuntimeError("out of memory")
        engine.allow()
        found = await asyncio.gather(*rest, return_exceptions=True)
        assert found == [engine.error] * 2
        engine.error = None
        after = batcher.submit(images(4), FAR, stays)
        engine.allow()
        assert names(await after) == [4]

    play(engine, scene)


def test_images_that_do_not_fit_together_are_an_error_and_not_the_runners_end() -> None:
    engine = Engine()

    async def scene(batcher: Batcher) -> None:
        engine.allow(2)
        with pytest.raises(ValueError, match="same shape"):
            await batcher.submit([np.zeros(2, np.uint8), np.zeros(3, np.uint8)], FAR, stays)
        assert names(await batcher.submit(images(1), FAR, stays)) == [1]

    play(engine, scene)


def test_an_error_while_counting_leaves_nobody_waiting() -> None:
    engine = Engine()

    def fail(_: Batch) -> None:
        raise IndexError("no such class")

    async def scene(batcher: Batcher) -> None:
        engine.allow()
        with pytest.raises(IndexError, match="no such class"):
            await batcher.submit(images(1), FAR, stays)

    play(engine, scene, on_batch=fail)


# Stopping


def test_stopping_answers_what_was_admitted_and_takes_nothing_new() -> None:
    engine = Engine(max_batch=2)

    async def scene(batcher: Batcher) -> None:
        waiting = [batcher.submit(images(name), FAR, stays) for name in range(5)]
        await engine.begun()
        stopping = asyncio.create_task(batcher.stop())
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            batcher.admit(1, FAR)
        with pytest.raises(Draining):
            batcher.submit(images(9), FAR, stays)
        engine.allow(5)
        await stopping
        assert [names(future.result()) for future in waiting] == [[0], [1], [2], [3], [4]]
        assert sum(engine.batches, []) == [0, 1, 2, 3, 4]

    play(engine, scene)


def test_stopping_an_idle_batcher_ends_its_thread() -> None:
    before = set(threading.enumerate())

    async def scene(batcher: Batcher) -> None:
        assert any(thread.name == "qualms-runner" for thread in set(threading.enumerate()) - before)

    play(Engine(), scene)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name == "qualms-runner"]
