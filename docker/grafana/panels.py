"""Grafana panels and dashboards as JSON objects. Each panel type is one function."""

from itertools import count
from typing import Any

Panel = dict[str, Any]
SOURCE = {"type": "prometheus", "uid": "prometheus"}
MODEL = 'model=~"$model"'
WINDOW = "$__rate_interval"
WIDTH = 24
LATEST_VALUE = {"values": False, "calcs": ["lastNotNull"], "fields": ""}


def query(expr: str, legend: str = "", **more: Any) -> dict[str, Any]:
    """Return one PromQL query. `legend` may refer to labels as {{label}}."""
    return {"datasource": SOURCE, "expr": expr, "legendFormat": legend or "__auto", **more}


def panel(kind: str, title: str, description: str, unit: str, *queries: dict[str, Any], **more: Any) -> Panel:
    """Return a panel of any type. `more` may hold `options`, `limit` (red from there on), `custom`, `height` and `width`."""
    defaults: dict[str, Any] = {"unit": unit}
    if "limit" in more:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": more["limit"]}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if "custom" in more:
        defaults["custom"] = more["custom"]
    targets = [{"refId": chr(ord("A") + index), **target} for index, target in enumerate(queries)]
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": SOURCE,
        "gridPos": {"h": more.get("height", 8), "w": more.get("width", 12), "x": 0, "y": 0},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": more.get("options", {}),
        "targets": targets,
    }


def timeseries(title: str, description: str, unit: str, *queries: dict[str, Any], **more: Any) -> Panel:
    """Draw values over time, and the limit as a dashed line."""
    custom: dict[str, Any] = {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never"}
    if "limit" in more:
        custom["thresholdsStyle"] = {"mode": "dashed"}
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel("timeseries", title, description, unit, *queries, custom=custom, options=options, **more)


def stat(
    title: str, description: str, unit: str, expr: str, legend: str = "{{model}} {{version}}", **more: Any
) -> Panel:
    """Show the latest value of each series in large type."""
    options = {
        "reduceOptions": LATEST_VALUE,
        "textMode": "value_and_name",
        "colorMode": "value" if "limit" in more else "none",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    }
    more = {"height": 4, "width": 6, **more}
    return panel("stat", title, description, unit, query(expr, legend), options=options, **more)


def label_stat(title: str, description: str, expr: str, legend: str, **more: Any) -> Panel:
    """Show the legend of each series in large type, without its value."""
    result = stat(title, description, "none", expr, legend, **more)
    result["options"] |= {"textMode": "name", "graphMode": "none"}
    return result


def bar_gauge(title: str, description: str, unit: str, target: dict[str, Any], **more: Any) -> Panel:
    """Draw the latest value of each series as a bar. For histogram buckets, set `format="heatmap"` in the query."""
    options = {
        "reduceOptions": LATEST_VALUE,
        "orientation": "horizontal",
        "displayMode": "basic",
        "valueMode": "color",
        "namePlacement": "left",
        "showUnfilled": False,
        "sizing": "auto",
        "minVizWidth": 8,
        "minVizHeight": 10,
        "maxVizHeight": 300,
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
    }
    latest = {**target, "instant": True, "range": False}
    return panel("bargauge", title, description, unit, latest, options=options, **more)


def heatmap(title: str, description: str, unit: str, expr: str, **more: Any) -> Panel:
    """Draw a histogram over time."""
    options = {
        "calculate": False,
        "color": {
            "mode": "scheme",
            "scheme": "Oranges",
            "steps": 64,
            "exponent": 0.5,
            "fill": "dark-orange",
            "reverse": False,
        },
        "cellGap": 1,
        "cellValues": {"unit": "short"},
        "yAxis": {"unit": unit, "axisPlacement": "left"},
        "rowsFrame": {"layout": "auto"},
        "filterValues": {"le": 1e-9},
        "legend": {"show": True},
        "tooltip": {"mode": "single", "yHistogram": True, "showColorScale": True},
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
    }
    return panel("heatmap", title, description, unit, query(expr, "{{le}}", format="heatmap"), options=options, **more)


def table(title: str, description: str, expr: str, *labels: str, **more: Any) -> Panel:
    """List the given labels of each series, one series per row."""
    options = {
        "showHeader": True,
        "cellHeight": "sm",
        "footer": {"show": False, "reducer": ["sum"], "countRows": False, "fields": ""},
    }
    latest = query(expr, format="table", instant=True, range=False)
    result = panel("table", title, description, "none", latest, options=options, **more)
    result["transformations"] = [{"id": "filterFieldsByName", "options": {"include": {"names": list(labels)}}}]
    return result


def dashboard(uid: str, title: str, description: str, rows: list[list[Panel]], *, by_model: bool) -> dict[str, Any]:
    """Return a dashboard with its panels laid out row by row; every row must fill the page's width.

    `by_model` adds a menu that selects models.
    """
    y = 0
    ids = count(1)
    for row in rows:
        x = 0
        for item in row:
            item["id"] = next(ids)
            item["gridPos"] |= {"x": x, "y": y}
            x += item["gridPos"]["w"]
        if x != WIDTH:
            raise ValueError(f"The row that starts with {row[0]['title']!r} has width {x}; the width must be {WIDTH}.")
        y += max(item["gridPos"]["h"] for item in row)
    variable = {
        "type": "query",
        "name": "model",
        "label": "Model",
        "datasource": SOURCE,
        "query": {"query": "label_values(qualms_model_info, model)", "refId": "model"},
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
    }
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["qualms"],
        "editable": True,
        "schemaVersion": 41,
        "version": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "graphTooltip": 1,
        "templating": {"list": [variable] if by_model else []},
        "annotations": {"list": []},
        "links": [
            {
                "title": "Qualms",
                "type": "dashboards",
                "icon": "external link",
                "tooltip": "",
                "tags": ["qualms"],
                "asDropdown": False,
                "targetBlank": False,
                "includeVars": False,
                "keepTime": True,
            }
        ],
        "panels": [item for row in rows for item in row],
    }


def increase(metric: str, by: str, labels: str = MODEL, window: str = "5m") -> str:
    """Return the PromQL for the increase of a counter over a window, summed by labels."""
    return f"sum by ({by}) (increase({metric}{{{labels}}}[{window}]))"
