"""The manifests against the schemas of Kubernetes, of the Prometheus operator and of KEDA."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import kubernetes_validate
import pytest
from kubernetes_validate.utils import all_versions
from tests.docker.kubernetes.manifests import (
    COMPONENTS,
    OVERLAYS,
    Manifest,
    build_overlay,
    build_with_model,
    needs_kustomize,
)
from tests.docker.stack import missing_programs

RELEASES = all_versions()[-5:]
"""the three releases that are maintained, and those of the year before"""
NPM = {"@kubernetes-models/prometheus-operator": "6.0.0", "@kubernetes-models/keda": "2.0.0", "typescript": "5.9.3"}
CLASSES = {
    "ServiceMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/ServiceMonitor",
    "PrometheusRule": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1/PrometheusRule",
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1/ScaledObject",
}
"""the module that exports a type and a validator of each kind"""

pytestmark = needs_kustomize


def invalid(manifests: list[Manifest], release: str) -> list[str]:
    errors = []
    for manifest in manifests:
        if manifest["kind"] not in CLASSES:
            try:
                kubernetes_validate.validate(manifest, release, strict=True)
            except kubernetes_validate.ValidationError as error:
                errors.append(f"{manifest['kind']}: {error.message}")
    return errors


@pytest.mark.parametrize("release", RELEASES)
def test_every_overlay_is_valid(release: str) -> None:
    assert {overlay: invalid(build_overlay(overlay), release) for overlay in OVERLAYS} == {
        name: [] for name in OVERLAYS
    }


@pytest.mark.parametrize("model", [name for name in COMPONENTS if name.startswith("model-")])
def test_every_source_of_a_model_is_valid(tmp_path: Path, model: str) -> None:
    manifests = build_with_model(tmp_path, model)
    assert {release: invalid(manifests, release) for release in RELEASES} == {release: [] for release in RELEASES}


def test_a_misspelt_field_is_detected() -> None:
    manifests = build_overlay("base")
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            manifest["spec"]["template"]["spec"]["enableServiceLink"] = False
    (error,) = invalid(manifests, RELEASES[-1])
    assert "enableServiceLink" in error


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the npm packages; their validators check values, and their types find unknown fields."""
    if missing := missing_programs("npm", "node"):
        pytest.skip(missing)
    folder = tmp_path_factory.mktemp("npm")
    (folder / "package.json").write_text(json.dumps({"private": True, "type": "module", "dependencies": NPM}))
    command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        pytest.skip(f"npm cannot fetch the schemas: {done.stderr.strip()[-200:]}")
    return folder


def custom_resource_errors(packages: Path, manifests: list[Manifest]) -> str:
    """Return what TypeScript and the validators object to; empty if nothing."""
    checked = [(manifest["kind"], json.dumps(manifest)) for manifest in manifests if manifest["kind"] in CLASSES]
    assert checked
    imports = "".join(f'import {{{kind}, type I{kind}}} from "{module}";\n' for kind, module in CLASSES.items())
    lines = "".join(
        f"const object{i}: I{kind} = {text};\nnew {kind}(object{i}).validate();\n"
        for i, (kind, text) in enumerate(checked)
    )
    (packages / "check.ts").write_text(imports + lines, encoding="utf-8")
    compiler = packages / "node_modules" / ".bin" / "tsc"
    compiled = subprocess.run(
        [compiler, "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022", "check.ts"],
        cwd=packages, capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    node = shutil.which("node")
    assert node is not None
    ran = subprocess.run([node, "check.js"], cwd=packages, capture_output=True, text=True, check=False, timeout=120)
    return compiled.stdout + ran.stderr


@pytest.mark.container
def test_custom_resources_are_valid(packages: Path, tmp_path: Path) -> None:
    assert custom_resource_errors(packages, build_with_model(tmp_path, "model-image")) == ""
    assert custom_resource_errors(packages, build_overlay("keda")) == ""


@pytest.mark.container
def test_wrong_values_and_unknown_fields_of_custom_resources_are_detected(packages: Path) -> None:
    manifests = build_overlay("keda")
    for manifest in manifests:
        if manifest["kind"] == "ScaledObject":
            manifest["spec"]["pollingInterval"] = "often"
        if manifest["kind"] == "ServiceMonitor":
            manifest["spec"]["endpoints"][0]["intervall"] = "15s"
    errors = custom_resource_errors(packages, manifests)
    assert re.search("intervall.* does not exist in type", errors)
    assert re.search("pollingInterval.* must be integer", errors)
