import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docker.stack import DOCKER, ROOT, compose_command

from qualms.settings import Settings

COMPOSE = ROOT / "docker-compose.yml"
GPU = DOCKER / "compose.gpu.yml"
PARSED: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = PARSED["services"]
SERVERS = ("service", "prometheus", "alertmanager", "grafana")


@pytest.mark.parametrize("files", [[COMPOSE], [COMPOSE, GPU]])
@pytest.mark.parametrize("profile", [[], ["--profile", "demo"]])
def test_compose_accepts_the_files(files: list[Path], profile: list[str]) -> None:
    options = [word for file in files for word in ("-f", str(file))]
    command = [*compose_command(), *options, *profile, "config", "-q"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "mem_limit" in service
    assert "cpus" in service
    assert service["memswap_limit"] == service["mem_limit"], "with more, the container would swap"
    assert service["pids_limit"] > 0
    assert service["init"] is True
    assert service["ulimits"]["nofile"]["hard"] > Settings.model_fields["max_connections"].default
    assert all(re.search(r":size=\d+m$", mount) for mount in service.get("tmpfs", []))
    assert not service.get("privileged")
    assert re.search(r":v?\d+\.\d+\.\d+(@sha256:\w+)?$|^qualms:", service["image"]), "the image needs an exact version"


@pytest.mark.parametrize("name", SERVERS)
def test_every_server_has_a_health_check(name: str) -> None:
    """The service's health check is part of its image."""
    health = SERVICES[name].get("healthcheck", {}).get("test")
    assert health or "HEALTHCHECK" in (DOCKER / "Dockerfile").read_text()


@pytest.mark.parametrize("name", SERVICES)
def test_unhealthy_containers_are_labelled_for_a_restart(name: str) -> None:
    """The label selects the containers in docker/systemd/restart-unhealthy.service."""
    assert SERVICES[name]["labels"] == {"autoheal": "true"}
    assert "label=autoheal=true" in (DOCKER / "systemd" / "restart-unhealthy.service").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", SERVERS)
def test_a_port_is_bound_to_loopback_unless_its_own_address_is_set(name: str) -> None:
    (port,) = SERVICES[name]["ports"]
    assert port.startswith(f"${{{name.upper()}_ADDRESS:-127.0.0.1}}:${{{name.upper()}_PORT:-")


def test_prometheus_scrapes_the_management_port_which_is_not_published() -> None:
    environment = SERVICES["service"]["environment"]
    port = environment["QUALMS_MANAGEMENT_PORT"]
    scraped = yaml.safe_load((DOCKER / "prometheus" / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    assert scraped[0]["static_configs"] == [{"targets": [f"service:{port}"]}]
    assert port != environment["QUALMS_PORT"]
    assert all(not published.endswith(f":{port}") for published in SERVICES["service"]["ports"])


def test_monitoring_is_on_a_network_of_its_own() -> None:
    networks = {name: service.get("networks", ["default"]) for name, service in SERVICES.items()}
    assert networks.pop("service") == ["default", "management"]
    assert networks.pop("traffic") == ["default"]
    assert set(map(tuple, networks.values())) == {("management",)}


def test_whether_keys_are_needed_is_set_explicitly() -> None:
    assert SERVICES["service"]["environment"]["QUALMS_ALLOW_ANONYMOUS"] == "${QUALMS_ALLOW_ANONYMOUS:-true}"


def test_exactly_the_settings_of_the_service_are_passed_through() -> None:
    """The service does not start with an unknown QUALMS_ variable."""
    assert set(SERVICES["service"]["environment"]) == {f"QUALMS_{name.upper()}" for name in Settings.model_fields}


def test_the_file_contains_no_secret() -> None:
    """A variable without a value is passed through from the shell."""
    variables = [pair for service in SERVICES.values() for pair in service.get("environment", {}).items()]
    assert not [name for name, value in variables if value and re.search("PASSWORD|SECRET|TOKEN|KEY", name)]


def test_every_mounted_path_exists() -> None:
    gpu = yaml.safe_load(GPU.read_text(encoding="utf-8"))["services"]
    for service in (*SERVICES.values(), *gpu.values()):
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists(), source


def test_every_path_in_the_readme_exists() -> None:
    text = (DOCKER / "README.md").read_text(encoding="utf-8")
    paths = re.findall(
        r"(?<![\w/.])(?:docker|prometheus|alertmanager|grafana|service|training|tests|requirements|proxy|systemd)/[\w./-]+",
        text,
    )
    assert len(paths) > 10
    assert [path for path in paths if not (ROOT / path).exists() and not (DOCKER / path).exists()] == []


def test_only_the_demo_traffic_needs_a_profile() -> None:
    assert [name for name, service in SERVICES.items() if "profiles" in service] == ["traffic"]
