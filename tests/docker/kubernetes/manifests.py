"""Builds the Kubernetes manifests with kustomize."""

import os
import shutil
import subprocess
import sysconfig
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docker.stack import DOCKER

KUBERNETES = DOCKER / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
KUSTOMIZE = shutil.which("kustomize", path=os.pathsep.join((sysconfig.get_path("scripts"), os.environ["PATH"])))
"""`.ci/run` puts it beside Python"""

Manifest = dict[str, Any]

needs_kustomize = pytest.mark.skipif(KUSTOMIZE is None, reason="kustomize is not installed")

_ALL_OF_A_CLUSTER = """
resources: [kubernetes/overlays/gpu]
components:
  - kubernetes/components/monitoring
  - kubernetes/components/gpu-alerts
  - kubernetes/components/keda
  - kubernetes/components/{model}
configMapGenerator:
  - name: qualms-model
    literals: [MODEL_URL=https://models.example.com/mine.onnx, MODEL_SHA256={digest}]
"""


def build(folder: Path) -> list[Manifest]:
    """Return the manifests of a kustomization."""
    assert KUSTOMIZE is not None
    done = subprocess.run([KUSTOMIZE, "build", folder], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    return list(yaml.load_all(done.stdout, yaml.CSafeLoader))


def build_overlay(name: str) -> list[Manifest]:
    """Return the manifests of an overlay, or of the base; the caller may change them."""
    return deepcopy(_overlay(name))


@cache
def _overlay(name: str) -> list[Manifest]:
    return build(KUBERNETES / (name if name == "base" else f"overlays/{name}"))


def build_text(folder: Path, kustomization: str) -> list[Manifest]:
    """Return the manifests of a kustomization.yaml in `folder`, which refers to the manifests as `kubernetes/`."""
    if not (folder / "kubernetes").exists():
        shutil.copytree(KUBERNETES, folder / "kubernetes")
    (folder / "kustomization.yaml").write_text(kustomization, encoding="utf-8")
    return build(folder)


def build_with_model(folder: Path, model: str) -> list[Manifest]:
    """Return the manifests of the overlay gpu with monitoring, KEDA and one of the components that provide a model."""
    return build_text(folder, _ALL_OF_A_CLUSTER.format(model=model, digest="0" * 64))


def only(manifests: list[Manifest], kind: str, name: str = "qualms") -> Manifest:
    """Return the only manifest of this kind whose name is, or begins with, `name`."""
    (found,) = [
        manifest
        for manifest in manifests
        if manifest["kind"] == kind
        and (manifest["metadata"]["name"] == name or manifest["metadata"]["name"].startswith(f"{name}-"))
    ]
    return found


def pod(manifests: list[Manifest]) -> Manifest:
    """Return the specification of the pods."""
    spec: Manifest = only(manifests, "Deployment")["spec"]["template"]["spec"]
    return spec


def container(manifests: list[Manifest]) -> Manifest:
    """Return the container of the service."""
    (one,) = pod(manifests)["containers"]
    service: Manifest = one
    return service
