"""Metrics of API keys and of files that are reloaded."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from qualms.access.key_ring import KeyRing


class AccessMetrics:
    """Refusals by reason, and reloads by file; their series exist from the start, at zero."""

    def __init__(self, registry: CollectorRegistry, reasons: Iterable[str]) -> None:
        text = "Requests refused because of their API key, by reason."
        refusals = Counter("qualms_access_refusals", text, ["reason"], registry=registry)
        self._reasons = {reason: refusals.labels(reason) for reason in reasons}
        text = "Changed files that were read again, by content and whether it was accepted."
        self._reloads = Counter("qualms_reloads", text, ["content", "accepted"], registry=registry)
        for content in ("keys", "tls"):
            for accepted in ("true", "false"):
                self._reloads.labels(content, accepted)

    def refused(self, reason: str) -> None:
        """Count a refused request."""
        self._reasons[reason].inc()

    def reloaded(self, content: str, accepted: bool) -> None:
        """Count files that were read again."""
        self._reloads.labels(content, str(accepted).lower()).inc()


class KeyMetrics(Collector):
    """Replies by key and status. The series of a key exist while the key does."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        requests = CounterMetricFamily(
            "qualms_key_requests", "Requests answered, by name of the API key and status code.", labels=["key", "code"]
        )
        for holder in self._keys:
            for status, count in holder.counts.items():
                requests.add_metric([holder.name, str(status)], count)
        yield requests
        yield GaugeMetricFamily("qualms_keys", "API keys that are accepted.", value=len(self._keys))
