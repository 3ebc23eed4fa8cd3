"""The embedded model `demo` is the default one, calibrated on digits that our own code draws.

These commands make it again:

    qualms demo draw --out drawn --count 5000
    qualms calibrate mnist drawn --name demo --target-risk 0.001 --out service/models/demo.onnx
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from qualms.bundle.embedded import resolve
from qualms.bundle.file import open_bundle
from qualms.bundle.runtime import GraphRunner
from qualms.decisions.operating_point import flag_point
from qualms.demo.digits import draw_many
from qualms.demo.drift import drift
from qualms.demo.folder import write_folder
from qualms.errors import DataError
from qualms.images.preprocess import preprocess_array

DEMO = open_bundle(resolve("demo"))
POINT = flag_point(DEMO.manifest)
UNSEEN = 20_000_001
"""a seed that neither calibration nor traffic uses"""


@pytest.fixture(scope="module")
def runner() -> GraphRunner:
    return GraphRunner(DEMO.graph, threads=1)


def outputs(runner: GraphRunner, count: int, seed: int, dose: float = 0.0) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    images = [preprocess_array(drift(image, dose, rng), DEMO.manifest.input) for _, image in draw_many(count, seed)]
    return runner(np.stack(images))


def test_it_is_the_default_models_graph_with_a_name_of_its_own() -> None:
    default = open_bundle(resolve(None)).manifest
    assert DEMO.manifest.graph_sha256 == default.graph_sha256
    assert (DEMO.manifest.name, default.name != "demo") == ("demo", True)


def test_it_was_calibrated_on_the_digits_that_the_code_draws_today(runner: GraphRunner) -> None:
    """A change of the drawing makes the demo's promises those of other images: calibrate it again."""
    values = np.sort(outputs(runner, 5000, 0)[POINT.score])
    assert DEMO.manifest.calibration.n == 5000
    assert np.allclose(values, DEMO.manifest.calibration.scores[POINT.score], rtol=1e-3)


def test_it_reads_drawn_digits_and_flags_no_more_than_it_promises(runner: GraphRunner) -> None:
    found = outputs(runner, 2000, UNSEEN)
    assert (found["prediction"] == np.arange(2000) % 10).mean() >= 0.97
    assert POINT.flags(found[POINT.score]).mean() < POINT.rate_bound


def test_drift_raises_the_flag_rate_far_above_the_bound_before_the_predictions_suffer(runner: GraphRunner) -> None:
    found = outputs(runner, 500, UNSEEN, dose=0.4)
    assert POINT.flags(found[POINT.score]).mean() > 10 * POINT.rate_bound
    assert (found["prediction"] == np.arange(500) % 10).mean() >= 0.95


def test_the_folder_holds_the_same_digits_by_class(tmp_path: Path) -> None:
    write_folder(tmp_path / "drawn", 20, 0)
    for index, (digit, image) in enumerate(draw_many(20, 0)):
        file = Image.open(tmp_path / "drawn" / str(digit) / f"{index:06}.png")
        assert np.array_equal(np.asarray(file), image)


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(DataError, match="is there already"):
        write_folder(tmp_path, 20, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]
