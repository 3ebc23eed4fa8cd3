"""docker-compose.yml, started for real on base images made here, in an engine of its own that ends with the tests.

It needs root, Debian's packages docker.io, docker-compose (or Compose v2), mmdebstrap, prometheus,
prometheus-alertmanager and busybox, and an index to install Python packages from. Grafana's image cannot be made here.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.docker.stack import FASTER, ROOT, Watch, dashboard_queries, faster_prometheus, missing, until

NEEDED = ("dockerd", "docker", "mmdebstrap", "prometheus", "prometheus-alertmanager", "busybox", "git")
DRIFT = "QualmsFlagRateAbovePromise"
MOST_BYTES = 350_000_000
CODE_BYTES = 1_000_000
"""of the build context besides the embedded models"""
PROJECT = "qualmstest"
STARTED = ("service", "prometheus", "alertmanager", "traffic")

pytestmark = [
    pytest.mark.skipif(bool(missing(*NEEDED)), reason=missing(*NEEDED)),
    pytest.mark.skipif(os.geteuid() != 0, reason="a container engine is started as root only"),
]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


class Engine:
    """A Docker engine of our own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.host = f"unix://{folder}/socket"
        self.variables = {**os.environ, "DOCKER_HOST": self.host}

    def run(self, *command: object, **variables: str) -> str:
        """What a command against this engine prints; its complaints if it fails."""
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
        """What the engine knows about a container or an image."""
        found: dict[str, Any] = json.loads(self.run("docker", "inspect", name))[0]
        return found


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """The engine, running; the tests are skipped, with its last words, where it does not start."""
    if subprocess.run(["docker", "info"], capture_output=True, check=False).returncode == 0:
        pytest.skip("a container engine is running here already, and a second one would rewrite its firewall")
    folder = Path(tempfile.mkdtemp(prefix="qs-"))  # short, as a socket's path must be
    running = Engine(folder)
    log = folder / "log"
    with log.open("w") as file:
        folders = (f"--data-root={folder}/data", f"--exec-root={folder}/exec", f"--pidfile={folder}/pid")
        process = subprocess.Popen(["dockerd", *folders, f"--host={running.host}"], stdout=file, stderr=file)
    try:
        give_up = time.monotonic() + 60
        while subprocess.run(["docker", "info"], env=running.variables, capture_output=True, check=False).returncode:
            if process.poll() is not None or time.monotonic() > give_up:
                last = [line for line in log.read_text().splitlines() if line][-1:]
                pytest.skip(f"the container engine does not start: {' '.join(last)[-300:]}")
            time.sleep(0.5)
        yield running
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        subprocess.run(["umount", folder / "exec" / "netns" / "default"], capture_output=True, check=False)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a clone of the present state would hold, and nothing else."""
    folder = tmp_path_factory.mktemp("clone")
    listing = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        capture_output=True,
        check=False,
    )
    if listing.returncode:
        pytest.skip("this is not a git checkout, so there is no saying what a clone would hold")
    for name in listing.stdout.decode().split("\0"):
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def images(engine: Engine, clone: Path) -> Engine:
    """The engine with base images made here and the service's image built from the clone."""
    engine.run(Path(__file__).parent / "base_images.sh", engine.folder / "base")
    build = ("docker", "build", "--quiet", "--network", "host", "--target", "cpu", "--tag", "qualms:cpu")
    engine.run(*build, "--file", clone / "docker" / "Dockerfile", clone)
    return engine


def compose_command() -> list[str]:
    """Compose v2 if there is one, else its predecessor."""
    if subprocess.run(["docker", "compose", "version"], capture_output=True, check=False).returncode == 0:
        return ["docker", "compose"]
    if shutil.which("docker-compose") is None:
        pytest.skip("neither docker compose nor docker-compose is installed")
    return ["docker-compose"]


@pytest.fixture(scope="module")
def stack(images: Engine, clone: Path) -> Iterator[Watch]:
    """The compose file with the profile `demo`, up; only Prometheus' clock runs faster than it says."""
    fast = clone / "fast"
    faster_prometheus(fast)
    override = {
        "services": {
            "prometheus": {
                "volumes": [
                    f"{fast}/prometheus.yml:/etc/prometheus/prometheus.yml:ro",
                    f"{fast}/rules:/etc/prometheus/rules:ro",
                ]
            }
        }
    }
    (clone / "fast.yml").write_text(yaml.safe_dump(override))
    ports = {name: str(free_port()) for name in ("SERVICE_PORT", "PROMETHEUS_PORT", "ALERTMANAGER_PORT")}
    variables = {
        **ports,
        "QUALMS_MODEL": "demo",
        "SERVICE_CPUS": str(min(2, os.cpu_count() or 1)),
        "DEMO_RATE": "40",
        "DEMO_PERIOD": str(1800 // FASTER),
    }
    files = ("-f", clone / "docker-compose.yml", "-f", clone / "fast.yml")
    compose = partial(images.run, *compose_command(), "-p", PROJECT, *files, "--profile", "demo", **variables)
    try:
        compose("up", "--detach", "--no-build", *STARTED)
        watch = Watch(f"http://127.0.0.1:{ports['PROMETHEUS_PORT']}", f"http://127.0.0.1:{ports['ALERTMANAGER_PORT']}")
        until(watch.ready, "Prometheus and Alertmanager are ready")
        yield watch
    finally:
        compose("down", "--volumes")


def container(engine: Engine, service: str) -> str:
    """The container's id."""
    return engine.run("docker", "ps", "-q", "-f", f"label=com.docker.compose.service={service}").strip()


def inside(engine: Engine, program: str) -> str:
    """What a Python program prints in the service's container."""
    return engine.run("docker", "exec", container(engine, "service"), "python3", "-c", program).strip()


# The image


def test_the_context_is_small(images: Engine, clone: Path, tmp_path: Path) -> None:
    """An image that is the context and nothing else has its size."""
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    images.run("docker", "build", "--quiet", "--tag", "context", "--file", tmp_path / "Dockerfile", clone)
    size = images.inspect("context")["Size"]
    models = sum(path.stat().st_size for path in (clone / "service" / "qualms" / "models").glob("*.onnx"))
    print(f"context: {size / 1e6:.1f} MB, of which the embedded models are {models / 1e6:.1f}")
    assert 500_000 < size - models < CODE_BYTES


def test_the_image_is_small(images: Engine) -> None:
    size = images.inspect("qualms:cpu")["Size"]
    print(
        f"qualms:cpu: {size / 1e6:.0f} MB, of which the base is {images.inspect('python:3.11-slim')['Size'] / 1e6:.0f}"
    )
    assert size <= MOST_BYTES
    for path in (ROOT / "README.md", ROOT / "docker" / "README.md"):
        stated = re.search(r"CPU image is (\d+) MB", " ".join(path.read_text(encoding="utf-8").split()))
        assert stated, f"{path} states the size"
        assert 1e6 * int(stated[1]) == pytest.approx(size, rel=0.05)


def test_the_image_names_a_user_by_number_and_says_how_to_ask_for_its_health(images: Engine) -> None:
    config = images.inspect("qualms:cpu")["Config"]
    assert config["User"] == "10001:10001"
    assert "/readyz" in " ".join(config["Healthcheck"]["Test"])


# The stack


@pytest.mark.parametrize("service", ["service", "prometheus", "alertmanager"])
def test_it_gets_healthy(images: Engine, stack: Watch, service: str) -> None:
    name = container(images, service)
    until(lambda: images.inspect(name)["State"]["Health"]["Status"] == "healthy", f"{service} is healthy")


@pytest.mark.parametrize("service", STARTED)
def test_it_runs_read_only_as_nobody_special_and_without_capabilities(
    images: Engine, stack: Watch, service: str
) -> None:
    found = images.inspect(container(images, service))
    assert found["HostConfig"]["ReadonlyRootfs"]
    assert found["HostConfig"]["CapDrop"] == ["ALL"]
    assert found["HostConfig"]["Memory"] > 0
    assert found["Config"]["User"].partition(":")[0] not in ("", "0", "root")
    addresses = {binding["HostIp"] for bindings in found["HostConfig"]["PortBindings"].values() for binding in bindings}
    assert addresses <= {"127.0.0.1"}


def test_from_inside_it_is_as_the_file_says(images: Engine, stack: Watch) -> None:
    status = inside(images, "print(open('/proc/self/status').read())")
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    assert fields["Uid"].split() == ["10001"] * 4
    assert {int(fields[name], 16) for name in ("CapEff", "CapPrm", "CapBnd")} == {0}
    assert fields["NoNewPrivs"] == "1"
    tried = "import errno\ntry: open('/opt/qualms/x', 'w')\nexcept OSError as e: print(errno.errorcode[e.errno])"
    assert inside(images, tried) == "EROFS"


def test_it_holds_neither_torch_nor_tools_to_build_with(images: Engine, stack: Watch) -> None:
    wanted = (
        "import importlib.util as u; print([n for n in ('torch', 'scipy', 'onnx', 'sklearn', 'pip') if u.find_spec(n)])"
    )
    assert inside(images, wanted) == "[]"
    tools = "import shutil; print([n for n in ('gcc', 'cc', 'make', 'git', 'curl') if shutil.which(n)])"
    assert inside(images, tools) == "[]"


def test_prometheus_scrapes_it_and_every_rule_works(stack: Watch) -> None:
    for job in ("qualms", "prometheus", "alertmanager"):
        until(partial(stack.is_up, job), f"Prometheus scrapes {job}")
    until(lambda: set(stack.rules().values()) == {"ok"}, "every rule works")
    assert DRIFT in stack.rules()


def test_the_demo_raises_the_alert_and_clears_it(stack: Watch) -> None:
    until(lambda: stack.fires(DRIFT), "the drift is told")
    until(lambda: not stack.fires(DRIFT), "the alert ends")


def test_every_query_of_every_dashboard_returns_data(stack: Watch) -> None:
    for panel, expr in dashboard_queries():
        until(partial(stack.has_data, expr), f"{panel} has data: {expr}")


def test_it_stops_when_asked_and_ends_with_nothing_wrong(images: Engine, stack: Watch) -> None:
    names = {service: container(images, service) for service in ("traffic", "service")}
    for service, name in names.items():
        images.run("docker", "stop", "--time", "35", name)
        assert images.inspect(name)["State"]["ExitCode"] == 0, service
