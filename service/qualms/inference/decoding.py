"""Decoding for many requests: where each image is decoded, how much memory it may take, and how long that will take.

Small plain files are decoded on the event loop, when their batch is formed. Other plain files are decoded in threads of the
service, and all other files in worker processes, which can be killed. Threads take one image of each waiting request in turn, so
that a request with many images does not keep others waiting.
"""

import asyncio
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qualms.errors import ImageError
from qualms.images.estimates import Estimate, estimate, resized_pixels
from qualms.images.input_spec import InputSpec
from qualms.images.observed import observe
from qualms.images.pillow_decoder import check_size
from qualms.images.plain_files import PlainFile, read_plain
from qualms.images.preprocess import ImageInput, preprocess, preprocess_array, preprocess_plain
from qualms.images.worker_pool import DeadlinePassed, KilledFor, WorkerPool
from qualms.inference.batch import Draining, Expired
from qualms.inference.decode_memory import MemoryBudget
from qualms.inference.decode_queue import Decoded, DecodeQueue, DecodeRequest, InvalidImage, Place, Plan

INLINE_BYTES = 12 * 1024
"""files up to this size are decoded on the event loop: a hostile PNG takes 0.1 µs per byte"""
INLINE_PIXELS = 96 * 96
"""pixels of the largest image that is decoded on the event loop: at most about a tenth of a millisecond"""
_INLINE_TOTAL_PIXELS = 2 * INLINE_PIXELS
"""pixels of all images of a request, before and after resizing"""
_INLINE_IMAGES = 8


class Limits(NamedTuple):
    """What one image file may have, and what all files under way may take."""

    pixels: int
    side: int
    memory: int
    """bytes"""


class NotInline(Exception):  # noqa: N818
    """A fast decoder refused a file, so that it must be decoded in a worker."""


class Decoder:
    """Decodes the images of all requests to all models; use it on the event loop, except for `plan`."""

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
        # Worker processes need system calls of Linux; elsewhere all files are decoded in threads.
        self._workers = WorkerPool(threads, on_killed=on_killed, clock=clock) if sys.platform == "linux" else None
        self._queues = {
            Place.THREAD: DecodeQueue(threads, "qualms-decode", self._decode_in_thread),
            Place.WORKER: DecodeQueue(threads, "qualms-worker", self._decode_in_worker),
        }
        self._closed = False
        self.rows = self.requests = 0
        """images and requests that are queued or under way, without those that are decoded inline"""

    def plan(self, inputs: list[ImageInput], spec: InputSpec) -> Plan:
        """Read the headers of all images; takes microseconds for small bodies, milliseconds for the largest.

        Raises InvalidImage for an image that is too large.
        """
        if (plain := self._small_file(inputs, spec)) is not None:
            return Plan(inputs, [plain], [Place.INLINE], [])
        plain_files, estimates, places = list[PlainFile | None](), list[Estimate](), list[Place]()
        size, pixels, largest = 0, 0, 0
        for index, image in enumerate(inputs):
            is_file = isinstance(image, bytes)
            plain = read_plain(image) if isinstance(image, bytes) else None
            needed = estimate(image, plain, spec, self._limits.pixels)
            try:
                self._check(image, plain, needed)
            except ImageError as error:
                raise InvalidImage(index, error) from error
            size += len(image) if isinstance(image, bytes) else image.nbytes
            pixels += needed.pixels + resized_pixels(image, plain, spec)
            largest = max(largest, needed.pixels)
            plain_files.append(plain)
            estimates.append(needed)
            places.append(Place.WORKER if is_file and plain is None else Place.THREAD)
        is_small = size <= INLINE_BYTES and largest <= INLINE_PIXELS and pixels <= _INLINE_TOTAL_PIXELS
        if is_small and len(inputs) <= _INLINE_IMAGES and Place.WORKER not in places:
            places = [Place.INLINE] * len(inputs)
        return Plan(inputs, plain_files, places, estimates)

    def _small_file(self, inputs: list[ImageInput], spec: InputSpec) -> PlainFile | None:
        """The headers of a single small file, as most requests have, for which nothing else needs to be estimated."""
        image = inputs[0]
        if len(inputs) > 1 or not isinstance(image, bytes) or len(image) > INLINE_BYTES:
            return None
        if spec.shorter_side is not None or spec.width * spec.height > INLINE_PIXELS:
            return None
        plain = read_plain(image)
        return plain if plain is not None and plain.width * plain.height <= INLINE_PIXELS else None

    def wait(self, plan: Plan) -> float | None:
        """Predicted seconds until the images are decoded; None if they are decoded inline."""
        if plan.is_inline:
            return None
        waits = []
        for place, queue in self._queues.items():
            seconds = [needed.seconds for at, needed in zip(plan.places, plan.estimates, strict=True) if at is place]
            if seconds:
                waits.append(queue.wait(len(seconds), sum(seconds)))
        return max(waits)

    def shortest_wait(self) -> float:
        """Predicted seconds until a file that is not known yet could be decoded."""
        return min(queue.wait(1, 0.0) for queue in self._queues.values())

    def in_workers(self, plan: Plan, spec: InputSpec) -> Plan:
        """The plan to decode files in workers that a fast decoder has refused."""
        return Plan(
            plan.inputs,
            [None] * len(plan.inputs),
            [Place.WORKER if isinstance(image, bytes) else Place.THREAD for image in plan.inputs],
            [estimate(image, None, spec, self._limits.pixels) for image in plan.inputs],
        )

    def decode_inline(self, plan: Plan, spec: InputSpec) -> list[NDArray[np.uint8]]:
        """The images of an inline plan, each (H, W, C); raises InvalidImage, or NotInline."""
        images = []
        for index, (image, plain) in enumerate(zip(plan.inputs, plan.plain_files, strict=True)):
            try:
                pixels = self._decode_plain(image, plain, spec)
            except ImageError as error:
                raise InvalidImage(index, error) from error
            if pixels is None:
                raise NotInline
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
        """Decode in threads and workers; `done` is called once on the event loop, at the deadline at the latest."""
        if self._closed:
            raise Draining
        rows = len(plan.inputs)

        def finish(request: DecodeRequest, result: Decoded | BaseException) -> None:
            if request.plan is not None:
                request.plan = None
                self.rows -= rows
                self.requests -= 1
                timer.cancel()
                done(result)

        request = DecodeRequest(plan, spec, deadline, disconnected, finish)
        self.rows += rows
        self.requests += 1
        seconds = max(0.0, deadline - self._clock())
        timer = asyncio.get_running_loop().call_later(seconds, lambda: finish(request, Expired()))
        for place, queue in self._queues.items():
            indices = [index for index, at in enumerate(plan.places) if at is place]
            if indices:
                queue.add(request, indices, sum(plan.estimates[index].seconds for index in indices))

    def close(self) -> None:
        """End all workers and threads; may be called more than once. Requests under way get no result."""
        self._closed = True
        for queue in self._queues.values():
            queue.close()
        if self._workers is not None:
            self._workers.close()

    def _check(self, image: ImageInput, plain: PlainFile | None, needed: Estimate) -> None:
        """Raise ImageError for an image that is too large to be decoded at all."""
        if plain is not None:
            check_size(plain.width, plain.height, self._limits.pixels, self._limits.side)
        elif not isinstance(image, bytes):
            check_size(image.shape[1], image.shape[0], self._limits.pixels, self._limits.side)
        budget = self._memory.for_workers if plain is None and isinstance(image, bytes) else self._memory.total
        if needed.is_certain and needed.memory > budget:
            raise ImageError(
                f"The image needs about {needed.memory / 1e6:,.0f} MB to be decoded; {budget / 1e6:,.0f} MB are available. "
                "Send a smaller image, or a JPEG.",
                reason="too_large",
            )

    def _decode_plain(self, image: ImageInput, plain: PlainFile | None, spec: InputSpec) -> NDArray[np.uint8] | None:
        """The pixels of a plain file or an array; None if the fast decoder refuses the file."""
        limits = self._limits
        if not isinstance(image, bytes):
            return preprocess_array(image, spec, max_pixels=limits.pixels, max_side=limits.side)
        if plain is None:
            return None
        return preprocess_plain(image, plain, spec, max_pixels=limits.pixels, max_side=limits.side)

    # In the threads of the queues.

    def _decode_in_thread(self, request: DecodeRequest, index: int) -> float:
        def decode(plan: Plan, needed: Estimate) -> NDArray[np.uint8] | None:
            return self._decode_plain(plan.inputs[index], plan.plain_files[index], request.spec)

        return self._decode_one(request, index, decode, worker=False)

    def _decode_in_worker(self, request: DecodeRequest, index: int) -> float:
        def decode(plan: Plan, needed: Estimate) -> NDArray[np.uint8] | None:
            image, limits = plan.inputs[index], self._limits
            assert isinstance(image, bytes)
            if self._workers is None:
                return preprocess(image, request.spec, max_pixels=limits.pixels, max_side=limits.side)
            return self._workers.preprocess(
                image,
                request.spec,
                max_pixels=limits.pixels,
                max_side=limits.side,
                max_memory=min(needed.memory, self._memory.for_workers),
                deadline=request.deadline,
                pixels=needed.pixels,
            )

        return self._decode_one(request, index, decode, worker=True)

    def _decode_one(
        self,
        request: DecodeRequest,
        index: int,
        decode: Callable[[Plan, Estimate], NDArray[np.uint8] | None],
        *,
        worker: bool,
    ) -> float:
        """Decode one image with its share of memory; store it, or end the request. Returns the seconds without waits."""
        plan = request.plan
        if plan is None:
            return 0.0
        started: float | None = None
        try:
            needed = plan.estimates[index]
            if worker and plan.places[index] is not Place.WORKER:  # a fast decoder has refused it
                needed = estimate(plan.inputs[index], None, request.spec, self._limits.pixels)
            with self._memory.share(needed.memory, request.deadline, worker=worker):
                request.check_wanted()
                started = self._clock()
                pixels = decode(plan, needed)
                seconds = self._clock() - started
            if pixels is None:
                needed = estimate(plan.inputs[index], None, request.spec, self._limits.pixels)
                self._queues[Place.WORKER].add(request, [index], needed.seconds)
            else:
                request.store(index, pixels, observe(plan.inputs[index], request.spec), seconds)
        except ImageError as error:
            request.end(InvalidImage(index, error))
        except DeadlinePassed:
            request.end(Expired())
        except BaseException as error:
            request.end(error)
        else:
            return seconds
        return 0.0 if started is None else self._clock() - started
