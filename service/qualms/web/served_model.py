"""One model being served: bundle, engine, queue, decisions, replies and metrics."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from qualms.bundle.file import Bundle
from qualms.decisions.verdicts import Decider
from qualms.images.observed import ObservedEncoding
from qualms.inference.batch import Batch
from qualms.inference.batcher import Batcher
from qualms.inference.decoding import Decoder
from qualms.inference.engine import Engine
from qualms.telemetry.metrics import ModelMetrics
from qualms.telemetry.recent_flags import RecentFlags
from qualms.telemetry.score_log import ScoreLog
from qualms.web.reply import ReplyWriter
from qualms.web.state import ServiceState

MAX_FAILED_RUNS = 3
"""failed runs in a row after which the service is not ready"""


class ServedModel:
    """Everything that a request to one model needs. Start its batcher on the event loop."""

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        registry: CollectorRegistry,
        state: ServiceState,
        decoder: Decoder,
        score_log: ScoreLog | None = None,
    ) -> None:
        self.bundle = bundle
        self.engine = engine
        self.decider = Decider(bundle.manifest)
        self.writer = ReplyWriter(bundle, self.decider, engine.outputs)
        self.recent_flags = RecentFlags()
        self.metrics = ModelMetrics(registry, bundle, self.decider, engine.provider)
        self._score_log = score_log
        self._probe: NDArray[np.uint8] | None = None
        """the image of the probe that is being run"""
        self._last_probe: NDArray[np.uint8] | None = None
        self.batcher = Batcher(
            engine,
            on_batch=self._count,
            rows_decoding=lambda: decoder.rows,
            in_progress=lambda: state.in_progress() - decoder.requests,
            connections=lambda: state.connections(),  # noqa: PLW0108  # the server may set it later
        )
        self.metrics.queue_depth.set_function(lambda: self.batcher.depth)
        if score_log is not None:
            self.metrics.count_dropped(lambda: score_log.dropped)

    def count_answer(self, waited: float, decode_seconds: float, encodings: Sequence[ObservedEncoding]) -> None:
        """Count the time one request spent in the queue and in decoding, and the encodings of its images."""
        self.metrics.queue_seconds.observe_one(waited)
        self.metrics.decode_seconds.observe_one(decode_seconds)
        self.metrics.count_encodings(encodings)

    @property
    def why_failing(self) -> str | None:
        """One sentence if the model cannot be run at present, else None."""
        failed = self.batcher.failed_runs
        if failed < MAX_FAILED_RUNS:
            return None
        return f"The last {failed:,} runs of the model failed; the log has the reason."

    def probe(self) -> None:
        """Run one black image, unless one is being run: without requests, only this shows that runs succeed again."""
        if self._probe is None:
            self._probe = self._last_probe = np.zeros(self.bundle.manifest.input.shape, np.uint8)
            self.batcher.queue(self._probe_images, 1, math.inf, lambda: False, self._probed)

    def _probe_images(self) -> list[NDArray[np.uint8]]:
        return [] if self._probe is None else [self._probe]

    def _probed(self, _: object) -> None:
        self._probe = None

    def close(self) -> None:
        """Write what the score log has queued."""
        if self._score_log is not None:
            self._score_log.close()

    def _count(self, batch: Batch) -> None:
        if batch.images.base is not None and batch.images.base is self._last_probe:
            return
        outputs = self.writer.outputs(batch)
        verdicts = self.writer.verdicts(batch)
        self.metrics.observe(outputs, verdicts, batch.runs)
        self.recent_flags.add(len(verdicts.flags), int(np.count_nonzero(verdicts.flags)))
        if self._score_log is not None:
            self._score_log.write(batch.images, outputs, self.writer.encodings(batch))
