import re
from pathlib import Path

import pytest
import yaml
from docker.kubernetes import rules
from tests.docker.kubernetes.manifests import (
    COMPONENTS,
    KUBERNETES,
    OVERLAYS,
    Manifest,
    build_overlay,
    build_text,
    build_with_model,
    container,
    needs_kustomize,
    only,
    pod,
)

README = (KUBERNETES / "README.md").read_text(encoding="utf-8")
MODELS = sorted(name for name in COMPONENTS if name.startswith("model-"))

pytestmark = needs_kustomize


def test_the_prometheus_rules_match_the_rule_files_of_compose() -> None:
    assert {path: path.read_text(encoding="utf-8") for path in rules.texts()} == rules.texts(), (
        "run python -m docker.kubernetes.rules"
    )


@pytest.mark.parametrize("overlay", ["base", *OVERLAYS])
def test_every_overlay_builds(overlay: str) -> None:
    kinds = [manifest["kind"] for manifest in build_overlay(overlay)]
    assert {"Deployment", "Service", "PodDisruptionBudget", "NetworkPolicy", "ServiceAccount", "ConfigMap"} <= set(
        kinds
    )


@pytest.mark.parametrize(
    ("overlay", "kinds"),
    [
        ("cpu", {"HorizontalPodAutoscaler"}),
        ("gpu", set()),
        ("monitoring", {"HorizontalPodAutoscaler", "ServiceMonitor", "PrometheusRule"}),
        ("keda", {"ScaledObject", "ServiceMonitor", "PrometheusRule"}),
    ],
)
def test_each_overlay_adds_its_own_kinds(overlay: str, kinds: set[str]) -> None:
    base = {manifest["kind"] for manifest in build_overlay("base")}
    assert {manifest["kind"] for manifest in build_overlay(overlay)} - base == kinds


@pytest.mark.parametrize("model", MODELS)
def test_everything_is_in_one_namespace_and_every_reference_resolves(tmp_path: Path, model: str) -> None:
    manifests = build_with_model(tmp_path, model)
    assert {manifest["metadata"].get("namespace") for manifest in manifests} == {"qualms"}
    maps = {manifest["metadata"]["name"] for manifest in manifests if manifest["kind"] == "ConfigMap"}
    containers = [*pod(manifests)["containers"], *pod(manifests).get("initContainers", [])]
    used = {source["configMapRef"]["name"] for one in containers for source in one["envFrom"]}
    used |= {volume["configMap"]["name"] for volume in pod(manifests)["volumes"] if "configMap" in volume}
    assert used <= maps
    volumes = {volume["name"] for volume in pod(manifests)["volumes"]}
    assert {mount["name"] for one in containers for mount in one["volumeMounts"]} == volumes


@pytest.mark.parametrize("model", MODELS)
def test_the_service_reads_the_model_from_a_mount_that_it_cannot_write_to(tmp_path: Path, model: str) -> None:
    manifests = build_with_model(tmp_path, model)
    path = only(manifests, "ConfigMap", "qualms-settings")["data"]["QUALMS_MODEL"]
    (mount,) = [mount for mount in container(manifests)["volumeMounts"] if path.startswith(f"{mount['mountPath']}/")]
    assert mount["readOnly"] is True


def test_a_setting_of_a_component_is_changed_by_the_patch_of_the_readme(tmp_path: Path) -> None:
    (text,) = [text for text in examples() if "model-volume" in text]
    manifests = build_text(tmp_path, text.replace("../qualms/docker/kubernetes", "kubernetes"))
    settings = only(manifests, "ConfigMap", "qualms-settings")
    assert settings["data"]["QUALMS_MODEL"] == "/models/mine-1.0.0.onnx"
    assert container(manifests)["envFrom"] == [{"configMapRef": {"name": settings["metadata"]["name"]}}]


@pytest.mark.parametrize(("overlay", "kind"), [("cpu", "HorizontalPodAutoscaler"), ("keda", "ScaledObject")])
def test_an_autoscaler_follows_the_name_of_the_deployment(tmp_path: Path, overlay: str, kind: str) -> None:
    manifests = build_text(tmp_path, f"resources: [kubernetes/overlays/{overlay}]\nnamePrefix: team-\nnameSuffix: -b\n")
    deployment = only(manifests, "Deployment", "team-qualms-b")
    scaler = only(manifests, kind, "team-qualms-b")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]


@pytest.mark.parametrize("overlay", ["cpu", "monitoring"])
def test_pods_that_scale_by_cpu_have_one_core_so_that_a_busy_event_loop_is_full_utilisation(overlay: str) -> None:
    resources = container(build_overlay(overlay))["resources"]
    assert resources["requests"]["cpu"] == resources["limits"]["cpu"] == "1"


@pytest.mark.parametrize("overlay", ["cpu", "monitoring", "keda"])
def test_only_the_autoscaler_sets_the_number_of_replicas(overlay: str) -> None:
    assert "replicas" not in only(build_overlay(overlay), "Deployment")["spec"]


def test_selectors_match_the_labels_of_the_pods() -> None:
    manifests = build_overlay("monitoring")
    deployment = only(manifests, "Deployment")["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    selectors = [
        deployment["selector"]["matchLabels"],
        only(manifests, "Service")["spec"]["selector"],
        only(manifests, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
        only(manifests, "ServiceMonitor")["spec"]["selector"]["matchLabels"],
        *(one["spec"]["podSelector"]["matchLabels"] for one in manifests if one["kind"] == "NetworkPolicy"),
        *(one["labelSelector"]["matchLabels"] for one in pod(manifests)["topologySpreadConstraints"]),
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert only(manifests, "ServiceMonitor")["spec"]["selector"]["matchLabels"].items() <= (
        only(manifests, "Service")["metadata"]["labels"].items()
    )


def test_scraped_metrics_have_the_job_that_the_rules_expect() -> None:
    manifests = build_overlay("monitoring")
    monitor, service = only(manifests, "ServiceMonitor"), only(manifests, "Service")
    assert service["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "qualms"
    assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= {
        port["name"] for port in service["spec"]["ports"]
    }


def examples() -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("text", [text for text in examples() if "resources:" in text])
def test_every_example_of_the_readme_builds(tmp_path: Path, text: str) -> None:
    manifests = build_text(tmp_path, text.replace("../qualms/docker/kubernetes", "kubernetes"))
    given = yaml.safe_load(text)
    assert {manifest["metadata"]["namespace"] for manifest in manifests} == {given["namespace"]}
    assert container(manifests)["image"].startswith(given["images"][0]["newName"])
    assert {image.partition("@")[0] for image in images_of(pod(manifests))} == {
        one["newName"] for one in given["images"]
    }


def images_of(spec: Manifest) -> list[str]:
    """The images of all containers and volumes."""
    images = [one["image"] for one in (*spec["containers"], *spec.get("initContainers", []))]
    return images + [volume["image"]["reference"] for volume in spec["volumes"] if "image" in volume]


def test_every_path_in_the_readme_exists() -> None:
    text = README + (KUBERNETES / "SIZING.md").read_text(encoding="utf-8")
    paths = re.findall(r"(?<![\w/.])(?:base|overlays|components)/[\w./-]+", text)
    assert len(paths) > 5
    assert [path for path in paths if not (KUBERNETES / path.rstrip("./")).exists()] == []
