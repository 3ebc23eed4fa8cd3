"""Compose and Kubernetes run the same service: settings, ports, user, resources and time to stop."""

import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docker.kubernetes.manifests import (
    KUBERNETES,
    OVERLAYS,
    build_overlay,
    build_with_model,
    container,
    needs_kustomize,
    only,
    pod,
)
from tests.docker.stack import DOCKER, PROMETHEUS, ROOT

from qualms.settings import Settings, load_settings
from qualms.web.app import create_app

COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))["services"][
    "service"
]
COMPOSE_GPU: dict[str, Any] = yaml.safe_load((DOCKER / "compose.gpu.yml").read_text(encoding="utf-8"))["services"][
    "service"
]
DOCKERFILE = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
SETTINGS = (KUBERNETES / "base" / "settings.env").read_text(encoding="utf-8")
STOP_SECONDS = 5
"""from the end of the grace period to the end of the process: log lines and worker processes"""

pytestmark = needs_kustomize


def default_of(text: str) -> str:
    """`1g` of `${SERVICE_MEMORY:-1g}`; any other text is itself."""
    match = re.fullmatch(r"\$\{\w+:-(.*)\}", text)
    return match[1] if match else text


def settings_of(overlay: str) -> dict[str, str]:
    data: dict[str, str] = only(build_overlay(overlay), "ConfigMap", "qualms-settings")["data"]
    return data


def test_the_settings_file_lists_exactly_the_settings_of_the_service_and_of_compose() -> None:
    names = re.findall(r"^#?(QUALMS_\w+)=", SETTINGS, re.MULTILINE)
    assert names == [f"QUALMS_{name.upper()}" for name in Settings.model_fields]
    assert set(names) == set(COMPOSE["environment"])


def test_settings_without_a_value_show_the_default() -> None:
    shown = re.findall(r"^#QUALMS_(\w+)=(.+)$", SETTINGS, re.MULTILINE)
    assert len(shown) > 10
    for name, value in shown:
        default = getattr(Settings.model_construct(), name.lower())
        assert value == (f"{default:g}" if isinstance(default, float) else str(default).replace("True", "true")), name


@pytest.mark.parametrize("overlay", ["base", *OVERLAYS])
def test_the_service_accepts_the_settings(overlay: str, clean_environment: pytest.MonkeyPatch) -> None:
    for name, value in settings_of(overlay).items():
        clean_environment.setenv(name, value)
    assert load_settings().host == "0.0.0.0"


@pytest.fixture
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    for name in Settings.model_fields:
        monkeypatch.delenv(f"QUALMS_{name.upper()}", raising=False)
    yield monkeypatch


def test_settings_with_a_value_are_those_of_compose() -> None:
    given = {name: default_of(value) for name, value in COMPOSE["environment"].items() if value is not None}
    assert settings_of("base") == given


def test_only_the_device_differs_on_a_gpu_because_a_rollout_should_stop() -> None:
    assert default_of(COMPOSE_GPU["environment"]["QUALMS_DEVICE"]) == "auto"
    assert settings_of("gpu") == {**settings_of("base"), "QUALMS_DEVICE": "cuda"}


def test_the_driver_of_a_gpu_writes_no_kernels_to_tmp_because_a_pod_with_a_full_volume_is_evicted() -> None:
    assert {"name": "CUDA_CACHE_DISABLE", "value": "1"} in container(build_overlay("gpu"))["env"]
    assert re.search(r"^ENV .*\bHOME=/tmp\b", DOCKERFILE, re.MULTILINE)
    (tmp,) = [volume for volume in pod(build_overlay("gpu"))["volumes"] if volume["name"] == "tmp"]
    assert "sizeLimit" in tmp["emptyDir"]


def test_the_download_fits_into_its_volume_and_into_the_disk_of_its_pod(tmp_path: Path) -> None:
    spec = pod(build_with_model(tmp_path, "model-download"))
    sizes = {
        volume["name"]: mebibytes(volume["emptyDir"]["sizeLimit"]) for volume in spec["volumes"] if "emptyDir" in volume
    }
    assert max_model_bytes() / 2**20 < sizes["model"]
    for one in (*spec["containers"], *spec["initContainers"]):
        assert sum(sizes.values()) < mebibytes(one["resources"]["limits"]["ephemeral-storage"])


def max_model_bytes() -> int:
    """The largest model that the program of the init container accepts."""
    path = KUBERNETES / "components" / "model-download" / "fetch_model.py"
    return int(runpy.run_path(str(path))["MAX_BYTES"])


def mebibytes(text: str) -> int:
    assert text.endswith("Mi")
    return int(text.removesuffix("Mi"))


def test_images_are_those_of_compose() -> None:
    assert container(build_overlay("base"))["image"] == COMPOSE["image"]
    assert container(build_overlay("gpu"))["image"] == COMPOSE_GPU["image"]


def test_the_user_is_that_of_the_image() -> None:
    user = re.search(r"^USER (\d+):(\d+)$", DOCKERFILE, re.MULTILINE)
    assert user
    context = pod(build_overlay("base"))["securityContext"]
    assert (context["runAsUser"], context["runAsGroup"]) == (int(user[1]), int(user[2]))


def test_all_ports_are_the_same() -> None:
    manifests = build_overlay("base")
    ports = {port["name"]: port["containerPort"] for port in container(manifests)["ports"]}
    settings = settings_of("base")
    http, management = int(settings["QUALMS_PORT"]), int(settings["QUALMS_MANAGEMENT_PORT"])
    assert ports == {"http": http, "management": management}
    services = only(manifests, "Service")["spec"]["ports"]
    assert {port["targetPort"]: port["port"] for port in services} == ports
    exposed = re.search(r"^EXPOSE (\d+)", DOCKERFILE, re.MULTILINE)
    assert exposed
    assert int(exposed[1]) == http
    assert COMPOSE["ports"] == [f"${{SERVICE_ADDRESS:-127.0.0.1}}:${{SERVICE_PORT:-8000}}:{http}"]
    assert f"targets: [service:{management}]" in (PROMETHEUS / "prometheus.yml").read_text()
    (endpoint,) = only(build_overlay("monitoring"), "ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["port"] == "management"


@pytest.mark.parametrize("probe", ["startupProbe", "livenessProbe", "readinessProbe"])
def test_probes_use_the_management_port_because_it_never_needs_tls(probe: str) -> None:
    assert container(build_overlay("base"))[probe]["httpGet"]["port"] == "management"


@pytest.mark.parametrize(("overlay", "compose"), [("base", COMPOSE), ("gpu", COMPOSE_GPU)])
def test_the_limits_on_cpu_and_memory_are_those_of_compose(overlay: str, compose: dict[str, Any]) -> None:
    limits = container(build_overlay(overlay))["resources"]["limits"]
    assert limits["memory"] == default_of(compose["mem_limit"]).replace("g", "Gi")
    assert limits["cpu"] == default_of(COMPOSE["cpus"])


def test_the_scrape_interval_is_that_of_compose() -> None:
    (endpoint,) = only(build_overlay("monitoring"), "ServiceMonitor")["spec"]["endpoints"]
    prometheus = yaml.safe_load((PROMETHEUS / "prometheus.yml").read_text(encoding="utf-8"))
    assert endpoint["interval"] == prometheus["global"]["scrape_interval"]


@pytest.mark.parametrize("overlay", ["base", *OVERLAYS])
def test_the_rules_are_those_of_compose(overlay: str, tmp_path: Path) -> None:
    manifests = build_overlay(overlay)
    groups = [group for one in manifests if one["kind"] == "PrometheusRule" for group in one["spec"]["groups"]]
    if overlay in {"monitoring", "keda"}:
        assert groups == groups_of("rules")
    else:
        assert groups == []


def test_the_alerts_for_gpus_are_those_of_compose(tmp_path: Path) -> None:
    rule = only(build_with_model(tmp_path, "model-image"), "PrometheusRule", "qualms-gpu")
    assert rule["spec"]["groups"] == groups_of("gpu")


def groups_of(folder: str) -> list[Any]:
    files = sorted((PROMETHEUS / folder).glob("*.yml"))
    return [group for path in files for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]]


@pytest.mark.parametrize("overlay", ["base", *OVERLAYS])
def test_the_time_to_stop_covers_pre_stop_and_grace_period(overlay: str, clean_environment: pytest.MonkeyPatch) -> None:
    for name, value in settings_of(overlay).items():
        clean_environment.setenv(name, value)
    manifests = build_overlay(overlay)
    pre_stop = container(manifests)["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod(manifests)["terminationGracePeriodSeconds"] == pre_stop + load_settings().grace_seconds + STOP_SECONDS
    assert COMPOSE["stop_grace_period"] == f"{load_settings().grace_seconds + STOP_SECONDS:g}s"


def test_a_rolling_update_starts_a_pod_before_it_stops_one() -> None:
    strategy = only(build_overlay("base"), "Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def test_probes_use_paths_and_ports_that_the_service_has() -> None:
    one = container(build_overlay("base"))
    paths = {name: one[name]["httpGet"]["path"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert paths == {"startupProbe": "/readyz", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    assert {one[name]["httpGet"]["port"] for name in paths} <= {port["name"] for port in one["ports"]}
    document = create_app(Settings()).openapi()
    assert set(paths.values()) <= set(document["paths"])


def test_a_large_model_has_five_minutes_to_load_within_the_progress_deadline() -> None:
    deployment = only(build_overlay("base"), "Deployment")["spec"]
    probe = container(build_overlay("base"))["startupProbe"]
    seconds = probe["periodSeconds"] * probe["failureThreshold"]
    assert 300 <= seconds < deployment["progressDeadlineSeconds"]
