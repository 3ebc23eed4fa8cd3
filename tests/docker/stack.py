"""Helpers of the container tests: accelerated Prometheus rules, installed programs, and a client of a live Prometheus."""

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PROMETHEUS = DOCKER / "prometheus"
DRIFT_ALERT = "QualmsFlagRateAbovePromise"
ENCODING_ALERT = "QualmsUncalibratedEncoding"
SPEEDUP = 30
"""factor by which durations are shorter than in production: five minutes become ten seconds"""
_TIMEOUT_SECONDS = 150.0
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?<=\[)\d+[smhd](?=\])|(?<=offset )\d+[smhd]|(?<=for: )\d+[smhd]|(?<=interval: )\d+[smhd]")


def write_accelerated_prometheus(folder: Path, targets: dict[str, str] | None = None) -> Path:
    """Copy docker/prometheus to `folder` with durations divided by SPEEDUP (at least 1 s); return the configuration's path.

    `targets` maps addresses of the compose file to the addresses that replace them.
    """

    def shorten(duration: re.Match[str]) -> str:
        seconds = int(duration[0][:-1]) * _SECONDS[duration[0][-1]]
        return f"{max(1, round(seconds / SPEEDUP))}s"

    for source in (PROMETHEUS / "prometheus.yml", *PROMETHEUS.glob("rules/*.yml")):
        text = _DURATION.sub(shorten, source.read_text(encoding="utf-8"))
        for old, new in (targets or {}).items():
            text = text.replace(f"[{old}]", f"[{new}]")
        path = folder / source.relative_to(PROMETHEUS)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "prometheus.yml"


def dashboard_queries() -> list[tuple[str, str]]:
    """Return (panel title, PromQL) of every dashboard query, with Grafana's variables replaced."""
    queries = []
    for path in sorted(DOCKER.glob("grafana/dashboards/*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")
                queries.append((f"{dashboard['title']}: {panel['title']}", expr))
    return queries


def missing_programs(*programs: str) -> str:
    """Return the reason to skip a test: the programs that are not installed, or an empty string."""
    return ", ".join(f"{name} is not installed" for name in programs if shutil.which(name) is None)


def compose_command() -> list[str]:
    """Return the command of Compose v2, or else of v1; skip the test if neither is installed."""
    for command in (["docker", "compose"], ["docker-compose"]):
        if (
            shutil.which(command[0])
            and not subprocess.run([*command, "version"], capture_output=True, check=False).returncode
        ):
            return command
    pytest.skip("neither docker compose nor docker-compose is installed")


def free_port() -> int:
    """Return a TCP port that is free on the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_until(condition: Callable[[], object], expectation: str) -> None:
    """Wait until the condition is true. Connection errors count as false, because a server may still be starting."""
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while True:
        with suppress(OSError):
            if condition():
                return
        assert time.monotonic() < deadline, f"timed out: {expectation}"
        time.sleep(0.2)


class Monitoring:
    """A client of a running Prometheus and Alertmanager."""

    def __init__(self, prometheus: str, alertmanager: str) -> None:
        self._prometheus, self._alertmanager = prometheus, alertmanager

    def query(self, expr: str) -> list[dict[str, Any]]:
        """Return the samples of an instant query."""
        reply = _get(f"{self._prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")
        samples: list[dict[str, Any]] = reply["data"]["result"]
        return samples

    def rules(self) -> dict[str, str]:
        """Return the health of every rule by name."""
        groups = _get(f"{self._prometheus}/api/v1/rules")["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def has_data(self, expr: str) -> bool:
        """Return whether a query returns at least one number."""
        return any(sample["value"][1] != "NaN" for sample in self.query(expr))

    def is_up(self, job: str) -> bool:
        """Return whether Prometheus can scrape a job."""
        return any(sample["value"][1] == "1" for sample in self.query(f'up{{job="{job}"}}'))

    def is_firing(self, alert: str) -> bool:
        """Return whether an alert is active in Alertmanager."""
        return bool(_get(f"{self._alertmanager}/api/v2/alerts?active=true&filter=alertname%3D{alert}"))

    def description(self, alert: str) -> str:
        """Return the description of an active alert in Alertmanager."""
        (active,) = _get(f"{self._alertmanager}/api/v2/alerts?active=true&filter=alertname%3D{alert}")
        text: str = active["annotations"]["description"]
        return text

    def send_alerts(self, *alerts: dict[str, str]) -> None:
        """Send alerts with these labels to Alertmanager, as Prometheus does."""
        body = json.dumps([{"labels": labels} for labels in alerts]).encode()
        request = urllib.request.Request(
            f"{self._alertmanager}/api/v2/alerts", data=body, headers={"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=10).close()

    def alert_states(self, job: str) -> dict[str, str]:
        """Return the state ("active" or "suppressed") of each alert of a job, by alert name."""
        alerts = _get(f"{self._alertmanager}/api/v2/alerts?filter=job%3D{job}")
        return {alert["labels"]["alertname"]: alert["status"]["state"] for alert in alerts}

    def is_ready(self) -> bool:
        """Return True if both are ready, and raise OSError otherwise."""
        for url in (self._prometheus, self._alertmanager):
            urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
        return True


def _get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=10) as reply:
        return json.loads(reply.read())
