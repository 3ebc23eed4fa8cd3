"""The queue of images to decode: threads take one image of each waiting request in turn.

So a request with many images does not keep others waiting, and the time until an image is decoded can be predicted.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qualms.errors import ImageError
from qualms.images.estimates import Estimate
from qualms.images.input_spec import InputSpec
from qualms.images.observed import ObservedEncoding
from qualms.images.plain_files import PlainFile
from qualms.images.preprocess import ImageInput
from qualms.inference.batch import ClientDisconnected
from qualms.machine.cpu import lower_priority

_DECAY = 0.9
"""weight of older observations in the relation of actual to estimated time"""
_PRIOR_SECONDS = 0.01
"""time for which the estimates are trusted at the start"""
_FACTOR_RANGE = (0.1, 20.0)


class Place(Enum):
    """Where an image is decoded."""

    INLINE = "inline"
    THREAD = "thread"
    WORKER = "worker"


class Plan(NamedTuple):
    """Where and how the images of one request will be decoded."""

    inputs: list[ImageInput]
    plain_files: list[PlainFile | None]
    """for each image; None for pixels and for files that are not plain"""
    places: list[Place]
    estimates: list[Estimate]
    """for each image that is not decoded inline"""

    @property
    def is_inline(self) -> bool:
        """Whether all images are decoded on the event loop."""
        return self.places[0] is Place.INLINE


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


class DecodeRequest:
    """One request whose images are being decoded. Threads store images; the event loop ends it."""

    def __init__(
        self, plan: Plan, spec: InputSpec, deadline: float, disconnected: Callable[[], bool], finish: "Finish"
    ) -> None:
        self.plan: Plan | None = plan
        """None once the request has ended, so that its body is freed although images may still be queued"""
        self.spec, self.deadline = spec, deadline
        self._disconnected, self._finish = disconnected, finish
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._left = len(plan.inputs)
        self._images: list[NDArray[np.uint8] | None] = [None] * self._left
        self._encodings: list[ObservedEncoding | None] = [None] * self._left
        self._seconds = 0.0

    def check_wanted(self) -> None:
        """Raise ClientDisconnected if nobody waits for the images any more."""
        if self.plan is None or self._disconnected():
            raise ClientDisconnected

    def store(self, index: int, image: NDArray[np.uint8], encoding: ObservedEncoding, seconds: float) -> None:
        """Store an image; the last one ends the request."""
        with self._lock:
            self._images[index], self._encodings[index] = image, encoding
            self._seconds += seconds
            self._left -= 1
            complete = not self._left
        if complete:
            images = [image for image in self._images if image is not None]
            encodings = [encoding for encoding in self._encodings if encoding is not None]
            self.end(Decoded(images, encodings, self._seconds))

    def end(self, result: Decoded | BaseException) -> None:
        """End the request from any thread; all calls but the first have no effect."""
        try:
            self._loop.call_soon_threadsafe(self._finish, self, result)
        except RuntimeError:  # the loop is closed, because the service has ended
            return


Finish = Callable[[DecodeRequest, Decoded | BaseException], None]


class _Share:
    """The images of one request in one queue."""

    def __init__(self, request: DecodeRequest, indices: Sequence[int], seconds: float) -> None:
        self.request, self.indices, self.seconds = request, deque(indices), seconds


class DecodeQueue:
    """Threads that decode images at one place, one of each request in turn."""

    def __init__(self, threads: int, name: str, decode: Callable[[DecodeRequest, int], float]) -> None:
        """`decode` decodes one image of a request, and returns the seconds that it took without waits."""
        self._threads, self._decode = threads, decode
        self._changed = threading.Condition()
        self._shares: deque[_Share] = deque()
        self._closed = False
        self._running = 0.0
        """estimate of the images that threads are decoding"""
        self._actual = self._estimated = _PRIOR_SECONDS
        """decaying sums of the time of past images"""
        for number in range(threads):  # daemons: a decoder must not keep the process from ending
            threading.Thread(target=self._work, name=f"{name}_{number}", daemon=True).start()

    def add(self, request: DecodeRequest, indices: Sequence[int], seconds: float) -> None:
        """Queue images of a request; `seconds` is their estimate."""
        with self._changed:
            self._shares.append(_Share(request, indices, seconds))
            self._changed.notify(len(indices))

    def wait(self, images: int, seconds: float) -> float:
        """Predicted time until so many images with this estimate would be decoded.

        The experience with past images is ignored while nothing is queued, because only new images can renew it.
        """
        with self._changed:
            ahead = sum(share.seconds * min(1.0, images / len(share.indices)) for share in self._shares)
            running = self._running
        if not (ahead or running):
            return seconds
        low, high = _FACTOR_RANGE
        factor = min(max(self._actual / self._estimated, low), high)
        return factor * ((ahead + running) / self._threads + seconds)

    def close(self) -> None:
        """End the threads when they have decoded their present images."""
        with self._changed:
            self._closed = True
            self._shares.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        lower_priority()
        while (taken := self._take()) is not None:
            request, index, estimated = taken
            seconds = self._decode(request, index)
            del request, taken  # they hold the body
            with self._changed:
                self._running -= estimated
                self._actual = _DECAY * self._actual + seconds
                self._estimated = _DECAY * self._estimated + (estimated if seconds else 0.0)

    def _take(self) -> tuple[DecodeRequest, int, float] | None:
        """The next image, with its estimate; None if the queue is closed."""
        with self._changed:
            while not self._shares and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            share = self._shares.popleft()
            index = share.indices.popleft()
            estimated = share.seconds / (len(share.indices) + 1)
            share.seconds -= estimated
            if share.indices:
                self._shares.append(share)
            self._running += estimated
            return share.request, index, estimated
