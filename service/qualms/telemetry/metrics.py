"""Prometheus metrics. A whole batch is counted with a few array operations.

To add a metric: create it in `ServiceMetrics` (called by `web/predict.py` and `web/app.py` for each request) or in
`ModelMetrics` (called by `web/served_model.py` for each batch and answer), and count it in a method there.
Decisions are counted at the model's default operating point, whatever a request selected, so that rates are comparable.
All state belongs to the registry that is passed in.
"""

import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from itertools import accumulate
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, choose_encoder, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from qualms.bundle.file import Bundle
from qualms.bundle.manifest import Manifest
from qualms.decisions.verdicts import Decider, Verdicts
from qualms.images.observed import ObservedEncoding, all_observed
from qualms.images.worker_pool import KILLED_FOR, KilledFor

M = TypeVar("M", bound=Collector)
K = TypeVar("K")

MAX_CLASS_LABELS = 100
SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
P_VALUES = tuple(round(0.05 * step, 2) for step in range(1, 21))
SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
ROUTES = ("predict", "models", "metrics", "health", "status", "docs", "page", "other", "protocol", "access")
"""`protocol`, `access`: requests that were refused before they reached a route, the latter because of their API key"""
_MAX_PENDING_ROWS = 256
_MAX_PENDING_BATCHES = 16
"""pending batches are counted when either number is reached; counting more at once would delay a request for too long"""
OPEN_METRICS = "application/openmetrics-text"
EXPOSITIONS_PER_SECOND = 10
_MAX_FORMATS = 8


def expose(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The registry's text in the format of an Accept header, and its content type."""
    encode, content_type = _encoder(accept)
    return encode(_WithoutCreated(registry)), content_type


def _encoder(accept: str) -> tuple[Any, str]:
    try:
        return choose_encoder(accept)
    except TypeError:  # a version that is not a number
        return generate_latest, CONTENT_TYPE_PLAIN_0_0_4


class LimitedExposition:
    """The registry's text, made at most some ten times a second: it takes milliseconds, in which no request is answered."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry = registry
        self._clock = clock
        self._made: deque[float] = deque(maxlen=EXPOSITIONS_PER_SECOND)
        """times of the last expositions"""
        self._last: dict[str, tuple[bytes, str]] = {}
        """the last exposition by content type"""

    def __call__(self, accept: str) -> tuple[bytes, str]:
        """The text in the format of an Accept header, and its content type; at most about a second old."""
        now = self._clock()
        if len(self._made) == EXPOSITIONS_PER_SECOND and now - self._made[0] < 1.0:
            content_type = _encoder(accept)[1]
            if content_type in self._last:
                return self._last[content_type]
        self._made.append(now)
        text = expose(self._registry, accept)
        self._last = {**self._last, text[1]: text} if len(self._last) < _MAX_FORMATS else {text[1]: text}
        return text


class _WithoutCreated(Collector):
    """Omits the `_created` series, which would double the number of counters."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            copied = copy(family)
            copied.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield copied


class Histogram(Collector):
    """A histogram whose children count arrays; prometheus-client's counts one value at a time under a lock."""

    def __init__(self, name: str, text: str, label_names: Iterable[str], bounds: Sequence[float]) -> None:
        self._name, self._text, self._label_names, self._bounds = name, text, list(label_names), bounds
        self._children: dict[tuple[str, ...], Buckets] = {}

    def labels(self, *values: str) -> "Buckets":
        """The child with these values of the labels."""
        return self._children.setdefault(values, Buckets(self._bounds))

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        family = HistogramMetricFamily(self._name, self._text, labels=self._label_names)
        for values, buckets in self._children.items():
            buckets.add_to(family, list(values))
        return [family]


class Buckets:
    """Counts of values per bucket, and their sum; a bucket holds the values up to and including its bound."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = np.unique(bounds).tolist()
        self._counts = [0] * (len(self.bounds) + 1)
        self._sum = 0.0

    def observe(self, values: NDArray[Any]) -> None:
        """Count values (N,)."""
        indices = np.searchsorted(self.bounds, values, side="left")
        more = np.bincount(indices, minlength=len(self._counts)).tolist()
        self._counts = [before + new for before, new in zip(self._counts, more, strict=True)]
        self._sum += float(values.sum(where=np.isfinite(values)))  # a non-finite sum would stay non-finite

    def observe_one(self, value: float) -> None:
        """Count one value; faster than an array of one."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Add the buckets to a metric family."""
        bounds = [floatToGoString(bound) for bound in (*self.bounds, math.inf)]  # type: ignore[no-untyped-call]
        totals = map(float, accumulate(self._counts))
        family.add_metric(labels, list(zip(bounds, totals, strict=True)), self._sum)


class _Flusher(Collector):
    """Counts pending batches before the registry reads any value."""

    def __init__(self, flush: Callable[[], None]) -> None:
        self._flush = flush

    def collect(self) -> Iterable[Metric]:
        self._flush()
        return []


class Counts(Collector, Generic[K]):
    """Counters for the event loop alone; prometheus-client's take a lock for every value."""

    def __init__(
        self, name: str, text: str, label_names: Iterable[str], labels: Callable[[K], list[str]], keys: Iterable[K]
    ) -> None:
        """`labels` returns the values of the labels of a key. The series of `keys` exist from the start, at zero."""
        self._name, self._text, self._label_names, self._labels = name, text, list(label_names), labels
        self._values: dict[K, int] = dict.fromkeys(keys, 0)

    def add(self, key: K) -> None:
        """Count one."""
        try:
            self._values[key] += 1
        except KeyError:
            self._values[key] = 1

    def collect(self) -> Iterable[Metric]:
        """Called by the registry."""
        family = CounterMetricFamily(self._name, self._text, labels=self._label_names)
        for key, value in self._values.items():
            family.add_metric(self._labels(key), value)
        return [family]


class _CounterFunction(Collector):
    """A counter whose value a function returns."""

    def __init__(self, name: str, text: str, value: Callable[[], int]) -> None:
        self._name, self._text, self._value = name, text, value

    def collect(self) -> Iterable[Metric]:
        return [CounterMetricFamily(self._name, self._text, value=self._value())]


class ServiceMetrics:
    """Metrics of requests, independent of the model."""

    def __init__(
        self,
        registry: CollectorRegistry,
        statuses: Iterable[int],
        reasons: Iterable[str],
        protocol_reasons: Iterable[str] = (),
    ) -> None:
        """`statuses` and `reasons` are those of predictions, `protocol_reasons` those of refused requests and connections.

        Their series exist from the start, at zero.
        """
        self._registry = registry
        served = [(route, 200) for route in ROUTES if route not in ("protocol", "access")]
        self._requests = Counts[tuple[str, int]](
            "qualms_requests",
            "Requests answered, by route and status code.",
            ["route", "code"],
            lambda key: [key[0], str(key[1])],
            [*served, *(("predict", code) for code in statuses)],
        )
        registry.register(self._requests)
        text = "From the first byte of a request to the last of its reply."
        duration = Histogram("qualms_request_duration_seconds", text, ["route"], SECONDS)
        registry.register(duration)
        self._duration = {route: duration.labels(route) for route in ROUTES}
        self._rejected = Counter(
            "qualms_rejected", "Requests for predictions refused or dropped, by reason.", ["reason"], registry=registry
        )
        self._reasons = {reason: self._rejected.labels(reason) for reason in reasons}
        text = "Requests refused and connections closed by the HTTP server itself, by reason."
        refusals = Counter("qualms_protocol_refusals", text, ["reason"], registry=registry)
        self._protocol_reasons = {reason: refusals.labels(reason) for reason in protocol_reasons}
        text = "Worker processes that ended before they had decoded their image, by reason."
        killed = Counter("qualms_decode_workers_killed", text, ["reason"], registry=registry)
        self._killed: dict[str, Counter] = {reason: killed.labels(reason) for reason in KILLED_FOR}

    def answered(self, route: str, code: int, seconds: float) -> None:
        """Count one reply."""
        self._requests.add((route, code))
        self._duration[route].observe_one(seconds)

    def rejected(self, reason: str) -> None:
        """Count a request that got no prediction."""
        self._reasons[reason].inc()

    def worker_killed(self, reason: KilledFor) -> None:
        """Count a worker process that was killed or has crashed; may be called in any thread."""
        self._killed[reason].inc()

    def refused_by_protocol(self, reason: str) -> None:
        """Count a request or a connection that the HTTP server refused or closed."""
        self._protocol_reasons[reason].inc()

    def export(
        self, connections: Callable[[], int], body_bytes: Callable[[], int], log_dropped: Callable[[], int]
    ) -> None:
        """Export values that are read when the registry is."""
        for name, text, value in (
            ("qualms_connections", "Open connections.", connections),
            ("qualms_body_bytes", "Memory of request bodies that counts towards its limit.", body_bytes),
        ):
            Gauge(name, text, registry=self._registry).set_function(value)
        text = "Log lines that were not written because stdout blocked or failed."
        self._registry.register(_CounterFunction("qualms_log_lines_dropped", text, log_dropped))


class ModelMetrics:
    """Metrics of one model; `close` removes its series."""

    def __init__(self, registry: CollectorRegistry, bundle: Bundle, decider: Decider, provider: str) -> None:
        manifest, rule = bundle.manifest, decider.rule()
        self._registry, self._collectors = registry, list[Collector]()
        self.labels = {"model": manifest.name, "version": manifest.version}
        self._classes = manifest.classes if len(manifest.classes) <= MAX_CLASS_LABELS else ["any"]
        self._pending: list[tuple[dict[str, NDArray[Any]], Verdicts, list[tuple[int, float]]]] = []
        self._pending_rows = 0
        registry.register(self._track(_Flusher(self.flush)))  # first, so that it is read first
        self.queue_seconds = self._histogram(
            "queue_duration_seconds", "From queueing to the start of the run.", SECONDS
        )
        self.decode_seconds = self._histogram("decode_duration_seconds", "Time to decode a request's images.", SECONDS)
        self.inference_seconds = self._histogram("inference_duration_seconds", "Time of one run.", SECONDS)
        self.batch_size = self._histogram("batch_size", "Images in one run.", SIZES)
        self.p_value = self._histogram("p_value", "p-values of the default score; uniform in-distribution.", P_VALUES)
        quantiles = manifest.reference.quantiles
        self.total = self._histogram(
            "total_uncertainty", "Entropy; buckets at reference quantiles.", _not_negative(quantiles["entropy"])
        )
        self.epistemic = self._histogram(
            "epistemic_uncertainty",
            "Mutual information; buckets at reference quantiles.",
            _not_negative(quantiles["mutual_information"]),
        )
        self._reference(manifest, decider)
        self._encodings = self._encoding_counters(manifest)
        self._predictions = self._counter("predictions", "Predictions by class and flag.", "class", "ood")
        self._ood = self._counter("ood", "Images flagged.").labels(**self.labels)
        self._untrusted = self._counter("untrusted", "Predictions not accepted: flagged, or uncertain.").labels(
            **self.labels
        )
        self._cells = [
            [self._predictions.labels(**self.labels, **{"class": name, "ood": flag}) for flag in ("false", "true")]
            for name in self._classes
        ]
        self.queue_depth = self._gauge("queue_depth", "Images waiting.")
        self._gauge("ood_rate_bound", "99.9 % upper quantile of the false-alarm rate.").set(rule.flag.rate_bound)
        self._gauge("ood_target_rate", "The guaranteed false-alarm rate.").set(rule.flag.target_fpr)
        self._gauge("calibration_images", "Number of calibration images.").set(rule.flag.n)
        self._gauge("model_info", "The model that is served.", digest=bundle.digest).set(1)
        self._gauge("provider_info", "ONNX Runtime execution provider that runs the model.", provider=provider).set(1)

    def observe(self, outputs: dict[str, NDArray[Any]], verdicts: Verdicts, runs: list[tuple[int, float]]) -> None:
        """Count one batch, at the latest when the registry is read; `runs` are (rows, seconds)."""
        self._pending.append((outputs, verdicts, runs))
        self._pending_rows += len(verdicts.flags)
        if self._pending_rows >= _MAX_PENDING_ROWS or len(self._pending) >= _MAX_PENDING_BATCHES:
            self.flush()

    def flush(self) -> None:
        """Count pending batches together: array operations cost the same for one row as for hundreds."""
        if not self._pending:
            return
        pending, self._pending, self._pending_rows = self._pending, [], 0

        def joined(name: str) -> NDArray[Any]:
            return np.concatenate([outputs[name] for outputs, _, _ in pending])

        runs = np.array([run for _, _, runs in pending for run in runs])
        self.batch_size.observe(runs[:, 0])
        self.inference_seconds.observe(runs[:, 1])
        flags = np.concatenate([verdicts.flags for _, verdicts, _ in pending])
        self.p_value.observe(np.concatenate([verdicts.p_values for _, verdicts, _ in pending]))
        self.total.observe(joined("entropy"))
        self.epistemic.observe(joined("mutual_information"))
        classes = joined("prediction") if len(self._classes) > 1 else np.zeros(len(flags), np.int64)
        pairs, counts = np.unique(2 * classes + flags, return_counts=True)
        for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
            self._cells[pair // 2][pair % 2].inc(count)
        self._ood.inc(int(flags.sum()))
        accepts = [verdicts.accepts for _, verdicts, _ in pending if verdicts.accepts is not None]
        if accepts:
            self._untrusted.inc(int((~np.concatenate(accepts)).sum()))

    def count_encodings(self, encodings: Iterable[ObservedEncoding]) -> None:
        """Count the images of one request by their encoding."""
        for encoding in encodings:
            self._encodings.add(encoding)

    def count_dropped(self, dropped: Callable[[], int]) -> None:
        """Export the number of images that are missing in the score log."""
        self._gauge("score_log_dropped_images", "Images that are missing in the score log.").set_function(dropped)

    def _encoding_counters(self, manifest: Manifest) -> Counts[ObservedEncoding]:
        """One counter per encoding, with whether the calibration has seen it."""
        text = (
            "Images by format, rough quality, size relative to the model's input, and whether the calibration had such."
        )
        seen, model = manifest.calibration.seen_encodings, list(self.labels.values())

        def labels(one: ObservedEncoding) -> list[str]:
            return [*model, *one, "unknown" if seen is None else "true" if one.text in seen else "false"]

        names = [*self.labels, *ObservedEncoding._fields, "calibrated"]
        counts = self._track(Counts("qualms_images", text, names, labels, all_observed()))
        self._registry.register(counts)
        return counts

    def _reference(self, manifest: Manifest, decider: Decider) -> None:
        """Histograms of the calibration images in the same buckets, to compare live traffic with.

        The calibration images may have been sent in several settings. The distribution of p-values of any mixture of the settings
        lies between the largest and the smallest of their distributions, which are the two p-value references.
        """
        counts = np.array([_cumulative(values, self.p_value.bounds) for values in decider.calibration_p_values()])
        for name, cumulative in (("", counts.max(axis=0)), ("_lower", counts.min(axis=0))):
            text = f"{'Lower' if name else 'Upper'} bound of the distribution of p_value of the calibration images."
            values = np.repeat(self.p_value.bounds, np.diff(cumulative, prepend=0))
            self._histogram(f"p_value_reference{name}", text, self.p_value.bounds).observe(values)
        for name, score, live in (
            ("total_uncertainty", "entropy", self.total),
            ("epistemic_uncertainty", "mutual_information", self.epistemic),
        ):
            values = _reference_values(manifest, score)
            self._histogram(f"{name}_reference", f"{name} of the calibration images.", live.bounds).observe(values)

    def close(self) -> None:
        """Unregister everything of this model."""
        for collector in self._collectors:
            self._registry.unregister(collector)

    def _histogram(self, name: str, text: str, bounds: Sequence[float]) -> Buckets:
        histogram = self._track(Histogram(f"qualms_{name}", text, self.labels, bounds))
        self._registry.register(histogram)
        return histogram.labels(*self.labels.values())

    def _gauge(self, name: str, text: str, **labels: str) -> Gauge:
        names = {**self.labels, **labels}
        return self._track(Gauge(f"qualms_{name}", text, list(names), registry=self._registry)).labels(**names)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return self._track(Counter(f"qualms_{name}", text, [*self.labels, *labels], registry=self._registry))

    def _track(self, collector: M) -> M:
        self._collectors.append(collector)
        return collector


def _cumulative(values: NDArray[Any], bounds: Sequence[float]) -> NDArray[np.intp]:
    """Number of values at or below each bound; the last bound is the largest possible value."""
    return np.sort(values).searchsorted(bounds, side="right")


def _reference_values(manifest: Manifest, score: str) -> NDArray[Any]:
    """Values of a score of the calibration images; of several settings, n values with the recorded quantiles."""
    calibration, reference = manifest.calibration, manifest.reference
    if not calibration.settings:
        return calibration.scores[score]
    levels = (np.arange(calibration.n) + 0.5) / calibration.n
    return np.interp(levels, reference.levels, reference.quantiles[score])


def _not_negative(bounds: Sequence[float]) -> list[float]:
    """Replace negative bounds by 0.

    Rounding may make a quantile of an entropy negative, and a histogram with a negative bucket has no sum or count.
    """
    return [max(0.0, bound) for bound in bounds]
