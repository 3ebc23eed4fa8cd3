import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from qualms.inference import batcher as module
from qualms.inference import runs, standback
from qualms.inference.batcher import Batcher
from qualms.inference.engine import CostCurve
from qualms.inference.jobs import Answer, Batch, Draining, Expired, Left, Overloaded

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
    for reader in (module, runs):
        monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=found.monotonic))
    return found


class Engine:
    """Notes each batch, and ends a run only when it is allowed to; an image's first pixel is its name."""

    def __init__(self, seconds: float = 0.001, max_batch: int = 8) -> None:
        self.cost = CostCurve((1, max_batch), (seconds, seconds * max_batch))
        self.max_batch = max_batch
        self.batches: list[list[int]] = []
        self.threads: set[int] = set()
        self.error: Exception | None = None
        self._begun = threading.Semaphore(0)
        self._go = threading.Semaphore(0)

    def run(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        self.batches.append(images[:, 0].tolist())
        self.threads.add(threading.get_ident())
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


def submit(
    batcher: Batcher, given: list[NDArray[np.uint8]], deadline: float, gone: Callable[[], bool], **options: Any
) -> "asyncio.Future[Answer]":
    """Submit images that need no decoding."""
    return batcher.submit(lambda: given, len(given), deadline, gone, **options)


async def passes() -> None:
    """Let the loop do all that is due."""
    for _ in range(10):
        await asyncio.sleep(0)


def stays() -> bool:
    return False


def play(engine: Engine, scene: Callable[[Batcher], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a scene with a started batcher, and stop it in any case; every run is the thread's unless said otherwise."""

    async def whole() -> None:
        batcher = Batcher(engine, **{"short_seconds": -1.0, **options})
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
        first = submit(batcher, images(1), FAR, stays)
        await engine.begun()
        rest = [submit(batcher, images(name), FAR, stays) for name in (2, 3, 4)]
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
        waiting = [submit(batcher, images(0), FAR, stays)]
        await engine.begun()
        for start in (10, 20, 30):
            waiting.append(submit(batcher, images(start, start + 1, start + 2), FAR, stays))
        waiting.append(submit(batcher, images(40), FAR, stays))
        await passes()
        engine.allow(3)
        answers = await asyncio.gather(*waiting)
        assert engine.batches == [[0], [10, 11, 12, 20, 21, 22], [30, 31, 32, 40]]
        assert [names(answer) for answer in answers] == [[0], [10, 11, 12], [20, 21, 22], [30, 31, 32], [40]]

    play(engine, scene)


def test_a_request_larger_than_the_cap_takes_several_runs_and_shares_none() -> None:
    engine, heard = Engine(max_batch=4), list[Batch]()

    async def scene(batcher: Batcher) -> None:
        waiting = [submit(batcher, images(0), FAR, stays)]
        await engine.begun()
        waiting.append(submit(batcher, images(*range(10, 19)), FAR, stays))
        waiting.append(submit(batcher, images(20), FAR, stays))
        engine.allow(5)
        assert [names(answer) for answer in await asyncio.gather(*waiting)] == [[0], list(range(10, 19)), [20]]
        assert engine.batches == [[0], [10, 11, 12, 13], [14, 15, 16, 17], [18], [20]]
        await passes()

    play(engine, scene, on_batch=heard.append)
    assert [[rows for rows, _ in batch.runs] for batch in heard] == [[1], [4, 4, 1], [1]]


def test_a_batch_says_how_long_it_took_and_how_long_each_request_waited(clock: Clock) -> None:
    engine, heard = Engine(), list[Batch]()

    async def scene(batcher: Batcher) -> None:
        first = submit(batcher, images(1), FAR, stays)
        await engine.begun()
        second = submit(batcher, images(2, 3), FAR, stays)
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
        first = submit(batcher, images(1), FAR, stays)
        await engine.begun()
        expired = submit(batcher, images(2, 3), clock.now + 5, stays)
        gone = submit(batcher, images(4), FAR, lambda: bool(left))
        cancelled = submit(batcher, images(5), FAR, stays)
        in_time = submit(batcher, images(6), clock.now + 20, stays)
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
        first = submit(batcher, images(1), FAR, stays)
        await engine.begun()
        dead = submit(batcher, images(2, 3, 4), clock.now + 5, stays)
        alive = [submit(batcher, images(5, 6), FAR, stays), submit(batcher, images(7, 8), FAR, stays)]
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
    assert (caught.value.retry_after, caught.value.alone) == (retry_after, 1.0)


def test_what_runs_and_waits_and_is_being_decoded_counts_against_the_deadline(clock: Clock) -> None:
    engine = Engine(seconds=1.0, max_batch=4)

    async def scene(batcher: Batcher) -> None:
        assert batcher.predicted_wait(1) == 1.0
        running = submit(batcher, images(1), FAR, stays)
        await engine.begun()
        assert batcher.predicted_wait(1) == 1.0 + 1.0
        clock.now += 0.25
        assert batcher.predicted_wait(1) == 0.75 + 1.0
        waiting = submit(batcher, images(2, 3, 4), FAR, stays)
        assert batcher.predicted_wait(1) == 0.75 + 4.0
        with batcher.decoding(2):
            assert batcher.predicted_wait(1) == 0.75 + 4.0 + 2.0
        with pytest.raises(Overloaded):
            submit(batcher, images(5), clock.now + 4.7, stays)
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
        waiting = submit(batcher, images(name), FAR, stays)
        await engine.begun()
        clock.now += 100 * engine.cost(1)
        engine.allow()
        await waiting


def test_admission_follows_runs_that_are_slower_than_at_warm_up(clock: Clock) -> None:
    engine = Engine(seconds=0.01)

    async def scene(batcher: Batcher) -> None:
        await run_slowly(engine, batcher, clock, 40)
        running = submit(batcher, images(99), FAR, stays)
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
            waiting = submit(batcher, images(name), clock.now + 0.05, stays)
            await engine.begun()
            engine.allow()
            await waiting
        running = submit(batcher, images(99), FAR, stays)
        await engine.begun()
        assert batcher.predicted_wait(1) < 1.1 * 2 * engine.cost(1)
        engine.allow()
        await running

    play(engine, scene)


def test_time_without_work_is_not_slowness(clock: Clock) -> None:
    engine, left = Engine(seconds=0.01), list[bool]()

    async def scene(batcher: Batcher) -> None:
        first = submit(batcher, images(1), FAR, stays)
        await engine.begun()
        gone = submit(batcher, images(2), FAR, lambda: bool(left))
        left.append(True)
        engine.allow()
        await first
        with pytest.raises(Left):
            await gone
        clock.now += 100.0
        second = submit(batcher, images(3), FAR, stays)
        await engine.begun()
        engine.allow()
        await second
        third = submit(batcher, images(4), FAR, stays)
        await engine.begun()
        assert batcher.predicted_wait(1) == pytest.approx(2 * engine.cost(1))
        engine.allow()
        await third

    play(engine, scene)


def test_nor_is_it_where_somebody_else_was_in_progress_when_the_last_run_ended(clock: Clock) -> None:
    """On the event loop, where no thread rests in between."""
    engine, others = Engine(seconds=0.01), [1]

    async def scene(batcher: Batcher) -> None:
        engine.allow(100)
        for name in range(20):
            others[0] = 1
            waiting = submit(batcher, images(name), FAR, stays)
            others[0] = 2  # a scrape, say, which is answered before the next request comes
            await waiting
            clock.now += 10.0
        with batcher.decoding(1):
            assert batcher.predicted_wait(1) == pytest.approx(2 * engine.cost(1))

    play(engine, scene, short_seconds=1.0, in_progress=lambda: others[0])


# What goes wrong


def test_an_engines_error_reaches_every_request_of_its_batch_and_no_other() -> None:
    engine = Engine()

    async def scene(batcher: Batcher) -> None:
        first = submit(batcher, images(1), FAR, stays)
        await engine.begun()
        rest = [submit(batcher, images(name), FAR, stays) for name in (2, 3)]
        engine.allow()
        await first
        await engine.begun()
        engine.error = RuntimeError("out of memory")
        engine.allow()
        found = await asyncio.gather(*rest, return_exceptions=True)
        assert found == [engine.error] * 2
        engine.error = None
        after = submit(batcher, images(4), FAR, stays)
        engine.allow()
        assert names(await after) == [4]

    play(engine, scene)


def test_images_that_do_not_fit_together_are_an_error_and_not_the_runners_end() -> None:
    engine = Engine()

    async def scene(batcher: Batcher) -> None:
        engine.allow(2)
        with pytest.raises(ValueError, match="shape"):
            await submit(batcher, [np.zeros(2, np.uint8), np.zeros(3, np.uint8)], FAR, stays)
        assert names(await submit(batcher, images(1), FAR, stays)) == [1]

    play(engine, scene)


def test_an_error_while_counting_is_logged_and_nobody_elses(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()

    def fail(_: Batch) -> None:
        raise IndexError("no such class")

    async def scene(batcher: Batcher) -> None:
        engine.allow()
        assert names(await submit(batcher, images(1), FAR, stays)) == [1]
        await passes()

    play(engine, scene, on_batch=fail)
    assert "a batch could not be counted" in caplog.text
    assert "no such class" in caplog.text


def test_what_others_still_decode_is_part_of_the_wait() -> None:
    engine = Engine(seconds=0.001)

    async def scene(batcher: Batcher) -> None:
        before = batcher.predicted_wait(1)
        for _ in range(100):
            batcher.decoded(2, 4.0)
        assert batcher.predicted_wait(1) == before, "nothing is being decoded"
        with batcher.decoding(3):
            assert batcher.predicted_wait(1) == pytest.approx(3 * 2.0 / 2, rel=0.01)
            with pytest.raises(Overloaded) as refused:
                batcher.admit(1, 2.5)
        assert refused.value.retry_after == 4, "half as much again, to be sure"
        assert batcher.predicted_wait(1) == before

    play(engine, scene, decode_threads=2)


def test_requests_that_were_read_but_not_looked_at_yet_are_ahead_too() -> None:
    engine, read = Engine(seconds=0.01, max_batch=8), [1]

    async def scene(batcher: Batcher) -> None:
        assert batcher.predicted_wait(1) == engine.cost(1)
        read[0] = 801
        assert batcher.predicted_wait(1) == pytest.approx(100 * engine.cost(8), rel=0.02)
        with pytest.raises(Overloaded):
            batcher.admit(1, 5.0)

    play(engine, scene, in_progress=lambda: read[0])


def test_what_could_not_end_in_time_is_not_begun(clock: Clock) -> None:
    engine = Engine(seconds=1.0)

    async def scene(batcher: Batcher) -> None:
        running = submit(batcher, images(1), FAR, stays)
        await engine.begun()
        late = submit(batcher, images(2), clock.now + 4.0, stays)
        await passes()
        clock.now += 3.5
        engine.allow(2)
        await running
        with pytest.raises(Expired):
            await late
        assert engine.batches == [[1]]

    play(engine, scene)


# On the event loop


def test_a_short_run_is_made_on_the_event_loop_and_gathers_what_came_with_it() -> None:
    engine = Engine()
    engine.allow(2)

    async def scene(batcher: Batcher) -> None:
        waiting = [submit(batcher, images(name), FAR, stays) for name in (1, 2, 3)]
        answers = await asyncio.gather(*waiting)
        assert engine.batches == [[1, 2, 3]]
        assert engine.threads == {threading.get_ident()}
        assert [names(answer) for answer in answers] == [[1], [2], [3]]
        assert batcher.depth == 0

    play(engine, scene, short_seconds=math.inf)


def test_a_long_run_is_the_threads() -> None:
    engine = Engine()
    engine.allow()

    async def scene(batcher: Batcher) -> None:
        await submit(batcher, images(1), FAR, stays)
        assert threading.get_ident() not in engine.threads

    play(engine, scene, short_seconds=engine.cost(1) / 2)


def test_a_request_that_is_alone_is_answered_before_the_loop_goes_on() -> None:
    engine = Engine()
    engine.allow(2)

    async def scene(batcher: Batcher) -> None:
        answer = submit(batcher, images(1), FAR, stays, alone=True)
        assert answer.done()
        assert names(answer.result()) == [1]

    play(engine, scene, short_seconds=math.inf)


def test_requests_come_one_by_one_if_the_last_run_was_of_one_in_an_earlier_pass() -> None:
    engine = Engine()
    engine.allow(9)

    async def scene(batcher: Batcher) -> None:
        assert not batcher.one_by_one
        for together, expected in ((1, True), (2, False), (1, True)):
            await asyncio.gather(*[submit(batcher, images(name), FAR, stays) for name in range(together)])
            await passes()
            assert batcher.one_by_one is expected
        submit(batcher, images(1), FAR, stays, alone=True)
        assert not batcher.one_by_one  # what else this pass brings must not take itself for alone
        await passes()
        assert batcher.one_by_one

    play(engine, scene, short_seconds=math.inf)


def test_what_waits_is_not_overtaken_by_who_says_to_be_alone() -> None:
    engine = Engine()
    engine.allow(2)

    async def scene(batcher: Batcher) -> None:
        first = submit(batcher, images(1), FAR, stays)
        second = submit(batcher, images(2), FAR, stays, alone=True)
        assert not second.done()
        await asyncio.gather(first, second)
        assert engine.batches == [[1, 2]]

    play(engine, scene, short_seconds=math.inf)


def test_more_than_a_batch_is_run_in_several_with_room_for_others_between() -> None:
    engine = Engine(max_batch=2)
    engine.allow(10)
    between = list[int]()

    async def scene(batcher: Batcher) -> None:
        async def other() -> None:
            while len(engine.batches) < 3:
                between.append(len(engine.batches))
                await asyncio.sleep(0)

        waiting = [submit(batcher, images(name), FAR, stays) for name in range(5)]
        await asyncio.gather(other(), *waiting)
        assert engine.batches == [[0, 1], [2, 3], [4]]
        assert {1, 2} <= set(between)

    play(engine, scene, short_seconds=math.inf)


# Standing back


async def refuse(batcher: Batcher, clock: Clock) -> None:
    """Have something refused, and let the loop do all that is due."""
    with pytest.raises(Overloaded):
        batcher.admit(1, clock.now)
    await passes()


async def fill(batcher: Batcher, engine: Engine, waiting: int) -> "asyncio.Future[Answer]":
    """One request runs, and some wait; the one that runs."""
    running = submit(batcher, images(0), FAR, stays)
    await engine.begun()
    for name in range(waiting):
        submit(batcher, images(1 + name), FAR, stays)
    await passes()
    return running


def test_who_refuses_leaves_the_core_to_the_run_until_it_ends(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standback, "STAND_BACK_SECONDS", PATIENCE)
    engine = Engine(max_batch=2)

    async def scene(batcher: Batcher) -> None:
        running = await fill(batcher, engine, waiting=2)
        threading.Timer(0.1, engine.allow).start()
        await refuse(batcher, clock)
        assert running.done()

    play(engine, scene)


def test_a_long_run_does_not_hold_the_loop_up(clock: Clock) -> None:
    engine = Engine(max_batch=2)

    async def scene(batcher: Batcher) -> None:
        running = await fill(batcher, engine, waiting=2)
        for _ in range(3):
            await refuse(batcher, clock)
        assert not running.done()

    play(engine, scene)


@pytest.mark.parametrize(
    ("waiting", "connections"),
    [
        pytest.param(1, lambda: 1, id="there is room in the next batch"),
        pytest.param(2, partial(next, count(1)), id="new connections come"),
    ],
)
def test_nobody_stands_back_while(
    waiting: int, connections: Callable[[], int], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standback, "STAND_BACK_SECONDS", PATIENCE)
    engine = Engine(max_batch=2)

    async def scene(batcher: Batcher) -> None:
        running = await fill(batcher, engine, waiting)
        for _ in range(3):
            await refuse(batcher, clock)
        assert not running.done()

    play(engine, scene, connections=connections)


# Decoding


@pytest.mark.parametrize("alone", [False, True])
def test_images_that_cannot_be_decoded_fail_their_own_request_alone(alone: bool) -> None:
    engine = Engine()
    engine.allow(2)

    def broken() -> list[NDArray[np.uint8]]:
        raise OSError("cut short")

    async def scene(batcher: Batcher) -> None:
        bad = batcher.submit(broken, 1, FAR, stays, alone=alone)
        good = submit(batcher, images(1), FAR, stays)
        with pytest.raises(OSError, match="cut short"):
            await bad
        assert names(await good) == [1]
        assert batcher.depth == 0

    play(engine, scene, short_seconds=math.inf)


def test_what_expired_or_was_left_before_its_turn_is_not_even_decoded() -> None:
    engine = Engine()
    decoded = list[int]()

    def decode() -> list[NDArray[np.uint8]]:
        decoded.append(1)
        return images(1)

    async def scene(batcher: Batcher) -> None:
        left = batcher.submit(decode, 1, FAR, lambda: True)
        with pytest.raises(Left):
            await left
        assert not decoded
        assert batcher.depth == 0

    play(engine, scene, short_seconds=math.inf)


def test_an_answer_says_how_long_decoding_took_apart_from_waiting(clock: Clock) -> None:
    engine = Engine()
    engine.allow()

    def decode() -> list[NDArray[np.uint8]]:
        clock.now += 2.0
        return images(1)

    async def scene(batcher: Batcher) -> None:
        answer = await batcher.submit(decode, 1, FAR, stays)
        assert answer.decode_seconds == 2.0
        assert answer.waited == 0.0

    play(engine, scene, short_seconds=math.inf)


# Stopping


def test_stopping_answers_what_was_admitted_and_takes_nothing_new() -> None:
    engine = Engine(max_batch=2)

    async def scene(batcher: Batcher) -> None:
        waiting = [submit(batcher, images(name), FAR, stays) for name in range(5)]
        await engine.begun()
        stopping = asyncio.create_task(batcher.stop())
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            batcher.admit(1, FAR)
        with pytest.raises(Draining):
            submit(batcher, images(9), FAR, stays)
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
