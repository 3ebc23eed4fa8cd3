"""The recipe that is chosen for a model: valid, complete, and the same after it was written and read."""

from pathlib import Path
from typing import Any

import pytest

from qualms_training.own_model.default_recipe import default_recipe
from qualms_training.own_model.options import FitOptions
from qualms_training.own_model.recipe_text import recipe_text
from qualms_training.recipe import Recipe, load_recipe

SPEC = {"height": 224, "width": 224, "colour": "RGB", "mean": [0.5] * 3, "std": [0.5] * 3}
SPLITS = {"train": 800, "validation": 100, "fit": 100, "calibration": 400}


def recipe(data_id: str = "cifar10", side: int = 224, prediction: Any = "base", **options: Any) -> Recipe:
    return default_recipe(
        FitOptions("torchvision:resnet50", weights="w.pt", name="mine", **options),
        spec={**SPEC, "height": side, "width": side},
        data={"id": data_id, "held_out": "test", "splits": SPLITS},
        prediction=prediction,
        seen="all",
        classes=10,
    )


def test_large_images_are_evaluated_on_fewer_images_than_small_ones() -> None:
    assert recipe().report_limit < recipe(side=32).report_limit
    assert recipe().meta.statistics == ["mean", "max"]
    assert recipe(side=32).meta.statistics == ["mean", "max", "std"]


def test_the_meta_model_gets_positions_if_it_predicts_from_small_images() -> None:
    assert recipe(side=32, prediction="meta").meta.grid > 1
    assert recipe(side=224, prediction="meta").meta.grid == 1


def test_the_distance_can_be_left_out() -> None:
    assert recipe().uses_distance
    assert not recipe(distance=False).uses_distance


@pytest.mark.parametrize("prediction", ["base", "meta"])
def test_a_written_recipe_reads_back_the_same(tmp_path: Path, prediction: str) -> None:
    original = recipe(
        f"folder:{tmp_path}/photos",
        prediction=prediction,
        ood=(f"folder:{tmp_path}/ood",),
        taps=("layer1", "layer4"),
        as_sent=("png", "jpeg:75-95"),
        logits="out",
    )
    original = original.model_copy(update={"base": original.base.model_copy(update={"weights": f"{tmp_path}/w.pt"})})
    file = tmp_path / "runs" / "recipe.toml"
    file.parent.mkdir()
    file.write_text(recipe_text(original, file.parent), encoding="utf-8")
    loaded = load_recipe(str(file))
    assert Path(loaded.data.id.removeprefix("folder:")).resolve() == tmp_path / "photos"
    assert loaded.base.weights_file is not None
    assert loaded.base.weights_file.resolve() == tmp_path / "w.pt"
    changed = {"data": original.data, "base": original.base}
    assert loaded.model_copy(update=changed) == original
    assert 'folder:../photos"' in file.read_text(encoding="utf-8")


def test_a_written_recipe_explains_its_keys() -> None:
    text = recipe_text(recipe(), Path())
    assert "# a target of 1 % needs at least 299 calibration images" in text
    assert "epochs = 1\n" not in text  # of the base, which is not trained
