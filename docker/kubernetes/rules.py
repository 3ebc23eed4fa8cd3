"""Generate the PrometheusRule manifests from the rule files of Compose. After changing those, run this and commit the result.

python -m docker.kubernetes.rules
"""

from pathlib import Path
from typing import Any

import yaml

_COMPONENTS = Path(__file__).parent / "components"
_PROMETHEUS = Path(__file__).parents[1] / "prometheus"
_SOURCES = {"monitoring": ("qualms", "rules"), "gpu-alerts": ("qualms-gpu", "gpu")}
"""by component: the name of its PrometheusRule, and the folder with its rule files"""
_HEADER = "# Generated from docker/prometheus/{folder}/ by python -m docker.kubernetes.rules; change the rules there.\n"


class _Dumper(yaml.SafeDumper):
    """Writes expressions of several lines as blocks."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _string)


def texts() -> dict[Path, str]:
    """Return the text of each PrometheusRule by path."""
    return {
        _COMPONENTS / component / "prometheus-rule.yaml": _HEADER.format(folder=folder) + _text(name, folder)
        for component, (name, folder) in _SOURCES.items()
    }


def _text(name: str, folder: str) -> str:
    groups: list[Any] = []
    for path in sorted((_PROMETHEUS / folder).glob("*.yml")):
        groups += yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]
    manifest = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "qualms"}},
        "spec": {"groups": groups},
    }
    return yaml.dump(manifest, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


if __name__ == "__main__":
    for path, text in texts().items():
        path.write_text(text, encoding="utf-8")
