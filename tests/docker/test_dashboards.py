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


def test_the_files_are_what_the_code_writes() -> None:
    assert {path.name: path.read_text(encoding="utf-8") for path in FILES} == build.texts(), (
        "run python -m docker.grafana.build"
    )


def unknown(given: Any, kept: Any, path: str = "") -> list[str]:
    """Every place of a document that a schema did not take over."""
    if isinstance(given, dict):
        if not isinstance(kept, dict):
            return [path]
        return [
            place
            for name, value in given.items()
            for place in (unknown(value, kept[name], f"{path}.{name}") if name in kept else [f"{path}.{name}"])
        ]
    if isinstance(given, list):
        if not isinstance(kept, list) or len(given) != len(kept):
            return [path]
        pairs = enumerate(zip(given, kept, strict=True))
        return [place for index, (a, b) in pairs for place in unknown(a, b, f"{path}[{index}]")]
    return [] if given == kept else [path]


def through_the_schema(dashboard: dict[str, Any]) -> dict[str, Any]:
    """Read by Grafana's own types and written again."""
    text: str = JSONEncoder().encode(Dashboard.from_json(dashboard))
    written: dict[str, Any] = json.loads(text)
    return written


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: str(dashboard["uid"]))
def test_grafanas_schema_knows_every_field(dashboard: dict[str, Any]) -> None:
    assert unknown(dashboard, through_the_schema(dashboard)) == []


def test_a_field_that_grafana_does_not_know_would_be_found() -> None:
    wrong = json.loads(json.dumps(DASHBOARDS[0]))
    wrong["panels"][0]["options"]["grpahMode"] = "area"
    assert unknown(wrong, through_the_schema(wrong)) == [".panels[0].options.grpahMode"]


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_every_panel_has_a_unit_and_says_what_it_tells(panel: dict[str, Any]) -> None:
    assert panel["fieldConfig"]["defaults"]["unit"]
    assert len(panel["description"]) > 20
    assert panel["description"].endswith(".")
    assert panel["targets"]


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: str(dashboard["uid"]))
def test_panels_do_not_overlap_and_have_numbers_of_their_own(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert taken.isdisjoint(cells), panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_what_the_dashboards_are_for_is_on_them() -> None:
    doubt, service = ({panel["title"] for panel in dashboard["panels"]} for dashboard in DASHBOARDS)
    assert {
        "Flag rate against its promise",
        "Flag rate by predicted class",
        "p-values over time",
        "Epistemic uncertainty",
        "Epistemic uncertainty, reference",
        "Total uncertainty",
        "Total uncertainty, reference",
        "Most doubted classes",
        "Rejected by trust",
    } <= doubt
    assert {"Traffic by status", "Latency", "Queue", "Batch size", "Rejections by reason", "Provider"} <= service
