"""Starts docker-compose.yml, except for Grafana, in a separate Docker engine that stops after the tests.

Requires root, Debian's packages docker.io, docker-compose (or Compose v2), mmdebstrap, prometheus,
prometheus-alertmanager and busybox, and a package index for pip. base_images.sh builds the base images; Grafana is not
packaged in Debian.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from docker.lock import parse
from docker.pin_images import main as pin_images
from tests.docker.stack import (
    DRIFT_ALERT,
    ENCODING_ALERT,
    ROOT,
    SPEEDUP,
    Monitoring,
    compose_command,
    dashboard_queries,
    free_port,
    missing_programs,
    wait_until,
    write_accelerated_prometheus,
)

MISSING = missing_programs("dockerd", "docker", "mmdebstrap", "prometheus", "prometheus-alertmanager", "busybox", "git")
MAX_IMAGE_BYTES = 350_000_000
MAX_CODE_BYTES = 2_600_000
"""limit of the build context without the embedded models; the locks with their hashes are 0.3 MB of it"""
SERVICE_USER = 10001
PROJECT = "qualmstest"
STARTED = ("service", "prometheus", "alertmanager", "traffic")

pytestmark = [
    pytest.mark.container,
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a container engine"),
]


class Engine:
    """A client of the separate Docker engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/socket"
        self.variables = {**os.environ, "DOCKER_HOST": self.host}

    def run(self, *command: object, **variables: str) -> str:
        """Run a command against this engine and return its output."""
        done = subprocess.run(
            [str(word) for word in command],
            env={**self.variables, **variables},
            capture_output=True,
            text=True,
            check=False,
            timeout=900,
        )
        assert done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout[-2000:]} {done.stderr[-4000:]}"
        return done.stdout

    def inspect(self, name: str) -> dict[str, Any]:
        """Return the description of a container or an image."""
        description: dict[str, Any] = json.loads(self.run("docker", "inspect", name))[0]
        return description


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Start the engine; skip the tests with its last log line if it does not start."""
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        pytest.skip("a container engine is already running, and a second one would change its firewall rules")
    folder = Path(tempfile.mkdtemp(prefix="qs-"))  # paths of sockets must be short
    engine = Engine(folder)
    log = folder / "log"
    with log.open("w") as file:
        folders = (f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid")
        process = subprocess.Popen(["dockerd", *folders, f"--host={engine.host}"], stdout=file, stderr=file)
    try:
        deadline = time.monotonic() + 60
        while subprocess.run(["docker", "info"], env=engine.variables, capture_output=True, check=False).returncode:
            if process.poll() is not None or time.monotonic() > deadline:
                last = [line for line in log.read_text().splitlines() if line][-1:]
                pytest.skip(f"the container engine does not start: {' '.join(last)[-300:]}")
            time.sleep(0.5)
        yield engine
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        subprocess.run(["umount", folder / "exec" / "netns" / "default"], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the files that a clone of the working tree would contain."""
    folder = tmp_path_factory.mktemp("clone")
    listing = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("this is not a git checkout")
    for name in listing.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    # The images that base_images.sh builds have no digest of a registry.
    assert pin_images(["--unpin"], files=(folder / "docker" / "Dockerfile", folder / "docker-compose.yml")) == 0
    return folder


@pytest.fixture(scope="module")
def images(engine: Engine, clone: Path) -> Engine:
    """Build the base images, and the service's image from the clone."""
    engine.run(Path(__file__).parent / "base_images.sh", engine.folder / "base")
    build_image(engine, clone, "qualms:cpu")
    return engine


def build_image(engine: Engine, clone: Path, tag: str, *options: str) -> None:
    """Build the target `cpu`."""
    build = ("docker", "build", "--quiet", "--network", "host", "--target", "cpu", "--tag", tag, *options)
    engine.run(*build, "--file", clone / "docker" / "Dockerfile", clone)


@pytest.fixture(scope="module")
def stack(images: Engine, clone: Path) -> Iterator[Monitoring]:
    """Start the compose file with the profile `demo`, with accelerated Prometheus rules and with a folder for the score log."""
    fast = clone / "fast"
    write_accelerated_prometheus(fast)
    scores = clone / "scores"
    scores.mkdir()
    os.chown(scores, SERVICE_USER, SERVICE_USER)
    override = {
        "services": {
            "service": {"volumes": ["./scores:/scores"]},
            "prometheus": {
                "volumes": [
                    f"{fast}/prometheus.yml:/etc/prometheus/prometheus.yml:ro",
                    f"{fast}/rules:/etc/prometheus/rules:ro",
                ]
            },
        }
    }
    (clone / "fast.yml").write_text(yaml.safe_dump(override))
    ports = {name: str(free_port()) for name in ("SERVICE_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT")}
    variables = {
        **ports,
        "QUALMS_MODEL": "demo",
        "QUALMS_SCORE_LOG": "/scores/log.jsonl",
        "SERVICE_CPUS": str(min(2, os.cpu_count() or 1)),
        "DEMO_RATE": "40",
        "DEMO_PERIOD": str(1800 // SPEEDUP),
    }
    files = ("-f", clone / "docker-compose.yml", "-f", clone / "fast.yml")
    compose = partial(images.run, *compose_command(), "-p", PROJECT, *files, "--profile", "demo", **variables)
    try:
        compose("up", "--detach", "--no-build", *STARTED)
        monitoring = Monitoring(
            f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}", f"http://127.0.0.1:{ports['ALERTMANAGER_PORT']}"
        )
        wait_until(monitoring.is_ready, "Prometheus and Alertmanager are ready")
        yield monitoring
    finally:
        compose("down", "--volumes")


def container(engine: Engine, service: str) -> str:
    """Return the id of a service's container."""
    return engine.run("docker", "ps", "-q", "-f", f"label=com.docker.compose.service={service}").strip()


def sbom_of(engine: Engine, image: str) -> dict[str, Any]:
    """The list of components in an image, at the path in its label."""
    path = engine.inspect(image)["Config"]["Labels"]["qualms.sbom"]
    document: dict[str, Any] = json.loads(engine.run("docker", "run", "--rm", "--entrypoint", "cat", image, path))
    return document


def run_inside(engine: Engine, program: str) -> str:
    """Run a Python program in the service's container and return its output."""
    return engine.run("docker", "exec", container(engine, "service"), "python3", "-c", program).strip()


# The image


def test_the_build_context_is_small(images: Engine, clone: Path, tmp_path: Path) -> None:
    """The size is measured as that of an image with nothing but the context."""
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    images.run("docker", "build", "--quiet", "--tag", "context", "--file", tmp_path / "Dockerfile", clone)
    size = images.inspect("context")["Size"]
    models = sum(path.stat().st_size for path in (clone / "service" / "qualms" / "models").glob("*.onnx"))
    print(f"context: {size / 1e6:.1f} MB, of which the embedded models are {models / 1e6:.1f}")
    assert 500_000 < size - models < MAX_CODE_BYTES


def test_the_image_is_small_and_the_readme_states_its_size(images: Engine) -> None:
    size = images.inspect("qualms:cpu")["Size"]
    print(
        f"qualms:cpu: {size / 1e6:.0f} MB, of which the base is {images.inspect('python:3.11-slim')['Size'] / 1e6:.0f}"
    )
    assert size <= MAX_IMAGE_BYTES
    stated = re.search(r"CPU image is (\d+) MB", (ROOT / "docker" / "README.md").read_text(encoding="utf-8"))
    assert stated, "docker/README.md does not state the size of the image"
    assert 1e6 * int(stated[1]) == pytest.approx(size, rel=0.05)


def test_the_image_has_a_numeric_user_and_a_health_check(images: Engine) -> None:
    config = images.inspect("qualms:cpu")["Config"]
    assert config["User"] == f"{SERVICE_USER}:{SERVICE_USER}"
    assert "/readyz" in " ".join(config["Healthcheck"]["Test"])


def test_the_image_lists_the_packages_of_the_lock_and_of_debian(images: Engine) -> None:
    text = (ROOT / "docker" / "requirements" / "cpu.txt").read_text(encoding="utf-8")
    locked = {name: (str(one.version), one.hashes) for name, one in parse(text).items()}
    sbom = sbom_of(images, "qualms:cpu")
    errors = JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(sbom))
    assert errors is None, errors
    python = {one["name"]: one for one in sbom["components"] if one["purl"].startswith("pkg:pypi/")}
    assert {name: one["version"] for name, one in python.items()} == {name: one[0] for name, one in locked.items()}
    for name, one in python.items():
        assert f"sha256:{one['hashes'][0]['content']}" in locked[name][1]
    debian = {(one["name"], one["version"]) for one in sbom["components"] if one["purl"].startswith("pkg:deb/")}
    query = ("--entrypoint", "dpkg-query", "qualms:cpu", "--show", "--showformat", "${Package} ${Version}\n")
    installed = images.run("docker", "run", "--rm", *query).splitlines()
    assert debian == {tuple(line.split()) for line in installed}


def test_two_builds_have_the_same_packages_and_files(images: Engine, clone: Path) -> None:
    """The second build uses nothing of the first; RECORD files have the hashes of all files of a package."""
    build_image(images, clone, "qualms:again", "--no-cache")
    program = (
        "import glob, hashlib; paths = sorted(glob.glob('/opt/qualms/lib/python3*/site-packages/*.dist-info/RECORD')); "
        "print(*(f'{hashlib.sha256(open(p, \"rb\").read()).hexdigest()} {p}' for p in paths), sep='\\n')"
    )
    records = [
        images.run("docker", "run", "--rm", "--entrypoint", "python3", image, "-c", program).splitlines()
        for image in ("qualms:cpu", "qualms:again")
    ]
    assert images.inspect("qualms:cpu")["Id"] != images.inspect("qualms:again")["Id"]
    assert len(records[0]) == 1 + len(parse((clone / "docker" / "requirements" / "cpu.txt").read_text()))
    assert records[0] == records[1]
    assert sbom_of(images, "qualms:cpu") == sbom_of(images, "qualms:again")


def test_a_service_that_hangs_becomes_unhealthy_and_is_restarted_by_the_systemd_unit(images: Engine) -> None:
    """The unit's own command restarts it, without waiting for requests of a process that does not run."""
    unit = (ROOT / "docker" / "systemd" / "restart-unhealthy.service").read_text(encoding="utf-8")
    (command,) = re.findall(r"^ExecStart=/bin/sh -c '(.*)'$", unit, re.MULTILINE)
    options = ("--detach", "--init", "--name", "hanging", "--label", "autoheal=true", "--health-start-period=0s")
    health = ("--health-interval=2s", "--health-timeout=20s", "--health-retries=2")
    environment = ("--env", "QUALMS_PORT=8000", "--env", "QUALMS_ALLOW_ANONYMOUS=true")
    images.run("docker", "run", *options, *health, *environment, "qualms:cpu")
    try:
        status = partial(images.inspect, "hanging")
        wait_until(lambda: status()["State"]["Health"]["Status"] == "healthy", "the container is healthy")
        started = status()["State"]["StartedAt"]
        images.run("sh", "-c", command)
        assert status()["State"]["StartedAt"] == started, "a healthy container was restarted"
        # Not PID 1, which is Docker's init process.
        stop = (
            "import os, signal; os.kill(int(os.popen('cat /proc/1/task/1/children').read().split()[0]), signal.SIGSTOP)"
        )
        images.run("docker", "exec", "hanging", "python3", "-c", stop)
        wait_until(lambda: status()["State"]["Health"]["Status"] == "unhealthy", "the container is unhealthy")
        images.run("sh", "-c", command)
        assert status()["State"]["StartedAt"] != started
        wait_until(lambda: status()["State"]["Health"]["Status"] == "healthy", "the container is healthy again")
    finally:
        images.run("docker", "rm", "--force", "hanging")


# The stack


@pytest.mark.parametrize("service", ["service", "prometheus", "alertmanager"])
def test_containers_become_healthy(images: Engine, stack: Monitoring, service: str) -> None:
    name = container(images, service)
    wait_until(lambda: images.inspect(name)["State"]["Health"]["Status"] == "healthy", f"{service} is healthy")


@pytest.mark.parametrize("service", STARTED)
def test_containers_run_read_only_as_non_root_without_capabilities(
    images: Engine, stack: Monitoring, service: str
) -> None:
    description = images.inspect(container(images, service))
    assert description["HostConfig"]["ReadonlyRootfs"]
    assert description["HostConfig"]["CapDrop"] == ["ALL"]
    assert description["HostConfig"]["Memory"] == description["HostConfig"]["MemorySwap"] > 0
    assert description["HostConfig"]["Init"]
    assert description["HostConfig"]["PidsLimit"] > 0
    assert {(one["Name"], one["Soft"]) for one in description["HostConfig"]["Ulimits"]} == {("nofile", 8192)}
    assert description["Config"]["User"].partition(":")[0] not in ("", "0", "root")
    addresses = {
        binding["HostIp"] for bindings in description["HostConfig"]["PortBindings"].values() for binding in bindings
    }
    assert addresses <= {"127.0.0.1"}


def test_the_restrictions_hold_inside_the_container(images: Engine, stack: Monitoring) -> None:
    status = run_inside(images, "print(open('/proc/self/status').read())")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == [str(SERVICE_USER)] * 4
    assert {int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {0}
    assert fields["NoNewPrivs"] == "1"
    write_attempt = (
        "import errno\ntry: open('/opt/qualms/x', 'w')\nexcept OSError as e: print(errno.errorcode[e.errno])"
    )
    assert run_inside(images, write_attempt) == "EROFS"


def test_the_image_contains_neither_training_packages_nor_build_tools(images: Engine, stack: Monitoring) -> None:
    packages = (
        "import importlib.util as u; print([n for n in ('torch', 'scipy', 'onnx', 'sklearn', 'pip') if u.find_spec(n)])"
    )
    assert run_inside(images, packages) == "[]"
    tools = "import shutil; print([n for n in ('gcc', 'cc', 'make', 'git', 'curl') if shutil.which(n)])"
    assert run_inside(images, tools) == "[]"


def test_prometheus_scrapes_every_job_and_every_rule_is_healthy(stack: Monitoring) -> None:
    for job in ("qualms", "prometheus", "alertmanager"):
        wait_until(partial(stack.is_up, job), f"Prometheus scrapes {job}")
    wait_until(lambda: set(stack.rules().values()) == {"ok"}, "every rule is healthy")
    assert {DRIFT_ALERT, ENCODING_ALERT} <= set(stack.rules())


def test_the_demo_drift_raises_the_alert_and_ends_it(stack: Monitoring) -> None:
    wait_until(lambda: stack.is_firing(DRIFT_ALERT), "the alert fires")
    wait_until(lambda: not stack.is_firing(DRIFT_ALERT), "the alert ends")


def test_every_query_of_every_dashboard_returns_data(stack: Monitoring) -> None:
    for panel, expr in dashboard_queries():
        wait_until(partial(stack.has_data, expr), f"{panel} has data: {expr}")


def test_images_in_an_uncalibrated_encoding_raise_an_alert(images: Engine, stack: Monitoring) -> None:
    assert not stack.is_firing(ENCODING_ALERT)
    jpeg = ("--url", "http://127.0.0.1:8000", "--rate", "40", "--seconds", 600 / SPEEDUP, "--as-sent", "jpeg:50")
    images.run("docker", "exec", "--detach", container(images, "service"), "qualms", "demo", "traffic", *jpeg)
    wait_until(lambda: stack.is_firing(ENCODING_ALERT), "the encoding alert fires")


def test_the_score_log_is_written_to_the_mounted_folder(clone: Path, stack: Monitoring) -> None:
    log = clone / "scores" / "log.jsonl"
    wait_until(lambda: log.read_bytes().count(b"\n") > 100, "the scores of served images are in the file")
    assert stack.has_data("qualms_score_log_dropped_images == 0")


def test_with_keys_prometheus_and_the_demo_go_on_and_others_get_401(
    images: Engine, clone: Path, tmp_path: Path
) -> None:
    """A second stack of the same file, with the variables of docker/README.md."""
    folder = tmp_path / "keys"
    folder.mkdir()
    command = [sys.executable, "-m", "qualms", "keys", "add", "demo", "--file", str(folder / "keys")]
    token = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()
    for path in (folder, folder / "keys"):
        os.chown(path, SERVICE_USER, SERVICE_USER)
    ports = {name: str(free_port()) for name in ("SERVICE_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT")}
    variables = {
        **ports,
        "QUALMS_MODEL": "demo",
        "KEYS": str(folder),
        "QUALMS_KEYS_FILE": "/keys/keys",
        "QUALMS_ALLOW_ANONYMOUS": "false",
        "QUALMS_API_KEY": token,
        "SERVICE_CPUS": "1",
    }
    compose = partial(
        images.run,
        *compose_command(),
        *("-p", f"{PROJECT}keys", "-f", clone / "docker-compose.yml", "--profile", "demo"),
        **variables,
    )
    try:
        compose("up", "--detach", "--no-build", *STARTED)
        monitoring = Monitoring(
            f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}", f"http://127.0.0.1:{ports['ALERTMANAGER_PORT']}"
        )
        wait_until(monitoring.is_ready, "Prometheus and Alertmanager are ready")
        answered = 'qualms_key_requests_total{key="demo", code="200"} > 20'
        wait_until(lambda: monitoring.has_data(answered), "Prometheus has the requests of the demo's key")
        address = f"http://127.0.0.1:{ports['SERVICE_PORT']}"
        for route in ("/predict", "/models", "/metrics"):
            assert httpx.get(f"{address}{route}").status_code == 401, route
        key = {"Authorization": f"Bearer {token}"}
        assert httpx.get(f"{address}/models", headers=key).status_code == 200
        assert httpx.get(f"{address}/livez").status_code == 200
        assert token not in compose("logs")
    finally:
        compose("down", "--volumes")


def test_containers_stop_on_sigterm_with_exit_code_0(images: Engine, stack: Monitoring) -> None:
    names = {service: container(images, service) for service in ("traffic", "service")}
    for service, name in names.items():
        images.run("docker", "stop", "--time", "35", name)
        assert images.inspect(name)["State"]["ExitCode"] == 0, service
