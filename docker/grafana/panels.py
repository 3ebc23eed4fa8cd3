"""What dashboards are made of: a panel is one call with its title, what it tells, its unit and its queries."""

from typing import Any

Panel = dict[str, Any]
SOURCE = {"type": "prometheus", "uid": "prometheus"}
MODEL = 'model=~"$model"'
WINDOW = "$__rate_interval"
WIDTH = 24


def query(expr: str, legend: str = "", **more: Any) -> dict[str, Any]:
    """One PromQL query; `legend` may name labels as {{label}}."""
    return {"datasource": SOURCE, "expr": expr, "legendFormat": legend or "__auto", **more}


def panel(kind: str, title: str, tells: str, unit: str, *queries: dict[str, Any], **more: Any) -> Panel:
    """What all panels share; `more` may hold `options`, `limit` (a red line), `custom`, `height` and `width`."""
    defaults: dict[str, Any] = {"unit": unit}
    if "limit" in more:
        steps = [{"color": "green", "value": None}, {"color": "red", "value": more["limit"]}]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if "custom" in more:
        defaults["custom"] = more["custom"]
    targets = [{"refId": chr(ord("A") + place), **target} for place, target in enumerate(queries)]
    return {
        "type": kind,
        "title": title,
        "description": tells,
        "datasource": SOURCE,
        "gridPos": {"h": more.get("height", 8), "w": more.get("width", 12), "x": 0, "y": 0},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": more.get("options", {}),
        "targets": targets,
    }


def lines(title: str, tells: str, unit: str, *queries: dict[str, Any], **more: Any) -> Panel:
    """Values over time; a limit is drawn as a dashed line."""
    custom: dict[str, Any] = {"lineWidth": 2, "fillOpacity": 8, "showPoints": "never"}
    if "limit" in more:
        custom["thresholdsStyle"] = {"mode": "dashed"}
    options = {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    return panel("timeseries", title, tells, unit, *queries, custom=custom, options=options, **more)


def number(title: str, tells: str, unit: str, expr: str, legend: str = "{{model}} {{version}}", **more: Any) -> Panel:
    """The present value, large."""
    options = {
        "reduceOptions": {"values": False, "calcs": ["lastNotNull"], "fields": ""},
        "textMode": "value_and_name",
        "colorMode": "value" if "limit" in more else "none",
        "graphMode": "area",
        "justifyMode": "auto",
        "orientation": "auto",
        "wideLayout": True,
        "showPercentChange": False,
        "percentChangeColorMode": "standard",
    }
    return panel("stat", title, tells, unit, query(expr, legend), options=options, height=4, **{"width": 6, **more})


def names(title: str, tells: str, expr: str, legend: str, **more: Any) -> Panel:
    """Labels rather than a value."""
    shown = number(title, tells, "none", expr, legend, **more)
    shown["options"] |= {"textMode": "name", "graphMode": "none"}
    return shown


def bars(title: str, tells: str, unit: str, target: dict[str, Any], **more: Any) -> Panel:
    """One bar a series, as they are now; a histogram's buckets are told apart by `format: heatmap`."""
    options = {
        "reduceOptions": {"values": False, "calcs": ["lastNotNull"], "fields": ""},
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
    return panel("bargauge", title, tells, unit, {**target, "instant": True, "range": False}, options=options, **more)


def heat(title: str, tells: str, unit: str, expr: str, **more: Any) -> Panel:
    """A histogram over time: the darker, the more."""
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
    return panel("heatmap", title, tells, unit, query(expr, "{{le}}", format="heatmap"), options=options, **more)


def table(title: str, tells: str, expr: str, *labels: str, **more: Any) -> Panel:
    """The labels of a series, a row each."""
    options = {
        "showHeader": True,
        "cellHeight": "sm",
        "footer": {"show": False, "reducer": ["sum"], "countRows": False, "fields": ""},
    }
    shown = panel(
        "table", title, tells, "none", query(expr, format="table", instant=True, range=False), options=options, **more
    )
    shown["transformations"] = [{"id": "filterFieldsByName", "options": {"include": {"names": list(labels)}}}]
    return shown


def dashboard(uid: str, title: str, tells: str, rows: list[list[Panel]], *, by_model: bool) -> dict[str, Any]:
    """Rows of panels, laid out from left to right and from top to bottom."""
    y, number_ = 0, 0
    for row in rows:
        x = 0
        for shown in row:
            number_ += 1
            shown["id"] = number_
            shown["gridPos"] |= {"x": x, "y": y}
            x += shown["gridPos"]["w"]
        if x != WIDTH:
            raise ValueError(f"The row of {row[0]['title']!r} is {x} wide; {WIDTH} is the width of the page.")
        y += max(shown["gridPos"]["h"] for shown in row)
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
        "description": tells,
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
        "panels": [shown for row in rows for shown in row],
    }


def increase(metric: str, by: str, labels: str = MODEL, window: str = "5m") -> str:
    """How much a counter grew, summed by labels."""
    return f"sum by ({by}) (increase({metric}{{{labels}}}[{window}]))"
