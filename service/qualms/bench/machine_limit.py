"""The machine's limit: decode, run and encode in one thread without a server; an upper bound for any server of one core.

*The* limit decodes with Pillow, the reference, whatever decoders the service uses, so that it does not change with them.
The limit with the service's decoders is measured beside it.
"""

import time
from dataclasses import dataclass
from itertools import cycle, islice

import numpy as np

from qualms.bundle.file import Bundle
from qualms.decisions.verdicts import Decider
from qualms.images.preprocess import preprocess, preprocess_with_pillow
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
    """by Pillow"""
    our_decode: float
    """by `preprocess`, as the service decodes"""
    inference: float
    encode: float
    """decisions and JSON"""

    @property
    def images_per_second(self) -> float:
        """Maximum throughput of one core that decodes with Pillow."""
        return 1 / (self.decode + self.inference + self.encode)

    @property
    def with_our_decoder(self) -> float:
        """Maximum throughput of one core that decodes as the service does, in images/s."""
        return 1 / (self.our_decode + self.inference + self.encode)


class LimitMeter:
    """Measures the limit of one bundle in the calling thread, on the core to which that thread is pinned."""

    def __init__(self, bundle: Bundle, files: list[bytes], device: Device = "cpu", max_batch: int = 64) -> None:
        self._spec = bundle.manifest.input
        self._max_batch = max_batch
        self._engine = Engine(bundle, device, threads=1, max_batch=max_batch)
        self._writer = ReplyWriter(bundle, Decider(bundle.manifest), self._engine.outputs)
        self._files, self._number = cycle(files), len(files)

    def measure(self, concurrency: int, seconds: float) -> Limit:
        """Process batches for `seconds`; a batch is as large as `concurrency` simultaneous requests can make it."""
        size = min(concurrency, self._max_batch)
        total, batches = np.zeros(4), 0
        end = time.perf_counter() + seconds
        while batches == 0 or time.perf_counter() < end:
            total += self._time_batch(size)
            batches += 1
        return Limit(size, *(total / batches).tolist())

    def _time_batch(self, size: int) -> tuple[float, float, float, float]:
        """Seconds per image in each stage of one batch; each file is decoded only once, since large ones take long."""
        files = list(islice(self._files, min(size, self._number)))
        start = time.perf_counter()
        decoded = [preprocess_with_pillow(file, self._spec) for file in files]
        by_pillow = time.perf_counter()
        for file in files:
            preprocess(file, self._spec)
        by_ours = time.perf_counter()
        images = np.stack(list(islice(cycle(decoded), size)))
        outputs = self._engine.run(images)
        inferred = time.perf_counter()
        batch = Batch(outputs, [(size, inferred - by_ours)], by_ours, images)
        for row in range(size):
            self._writer.write(Answer(batch, row, 1, 0.0), DEFAULT_QUERY, _REQUEST_ID)
        encoded = time.perf_counter()
        return (
            (by_pillow - start) / len(files),
            (by_ours - by_pillow) / len(files),
            (inferred - by_ours) / size,
            (encoded - inferred) / size,
        )
