"""The queries by which KEDA scales: their metrics exist, and they yield the number of replicas that the comments promise."""

import json
import re
import subprocess
from pathlib import Path

import promql_parser
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tests.docker.kubernetes.manifests import Manifest, build_overlay, needs_kustomize, only
from tests.docker.stack import missing_programs

from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle
from qualms.decisions.verdicts import Decider
from qualms.telemetry.metrics import ModelMetrics, ServiceMetrics, expose
from qualms.web.predict import REASONS, STATUSES

needs_promtool = pytest.mark.skipif(bool(missing_programs("promtool")), reason=missing_programs("promtool"))

pytestmark = needs_kustomize


def triggers() -> dict[str, Manifest]:
    return {trigger["name"]: trigger for trigger in only(build_overlay("keda"), "ScaledObject")["spec"]["triggers"]}


def test_replicas_follow_queue_wait_and_refusals_and_nothing_else_scales() -> None:
    manifests = build_overlay("keda")
    assert list(triggers()) == ["busy", "queue-wait", "refusals"]
    assert not [one for one in manifests if one["kind"] == "HorizontalPodAutoscaler"]
    assert only(manifests, "ScaledObject")["spec"]["scaleTargetRef"]["name"] == "qualms"


def test_keda_and_the_autoscaler_have_the_same_bounds_and_the_same_behaviour() -> None:
    scaled = only(build_overlay("keda"), "ScaledObject")["spec"]
    autoscaler = only(build_overlay("cpu"), "HorizontalPodAutoscaler")["spec"]
    assert scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == autoscaler["behavior"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (
        autoscaler["minReplicas"],
        autoscaler["maxReplicas"],
    )
    assert scaled["minReplicaCount"] >= 2, "one replica could be evicted"


def test_every_metric_of_the_queries_exists() -> None:
    registry = CollectorRegistry()
    bundle = open_bundle(resolve_model("mnist"))
    ServiceMetrics(registry, STATUSES, REASONS)
    ModelMetrics(registry, bundle, Decider(bundle.manifest), "CPUExecutionProvider")
    samples = {
        sample.name
        for family in text_string_to_metric_families(expose(registry, "")[0].decode())
        for sample in family.samples
    }
    for name, trigger in triggers().items():
        query = trigger["metadata"]["query"]
        promql_parser.parse(query)
        used = set(re.findall(r"qualms_\w+", query))
        assert used, name
        assert used <= samples


LABELS = 'job="qualms", namespace="qualms"'
QUIET = {
    f"qualms_inference_duration_seconds_sum{{{LABELS}}}": "0x20",
    f'qualms_queue_duration_seconds_bucket{{{LABELS}, le="1"}}': "0x20",
    f'qualms_queue_duration_seconds_bucket{{{LABELS}, le="+Inf"}}': "0x20",
    f"qualms_queue_duration_seconds_count{{{LABELS}}}": "0x20",
    f'qualms_rejected_total{{{LABELS}, reason="overload"}}': "0x20",
    f'qualms_rejected_total{{{LABELS}, reason="malformed"}}': "0+900x20",
    f'qualms_requests_total{{{LABELS}, route="predict", code="200"}}': "0x20",
}
"""the series of a service without requests, one value every 15 s, but for malformed ones, which never count"""


def refusing(refused: int, answered: int) -> dict[str, str]:
    """Series of a service with so many refused and answered requests per second."""
    names = [name for name in QUIET if "overload" in name or "requests_total" in name]
    return dict(zip(names, (f"0+{15 * refused}x20", f"0+{15 * answered}x20"), strict=True))


@needs_promtool
@pytest.mark.parametrize(
    ("trigger", "series", "expected"),
    [
        ("busy", {}, 0.0),
        ("busy", {f"qualms_inference_duration_seconds_sum{{{LABELS}}}": "0+13.5x20"}, 0.9),
        ("queue-wait", {}, 0.0),
        ("queue-wait", {name: "0+15x20" for name in QUIET if "queue_duration" in name}, 0.9),
        ("refusals", {}, 0.0),
        ("refusals", refusing(0, 100), 0.0),
        ("refusals", refusing(1, 200), 0.0),
        ("refusals", refusing(50, 100), 1.5),
        ("refusals", refusing(100, 100), 2.0),
        ("refusals", refusing(100, 0), 4.0),
    ],
)
def test_a_query_yields_its_value(tmp_path: Path, trigger: str, series: dict[str, str], expected: float) -> None:
    assert promql(tmp_path, triggers()[trigger]["metadata"]["query"], {**QUIET, **series}, [expected])


@needs_promtool
@pytest.mark.parametrize("trigger", ["busy", "queue-wait", "refusals"])
def test_a_query_without_metrics_yields_nothing_so_that_keda_keeps_the_replicas(tmp_path: Path, trigger: str) -> None:
    assert triggers()[trigger]["metadata"]["ignoreNullValues"] == "false"
    assert promql(tmp_path, triggers()[trigger]["metadata"]["query"], {}, [])


def promql(folder: Path, query: str, series: dict[str, str], expected: list[float]) -> bool:
    """Whether promtool evaluates a query over series to these values."""
    test = {
        "interval": "15s",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": "4m", "exp_samples": [{"labels": "{}", "value": value} for value in expected]}
        ],
    }
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "15s", "tests": [test]}), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", path], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, json.dumps(test, indent=1) + done.stdout + done.stderr
    return True
