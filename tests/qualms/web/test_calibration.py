"""`/models/{name}/calibration`: quantiles, and operating points that `/predict` accepts."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from qualms.bundle.file import Bundle, write_bundle
from qualms.bundle.manifest import Manifest
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.verdicts import Decider


@pytest.fixture(scope="module")
def shown(client: httpx.Client) -> dict[str, Any]:
    reply = client.get("/models/tiny/calibration")
    assert reply.status_code == 200
    document: dict[str, Any] = reply.json()
    return document


def test_quantiles_are_those_of_the_calibration_images(shown: dict[str, Any], manifest: Manifest) -> None:
    assert shown["n"] == manifest.calibration.n
    assert set(shown["scores"]) == set(manifest.scores)
    for name, one in shown["scores"].items():
        expected = np.quantile(manifest.calibration.scores[name], shown["levels"], method="nearest")
        assert one["quantiles"] == pytest.approx(expected.tolist(), rel=1e-5), name


def test_thresholds_are_those_that_predictions_use(shown: dict[str, Any], manifest: Manifest) -> None:
    decider = Decider(manifest)
    assert {"confident", "marginal", "by-class"} == {point["guarantee"] for point in shown["operating_points"]}
    for point in shown["operating_points"]:
        if point["guarantee"] == "by-class":
            assert point["thresholds"] == {}
            continue
        for name, threshold in point["thresholds"].items():
            rule = decider.rule(OperatingPoint(name, point["target_fpr"], point["guarantee"]))
            assert threshold == pytest.approx(rule.flag.threshold, rel=1e-5), (name, point)


def test_predict_accepts_all_listed_points_and_no_smaller_rate(
    client: httpx.Client, shown: dict[str, Any], encode: Callable[..., bytes], draw_images: Callable[[int, int], Any]
) -> None:
    body: dict[str, Any] = {"content": encode(draw_images(1, 1)[0]), "headers": {"content-type": "image/png"}}
    for point in shown["operating_points"]:
        params = {name: point[name] for name in ("guarantee", "target_fpr")}
        assert client.post("/predict", params=params, **body).status_code == 200, params
    smallest = min(one["target_fpr"] for one in shown["operating_points"] if one["guarantee"] == "confident")
    assert math.isclose(smallest, 0.01)
    params = {"guarantee": "confident", "target_fpr": 0.005}
    assert client.post("/predict", params=params, **body).status_code == 422


def test_calibrations_by_size_and_of_earlier_versions_are_shown(
    start_service: Callable[..., httpx.Client],
    graph: bytes,
    sized_manifest: Manifest,
    earlier_bundle: Bundle,
    tmp_path: Path,
) -> None:
    for path in (write_bundle(tmp_path / "tiny.onnx", graph, sized_manifest).path, earlier_bundle.path):
        document = start_service(path).get("/models/tiny/calibration").json()
        assert document["operating_points"]
        assert all(len(one["quantiles"]) == len(document["levels"]) for one in document["scores"].values())


def test_an_unknown_model_is_404(client: httpx.Client) -> None:
    assert client.get("/models/other/calibration").status_code == 404
