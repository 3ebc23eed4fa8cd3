import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docker.stack import DOCKER, ROOT

from qualms.settings import Settings

COMPOSE = ROOT / "docker-compose.yml"
GPU = DOCKER / "compose.gpu.yml"
PARSED: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = PARSED["services"]
LONG_RUNNING = ("service", "prometheus", "alertmanager", "grafana")


def compose() -> list[str]:
    """Compose v2 if there is one, else its predecessor; the test is skipped where there is neither."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True, check=False).returncode
        ):
            return command
    pytest.skip("neither docker compose nor docker-compose is installed")


@pytest.mark.parametrize("files", [[COMPOSE], [COMPOSE, GPU]])
@pytest.mark.parametrize("profile", [[], ["--profile", "demo"]])
def test_compose_takes_the_files(files: list[Path], profile: list[str]) -> None:
    given = [word for file in files for word in ("-f", str(file))]
    done = subprocess.run(
        [*compose(), *given, *profile, "config", "-q"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", SERVICES)
def test_every_container_is_confined(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "mem_limit" in service
    assert "cpus" in service
    assert service["pids_limit"] > 0
    assert not service.get("privileged")
    assert re.search(r":v?\d+\.\d+\.\d+$|^qualms:", service["image"]), "an image has an exact version"


@pytest.mark.parametrize("name", LONG_RUNNING)
def test_every_server_says_whether_it_is_well(name: str) -> None:
    """The service's own image says it."""
    health = SERVICES[name].get("healthcheck", {}).get("test")
    assert health or "HEALTHCHECK" in (DOCKER / "Dockerfile").read_text()


def test_ports_are_bound_to_loopback_unless_a_variable_says_otherwise() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
    assert len(ports) == len(LONG_RUNNING)
    assert all(port.startswith("${BIND_ADDRESS:-127.0.0.1}:") for port in ports)


def test_every_setting_of_the_service_is_passed_through_and_nothing_else() -> None:
    """The service refuses a QUALMS_ variable that it does not know."""
    assert set(SERVICES["service"]["environment"]) == {f"QUALMS_{name.upper()}" for name in Settings.model_fields}


def test_no_secret_is_in_the_file() -> None:
    names = [name for service in SERVICES.values() for name in service.get("environment", {})]
    assert not [name for name in names if re.search("PASSWORD|SECRET|TOKEN|KEY", name)]


def test_every_folder_that_is_mounted_exists() -> None:
    gpu = yaml.safe_load(GPU.read_text(encoding="utf-8"))["services"]
    for service in (*SERVICES.values(), *gpu.values()):
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            assert not source.startswith(".") or (ROOT / source).exists(), source


def test_the_demo_sends_nothing_unless_it_is_asked_for() -> None:
    assert [name for name, service in SERVICES.items() if "profiles" in service] == ["traffic"]
