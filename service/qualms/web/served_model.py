"""One model being served: bundle, engine, queue, decisions, replies and metrics."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from qualms.bundle.file import Bundle
from qualms.decisions.verdicts import Decider
from qualms.images.observed import ObservedEncoding
from qualms.inference.batch import Batch
from qualms.inference.batcher import Batcher
from qualms.inference.engine import Engine
from qualms.telemetry.metrics import ModelMetrics
from qualms.telemetry.score_log import ScoreLog
from qualms.web.reply import ReplyWriter
from qualms.web.state import ServiceState


class ServedModel:
    """Everything that a request to one model needs. Start its batcher on the event loop."""

    def __init__(
        self,
        bundle: Bundle,
        engine: Engine,
        registry: CollectorRegistry,
        state: ServiceState,
        decode_threads: int = 1,
        score_log: ScoreLog | None = None,
    ) -> None:
        self.bundle = bundle
        self.engine = engine
        self.decider = Decider(bundle.manifest)
        self.writer = ReplyWriter(bundle, self.decider, engine.outputs)
        self.metrics = ModelMetrics(registry, bundle, self.decider, engine.provider)
        self._score_log = score_log
        self.batcher = Batcher(
            engine,
            on_batch=self._count,
            decode_threads=decode_threads,
            in_progress=state.in_progress,
            connections=lambda: state.connections(),  # noqa: PLW0108  # the server sets it later
        )
        self.metrics.queue_depth.set_function(lambda: self.batcher.depth)
        if score_log is not None:
            self.metrics.count_dropped(lambda: score_log.dropped)

    def count_answer(self, waited: float, decode_seconds: float, encodings: Sequence[ObservedEncoding]) -> None:
        """Count the time one request spent in the queue and in decoding, and the encodings of its images."""
        self.metrics.queue_seconds.observe_one(waited)
        self.metrics.decode_seconds.observe_one(decode_seconds)
        self.metrics.count_encodings(encodings)

    def close(self) -> None:
        """Write what the score log has queued."""
        if self._score_log is not None:
            self._score_log.close()

    def _count(self, batch: Batch) -> None:
        outputs = self.writer.outputs(batch)
        self.metrics.observe(outputs, self.writer.verdicts(batch), batch.runs)
        if self._score_log is not None:
            self._score_log.write(batch.images, outputs, self.writer.encodings(batch))
