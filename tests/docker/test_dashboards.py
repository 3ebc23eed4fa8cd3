import json
from typing import Any

import pytest
from docker.grafana import build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard
from tests.docker.stack import DOCKER

FILES = sorted(DOCKER.glob("grafana/dashboards/*.json"))
DASHBOARDS: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in FILES]
PANELS: list[dict[str, Any]] = [panel for dashboard in DASHBOARDS for panel in dashboard["panels"]]

register_default_plugins()


def test_the_files_match_the_code() -> None:
    assert {path.name: path.read_text(encoding="utf-8") for path in FILES} == build.texts(), (
        "run python -m docker.grafana.build"
    )


def lost_fields(original: Any, parsed: Any, path: str = "") -> list[str]:
    """Return the path of every value of a document that the schema dropped or changed."""
    if isinstance(original, dict):
        if not isinstance(parsed, dict):
            return [path]
        return [
            lost
            for name, value in original.items()
            for lost in (lost_fields(value, parsed[name], f"{path}.{name}") if name in parsed else [f"{path}.{name}"])
        ]
    if isinstance(original, list):
        if not isinstance(parsed, list) or len(original) != len(parsed):
            return [path]
        pairs = enumerate(zip(original, parsed, strict=True))
        return [lost for index, (a, b) in pairs for lost in lost_fields(a, b, f"{path}[{index}]")]
    return [] if original == parsed else [path]


def parse(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Read a dashboard into Grafana's types and write it again."""
    text: str = JSONEncoder().encode(Dashboard.from_json(dashboard))
    written: dict[str, Any] = json.loads(text)
    return written


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: str(dashboard["uid"]))
def test_every_field_is_in_grafanas_schema(dashboard: dict[str, Any]) -> None:
    assert lost_fields(dashboard, parse(dashboard)) == []


def test_a_misspelled_field_is_detected() -> None:
    wrong = json.loads(json.dumps(DASHBOARDS[0]))
    wrong["panels"][0]["options"]["grpahMode"] = "area"
    assert lost_fields(wrong, parse(wrong)) == [".panels[0].options.grpahMode"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_every_panel_has_a_unit_and_a_description(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert len(panel["description"]) > 20
    assert panel["description"].endswith(".")
    assert panel["targets"]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: str(dashboard["uid"]))
def test_panels_do_not_overlap_and_have_unique_ids(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        grid = panel["gridPos"]
        cells = {(grid["x"] + x, grid["y"] + y) for x in range(grid["w"]) for y in range(grid["h"])}
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_the_dashboards_have_the_required_panels() -> None:
    service, uncertainty = ({panel["title"] for panel in dashboard["panels"]} for dashboard in DASHBOARDS)
    assert {
        "Flag rate against its guarantee",
        "Flag rate by predicted class",
        "p-values over time",
        "Epistemic uncertainty",
        "Epistemic uncertainty, reference",
        "Total uncertainty",
        "Total uncertainty, reference",
        "Most flagged classes",
        "Rejected by trust",
        "Images by format and quality",
        "Images in uncalibrated encodings",
    } <= uncertainty
    assert {"Traffic by status", "Latency", "Queue", "Batch size", "Rejections by reason", "Provider"} <= service
