"""Bundles with random weights are complete: they open, run and reproduce their golden vectors."""

from pathlib import Path

import pytest

from qualms.bundle.file import open_bundle
from qualms.bundle.runtime import GraphRunner, check_golden
from qualms_training.bench.large_bundles import CALIBRATION_IMAGES, MODELS, large_recipe, write_random_bundle
from qualms_training.recipe import load_recipe

pytestmark = pytest.mark.slow


def test_a_random_bundle_reproduces_its_golden_vectors(tmp_path: Path) -> None:
    path = tmp_path / "random.onnx"
    write_random_bundle(path, load_recipe("tiny"), classes=12)
    bundle = open_bundle(path)
    assert (len(bundle.manifest.classes), bundle.manifest.calibration.n) == (12, CALIBRATION_IMAGES)
    check_golden(GraphRunner(bundle.graph), bundle.manifest)


@pytest.mark.parametrize("name", MODELS)
def test_large_models_take_cropped_images_of_224_pixels(name: str) -> None:
    spec = large_recipe(name, MODELS[name][1]).input.spec
    assert (spec.shape, spec.fit, spec.shorter_side) == ((224, 224, 3), "crop", 256)
