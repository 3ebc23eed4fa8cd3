"""The queue: batching, dropped requests, admission, runs on the event loop, pauses and stopping."""

import asyncio
import math
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from qualms.inference import batcher as module
from qualms.inference.batch import Answer, Batch, ClientDisconnected, Decode, Draining, Expired
from qualms.inference.batcher import Batcher
from qualms.inference.cost import CostCurve

TIMEOUT = 30.0
FAR = 1000.0
"""a deadline that no test reaches"""


class Clock:
    """A clock that only the test advances."""

    def __init__(self) -> None:
        self.now = 1.0

    def monotonic(self) -> float:
        return self.now


CLOCK = Clock()


@pytest.fixture(autouse=True)
def clock() -> Clock:
    CLOCK.now = 1.0
    return CLOCK


class RefusedError(Exception):
    """The batcher does not admit a request."""

    def __init__(self, retry_after: int) -> None:
        super().__init__(f"retry after {retry_after} s")
        self.retry_after = retry_after


class Engine:
    """Records each batch and ends a run only when the test allows it; an image is identified by its first pixel."""

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
        assert self._go.acquire(timeout=TIMEOUT)
        if self.error is not None:
            raise self.error
        return [images[:, 0].astype(np.int64)]

    def allow(self, runs: int = 1) -> None:
        self._go.release(runs)

    async def begun(self) -> None:
        """Wait until one more run has begun."""
        assert await asyncio.to_thread(self._begun.acquire, timeout=TIMEOUT)


def images(*names: int) -> list[NDArray[np.uint8]]:
    return [np.array([name, 0], np.uint8) for name in names]


def names(answer: Answer) -> list[int]:
    """The images of an answer."""
    values: list[int] = answer.batch.outputs[0][answer.start : answer.start + answer.count].tolist()
    return values


def admit(batcher: Batcher, rows: int, deadline: float) -> None:
    retry_after = batcher.retry_after(rows, deadline)
    if retry_after is not None:
        raise RefusedError(retry_after)


def submit_undecoded(
    batcher: Batcher, decode: Decode, rows: int, deadline: float, gone: Callable[[], bool]
) -> "asyncio.Future[Answer]":
    """Admit and queue a request; the future holds its answer."""
    admit(batcher, rows, deadline)
    future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def done(result: Answer | Exception) -> None:
        if isinstance(result, Exception):
            future.set_exception(result)
        else:
            future.set_result(result)

    batcher.queue(decode, rows, deadline, gone, done)
    return future


def submit(
    batcher: Batcher, decoded: list[NDArray[np.uint8]], deadline: float, gone: Callable[[], bool]
) -> "asyncio.Future[Answer]":
    """Submit images that need no decoding."""
    return submit_undecoded(batcher, lambda: decoded, len(decoded), deadline, gone)


async def run_scheduled() -> None:
    """Let the loop run everything that is scheduled."""
    for _ in range(10):
        await asyncio.sleep(0)


def connected() -> bool:
    """`gone` of a client that stays connected."""
    return False


def play(engine: Engine, scene: Callable[[Batcher], Coroutine[Any, Any, None]], **options: Any) -> None:
    """Run a scene with a started batcher and stop it; all runs are on the thread unless `short_seconds` is given."""

    async def whole() -> None:
        batcher = Batcher(engine, **{"short_seconds": -1.0, "clock": CLOCK.monotonic, **options})
        batcher.start()
        try:
            await asyncio.wait_for(scene(batcher), TIMEOUT)
        finally:
            engine.allow(1000)
            await batcher.stop()

    asyncio.run(whole())


# Batching


def test_an_idle_runner_starts_at_once_and_later_requests_share_the_next_run() -> None:
    engine = Engine()

    async def scene(batcher: Batcher) -> None:
        first = submit(batcher, images(1), FAR, connected)
        await engine.begun()
        rest = [submit(batcher, images(name), FAR, connected) for name in (2, 3, 4)]
        assert batcher.depth == 3
        engine.allow(2)
        answers = await asyncio.gather(first, *rest)
        assert engine.batches == [[1], [2, 3, 4]]
        assert [names(answer) for answer in answers] == [[1], [2], [3], [4]]
        assert batcher.depth == 0

    play(engine, scene)


def test_batches_are_limited_by_rows_and_keep_the_order() -> None:
    engine = Engine(max_batch=8)

    async def scene(batcher: Batcher) -> None:
        waiting = [submit(batcher, images(0), FAR, connected)]
        await engine.begun()
        for start in (10, 20, 30):
            waiting.append(submit(batcher, images(start, start + 1, start + 2), FAR, connected))
        waiting.append(submit(batcher, images(40), FAR, connected))
        await run_scheduled()
        engine.allow(3)
        answers = await asyncio.gather(*waiting)
        assert engine.batches == [[0], [10, 11, 12, 20, 21, 22], [30, 31, 32, 40]]
        assert [names(answer) for answer in answers] == [[0], [10, 11, 12], [20, 21, 22], [30, 31, 32], [40]]

    play(engine, scene)


def test_a_request_larger_than_max_batch_is_run_in_several_parts() -> None:
    engine, batches = Engine(max_batch=4), list[Batch]()

    async def scene(batcher: Batcher) -> None:
        waiting = [submit(batcher, images(0), FAR, connected)]
        await engine.begun()
        waiting.append(submit(batcher, images(*range(10, 19)), FAR, connected))
        waiting.append(submit(batcher, images(20), FAR, connected))
        engine.allow(5)
        assert [names(answer) for answer in await asyncio.gather(*waiting)] == [[0], list(range(10, 19)), [20]]
        assert engine.batches == [[0], [10, 11, 12, 13], [14, 15, 16, 17], [18], [20]]
        await run_scheduled()

    play(engine, scene, on_batch=batches.append)
    assert [[rows for rows, _ in batch.runs] for batch in batches] == [[1], [4, 4, 1], [1]]


def test_a_batch_reports_its_duration_and_each_requests_wait(clock: Clock) -> None:
    engine, batches = Engine(), list[Batch]()

    async def scene(batcher: Batcher) -> None:
        first = submit(batcher, images(1), FAR, connected)
        await engine.begun()
        second = submit(batcher, images(2, 3), FAR, connected)
        clock.now += 0.5
        engine.allow()
        assert (await first).waited == 0.0
        await engine.begun()
        engine.allow()
        assert (await second).waited == 0.5

    play(engine, scene, on_batch=batches.append)
    assert [(batch.rows, batch.seconds) for batch in batches] == [(1, 0.5), (2, 0.0)]


# Dropped requests


def test_expired_and_disconnected_requests_are_not_run(clock: Clock) -> None:
    engine, left = Engine(), list[bool]()

    async def scene(batcher: Batcher) -> None:
        first = submit(batcher, images(1), FAR, connected)
        await engine.begun()
        expired = submit(batcher, images(2, 3), clock.now + 5, connected)
        gone = submit(batcher, images(4), FAR, lambda: bool(left))
        in_time = submit(batcher, images(6), clock.now + 20, connected)
        left.append(True)
        clock.now += 10
        engine.allow(2)
        assert names(await first) == [1]
        with pytest.raises(Expired):
            await expired
        with pytest.raises(ClientDisconnected):
            await gone
        assert names(await in_time) == [6]
        assert engine.batches == [[1], [6]]
        assert batcher.depth == 0

    play(engine, scene)


def test_dropped_requests_do_not_count_towards_max_batch(clock: Clock) -> None:
    engine = Engine(max_batch=4)

    async def scene(batcher: Batcher) -> None:
        first = submit(batcher, images(1), FAR, connected)
        await engine.begun()
        dead = submit(batcher, images(2, 3, 4), clock.now + 5, connected)
        alive = [submit(batcher, images(5, 6), FAR, connected), submit(batcher, images(7, 8), FAR, connected)]
        clock.now += 10
        engine.allow(2)
        await asyncio.gather(first, *alive)
        assert engine.batches == [[1], [5, 6, 7, 8]]
        assert isinstance(dead.exception(), Expired)

    play(engine, scene)


# Admission


@pytest.mark.parametrize(("deadline", "retry_after"), [(0.001, 1), (0.99, 1), (-1.5, 3), (-99.0, 100)])
def test_a_deadline_that_cannot_be_met_is_refused_with_retry_after(
    clock: Clock, deadline: float, retry_after: int
) -> None:
    batcher = Batcher(Engine(seconds=1.0), clock=clock.monotonic)
    admit(batcher, 1, clock.now + 1.0)
    with pytest.raises(RefusedError, match=f"retry after {retry_after} s") as caught:
        admit(batcher, 1, clock.now + deadline)
    assert caught.value.retry_after == retry_after
    assert batcher.admission.cost(1) == 1.0


def test_running_waiting_and_decoding_rows_count_against_the_deadline(clock: Clock) -> None:
    engine, decoding = Engine(seconds=1.0, max_batch=4), [0]

    async def scene(batcher: Batcher) -> None:
        assert batcher.admission.predicted_wait(1) == 1.0
        running = submit(batcher, images(1), FAR, connected)
        await engine.begun()
        assert batcher.admission.predicted_wait(1) == 1.0 + 1.0
        clock.now += 0.25
        assert batcher.admission.predicted_wait(1) == 0.75 + 1.0
        waiting = submit(batcher, images(2, 3, 4), FAR, connected)
        assert batcher.admission.predicted_wait(1) == 0.75 + 4.0
        decoding[0] = 2
        assert batcher.admission.predicted_wait(1, decoding=0.5) == 0.75 + 4.0 + 2.0, "decoded before the run ends"
        assert batcher.admission.predicted_wait(1, decoding=3.0) == 3.0 + 4.0 + 2.0
        assert batcher.admission.predicted_wait(1) == 0.75 + 4.0, "it does not wait for images that are decoded"
        decoding[0] = 0
        with pytest.raises(RefusedError):
            submit(batcher, images(5), clock.now + 4.7, connected)
        engine.allow(2)
        await asyncio.gather(running, waiting)
        assert batcher.admission.predicted_wait(1) == 1.0
        assert engine.batches == [[1], [2, 3, 4]]

    play(engine, scene, rows_decoding=lambda: decoding[0])


@given(
    st.lists(st.floats(0, 10), min_size=1, max_size=6),
    st.integers(0, 100),
    st.lists(st.integers(1, 200), min_size=2, max_size=5),
)
def test_more_rows_never_wait_less(seconds: list[float], decoding: int, rows: list[int]) -> None:
    engine = Engine(max_batch=2 ** (len(seconds) - 1))
    engine.cost = CostCurve(tuple(2**power for power in range(len(seconds))), tuple(sorted(seconds)))
    batcher = Batcher(engine, clock=CLOCK.monotonic, rows_decoding=lambda: decoding)
    waits = [batcher.admission.predicted_wait(count, decoding=0.5) for count in sorted(rows)]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in zip(waits, waits[1:], strict=False))
    assert waits[-1] >= batcher.admission.predicted_wait(max(rows)) * (1 - 1e-12)


async def run_slowly(engine: Engine, batcher: Batcher, clock: Clock, runs: int) -> None:
    """Let some runs take a hundred times as long as they should."""
    for name in range(runs):
        waiting = submit(batcher, images(name), FAR, connected)
        await engine.begun()
        clock.now += 100 * engine.cost(1)
        engine.allow()
        await waiting


def test_admission_follows_runs_that_are_slower_than_at_warm_up(clock: Clock) -> None:
    engine = Engine(seconds=0.01)

    async def scene(batcher: Batcher) -> None:
        await run_slowly(engine, batcher, clock, 40)
        running = submit(batcher, images(99), FAR, connected)
        await engine.begun()
        assert batcher.admission.predicted_wait(1) > 10 * 2 * engine.cost(1)
        engine.allow()
        await running

    play(engine, scene)


def test_past_slowness_does_not_refuse_a_request_that_would_run_alone(clock: Clock) -> None:
    """Only a run can show that slowness has passed; otherwise requests would be refused for ever."""
    engine = Engine(seconds=0.01)

    async def scene(batcher: Batcher) -> None:
        await run_slowly(engine, batcher, clock, 40)
        for name in range(60):
            waiting = submit(batcher, images(name), clock.now + 0.05, connected)
            await engine.begun()
            engine.allow()
            await waiting
        running = submit(batcher, images(99), FAR, connected)
        await engine.begun()
        assert batcher.admission.predicted_wait(1) < 1.1 * 2 * engine.cost(1)
        engine.allow()
        await running

    play(engine, scene)


def test_time_without_work_is_not_slowness(clock: Clock) -> None:
    engine, left = Engine(seconds=0.01), list[bool]()

    async def scene(batcher: Batcher) -> None:
        first = submit(batcher, images(1), FAR, connected)
        await engine.begun()
        gone = submit(batcher, images(2), FAR, lambda: bool(left))
        left.append(True)
        engine.allow()
        await first
        with pytest.raises(ClientDisconnected):
            await gone
        clock.now += 100.0
        second = submit(batcher, images(3), FAR, connected)
        await engine.begun()
        engine.allow()
        await second
        third = submit(batcher, images(4), FAR, connected)
        await engine.begun()
        assert batcher.admission.predicted_wait(1) == pytest.approx(2 * engine.cost(1))
        engine.allow()
        await third

    play(engine, scene)


def test_time_without_work_is_not_slowness_on_the_event_loop_either(clock: Clock) -> None:
    engine, others = Engine(seconds=0.01), [1]

    async def scene(batcher: Batcher) -> None:
        engine.allow(100)
        for name in range(20):
            others[0] = 1
            waiting = submit(batcher, images(name), FAR, connected)
            others[0] = 2  # for example a scrape, which is answered before the next request arrives
            await waiting
            clock.now += 10.0
        assert batcher.admission.predicted_wait(1, decoding=0.0) == pytest.approx(2 * engine.cost(1))

    play(engine, scene, short_seconds=1.0, in_progress=lambda: others[0])


# Errors


def test_an_engine_error_fails_every_request_of_its_batch_and_no_other() -> None:
    engine = Engine()

    async def scene(batcher: Batcher) -> None:
        first = submit(batcher, images(1), FAR, connected)
        await engine.begun()
        rest = [submit(batcher, images(name), FAR, connected) for name in (2, 3)]
        engine.allow()
        await first
        await engine.begun()
        engine.error = RuntimeError("out of memory")
        engine.allow()
        errors = await asyncio.gather(*rest, return_exceptions=True)
        assert errors == [engine.error] * 2
        engine.error = None
        after = submit(batcher, images(4), FAR, connected)
        engine.allow()
        assert names(await after) == [4]

    play(engine, scene)


def test_images_of_different_shapes_are_an_error_and_the_runner_continues() -> None:
    engine = Engine()

    async def scene(batcher: Batcher) -> None:
        engine.allow(2)
        with pytest.raises(ValueError, match="shape"):
            await submit(batcher, [np.zeros(2, np.uint8), np.zeros(3, np.uint8)], FAR, connected)
        assert names(await submit(batcher, images(1), FAR, connected)) == [1]

    play(engine, scene)


def test_an_error_while_counting_is_logged_and_fails_no_request(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()

    def fail(_: Batch) -> None:
        raise IndexError("no such class")

    async def scene(batcher: Batcher) -> None:
        engine.allow()
        assert names(await submit(batcher, images(1), FAR, connected)) == [1]
        await run_scheduled()

    play(engine, scene, on_batch=fail)
    assert "a batch could not be counted" in caplog.text
    assert "no such class" in caplog.text


def test_only_requests_that_need_decoding_wait_for_it() -> None:
    engine = Engine(seconds=0.001)

    async def scene(batcher: Batcher) -> None:
        assert batcher.admission.predicted_wait(1, decoding=3.0) == pytest.approx(3.0 + 4 * 0.001, rel=0.01)
        assert batcher.retry_after(1, 2.5, 3.0) is not None
        assert batcher.retry_after(1, 2.5) is None, "small images do not wait for those that are decoded"

    play(engine, scene, rows_decoding=lambda: 3)


def test_requests_that_were_read_but_not_queued_add_to_the_predicted_wait() -> None:
    engine, read = Engine(seconds=0.01, max_batch=8), [1]

    async def scene(batcher: Batcher) -> None:
        assert batcher.admission.predicted_wait(1) == engine.cost(1)
        read[0] = 801
        assert batcher.admission.predicted_wait(1) == pytest.approx(100 * engine.cost(8), rel=0.02)
        with pytest.raises(RefusedError):
            admit(batcher, 1, 5.0)

    play(engine, scene, in_progress=lambda: read[0])


def test_a_run_that_would_miss_the_deadline_is_not_started(clock: Clock) -> None:
    engine = Engine(seconds=1.0)

    async def scene(batcher: Batcher) -> None:
        running = submit(batcher, images(1), FAR, connected)
        await engine.begun()
        late = submit(batcher, images(2), clock.now + 4.0, connected)
        await run_scheduled()
        clock.now += 3.5
        engine.allow(2)
        await running
        with pytest.raises(Expired):
            await late
        assert engine.batches == [[1]]

    play(engine, scene)


# On the event loop


def test_a_short_run_is_made_on_the_event_loop_with_all_requests_of_the_iteration() -> None:
    engine = Engine()
    engine.allow(2)

    async def scene(batcher: Batcher) -> None:
        waiting = [submit(batcher, images(name), FAR, connected) for name in (1, 2, 3)]
        answers = await asyncio.gather(*waiting)
        assert engine.batches == [[1, 2, 3]]
        assert engine.threads == {threading.get_ident()}
        assert [names(answer) for answer in answers] == [[1], [2], [3]]
        assert batcher.depth == 0

    play(engine, scene, short_seconds=math.inf)


def test_a_long_run_is_made_on_the_thread() -> None:
    engine = Engine()
    engine.allow()

    async def scene(batcher: Batcher) -> None:
        await submit(batcher, images(1), FAR, connected)
        assert threading.get_ident() not in engine.threads

    play(engine, scene, short_seconds=engine.cost(1) / 2)


async def run_one(batcher: Batcher) -> None:
    """After a run of one request, in an earlier iteration of the loop, the next request may be a lone one."""
    await submit(batcher, images(0), FAR, connected)
    await run_scheduled()


def test_a_lone_request_is_answered_before_the_loop_continues() -> None:
    engine = Engine()
    engine.allow(2)

    async def scene(batcher: Batcher) -> None:
        await run_one(batcher)
        answer = submit(batcher, images(1), FAR, connected)
        assert answer.done()
        assert names(answer.result()) == [1]

    play(engine, scene, short_seconds=math.inf, in_progress=lambda: 1)


@pytest.mark.parametrize("reason", ["the last run was of two", "another is in progress", "the run would be long"])
def test_a_request_that_may_not_be_alone_waits_for_the_next_iteration(reason: str) -> None:
    engine, in_progress = Engine(), [1]
    engine.allow(9)

    async def scene(batcher: Batcher) -> None:
        await run_one(batcher)
        if reason == "the last run was of two":
            in_progress[0] = 2
            await asyncio.gather(*[submit(batcher, images(name), FAR, connected) for name in (1, 2)])
            await run_scheduled()
            in_progress[0] = 1
        elif reason == "another is in progress":
            in_progress[0] = 2
        answer = submit(batcher, images(3), FAR, connected)
        assert not answer.done()
        assert names(await answer) == [3]

    short = engine.cost(1) / 2 if reason == "the run would be long" else math.inf
    play(engine, scene, short_seconds=short, in_progress=lambda: in_progress[0])


def test_of_several_lone_requests_in_one_iteration_only_the_first_is_run_alone() -> None:
    engine = Engine()
    engine.allow(9)

    async def scene(batcher: Batcher) -> None:
        await run_one(batcher)
        answers = [submit(batcher, images(name), FAR, connected) for name in (1, 2, 3)]
        assert [answer.done() for answer in answers] == [True, False, False]
        await asyncio.gather(*answers)
        assert engine.batches == [[0], [1], [2, 3]]

    play(engine, scene, short_seconds=math.inf, in_progress=lambda: 1)


def test_a_lone_request_does_not_overtake_waiting_ones() -> None:
    engine, in_progress = Engine(), [1]
    engine.allow(3)

    async def scene(batcher: Batcher) -> None:
        await run_one(batcher)
        in_progress[0] = 2
        first = submit(batcher, images(1), FAR, connected)
        in_progress[0] = 1
        second = submit(batcher, images(2), FAR, connected)
        assert not second.done()
        await asyncio.gather(first, second)
        assert engine.batches == [[0], [1, 2]]

    play(engine, scene, short_seconds=math.inf, in_progress=lambda: in_progress[0])


def test_between_two_runs_on_the_event_loop_other_tasks_run() -> None:
    engine = Engine(max_batch=2)
    engine.allow(10)
    between = list[int]()

    async def scene(batcher: Batcher) -> None:
        async def other() -> None:
            while len(engine.batches) < 3:
                between.append(len(engine.batches))
                await asyncio.sleep(0)

        waiting = [submit(batcher, images(name), FAR, connected) for name in range(5)]
        await asyncio.gather(other(), *waiting)
        assert engine.batches == [[0, 1], [2, 3], [4]]
        assert {1, 2} <= set(between)

    play(engine, scene, short_seconds=math.inf)


# Pausing the event loop


async def refuse(batcher: Batcher, clock: Clock) -> None:
    """Refuse a request and run everything that is scheduled."""
    with pytest.raises(RefusedError):
        admit(batcher, 1, clock.now)
    await run_scheduled()


async def fill(batcher: Batcher, engine: Engine, waiting: int) -> "asyncio.Future[Answer]":
    """Start one request, which is returned, and let others wait."""
    running = submit(batcher, images(0), FAR, connected)
    await engine.begun()
    for name in range(waiting):
        submit(batcher, images(1 + name), FAR, connected)
    await run_scheduled()
    return running


def test_refusals_pause_the_event_loop_until_the_run_ends(clock: Clock) -> None:
    engine = Engine(max_batch=2)

    async def scene(batcher: Batcher) -> None:
        running = await fill(batcher, engine, waiting=2)
        threading.Timer(0.1, engine.allow).start()
        await refuse(batcher, clock)
        assert running.done()

    play(engine, scene, pause_seconds=TIMEOUT)


def test_the_pause_of_the_event_loop_is_bounded(clock: Clock) -> None:
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
        pytest.param(1, lambda: 1, id="the next batch has room"),
        pytest.param(2, partial(next, count(1)), id="new connections arrive"),
    ],
)
def test_the_event_loop_does_not_pause_if(waiting: int, connections: Callable[[], int], clock: Clock) -> None:
    engine = Engine(max_batch=2)

    async def scene(batcher: Batcher) -> None:
        running = await fill(batcher, engine, waiting)
        for _ in range(3):
            await refuse(batcher, clock)
        assert not running.done()

    play(engine, scene, connections=connections, pause_seconds=TIMEOUT)


# Decoding


@pytest.mark.parametrize("lone", [False, True])
def test_images_that_cannot_be_decoded_fail_their_own_request_alone(lone: bool) -> None:
    engine = Engine()
    engine.allow(2)

    def broken() -> list[NDArray[np.uint8]]:
        raise OSError("cut short")

    async def scene(batcher: Batcher) -> None:
        if lone:
            await run_one(batcher)
        bad = submit_undecoded(batcher, broken, 1, FAR, connected)
        good = submit(batcher, images(1), FAR, connected)
        with pytest.raises(OSError, match="cut short"):
            await bad
        assert names(await good) == [1]
        assert batcher.depth == 0

    play(engine, scene, short_seconds=math.inf)


def test_disconnected_requests_are_not_decoded() -> None:
    engine = Engine()
    decoded = list[int]()

    def decode() -> list[NDArray[np.uint8]]:
        decoded.append(1)
        return images(1)

    async def scene(batcher: Batcher) -> None:
        left = submit_undecoded(batcher, decode, 1, FAR, lambda: True)
        with pytest.raises(ClientDisconnected):
            await left
        assert not decoded
        assert batcher.depth == 0

    play(engine, scene, short_seconds=math.inf)


def test_decoding_time_is_reported_apart_from_waiting_time(clock: Clock) -> None:
    engine = Engine()
    engine.allow()

    def decode() -> list[NDArray[np.uint8]]:
        clock.now += 2.0
        return images(1)

    async def scene(batcher: Batcher) -> None:
        answer = await submit_undecoded(batcher, decode, 1, FAR, connected)
        assert answer.decode_seconds == 2.0
        assert answer.waited == 0.0

    play(engine, scene, short_seconds=math.inf)


def test_the_rows_of_a_failed_request_have_left_the_queue_when_it_ends() -> None:
    """So that it can be admitted again, for decoding elsewhere."""
    depths = list[int]()

    def broken() -> list[NDArray[np.uint8]]:
        raise OSError("too large")

    async def scene(batcher: Batcher) -> None:
        batcher.queue(broken, 3, FAR, connected, lambda _: depths.append(batcher.depth))
        assert batcher.depth == 3
        await run_scheduled()
        assert depths == [0]

    play(Engine(), scene)


# Scheduling of the event loop


@pytest.mark.parametrize(("learned", "calls"), [(1.0, 1), (0.001, 0)])
def test_the_event_loop_yields_once_full_batches_are_known_to_be_long(
    monkeypatch: pytest.MonkeyPatch, learned: float, calls: int
) -> None:
    """One request with many images is run on the thread, too, but says nothing about full batches."""
    yields: list[None] = []
    monkeypatch.setattr(module, "yield_to_other_threads", lambda: yields.append(None))
    engine = Engine(seconds=0.001, max_batch=2)

    async def scene(batcher: Batcher) -> None:
        assert not yields
        engine.cost = CostCurve((1, 2), (learned, 2 * learned))
        for _ in range(2):
            waiting = submit(batcher, images(*range(12)), FAR, connected)
            engine.allow(6)
            await waiting

    play(engine, scene, short_seconds=0.005)
    assert len(yields) == calls


# Stopping


def test_stopping_answers_admitted_requests_and_accepts_no_new_ones() -> None:
    engine = Engine(max_batch=2)

    async def scene(batcher: Batcher) -> None:
        waiting = [submit(batcher, images(name), FAR, connected) for name in range(5)]
        await engine.begun()
        stopping = asyncio.create_task(batcher.stop())
        await asyncio.sleep(0)
        with pytest.raises(Draining):
            admit(batcher, 1, FAR)
        with pytest.raises(Draining):
            submit(batcher, images(9), FAR, connected)
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
