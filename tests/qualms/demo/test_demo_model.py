"""The embedded model `demo`: the graph of the default model, calibrated on digits drawn by our own code.

These commands create it:

    qualms demo draw --out drawn --count 5000
    qualms calibrate mnist drawn --name demo --target-risk 0.001 --out service/qualms/models/demo.onnx
"""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle
from qualms.bundle.runtime import GraphRunner
from qualms.decisions.calibration_set import CalibrationSet
from qualms.demo.digits import draw_many
from qualms.demo.drift import drift
from qualms.images.preprocess import preprocess_array

pytestmark = pytest.mark.slow

DEMO = open_bundle(resolve_model("demo"))
POINT = CalibrationSet(DEMO.manifest).flag_point()
UNSEEN = 20_000_001
"""a seed that is used neither for calibration nor for traffic"""


@pytest.fixture(scope="module")
def runner() -> GraphRunner:
    return GraphRunner(DEMO.graph, threads=1)


def outputs(runner: GraphRunner, count: int, seed: int, dose: float = 0.0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    images = [preprocess_array(drift(image, dose, rng), DEMO.manifest.input) for _, image in draw_many(count, seed)]
    return runner(np.stack(images))


def test_it_has_the_default_models_graph_and_another_name() -> None:
    default = open_bundle(resolve_model(None)).manifest
    assert DEMO.manifest.graph_sha256 == default.graph_sha256
    assert (DEMO.manifest.name, default.name != "demo") == ("demo", True)


def test_it_was_calibrated_on_the_digits_that_the_code_draws(runner: GraphRunner) -> None:
    """If the drawing changes, the guarantees no longer apply: calibrate the model again."""
    values = np.sort(outputs(runner, 5000, 0)[POINT.score])
    assert DEMO.manifest.calibration.n == 5000
    assert np.allclose(values, np.sort(DEMO.manifest.calibration.scores[POINT.score]), rtol=1e-3, atol=1e-3)


def test_it_classifies_drawn_digits_and_its_flag_rate_is_below_the_bound(runner: GraphRunner) -> None:
    result = outputs(runner, 2000, UNSEEN)
    assert (result["prediction"] == np.arange(2000) % 10).mean() >= 0.97
    assert POINT.flags(result[POINT.score]).mean() < POINT.rate_bound


def test_drift_raises_the_flag_rate_far_above_the_bound_while_accuracy_is_still_high(runner: GraphRunner) -> None:
    result = outputs(runner, 500, UNSEEN, dose=0.4)
    assert POINT.flags(result[POINT.score]).mean() > 10 * POINT.rate_bound
    assert (result["prediction"] == np.arange(500) % 10).mean() >= 0.95
