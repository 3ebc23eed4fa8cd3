"""What the tests of a running stack share: a faster copy of Prometheus' files, and questions to a live Prometheus."""

import json
import re
import shutil
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "docker"
PROMETHEUS = DOCKER / "prometheus"
FASTER = 30
"""how many times faster than in production time passes: five minutes become ten seconds"""
PATIENCE = 150.0
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?<=\[)\d+[smhd](?=\])|(?<=offset )\d+[smhd]|(?<=for: )\d+[smhd]|(?<=interval: )\d+[smhd]")


def faster(text: str) -> str:
    """Rules or settings of Prometheus with every duration divided, though none below a second."""

    def shorten(found: re.Match[str]) -> str:
        length = int(found[0][:-1]) * _SECONDS[found[0][-1]]
        return f"{max(1, round(length / FASTER))}s"

    return _DURATION.sub(shorten, text)


def faster_prometheus(folder: Path, targets: dict[str, str] | None = None) -> Path:
    """A faster copy of docker/prometheus in `folder`, with other addresses in place of those of the compose file."""
    for source in (PROMETHEUS / "prometheus.yml", *PROMETHEUS.glob("rules/*.yml")):
        text = faster(source.read_text(encoding="utf-8"))
        for old, new in (targets or {}).items():
            text = text.replace(f"[{old}]", f"[{new}]")
        path = folder / source.relative_to(PROMETHEUS)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "prometheus.yml"


def dashboard_queries() -> list[tuple[str, str]]:
    """(panel, PromQL) of every query of every dashboard, with Grafana's variables filled in."""
    found = []
    for path in sorted(DOCKER.glob("grafana/dashboards/*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                expr = target["expr"].replace("$__rate_interval", "1m").replace("$model", ".*")
                found.append((f"{dashboard['title']}: {panel['title']}", expr))
    return found


def missing(*programs: str) -> str:
    """Why a test cannot run, or nothing: the programs that are not installed."""
    return ", ".join(f"{name} is not installed" for name in programs if shutil.which(name) is None)


def until(condition: Callable[[], object], what: str, patience: float = PATIENCE) -> None:
    """Wait until something is true; a server that does not answer yet, or not just now, is asked again."""
    give_up = time.monotonic() + patience
    while True:
        with suppress(OSError):
            if condition():
                return
        assert time.monotonic() < give_up, f"it did not happen: {what}"
        time.sleep(0.2)


class Watch:
    """A running Prometheus and Alertmanager to ask."""

    def __init__(self, prometheus: str, alertmanager: str) -> None:
        self._prometheus, self._alertmanager = prometheus, alertmanager

    def query(self, expr: str) -> list[dict[str, Any]]:
        """What an instant query gives now."""
        found = self._get(f"{self._prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")
        result: list[dict[str, Any]] = found["data"]["result"]
        return result

    def rules(self) -> dict[str, str]:
        """The health of every rule by its name."""
        groups = self._get(f"{self._prometheus}/api/v1/rules")["data"]["groups"]
        return {rule["name"]: rule["health"] for group in groups for rule in group["rules"]}

    def has_data(self, expr: str) -> bool:
        """Whether a query gives at least one number."""
        return any(sample["value"][1] != "NaN" for sample in self.query(expr))

    def is_up(self, job: str) -> bool:
        """Whether Prometheus scrapes a job."""
        return any(sample["value"][1] == "1" for sample in self.query(f'up{{job="{job}"}}'))

    def fires(self, alert: str) -> bool:
        """Whether an alert has reached Alertmanager and goes on."""
        found: list[Any] = self._get(f"{self._alertmanager}/api/v2/alerts?active=true&filter=alertname%3D{alert}")
        return bool(found)

    def tell(self, *alerts: dict[str, str]) -> None:
        """Send Alertmanager alerts of these labels, as Prometheus does."""
        body = json.dumps([{"labels": labels} for labels in alerts]).encode()
        request = urllib.request.Request(
            f"{self._alertmanager}/api/v2/alerts", data=body, headers={"Content-Type": "application/json"}
        )
        urllib.request.urlopen(request, timeout=10).close()

    def states(self, job: str) -> dict[str, str]:
        """By name, whether each alert of a job is active or suppressed."""
        found = self._get(f"{self._alertmanager}/api/v2/alerts?filter=job%3D{job}")
        return {alert["labels"]["alertname"]: alert["status"]["state"] for alert in found}

    def _get(self, url: str) -> Any:
        with urllib.request.urlopen(url, timeout=10) as reply:
            return json.loads(reply.read())

    def ready(self) -> bool:
        """Whether both answer."""
        for url in (self._prometheus, self._alertmanager):
            urllib.request.urlopen(f"{url}/-/ready", timeout=5).close()
        return True
