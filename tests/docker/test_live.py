"""The service, Prometheus and Alertmanager run as plain processes: scrapes, alerts and every dashboard query."""

import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import pytest
from tests.docker.stack import (
    DOCKER,
    DRIFT_ALERT,
    ENCODING_ALERT,
    SPEEDUP,
    Monitoring,
    dashboard_queries,
    free_port,
    missing_programs,
    wait_until,
    write_accelerated_prometheus,
)

MISSING = missing_programs("prometheus", "prometheus-alertmanager")

QUALMS = (sys.executable, Path(sysconfig.get_path("scripts")) / "qualms")

pytestmark = [pytest.mark.container, pytest.mark.skipif(bool(MISSING), reason=MISSING)]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., None]]:
    """Start a program that is killed after the tests; its output goes to a file."""
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
def service() -> str:
    """The address of the service."""
    return f"127.0.0.1:{free_port()}"


@pytest.fixture(scope="module")
def monitoring(tmp_path_factory: pytest.TempPathFactory, start: Callable[..., None], service: str) -> Monitoring:
    """Everything running, with demo traffic."""
    folder = tmp_path_factory.mktemp("prometheus")
    prometheus, alertmanager = (f"127.0.0.1:{free_port()}" for _ in range(2))
    config = write_accelerated_prometheus(
        folder, {"service:8001": service, "localhost:9090": prometheus, "alertmanager:9093": alertmanager}
    )
    start(*QUALMS, "serve", "demo", QUALMS_PORT=service.partition(":")[2], QUALMS_DEVICE="cpu", QUALMS_THREADS="1")
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
    monitoring = Monitoring(f"http://{prometheus}", f"http://{alertmanager}")
    wait_until(monitoring.is_ready, "Prometheus and Alertmanager are ready")
    wait_until(lambda: monitoring.is_up("qualms"), "Prometheus scrapes the service")
    start(*QUALMS, "demo", "traffic", "--url", f"http://{service}", "--rate", "40", "--period", 1800 / SPEEDUP)
    return monitoring


def test_drift_raises_both_uncertainty_alerts_and_the_flag_rate_alert_ends(monitoring: Monitoring) -> None:
    wait_until(lambda: monitoring.is_firing(DRIFT_ALERT), "the flag-rate alert fires")
    wait_until(lambda: monitoring.is_firing("QualmsPValuesNotUniform"), "the p-value alert fires")
    wait_until(lambda: not monitoring.is_firing(DRIFT_ALERT), "the flag-rate alert ends")


def test_every_rule_is_evaluated_without_an_error(monitoring: Monitoring) -> None:
    wait_until(lambda: set(monitoring.rules().values()) == {"ok"}, "every rule is healthy")
    assert {DRIFT_ALERT, "QualmsDown", "model:qualms_ood:evidence5m"} <= set(monitoring.rules())


@pytest.mark.parametrize("alert", ["QualmsDown", "QualmsErrorsBurnFast", "QualmsQueueSaturated", "QualmsNoTraffic"])
def test_other_alerts_do_not_fire(monitoring: Monitoring, alert: str) -> None:
    """Waits, because at this speed a busy machine may fire an alert for a moment."""
    wait_until(lambda: not monitoring.is_firing(alert), f"{alert} does not fire")


def test_every_query_of_every_dashboard_returns_data(monitoring: Monitoring) -> None:
    queries = dashboard_queries()
    assert len(queries) >= 30
    for panel, expr in queries:
        wait_until(partial(monitoring.has_data, expr), f"{panel} has data: {expr}")


def test_images_in_an_uncalibrated_encoding_raise_an_alert_that_ends_after_them(
    monitoring: Monitoring, start: Callable[..., None], service: str
) -> None:
    """The model was calibrated on PNG files, and the demo traffic sends them. Must run after the tests of that traffic."""
    wait_until(lambda: monitoring.has_data("model:qualms_uncalibrated:ratio15m == 0"), "PNG files count as calibrated")
    assert not monitoring.is_firing(ENCODING_ALERT)
    jpeg = ("--as-sent", "jpeg:50", "--rate", "40", "--seconds", 600 / SPEEDUP)
    start(*QUALMS, "demo", "traffic", "--url", f"http://{service}", *jpeg)
    wait_until(lambda: monitoring.is_firing(ENCODING_ALERT), "the encoding alert fires")
    assert "most often jpeg 50-59, smaller size." in monitoring.description(ENCODING_ALERT)
    wait_until(lambda: not monitoring.is_firing(ENCODING_ALERT), "the encoding alert ends")


def test_an_outage_suppresses_the_alerts_it_explains_and_no_others(monitoring: Monitoring) -> None:
    """Must run last, because the alerts it sends stay in Alertmanager for minutes."""
    explained = ["QualmsErrorsBurnFast", "QualmsLatencyBurnsSlowly", "QualmsQueueSaturated", "QualmsNoTraffic"]
    monitoring.send_alerts(
        {"alertname": "QualmsDown", "job": "one", "instance": "a"},
        *({"alertname": name, "job": "one"} for name in (*explained, DRIFT_ALERT)),
        {"alertname": "QualmsNoTraffic", "job": "other"},
    )
    expected = {**dict.fromkeys(explained, "suppressed"), "QualmsDown": "active", DRIFT_ALERT: "active"}
    wait_until(lambda: monitoring.alert_states("one") == expected, "only the explained alerts are suppressed")
    assert monitoring.alert_states("other") == {"QualmsNoTraffic": "active"}
