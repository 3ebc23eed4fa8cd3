import re
import subprocess
import sysconfig
from pathlib import Path

from tests.docker.stack import DOCKER, ROOT

TEXT = (DOCKER / "Dockerfile").read_text(encoding="utf-8")


def test_hadolint_reports_nothing() -> None:
    hadolint = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([hadolint, DOCKER / "Dockerfile"], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_build_context_is_an_allow_list() -> None:
    """A deny list would let new caches, data and environments into the context."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and not line.startswith("#")]
    assert lines[0] == "*"
    assert {line for line in lines if line.startswith("!")} == {
        "!pyproject.toml",
        "!README.md",
        "!LICENSE",
        "!service",
        "!training",
        "!docker/requirements",
        "!docker/sbom.py",
    }


def test_every_base_image_has_a_version() -> None:
    bases = {line.split()[1].partition("@")[0] for line in TEXT.splitlines() if line.startswith("FROM ")}
    stages = {line.split()[3] for line in TEXT.splitlines() if line.startswith("FROM ")}
    assert bases - stages == {"python:3.11-slim"}
    assert {"cpu", "gpu", "training"} <= stages


def test_every_package_is_installed_from_a_lock_with_hashes() -> None:
    """Our own wheel has no hash there: it is built in the stage `wheel`, with the packages of a lock."""
    commands = re.findall(r"bin/pip (?:install|wheel) ([^&\n]*)", TEXT)
    locks = [match[1] for command in commands if (match := re.search(r"--require-hashes .*-r (\w+)\.txt", command))]
    assert sorted(locks) == ["build", "cpu", "gpu", "training"]
    for command in commands:
        assert "--require-hashes" in command or (
            "--no-deps" in command and re.search(r"--no-(index|build-iso)", command)
        )
    assert "PIP_ONLY_BINARY=:all:" in TEXT
