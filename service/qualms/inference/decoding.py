"""Decoding for many requests: where each file is decoded, how much memory it may take, and how long that will take.

Small plain files are decoded on the event loop, when their batch is formed. Other plain files are decoded in threads of the
service, and all other files in worker processes, which can be killed. The estimated memory of all decodes under way is one
budget: a file waits until its share is free. Three quarters of it are open to worker processes, so that files which are
not plain never keep plain ones waiting for memory.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qualms.errors import ImageError
from qualms.images.estimates import estimate
from qualms.images.input_spec import InputSpec
from qualms.images.observed import ObservedEncoding, observe
from qualms.images.plain_files import PlainFile, read_plain
from qualms.images.preprocess import ImageInput, preprocess, preprocess_array, preprocess_plain
from qualms.images.worker_pool import DeadlinePassed, KilledFor, WorkerPool
from qualms.inference.batch import ClientDisconnected, Expired
from qualms.inference.cpu import lower_priority

INLINE_BYTES = 32 * 1024
INLINE_PIXELS = 96 * 96
"""images up to this size are decoded on the event loop: at most about a tenth of a millisecond"""
_INLINE_TOTAL_PIXELS = 4 * INLINE_PIXELS
_WORKERS_SHARE = 0.75
"""part of the memory budget that is open to files which are not plain"""
_ADAPTATION = 0.1
"""weight of the newest observation in a moving average"""
_FACTOR_RANGE = (0.1, 20.0)
"""range of one observed ratio of actual to estimated time, which limits the effect of a single stall"""


class Place(Enum):
    """Where the images of a request are decoded."""

    INLINE = "inline"
    THREAD = "thread"
    WORKER = "worker"


@dataclass(frozen=True, slots=True)
class Limits:
    """What one image file may have, and what all files under way may take."""

    pixels: int
    side: int
    memory: int
    """bytes"""


class Plan(NamedTuple):
    """Where and how the images of one request will be decoded."""

    inputs: list[ImageInput]
    plain_files: list[PlainFile | None]
    """for each image; None for pixels and for files that are not plain"""
    place: Place
    seconds: float = 0.0
    """estimate for all images, before it is corrected by experience"""


class Decoded(NamedTuple):
    """The images of one request, each (H, W, C), their encodings, and the seconds that decoding took."""

    images: list[NDArray[np.uint8]]
    encodings: list[ObservedEncoding]
    seconds: float


class InvalidImage(Exception):  # noqa: N818
    """One image of a request cannot be decoded."""

    def __init__(self, index: int, error: ImageError) -> None:
        super().__init__(index)
        self.index, self.error = index, error


class NotInline(Exception):  # noqa: N818
    """A fast decoder refused a file, so that it must be decoded in a worker."""


class MemoryBudget:
    """Estimated memory of all decodes under way; threads wait until their share is free."""

    def __init__(self, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = total
        self.for_workers = int(_WORKERS_SHARE * total)
        self._clock = clock
        self._used = self._used_by_workers = 0
        self._changed = threading.Condition()

    @contextmanager
    def share(self, size: int, deadline: float, *, worker: bool) -> Iterator[None]:
        """Hold `size` bytes; raises Expired if they are not free before the deadline."""
        with self._changed:
            if not self._changed.wait_for(partial(self._fits, size, worker), max(0.0, deadline - self._clock())):
                raise Expired
            self._add(size, worker)
        try:
            yield
        finally:
            with self._changed:
                self._add(-size, worker)
                self._changed.notify_all()

    def _fits(self, size: int, worker: bool) -> bool:
        return self._used + size <= self.total and (not worker or self._used_by_workers + size <= self.for_workers)

    def _add(self, size: int, worker: bool) -> None:
        self._used += size
        self._used_by_workers += size if worker else 0


class _Queue:
    """The threads of one place, and the time that their work is expected to take."""

    def __init__(self, threads: int, name: str) -> None:
        self._threads = threads
        self._executor = ThreadPoolExecutor(threads, name, initializer=lower_priority)
        self._seconds = 0.0
        """estimates of all work that is queued or under way"""
        self._factor = 1.0
        """moving average of actual over estimated time"""

    def wait(self, seconds: float) -> float:
        """Predicted time until work with this estimate would be done."""
        return self._factor * (self._seconds / self._threads + seconds)

    def run(self, seconds: float, work: Callable[[], Decoded]) -> "asyncio.Future[Decoded]":
        """Run work with this estimate in a thread."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, work)
        self._seconds += seconds
        future.add_done_callback(partial(self._ended, seconds))
        return future

    def _ended(self, seconds: float, future: "asyncio.Future[Decoded]") -> None:
        self._seconds -= seconds
        if not future.cancelled() and future.exception() is None:
            low, high = _FACTOR_RANGE
            ratio = min(max(future.result().seconds / seconds, low), high)
            self._factor += _ADAPTATION * (ratio - self._factor)

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)


class Decoder:
    """Decodes the images of all requests to all models; use it on the event loop, except for `plan` and `decode_inline`."""

    def __init__(
        self,
        threads: int,
        limits: Limits,
        *,
        on_killed: Callable[[KilledFor], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`threads` is the number of decoding threads, and of worker processes; `on_killed` as in WorkerPool."""
        self._limits = limits
        self._clock = clock
        self._memory = MemoryBudget(limits.memory, clock)
        self._queues = {Place.THREAD: _Queue(threads, "qualms-decode"), Place.WORKER: _Queue(threads, "qualms-worker")}
        # Worker processes need system calls of Linux; elsewhere all files are decoded in threads.
        self._workers = WorkerPool(threads, on_killed=on_killed, clock=clock) if sys.platform == "linux" else None
        self.rows = self.requests = 0
        """images and requests that are queued or under way, without those that are decoded inline"""

    def plan(self, inputs: list[ImageInput], spec: InputSpec) -> Plan:
        """Read the headers of all images; takes microseconds for small bodies, milliseconds for the largest."""
        plain_files, size, pixels, is_plain = [], 0, 0, True
        for image in inputs:
            if isinstance(image, bytes):
                plain = read_plain(image)
                size += len(image)
                if plain is None:
                    is_plain = False
                else:
                    pixels += plain.width * plain.height
            else:
                plain = None
                size += image.nbytes
                pixels += image.shape[0] * image.shape[1]
            plain_files.append(plain)
        if (
            is_plain
            and size <= INLINE_BYTES
            and pixels <= (INLINE_PIXELS if len(inputs) == 1 else _INLINE_TOTAL_PIXELS)
        ):
            return Plan(inputs, plain_files, Place.INLINE)
        place = Place.THREAD if is_plain else Place.WORKER
        seconds = sum(
            estimate(image, plain, spec, self._limits.pixels).seconds
            for image, plain in zip(inputs, plain_files, strict=True)
        )
        return Plan(inputs, plain_files, place, seconds)

    def wait(self, plan: Plan) -> float | None:
        """Predicted seconds until the images are decoded; None if they are decoded inline."""
        return None if plan.place is Place.INLINE else self._queues[plan.place].wait(plan.seconds)

    def shortest_wait(self) -> float:
        """Predicted seconds until a file that is not known yet could be decoded."""
        return min(queue.wait(0.0) for queue in self._queues.values())

    def in_workers(self, plan: Plan, spec: InputSpec) -> Plan:
        """The plan to decode files in workers that a fast decoder has refused."""
        seconds = sum(estimate(image, None, spec, self._limits.pixels).seconds for image in plan.inputs)
        return plan._replace(plain_files=[None] * len(plan.inputs), place=Place.WORKER, seconds=seconds)

    def decode_inline(self, plan: Plan, spec: InputSpec) -> list[NDArray[np.uint8]]:
        """The images of an inline plan, each (H, W, C); raises InvalidImage, or NotInline."""
        limits, images = self._limits, []
        for index, (image, plain) in enumerate(zip(plan.inputs, plan.plain_files, strict=True)):
            try:
                if isinstance(image, bytes):
                    assert plain is not None
                    pixels = preprocess_plain(image, plain, spec, max_pixels=limits.pixels, max_side=limits.side)
                    if pixels is None:
                        raise NotInline
                else:
                    pixels = preprocess_array(image, spec, max_pixels=limits.pixels, max_side=limits.side)
            except ImageError as error:
                raise InvalidImage(index, error) from error
            images.append(pixels)
        return images

    def decode(
        self,
        plan: Plan,
        spec: InputSpec,
        deadline: float,
        disconnected: Callable[[], bool],
        done: Callable[[Decoded | BaseException], None],
    ) -> None:
        """Decode in a thread or in a worker; `done` is called once on the event loop, at the deadline at the latest."""
        loop, rows = asyncio.get_running_loop(), len(plan.inputs)
        is_done = False

        def finish(result: Decoded | BaseException) -> None:
            nonlocal is_done
            if not is_done:
                is_done = True
                timer.cancel()
                done(result)

        def ended(future: "asyncio.Future[Decoded]") -> None:
            self.rows -= rows
            self.requests -= 1
            error = asyncio.CancelledError() if future.cancelled() else future.exception()
            finish(future.result() if error is None else error)

        work = partial(self._decode, plan, spec, deadline, lambda: is_done or disconnected())
        future = self._queues[plan.place].run(plan.seconds, work)
        self.rows += rows
        self.requests += 1
        timer = loop.call_later(max(0.0, deadline - self._clock()), lambda: finish(Expired()))
        future.add_done_callback(ended)

    def close(self) -> None:
        """End all workers and threads; may be called more than once."""
        if self._workers is not None:
            self._workers.close()
        for queue in self._queues.values():
            queue.close()

    def _decode(self, plan: Plan, spec: InputSpec, deadline: float, not_needed: Callable[[], bool]) -> Decoded:
        """Decode all images in the calling thread, each in a worker if it is not plain."""
        start, images = self._clock(), []
        for index, (image, plain) in enumerate(zip(plan.inputs, plan.plain_files, strict=True)):
            if not_needed():
                raise ClientDisconnected
            if self._clock() > deadline:  # it waited too long for a thread
                raise Expired
            try:
                images.append(self._decode_one(image, plain, spec, deadline))
            except ImageError as error:
                raise InvalidImage(index, error) from error
            except DeadlinePassed:
                raise Expired from None
        return Decoded(images, [observe(image, spec) for image in plan.inputs], self._clock() - start)

    def _decode_one(
        self, image: ImageInput, plain: PlainFile | None, spec: InputSpec, deadline: float
    ) -> NDArray[np.uint8]:
        limits = self._limits
        needed = estimate(image, plain, spec, limits.pixels)
        if not isinstance(image, bytes):
            with self._memory.share(min(needed.memory, self._memory.total), deadline, worker=False):
                return preprocess_array(image, spec, max_pixels=limits.pixels, max_side=limits.side)
        if plain is not None:
            with self._memory.share(self._checked(needed.memory, self._memory.total), deadline, worker=False):
                pixels = preprocess_plain(image, plain, spec, max_pixels=limits.pixels, max_side=limits.side)
            if pixels is not None:
                return pixels
            needed = estimate(image, None, spec, limits.pixels)
        budget = self._memory.for_workers
        memory = self._checked(needed.memory, budget) if needed.is_certain else min(needed.memory, budget)
        with self._memory.share(memory, deadline, worker=True):
            if self._workers is None:
                return preprocess(image, spec, max_pixels=limits.pixels, max_side=limits.side)
            return self._workers.preprocess(
                image,
                spec,
                max_pixels=limits.pixels,
                max_side=limits.side,
                max_memory=memory,
                deadline=deadline,
                pixels=needed.pixels,
            )

    def _checked(self, memory: int, budget: int) -> int:
        """The memory of a file; ImageError if it would not fit even alone."""
        if memory > budget:
            raise ImageError(
                f"The image needs about {memory / 1e6:,.0f} MB to be decoded; {budget / 1e6:,.0f} MB are available. Send a "
                "smaller image, or a JPEG.",
                reason="too_large",
            )
        return memory
