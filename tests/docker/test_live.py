"""The service, Prometheus and Alertmanager as plain processes: real scrapes, real rules, every query of every panel."""

import os
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tests.docker.stack import DOCKER, FASTER, Watch, dashboard_queries, faster_prometheus, missing, until

NEEDED = ("prometheus", "prometheus-alertmanager")
DRIFT = "QualmsFlagRateAbovePromise"

pytestmark = pytest.mark.skipif(bool(missing(*NEEDED)), reason=missing(*NEEDED))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Start a program that ends with the tests; what it says goes to a file."""
    folder = tmp_path_factory.mktemp("logs")
    with ExitStack() as stack:

        def run(*command: object, **variables: str) -> None:
            log = stack.enter_context((folder / Path(str(command[0])).name).open("a"))
            environment = {name: value for name, value in os.environ.items() if not name.startswith("QUALMS_")}
            words = [str(word) for word in command]
            process = stack.enter_context(
                subprocess.Popen(words, env={**environment, **variables}, stdout=log, stderr=log)
            )
            stack.callback(process.kill)

        yield run


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., None]) -> Watch:
    """Everything running, with the demo's traffic."""
    folder = tmp_path_factory.mktemp("prometheus")
    service, prometheus, alertmanager = (f"127.0.0.1:{free_port()}" for _ in range(3))
    qualms = (sys.executable, Path(sysconfig.get_path("scripts")) / "qualms")
    config = faster_prometheus(
        folder, {"service:8000": service, "localhost:9090": prometheus, "alertmanager:9093": alertmanager}
    )
    start(*qualms, "serve", "demo", QUALMS_PORT=service.partition(":")[2], QUALMS_DEVICE="cpu", QUALMS_THREADS="1")
    start(
        "prometheus-alertmanager",
        f"--config.file={DOCKER / 'alertmanager' / 'alertmanager.yml'}",
        f"--storage.path={folder / 'alerts'}",
        f"--web.listen-address={alertmanager}",
        "--cluster.listen-address=",
    )
    start(
        "prometheus",
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={prometheus}",
    )
    watch = Watch(f"http://{prometheus}", f"http://{alertmanager}")
    until(watch.ready, "Prometheus and Alertmanager are ready")
    until(lambda: watch.is_up("qualms"), "Prometheus scrapes the service")
    start(*qualms, "demo", "traffic", "--url", f"http://{service}", "--rate", "40", "--period", 1800 / FASTER)
    return watch


def test_drift_raises_the_alert_and_its_end_clears_it(watch: Watch) -> None:
    until(lambda: watch.fires(DRIFT), "the drift is told")
    until(lambda: watch.fires("QualmsPValuesNotUniform"), "the p-values are told")
    until(lambda: not watch.fires(DRIFT), "the alert ends")


def test_every_rule_is_evaluated_without_an_error(watch: Watch) -> None:
    until(lambda: set(watch.rules().values()) == {"ok"}, "every rule works")
    assert {DRIFT, "QualmsDown", "model:qualms_ood:evidence5m"} <= set(watch.rules())


@pytest.mark.parametrize("alert", ["QualmsDown", "QualmsErrorsBurnFast", "QualmsQueueSaturated", "QualmsNoTraffic"])
def test_what_is_well_is_not_told(watch: Watch, alert: str) -> None:
    """In the end: a machine that is busy elsewhere may look down for a moment, at thirty times the usual pace."""
    until(lambda: not watch.fires(alert), f"{alert} is silent")


def test_every_query_of_every_dashboard_returns_data(watch: Watch) -> None:
    queries = dashboard_queries()
    assert len(queries) >= 30
    for panel, expr in queries:
        until(partial(watch.has_data, expr), f"{panel} has data: {expr}")


def test_a_service_that_is_down_hides_what_that_explains_and_nothing_else(watch: Watch) -> None:
    """Last, as these alerts, of jobs that are not there, stay in Alertmanager for minutes."""
    explained = ["QualmsErrorsBurnFast", "QualmsLatencyBurnsSlowly", "QualmsQueueSaturated", "QualmsNoTraffic"]
    watch.tell(
        {"alertname": "QualmsDown", "job": "one", "instance": "a"},
        *({"alertname": name, "job": "one"} for name in (*explained, DRIFT)),
        {"alertname": "QualmsNoTraffic", "job": "other"},
    )
    hidden = dict.fromkeys(explained, "suppressed")
    until(lambda: watch.states("one") == {**hidden, "QualmsDown": "active", DRIFT: "active"}, "only those are hidden")
    assert watch.states("other") == {"QualmsNoTraffic": "active"}
