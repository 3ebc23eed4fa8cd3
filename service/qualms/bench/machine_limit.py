"""The machine's limit: decode, run and encode in one thread without a server; an upper bound for any server."""

import time
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from qualms.bundle.file import Bundle
from qualms.decisions.verdicts import Decider
from qualms.images.preprocess import preprocess
from qualms.inference.batch import Answer, Batch
from qualms.inference.engine import Engine
from qualms.settings import Device
from qualms.web.reply import DEFAULT_QUERY, ReplyWriter

_REQUEST_ID = "0" * 32


@dataclass(frozen=True)
class Limit:
    """Seconds per image in each stage, for batches of one size."""

    batch: int
    decode: float
    inference: float
    encode: float
    """decisions and JSON"""

    @property
    def images_per_second(self) -> float:
        """Maximum throughput of one core."""
        return 1 / (self.decode + self.inference + self.encode)


class LimitMeter:
    """Measures the limit of one bundle in the calling thread, on the core to which that thread is pinned."""

    def __init__(self, bundle: Bundle, files: list[bytes], device: Device = "cpu", max_batch: int = 64) -> None:
        self._spec = bundle.manifest.input
        self._max_batch = max_batch
        self._engine = Engine(bundle, device, threads=1, max_batch=max_batch)
        self._writer = ReplyWriter(bundle, Decider(bundle.manifest), self._engine.outputs)
        self._files = cycle(files)

    def measure(self, concurrency: int, seconds: float) -> Limit:
        """Process batches for `seconds`; a batch is as large as `concurrency` simultaneous requests can make it."""
        size = min(concurrency, self._max_batch)
        total, images = np.zeros(3), 0
        end = time.perf_counter() + seconds
        while images == 0 or time.perf_counter() < end:
            total += self._time_batch(size)
            images += size
        decode, inference, encode = (total / images).tolist()
        return Limit(size, decode, inference, encode)

    def _time_batch(self, size: int) -> tuple[float, float, float]:
        """Seconds per stage for one batch."""
        files = list(islice(self._files, size))
        start = time.perf_counter()
        images = np.stack([preprocess(file, self._spec) for file in files])
        decoded = time.perf_counter()
        outputs = self._engine.run(images)
        inferred = time.perf_counter()
        batch = Batch(outputs, [(size, inferred - decoded)], decoded, images)
        for row in range(size):
            self._writer.write(Answer(batch, row, 1, 0.0), DEFAULT_QUERY, _REQUEST_ID)
        return decoded - start, inferred - decoded, time.perf_counter() - inferred
