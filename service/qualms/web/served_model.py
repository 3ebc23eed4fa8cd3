"""One model being served: bundle, engine, queue, decisions, replies and metrics."""

from prometheus_client import CollectorRegistry

from qualms.bundle.file import Bundle
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT
from qualms.decisions.verdicts import Decider
from qualms.inference.batch import Batch
from qualms.inference.batcher import Batcher
from qualms.inference.engine import Engine
from qualms.telemetry.metrics import ModelMetrics
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
    ) -> None:
        self.bundle = bundle
        self.engine = engine
        self.decider = Decider(bundle.manifest)
        self.writer = ReplyWriter(bundle, self.decider, engine.outputs)
        self.metrics = ModelMetrics(registry, bundle, self.decider.rule(DEFAULT_OPERATING_POINT), engine.provider)
        self.batcher = Batcher(
            engine,
            on_batch=self._count,
            decode_threads=decode_threads,
            in_progress=state.in_progress,
            connections=lambda: state.connections(),  # noqa: PLW0108  # the server sets it later
        )
        self.metrics.queue_depth.set_function(lambda: self.batcher.depth)

    def count_answer(self, waited: float, decode_seconds: float) -> None:
        """Count the time one request spent in the queue and in decoding."""
        self.metrics.queue_seconds.observe_one(waited)
        self.metrics.decode_seconds.observe_one(decode_seconds)

    def _count(self, batch: Batch) -> None:
        self.metrics.observe(self.writer.outputs(batch), self.writer.verdicts(batch), batch.runs)
