"""Alerts fire on what should fire them, and an hour of in-distribution traffic fires none, whatever the calibration draw."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import promql_parser
import pytest
import yaml
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from tests.docker.stack import DOCKER, PROMETHEUS, dashboard_queries, missing

from qualms.bundle.embedded import resolve
from qualms.bundle.file import open_bundle
from qualms.decisions.flag import choose_flag_point, p_values
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT
from qualms.decisions.verdicts import Decider
from qualms.telemetry.metrics import P_VALUES, ModelMetrics, ServiceMetrics, expose

FILES = sorted((*PROMETHEUS.glob("rules/*.yml"), *PROMETHEUS.glob("gpu/*.yml")))
TESTS = sorted(PROMETHEUS.glob("tests/*.yml"))
RULES: list[dict[str, Any]] = [
    rule for path in FILES for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]
]
ALERTS = [rule for rule in RULES if "alert" in rule]
RUNBOOK = (DOCKER / "RUNBOOK.md").read_text(encoding="utf-8")

needs_promtool = pytest.mark.skipif(bool(missing("promtool")), reason=missing("promtool"))


def promtool(*arguments: object) -> str:
    done = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# What is written


@needs_promtool
def test_promtool_takes_the_configuration_and_every_rule() -> None:
    promtool("check", "config", PROMETHEUS / "prometheus.yml")
    promtool("check", "rules", *FILES)


@pytest.mark.skipif(bool(missing("amtool")), reason=missing("amtool"))
def test_amtool_takes_the_configuration() -> None:
    path = DOCKER / "alertmanager" / "alertmanager.yml"
    done = subprocess.run(["amtool", "check-config", path], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("path", TESTS, ids=lambda path: str(path.stem))
def test_each_alert_fires_when_it_should_and_only_then(path: Path) -> None:
    promtool("test", "rules", path)


def test_every_alert_is_among_those_tests() -> None:
    tested = " ".join(path.read_text() for path in TESTS)
    assert [alert["alert"] for alert in ALERTS if alert["alert"] not in tested] == []


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: str(alert["alert"]))
def test_every_alert_tells_a_person_at_night_what_to_do(alert: dict[str, Any]) -> None:
    assert alert["labels"]["severity"] in {"critical", "warning", "info"}
    notes = alert["annotations"]
    assert set(notes) == {"summary", "description", "runbook"}
    anchor = re.search(r"docker/RUNBOOK\.md#(\w+)$", notes["runbook"])
    assert anchor
    headings = {re.sub(r"\W", "", line.lower()) for line in RUNBOOK.splitlines() if line.startswith("## ")}
    assert anchor[1] in headings


# What is asked for


def exported() -> set[str]:
    """The names of all series that the service has."""
    registry = CollectorRegistry()
    bundle = open_bundle(resolve("demo"))
    ServiceMetrics(registry)
    ModelMetrics(registry, bundle, Decider(bundle.manifest).rule(DEFAULT_OPERATING_POINT), "CPUExecutionProvider")
    text = expose(registry, "")[0].decode()
    return {sample.name for family in text_string_to_metric_families(text) for sample in family.samples}


def selectors(expr: Any) -> Iterator[str]:
    """The metric of every selector in a parsed expression."""
    if isinstance(expr, promql_parser.VectorSelector):
        yield str(expr.name)
    elif isinstance(expr, promql_parser.MatrixSelector):
        yield from selectors(expr.vector_selector)
    elif isinstance(expr, promql_parser.Call):
        for argument in expr.args:
            yield from selectors(argument)
    else:
        for name in ("expr", "lhs", "rhs", "param"):
            if getattr(expr, name, None) is not None:
                yield from selectors(getattr(expr, name))


QUERIES = [(rule.get("record") or rule["alert"], rule["expr"]) for rule in RULES] + dashboard_queries()


@pytest.mark.parametrize(("name", "expr"), QUERIES)
def test_every_query_parses_and_asks_for_series_that_exist(name: str, expr: str) -> None:
    known = exported() | {rule["record"] for rule in RULES if "record" in rule} | {"up"}
    asked = set(selectors(promql_parser.parse(expr)))
    assert asked
    assert asked <= known


# An hour of in-distribution traffic

N = 2000
"""calibration images of a draw: few, so that a draw matters"""
DRAWS = 3000
HOUR = 60
A_MINUTE = 1200
"""images, as the demo sends them"""
KEPT = 12
"""of each kind of unlucky draw, and as many ordinary ones, for Prometheus to go through"""


REFERENCE = np.array([np.count_nonzero(p_values(np.arange(N) / N, np.arange(N) / N) <= t) for t in P_VALUES])
"""calibration images by their own p-value, which is the same for every draw without ties"""


def draws(rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any], float]:
    """For many calibration sets: true flag rates (D,), true distributions of p-values (D, B), and the bound.

    A continuous score may as well be uniform: doubt u has p-value rank(u), and what lies above the k-th most doubtful
    of n calibration images is flagged.
    """
    rates, shares = np.empty(DRAWS), np.empty((DRAWS, len(P_VALUES)))
    bound = 0.0
    for index in range(DRAWS):
        calibration = np.sort(rng.random(N))
        point = choose_flag_point(calibration, score="u", direction="higher", target_fpr=0.01)
        rates[index], bound = 1 - point.threshold, point.rate_bound
        # p ≤ t iff at most ⌊t(n + 1)⌋ − 1 calibration images are at least as doubtful: beyond that order statistic.
        places = np.floor(np.array(P_VALUES) * (N + 1) + 1e-9).astype(int)
        shares[index] = np.where(places > N, 1.0, 1 - calibration[np.maximum(N - places, 0)])
    return rates, shares, bound


def test_the_simulation_is_the_services_own_arithmetic() -> None:
    rng = np.random.default_rng(1)
    calibration, images = np.sort(rng.random(50)), rng.random(4000)
    found = p_values(images, calibration)
    for t in P_VALUES:
        place = int(np.floor(t * 51 + 1e-9))
        beyond = images > calibration[50 - place] if place <= 50 else np.ones(4000, bool)
        assert np.array_equal(found <= t, beyond)


def silent_hour(rng: np.random.Generator) -> dict[str, Any]:
    """A promtool test: counters of an hour for unlucky and ordinary calibration draws, and no alert at any minute."""
    rates, shares, bound = draws(rng)
    distance = np.abs(shares - np.array(P_VALUES)).max(axis=1)
    kept = {*np.argsort(rates)[-KEPT:], *np.argsort(distance)[-KEPT:], *rng.choice(DRAWS, KEPT)}
    series = []

    def add(name: str, draw: int, values: object, le: str | None = None) -> None:
        labels = f'job="qualms", instance="a", model="draw-{draw}", version="1"' + (f', le="{le}"' if le else "")
        series.append({"series": f"qualms_{name}{{{labels}}}", "values": str(values)})

    for draw in sorted(int(index) for index in kept):
        cells = np.diff(shares[draw], prepend=0.0)
        counts = rng.multinomial(A_MINUTE, cells / cells.sum(), size=HOUR).cumsum(axis=0)
        add("p_value_count", draw, " ".join(map(str, A_MINUTE * np.arange(1, HOUR + 1))))
        add("ood_total", draw, " ".join(map(str, rng.binomial(A_MINUTE, rates[draw], HOUR).cumsum())))
        add("ood_rate_bound", draw, f"{bound}x{HOUR}")
        add("p_value_reference_count", draw, f"{N}x{HOUR}")
        for place, t in enumerate(P_VALUES):
            add("p_value_bucket", draw, " ".join(map(str, counts[:, : place + 1].sum(axis=1))), str(t))
            add("p_value_reference_bucket", draw, f"{REFERENCE[place]}x{HOUR}", str(t))
    names = [
        alert["alert"]
        for alert in ALERTS
        if alert["alert"] in ("QualmsFlagRateAbovePromise", "QualmsPValuesNotUniform")
    ]
    expected = [
        {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []} for minute in range(1, HOUR) for name in names
    ]
    # That the series are there at all: both statistics of every draw are known at the end.
    present = [
        {"expr": f"count({record})", "eval_time": "59m", "exp_samples": [{"value": len(kept)}]}
        for record in ("model:qualms_ood:evidence5m", "model:qualms_p_value:distance5m")
    ]
    return {
        "rule_files": [str(PROMETHEUS / "rules" / "doubt.yml")],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": expected, "promql_expr_test": present}],
    }


@needs_promtool
def test_an_hour_of_in_distribution_traffic_is_silent_for_the_unluckiest_of_3000_calibration_draws(
    tmp_path: Path,
) -> None:
    """Against the target rate instead of the bound, or against exact uniformity, many of these would fire."""
    path = tmp_path / "hour.json"
    path.write_text(json.dumps(silent_hour(np.random.default_rng(2026))))
    promtool("test", "rules", path)


def evidence(observed: NDArray[Any], images: int, against: float) -> NDArray[Any]:
    """N·KL(observed ‖ against) where observed is above, else 0."""
    o = np.clip(observed, 1e-9, 1 - 1e-9)
    divergence = o * np.log(o / against) + (1 - o) * np.log((1 - o) / (1 - against))
    return np.where(observed > against, images * divergence, 0.0)


def test_every_one_of_3000_calibration_draws_is_silent_at_every_window_of_an_hour() -> None:
    rng = np.random.default_rng(7)
    rates, shares, bound = draws(rng)
    window = 5 * A_MINUTE
    cells = np.diff(shares, prepend=0.0, axis=1)
    chance = np.sqrt(10.71 / window) + np.sqrt(3.80 / N)
    fired = np.zeros(DRAWS, bool)
    for _ in range(HOUR // 5):
        fired |= evidence(rng.binomial(window, rates) / window, window, bound) > 20.72
        live = rng.multinomial(window, cells / cells.sum(axis=1, keepdims=True)).cumsum(axis=1) / window
        fired |= np.abs(live - REFERENCE / N).max(axis=1) > chance
    assert not fired.any()


def test_against_the_target_instead_of_the_bound_many_draws_would_fire() -> None:
    """Why the bound is there: with more images the luck of a calibration set outweighs chance."""
    rates, _, bound = draws(np.random.default_rng(7))
    against_target = (evidence(rates, 1_000_000, 0.01) > 20.72).mean()
    against_bound = (evidence(rates, 1_000_000, bound) > 20.72).mean()
    assert against_target > 0.015  # the confident rule misses its target for one draw in twenty, some by little
    assert against_bound < 0.003  # and the bound is missed for one in a thousand
