import re
import subprocess
import sys
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
    }


def test_every_base_image_has_a_version() -> None:
    bases = {line.split()[1] for line in TEXT.splitlines() if line.startswith("FROM ")}
    stages = {line.split()[3] for line in TEXT.splitlines() if line.startswith("FROM ")}
    assert bases - stages == {"python:3.11-slim"}
    assert {"cpu", "gpu", "training"} <= stages


def test_each_target_installs_the_dependencies_of_its_extras(tmp_path: Path) -> None:
    """pip would look for an extra of this project, such as qualms[service], in the package index."""
    match = re.search(r'bin/python -c "(.*?)"\n', TEXT, re.DOTALL)
    assert match
    (tmp_path / "pyproject.toml").write_bytes((ROOT / "pyproject.toml").read_bytes())
    subprocess.run([sys.executable, "-c", match[1].replace("\\\n", "")], cwd=tmp_path, check=True, timeout=60)
    for name, package in (("cpu", "onnxruntime>="), ("gpu", "onnxruntime-gpu"), ("train", "torch==")):
        lines = (tmp_path / f"{name}.txt").read_text().splitlines()
        for needed in ("httpx>=", "pydantic>=", "uvicorn>=", package):
            assert sum(line.startswith(needed) for line in lines) == 1
        assert not any(line.startswith("qualms") for line in lines)
