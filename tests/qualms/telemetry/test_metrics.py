"""Prometheus metrics: histograms, counters per batch and per request, and the text formats."""

import math
import re
import shutil
import subprocess
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_open_metrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from qualms.bundle.file import Bundle
from qualms.bundle.manifest import Manifest
from qualms.decisions.verdicts import Decider, decide
from qualms.images.observed import ObservedEncoding, all_observed
from qualms.telemetry.metrics import (
    P_VALUES,
    Histogram,
    ModelMetrics,
    ServiceMetrics,
    expose,
)
from qualms.web.predict import REASONS, STATUSES
from qualms.web.state import ServiceState

MODEL = {"model": "tiny", "version": "1.2"}
OOD_COLOURS = ((128, 64, 0), (255, 255, 0), (64, 0, 0))
"""colours far from those of the calibration images"""
PROVIDER = "CPUExecutionProvider"
Draw = Callable[[int, int], NDArray[np.uint8]]
OutputsAsSent = Mapping[str, dict[str, NDArray[Any]]]


def series(text: str) -> dict[str, float]:
    """The value of every sample, by name and labels."""
    return {
        sample.name + str(sorted(sample.labels.items())): sample.value
        for family in parse_text(text)
        for sample in family.samples
    }


def total(values: dict[str, float], name: str, **labels: str) -> float:
    """The sum of all samples with this name and these labels."""
    wanted = {str(pair) for pair in labels.items()}
    return sum(
        value for key, value in values.items() if key.startswith(f"{name}[") and all(pair in key for pair in wanted)
    )


# Histograms


def test_a_histogram_counts_arrays_and_single_values() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "text", ["model"], [1.0, 0.5, 0.5])
    registry.register(histogram)
    histogram.labels("m").observe(np.array([0.25, 0.5, 0.75, 1.0, 7.0]))
    histogram.labels("m").observe_one(0.5)
    buckets = [registry.get_sample_value("h_bucket", {"model": "m", "le": bound}) for bound in ("0.5", "1.0", "+Inf")]
    assert buckets == [3, 5, 6]
    assert registry.get_sample_value("h_count", {"model": "m"}) == 6
    assert registry.get_sample_value("h_sum", {"model": "m"}) == 10


def test_non_finite_values_are_counted_but_not_summed() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("h", "text", [], [1.0])
    registry.register(histogram)
    histogram.labels().observe(np.array([0.5, math.nan, math.inf], np.float32))
    assert registry.get_sample_value("h_bucket", {"le": "1.0"}) == 1
    assert (registry.get_sample_value("h_count"), registry.get_sample_value("h_sum")) == (3, 0.5)


# One model


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


def test_all_series_exist_at_zero_before_the_first_request(registry: CollectorRegistry, bundle: Bundle) -> None:
    ServiceMetrics(registry, STATUSES, REASONS)
    decider = Decider(bundle.manifest)
    rule = decider.rule()
    ModelMetrics(registry, bundle, decider, PROVIDER)
    values = series(expose(registry, "")[0].decode())
    constants = {
        "qualms_ood_rate_bound": rule.flag.rate_bound,
        "qualms_ood_target_rate": 0.01,
        "qualms_calibration_images": 400,
        "qualms_model_info": 1,
        "qualms_provider_info": 1,
    }
    for key, value in values.items():
        if "_reference_" in key:
            continue  # the calibration images are counted from the start
        assert value == constants.get(key.partition("[")[0], 0), key
    keys = " ".join(values)
    for name in bundle.manifest.classes:
        for flag in ("true", "false"):
            assert f"('class', '{name}'), ('model', 'tiny'), ('ood', '{flag}'), ('version', '1.2')" in keys
    reasons = ("overload", "draining", "loading", "too_large", "unsupported", "malformed", "invalid")
    for reason in (*reasons, "slow", "expired", "disconnected"):
        assert f"qualms_rejected_total[('reason', '{reason}')]" in values
    for code in (200, 400, 408, 413, 415, 422, 429, 499, 500, 503, 504):
        assert f"qualms_requests_total[('code', '{code}'), ('route', 'predict')]" in values


def test_a_batch_is_counted_at_the_default_operating_point(
    registry: CollectorRegistry, bundle: Bundle, runner: Callable[..., dict[str, NDArray[Any]]], draw_images: Draw
) -> None:
    decider = Decider(bundle.manifest)
    rule = decider.rule()
    metrics = ModelMetrics(registry, bundle, decider, PROVIDER)
    ood_images = np.array([np.full((6, 5, 3), colour, np.uint8) for colour in OOD_COLOURS])
    expected: Counter[str] = Counter()
    for seed, count in ((1, 20), (2, 5)):
        outputs = runner(np.concatenate((draw_images(seed, count), ood_images)))
        verdicts = decide(rule, outputs)
        metrics.observe(outputs, verdicts, [(len(verdicts.flags), 0.5)])
        for index, flag in zip(outputs["prediction"], verdicts.flags, strict=True):
            expected[f"{bundle.manifest.classes[index]} {str(bool(flag)).lower()}"] += 1
    values = series(expose(registry, "")[0].decode())
    for name in bundle.manifest.classes:
        for flag in ("true", "false"):
            counted = total(values, "qualms_predictions_total", **{"class": name, "ood": flag})
            assert counted == expected[f"{name} {flag}"]
    flagged = sum(count for key, count in expected.items() if key.endswith("true"))
    assert flagged > 0
    assert total(values, "qualms_ood_total") == flagged
    assert total(values, "qualms_predictions_total") == 31
    assert total(values, "qualms_batch_size_sum") == total(values, "qualms_p_value_count") == 31
    assert total(values, "qualms_total_uncertainty_count") == total(values, "qualms_epistemic_uncertainty_count") == 31
    assert total(values, "qualms_inference_duration_seconds_count") == 2
    assert total(values, "qualms_inference_duration_seconds_sum") == 1.0


def test_p_values_of_calibration_images_are_uniform(
    registry: CollectorRegistry, bundle: Bundle, manifest: Manifest
) -> None:
    """The dashboards detect drift by this: one twentieth of in-distribution images is in each bucket."""
    decider = Decider(manifest)
    rule = decider.rule()
    metrics = ModelMetrics(registry, bundle, decider, PROVIDER)
    outputs: dict[str, NDArray[Any]] = dict(manifest.calibration.scores)
    outputs["prediction"] = np.zeros(manifest.calibration.n, np.int64)
    metrics.observe(outputs, decide(rule, outputs), [(len(outputs["prediction"]), 0.1)])
    values = series(expose(registry, "")[0].decode())
    for bound in P_VALUES:
        share = total(values, "qualms_p_value_bucket", le=str(bound)) / manifest.calibration.n
        assert share == pytest.approx(bound, abs=0.02)


@pytest.mark.parametrize("batches", [1, 16, 49])
def test_pending_batches_are_counted_once_when_the_registry_is_read(
    registry: CollectorRegistry, bundle: Bundle, manifest: Manifest, batches: int
) -> None:
    decider = Decider(manifest)
    rule = decider.rule()
    metrics = ModelMetrics(registry, bundle, decider, PROVIDER)
    outputs: dict[str, NDArray[Any]] = {name: values[:2] for name, values in manifest.calibration.scores.items()}
    outputs["prediction"] = np.zeros(2, np.int64)
    for _ in range(batches):
        metrics.observe(outputs, decide(rule, outputs), [(len(outputs["prediction"]), 0.1)])
    for _ in range(2):
        values = series(expose(registry, "")[0].decode())
        assert total(values, "qualms_predictions_total") == 2 * batches
        assert total(values, "qualms_p_value_count") == 2 * batches


def test_pending_batches_are_bounded_if_the_registry_is_never_read(
    registry: CollectorRegistry, bundle: Bundle, manifest: Manifest
) -> None:
    """A service without a scraper must not hold the outputs of all its batches."""
    decider = Decider(manifest)
    rule = decider.rule()
    metrics = ModelMetrics(registry, bundle, decider, PROVIDER)
    held = []
    for _ in range(100):
        outputs = {name: values[:2].copy() for name, values in manifest.calibration.scores.items()}
        outputs["prediction"] = np.zeros(2, np.int64)
        metrics.observe(outputs, decide(rule, outputs), [(2, 0.1)])
        held.append(weakref.ref(outputs["prediction"]))
    del outputs
    assert sum(reference() is not None for reference in held) < 20


def test_reference_histograms_equal_those_of_the_calibration_images(
    registry: CollectorRegistry, bundle: Bundle, manifest: Manifest
) -> None:
    """Both treat ties, rounding and bucket bounds alike, so that any difference comes from the traffic."""
    decider = Decider(manifest)
    rule = decider.rule()
    metrics = ModelMetrics(registry, bundle, decider, PROVIDER)
    outputs: dict[str, NDArray[Any]] = dict(manifest.calibration.scores)
    outputs["prediction"] = np.zeros(manifest.calibration.n, np.int64)
    metrics.observe(outputs, decide(rule, outputs), [(len(outputs["prediction"]), 0.1)])
    values = series(expose(registry, "")[0].decode())
    for name in ("p_value", "total_uncertainty", "epistemic_uncertainty"):
        assert total(values, f"qualms_{name}_reference_count") == manifest.calibration.n
        live = {key: value for key, value in values.items() if key.startswith(f"qualms_{name}_bucket")}
        assert live
        assert max(live.values()) == manifest.calibration.n
        for key, value in live.items():
            assert values[key.replace("_bucket", "_reference_bucket")] == value, key


def cumulative(values: dict[str, float], name: str) -> list[float]:
    """The cumulative counts of a histogram of p-values, in the order of its bounds."""
    return [total(values, f"{name}_bucket", le=str(bound)) for bound in P_VALUES]


def test_the_two_references_of_p_values_are_equal_with_one_setting(
    registry: CollectorRegistry, bundle: Bundle, manifest: Manifest
) -> None:
    ModelMetrics(registry, bundle, Decider(manifest), PROVIDER)
    values = series(expose(registry, "")[0].decode())
    upper, lower = (cumulative(values, f"qualms_p_value_reference{end}") for end in ("", "_lower"))
    assert upper == lower
    assert upper[-1] == 400


def test_the_p_values_of_every_setting_and_mixture_are_between_the_references(
    registry: CollectorRegistry, bundle: Bundle, worst_manifest: Manifest, outputs_as_sent: OutputsAsSent
) -> None:
    worst, decider = replace(bundle, manifest=worst_manifest), Decider(worst_manifest)
    ModelMetrics(registry, worst, decider, PROVIDER)
    values = series(expose(registry, "")[0].decode())
    upper, lower = (np.array(cumulative(values, f"qualms_p_value_reference{end}")) for end in ("", "_lower"))
    by_setting = []
    for outputs in outputs_as_sent.values():
        found = decide(decider.rule(), outputs).p_values
        by_setting.append(np.array([(found <= bound).sum() for bound in P_VALUES]))
    np.testing.assert_array_equal(upper, np.max(by_setting, axis=0))
    np.testing.assert_array_equal(lower, np.min(by_setting, axis=0))
    mixture = np.mean(by_setting, axis=0)
    assert ((lower <= mixture) & (mixture <= upper)).all()
    assert (lower < upper).any()
    assert (
        total(values, "qualms_p_value_reference_count") == total(values, "qualms_p_value_reference_lower_count") == 400
    )


def test_the_references_of_uncertainties_have_the_quantiles_of_all_settings(
    registry: CollectorRegistry, bundle: Bundle, worst_manifest: Manifest, outputs_as_sent: OutputsAsSent
) -> None:
    ModelMetrics(registry, replace(bundle, manifest=worst_manifest), Decider(worst_manifest), PROVIDER)
    values = series(expose(registry, "")[0].decode())
    entropy = np.concatenate([outputs["entropy"] for outputs in outputs_as_sent.values()])
    assert total(values, "qualms_total_uncertainty_reference_count") == 400
    for family in parse_text(expose(registry, "")[0].decode()):
        for sample in family.samples:
            if sample.name == "qualms_total_uncertainty_reference_bucket" and sample.labels["le"] != "+Inf":
                share = (entropy <= float(sample.labels["le"])).mean()
                assert sample.value / 400 == pytest.approx(share, abs=0.01)


# Encodings


def encodings_of(values: dict[str, float]) -> dict[tuple[str, ...], float]:
    """The number of images by format, quality, size and whether it is calibrated, where it is not zero."""
    names = ("format", "quality", "size", "calibrated")
    counts = {}
    for key, value in values.items():
        if key.startswith("qualms_images_total[") and value:
            labels = dict(re.findall(r"\('(\w+)', '([^']*)'\)", key))
            counts[tuple(labels[name] for name in names)] = value
    return counts


def calibrated(manifest: Manifest, encoding: ObservedEncoding) -> str:
    """The label `calibrated` of images in an encoding."""
    registry = CollectorRegistry()
    bundle = Bundle(Path("tiny.onnx"), manifest, b"", "0" * 64)
    ModelMetrics(registry, bundle, Decider(manifest), PROVIDER).count_encodings([encoding])
    ((*_, label),) = encodings_of(series(expose(registry, "")[0].decode()))
    return label


def test_images_are_counted_by_their_encoding(registry: CollectorRegistry, bundle: Bundle) -> None:
    metrics = ModelMetrics(registry, bundle, Decider(bundle.manifest), PROVIDER)
    jpeg, png = ObservedEncoding("jpeg", "70-79", "larger"), ObservedEncoding("png", "lossless", "same")
    metrics.count_encodings([jpeg, png, jpeg])
    metrics.count_encodings([png, jpeg])
    assert encodings_of(series(expose(registry, "")[0].decode())) == {
        ("jpeg", "70-79", "larger", "false"): 3,
        ("png", "lossless", "same", "true"): 2,
    }


def test_every_encoding_has_exactly_one_series_from_the_start(registry: CollectorRegistry, bundle: Bundle) -> None:
    metrics = ModelMetrics(registry, bundle, Decider(bundle.manifest), PROVIDER)
    values = series(expose(registry, "")[0].decode())
    assert sum(key.startswith("qualms_images_total[") for key in values) == len(all_observed())
    metrics.count_encodings(all_observed())
    counts = encodings_of(series(expose(registry, "")[0].decode()))
    assert set(counts.values()) == {1}
    assert {key[:3] for key in counts} == set(all_observed())


def test_all_lossless_formats_of_a_calibrated_size_are_calibrated(manifest: Manifest) -> None:
    for name in ("pixels", "png", "bmp", "tiff", "webp"):
        assert calibrated(manifest, ObservedEncoding(name, "lossless", "same")) == "true"
        assert calibrated(manifest, ObservedEncoding(name, "lossless", "larger")) == "false"
    assert calibrated(manifest, ObservedEncoding("webp", "lossy", "same")) == "false"


@pytest.mark.parametrize(("count", "label"), [(3, "false"), (4, "true"), (400, "true")])
def test_an_encoding_is_calibrated_from_one_percent_of_the_images_on(
    manifest: Manifest, count: int, label: str
) -> None:
    observed = {"lossless, same size": 400 - count, "jpeg 70-79, same size": count}
    calibration = manifest.calibration.model_copy(update={"observed": observed})
    changed = manifest.model_copy(update={"calibration": calibration})
    assert calibrated(changed, ObservedEncoding("jpeg", "70-79", "same")) == label


def test_without_recorded_encodings_it_is_unknown_whether_an_image_is_calibrated(earlier_manifest: Manifest) -> None:
    assert earlier_manifest.calibration.seen_encodings is None
    assert calibrated(earlier_manifest, ObservedEncoding("png", "lossless", "same")) == "unknown"


def test_all_settings_of_the_form_worst_are_calibrated(worst_manifest: Manifest) -> None:
    assert worst_manifest.calibration.seen_encodings == frozenset({"lossless, same size", "jpeg 70-79, same size"})
    assert calibrated(worst_manifest, ObservedEncoding("jpeg", "70-79", "same")) == "true"
    assert calibrated(worst_manifest, ObservedEncoding("jpeg", "80-89", "same")) == "false"


def test_by_class_the_gauges_are_those_of_all_classes(
    registry: CollectorRegistry, bundle: Bundle, manifest: Manifest
) -> None:
    operating = manifest.operating.model_copy(update={"guarantee": "by-class", "target_fpr": 0.05})
    calibration = manifest.calibration.model_copy(update={"predictions": np.arange(400, dtype=np.int32) % 3})
    changed = manifest.model_copy(update={"operating": operating, "calibration": calibration})
    decider = Decider(changed)
    ModelMetrics(registry, replace(bundle, manifest=changed), decider, PROVIDER)
    flags = decider.rule().classes
    assert flags is not None
    bounds = [group.rate_bound for group in flags.groups]
    assert len(bounds) == 3
    assert registry.get_sample_value("qualms_ood_rate_bound", MODEL) == max(bounds)
    assert registry.get_sample_value("qualms_ood_target_rate", MODEL) == 0.05
    assert registry.get_sample_value("qualms_calibration_images", MODEL) == 400


def test_images_that_are_missing_in_the_score_log_are_a_gauge(registry: CollectorRegistry, bundle: Bundle) -> None:
    metrics = ModelMetrics(registry, bundle, Decider(bundle.manifest), PROVIDER)
    assert registry.get_sample_value("qualms_score_log_dropped_images", MODEL) is None
    dropped = [3]
    metrics.count_dropped(lambda: dropped[0])
    assert registry.get_sample_value("qualms_score_log_dropped_images", MODEL) == 3
    dropped[0] = 5
    assert registry.get_sample_value("qualms_score_log_dropped_images", MODEL) == 5
    metrics.close()
    assert expose(registry, "")[0] == b""


def test_more_than_100_classes_share_one_label(registry: CollectorRegistry, bundle: Bundle, manifest: Manifest) -> None:
    many = manifest.model_copy(update={"classes": [f"class {index}" for index in range(101)]})
    decider = Decider(manifest)
    rule = decider.rule()
    metrics = ModelMetrics(registry, replace(bundle, manifest=many), decider, PROVIDER)
    outputs: dict[str, NDArray[Any]] = {name: values[:4] for name, values in manifest.calibration.scores.items()}
    outputs["prediction"] = np.array([0, 7, 100, 100])
    metrics.observe(outputs, decide(rule, outputs), [(len(outputs["prediction"]), 0.1)])
    values = series(expose(registry, "")[0].decode())
    assert total(values, "qualms_predictions_total", **{"class": "any"}) == 4
    assert "class 7" not in " ".join(values)


def test_a_negative_reference_quantile_does_not_remove_the_sum(
    registry: CollectorRegistry, bundle: Bundle, manifest: Manifest
) -> None:
    quantiles = {name: [-1e-9, *values[1:]] for name, values in manifest.reference.quantiles.items()}
    rounded = manifest.model_copy(update={"reference": manifest.reference.model_copy(update={"quantiles": quantiles})})
    decider = Decider(manifest)
    ModelMetrics(registry, replace(bundle, manifest=rounded), decider, PROVIDER)
    assert registry.get_sample_value("qualms_epistemic_uncertainty_count", MODEL) == 0
    assert registry.get_sample_value("qualms_total_uncertainty_sum", MODEL) == 0


def test_closing_a_model_removes_its_series(registry: CollectorRegistry, bundle: Bundle) -> None:
    decider = Decider(bundle.manifest)
    metrics = ModelMetrics(registry, bundle, decider, PROVIDER)
    metrics.close()
    assert expose(registry, "")[0] == b""
    ModelMetrics(registry, bundle, decider, PROVIDER)


# Requests


def test_counters_add_up_to_the_requests_sent(
    start_service: Callable[..., httpx.Client], encode: Callable[..., bytes], draw_images: Draw
) -> None:
    state = ServiceState()
    client = start_service(state=state, max_body_bytes=20_000, max_images=8, max_batch=5)
    files = [encode(image) for image in draw_images(31, 30)]
    files += [encode(np.full((6, 5, 3), colour, np.uint8)) for colour in OOD_COLOURS[:2]]
    png, json = {"content-type": "image/png"}, {"content-type": "application/json"}
    codes: Counter[str] = Counter()
    results: list[dict[str, Any]] = []

    def send(**request: Any) -> None:
        response = client.post("/predict", **request)
        codes[str(response.status_code)] += 1
        results.extend(response.json().get("results", []))

    for data in files:
        send(content=data, headers=png)
    for start in range(0, 32, 8):
        send(files=[("images", ("a.png", data)) for data in files[start : start + 8]])
    send(content=files[0], headers=png, params="target_fpr=0.5&score=entropy")
    refused: list[dict[str, Any]] = [
        {"content": b"", "headers": png},
        {"content": files[0][:50], "headers": png},
        {"content": bytes(20_001), "headers": png},
        {"content": b"?", "headers": png},
        {"content": b"?"},
        {"content": b"{}", "headers": json},
        {"content": files[0], "headers": png, "params": "target_fpr=2"},
        {"content": files[0], "headers": {**png, "x-request-timeout": "1e-9"}},
    ]
    for request in (again for number, once in enumerate(refused, start=1) for again in number * [once]):
        send(**request)
    state.in_progress = lambda: 10**9
    for _ in range(9):
        send(content=files[0], headers=png)
    for path, times in (("/livez", 2), ("/models", 3), ("/models/other", 4), ("/docs", 1), ("/nowhere", 5)):
        for _ in range(times):
            client.get(path)
    values = series(client.get("/metrics").text)

    assert codes == {"200": 37, "400": 3, "413": 3, "415": 9, "422": 21, "429": 9}
    for code in ("200", "400", "408", "413", "415", "422", "429", "499", "500", "503", "504"):
        assert total(values, "qualms_requests_total", route="predict", code=code) == codes[code], code
    assert total(values, "qualms_request_duration_seconds_count", route="predict") == sum(codes.values())
    rejected = {"malformed": 3, "too_large": 3, "unsupported": 9, "invalid": 21, "overload": 9}
    for reason, count in rejected.items():
        assert total(values, "qualms_rejected_total", reason=reason) == count, reason
    assert total(values, "qualms_rejected_total") == sum(codes.values()) - codes["200"]

    # The last request selected another operating point; its image, the first one, is counted at the default one.
    by_default = (*results[:-1], results[0])
    flagged = sum(result["ood"]["flag"] for result in by_default)
    assert len(results) == 65
    assert flagged >= 2
    assert total(values, "qualms_predictions_total") == 65
    assert total(values, "qualms_predictions_total", ood="true") == total(values, "qualms_ood_total") == flagged
    for name in ("bee", "crab", "dove"):
        predicted = sum(result["prediction"]["label"] == name for result in results)
        assert total(values, "qualms_predictions_total", **{"class": name}) == predicted
    untrusted = sum(not result["trust"]["accept"] for result in by_default)
    assert untrusted >= flagged
    assert total(values, "qualms_untrusted_total") == untrusted
    for name in ("batch_size_sum", "p_value_count", "total_uncertainty_count", "epistemic_uncertainty_count"):
        assert total(values, f"qualms_{name}") == 65
    for name in ("queue", "decode"):
        assert total(values, f"qualms_{name}_duration_seconds_count") == 37
    # Each of the four requests with eight images takes two to eight runs of at most five.
    runs = total(values, "qualms_batch_size_count")
    assert 33 + 4 * 2 <= runs <= 33 + 4 * 8
    assert total(values, "qualms_inference_duration_seconds_count") == runs
    assert total(values, "qualms_batch_size_bucket", le="8.0") == runs
    assert total(values, "qualms_batch_size_bucket", le="1.0") >= 33
    assert total(values, "qualms_queue_depth") == 0
    assert encodings_of(values) == {("png", "lossless", "same", "true"): 65}
    others = {("health", "200"): 2, ("models", "200"): 3, ("models", "404"): 4, ("docs", "200"): 1, ("other", "404"): 5}
    for (route, code), count in others.items():
        ready = total(values, "qualms_requests_total", route=route, code=code)
        assert ready == count or (route == "health" and ready >= count)  # the test also waits for readiness


# Exposition


def test_both_text_formats_can_be_parsed_and_have_no_created_series(client: httpx.Client) -> None:
    plain = client.get("/metrics")
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    names = {family.name for family in parse_text(plain.text)}
    assert {"qualms_requests", "qualms_rejected", "qualms_p_value", "qualms_model_info", "qualms_ood"} <= names
    open_metrics = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    assert open_metrics.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    assert {family.name for family in parse_open_metrics(open_metrics.text)} == names  # type: ignore[no-untyped-call]
    assert "_created" not in plain.text + open_metrics.text


@pytest.mark.parametrize(
    "accept", ["text/plain; version=abc", "application/openmetrics-text; version=x.y", "application/json", ";=,;", ""]
)
def test_an_unknown_accept_header_gets_plain_text(client: httpx.Client, accept: str) -> None:
    response = client.get("/metrics", headers={"accept": accept})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")


def test_promtool_accepts_the_metrics(client: httpx.Client) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed")
    text = client.get("/metrics").text
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
