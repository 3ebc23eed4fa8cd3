"""The restricted pod security standard, and a scan with checkov where it is installed."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.docker.kubernetes.manifests import (
    COMPONENTS,
    OVERLAYS,
    Manifest,
    build_overlay,
    build_with_model,
    needs_kustomize,
    only,
    pod,
)
from tests.docker.stack import ROOT

CHECKOV = shutil.which("checkov") or shutil.which("checkov", path=str(ROOT / ".venv-checkov" / "bin"))
VOLUMES = {"configMap", "emptyDir", "persistentVolumeClaim", "image"}
"""those that the manifests use of the kinds that the restricted standard allows"""
ACCEPTED = {
    "CKV_K8S_43": "the image is a placeholder; README.md sets it by its digest",
    "CKV_K8S_15": "an image with a digest never changes; checkov accepts IfNotPresent for such",
}

pytestmark = needs_kustomize


def violations(spec: Manifest) -> list[str]:
    """Return what the restricted pod security standard forbids in a pod, but for what the API server refuses anyway."""
    found = []
    for name in ("hostNetwork", "hostPID", "hostIPC"):
        if spec.get(name):
            found.append(name)
    whole = spec["securityContext"]
    if not whole.get("runAsNonRoot") or whole.get("runAsUser") == 0:
        found.append("the pod may run as root")
    if whole.get("seccompProfile") != {"type": "RuntimeDefault"}:
        found.append("seccompProfile")
    for volume in spec["volumes"]:
        if not (volume.keys() - {"name"}) <= VOLUMES:
            found.append(f"volume {volume['name']}")
    for container in (*spec["containers"], *spec.get("initContainers", [])):
        context = container["securityContext"]
        allowed = {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}
        if context != allowed:
            found.append(f"securityContext of {container['name']}")
        if any("hostPort" in port for port in container.get("ports", [])):
            found.append(f"hostPort of {container['name']}")
    return found


@pytest.mark.parametrize("overlay", ["base", *OVERLAYS])
def test_pods_meet_the_restricted_standard(overlay: str) -> None:
    assert violations(pod(build_overlay(overlay))) == []


@pytest.mark.parametrize("model", [name for name in COMPONENTS if name.startswith("model-")])
def test_pods_with_a_model_meet_the_restricted_standard(tmp_path: Path, model: str) -> None:
    assert violations(pod(build_with_model(tmp_path, model))) == []


def test_a_privileged_container_a_host_path_and_root_are_detected() -> None:
    spec = pod(build_overlay("base"))
    spec["containers"][0]["securityContext"]["privileged"] = True
    spec["securityContext"]["runAsUser"] = 0
    spec["volumes"].append({"name": "host", "hostPath": {"path": "/"}})
    assert violations(spec) == ["the pod may run as root", "volume host", "securityContext of qualms"]


def test_no_pod_gets_a_token_or_service_links() -> None:
    manifests = build_overlay("base")
    assert pod(manifests)["automountServiceAccountToken"] is False
    assert only(manifests, "ServiceAccount")["automountServiceAccountToken"] is False
    assert pod(manifests)["enableServiceLinks"] is False


def test_every_container_has_requests_and_limits(tmp_path: Path) -> None:
    spec = pod(build_with_model(tmp_path, "model-download"))
    for container in (*spec["containers"], *spec["initContainers"]):
        assert {"cpu", "memory", "ephemeral-storage"} <= container["resources"]["limits"].keys()
        assert container["resources"]["requests"] == container["resources"]["limits"]


def test_the_service_may_open_no_connections_unless_it_fetches_its_model(tmp_path: Path) -> None:
    policies = {
        overlay: [one for one in build_overlay(overlay) if one["kind"] == "NetworkPolicy"] for overlay in OVERLAYS
    }
    for found in policies.values():
        assert any(policy["spec"]["policyTypes"] == ["Ingress", "Egress"] for policy in found)
        assert [policy["spec"].get("egress", []) for policy in found] == [[]] * len(found)
    assert only(build_with_model(tmp_path, "model-download"), "NetworkPolicy", "qualms-model-download")["spec"][
        "egress"
    ]


@pytest.mark.container
@pytest.mark.skipif(CHECKOV is None, reason="checkov is not installed")
def test_checkov_reports_only_accepted_findings(tmp_path: Path) -> None:
    assert CHECKOV is not None
    for overlay in OVERLAYS:
        (tmp_path / f"{overlay}.yaml").write_text(yaml.safe_dump_all(build_overlay(overlay)))
    (tmp_path / "model").mkdir()
    manifests = build_with_model(tmp_path / "model", "model-download")
    (tmp_path / "model.yaml").write_text(yaml.safe_dump_all(manifests))
    files = [word for path in sorted(tmp_path.glob("*.yaml")) for word in ("--file", str(path))]
    options = ["--framework", "kubernetes", "--skip-download", "--compact", "--quiet", "--output", "json"]
    done = subprocess.run([CHECKOV, *files, *options], capture_output=True, text=True, check=False, timeout=300)
    report = json.loads(done.stdout)
    assert report["summary"]["passed"] > 300
    failed = {check["check_id"] for check in report["results"]["failed_checks"]}
    assert failed <= ACCEPTED.keys(), failed - ACCEPTED.keys()
