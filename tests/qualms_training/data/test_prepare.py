"""Data reach the model by one path, in splits that share no image; strangers are the same for every seed."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from qualms.images.preprocess import preprocess_batch
from qualms_training.console import Display
from qualms_training.data import load
from qualms_training.data.dataset import ImageSet
from qualms_training.data.npz import write_npz
from qualms_training.data.prepare import CORRUPTED, Part, PreparedData, itself, ood_sets, prepare
from qualms_training.data.synthetic import draw_shapes, draw_textures
from qualms_training.errors import DataError
from qualms_training.recipe import Recipe

Alter = Callable[[Mapping[str, Any]], Recipe]
SIZES = {"train": 200, "validation": 40, "fit": 30, "calibration": 60}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Small sets of our own: `known` to be learnt, `unknown` as a stranger of another size."""
    for split, n, seed in (("train", 400, 1), ("test", 150, 2)):
        drawn = draw_shapes(n, seed)
        write_npz(tmp_path, ImageSet("known", split, drawn.images, drawn.labels, drawn.classes))
    drawn = draw_textures(80, 3)
    grey = np.asarray(drawn.images)[:, :, :, 0].repeat(2, axis=1).repeat(2, axis=2)
    write_npz(tmp_path, ImageSet("unknown", "test", grey, drawn.labels, drawn.classes))
    return tmp_path


@pytest.fixture
def recipe(tiny: Alter) -> Recipe:
    return tiny({"data.id": "known", "data.ood": ["unknown"], "data.splits": SIZES, "data.limit": 50})


def held_out_in_test(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"held_out": "test"})})


def rows(images: NDArray[np.uint8]) -> set[bytes]:
    return {image.tobytes() for image in images}


def assert_disjoint(data: PreparedData) -> None:
    pictures = [rows(part.images) for part in data.parts.values()]
    assert len(set.union(*pictures)) == sum(len(part.labels) for part in data.parts.values())


def test_splits_have_their_sizes_share_no_image_and_keep_their_labels(
    recipe: Recipe, data_dir: Path, display: Display
) -> None:
    data = prepare(recipe, 0, data_dir, display)
    assert {name: len(part.labels) for name, part in data.parts.items()} == {**SIZES, "test": 150}
    assert_disjoint(data)
    whole = load("known", "train", data_dir)
    label_of = {image.tobytes(): label for image, label in zip(np.asarray(whole.images), whole.labels, strict=True)}
    for name in SIZES:
        part = data.parts[name]
        assert [label_of[image.tobytes()] for image in part.images] == part.labels.tolist()
    np.testing.assert_array_equal(data.parts["test"].labels, load("known", "test", data_dir).labels)
    assert data.classes == whole.classes


def test_held_out_images_can_come_from_the_test_set(recipe: Recipe, data_dir: Path, display: Display) -> None:
    data = prepare(held_out_in_test(recipe), 0, data_dir, display)
    assert {name: len(part.labels) for name, part in data.parts.items()} == {**SIZES, "test": 150 - 30 - 60}
    assert_disjoint(data)
    train, test = (rows(np.asarray(load("known", split, data_dir).images)) for split in ("train", "test"))
    for name, part in data.parts.items():
        assert rows(part.images) <= (train if name in ("train", "validation") else test)
    assert [record["n"] for record in data.record["splits"]] == [400, 150]


def test_a_test_set_used_up_by_calibration_is_refused(recipe: Recipe, data_dir: Path, display: Display) -> None:
    sizes = recipe.data.splits.model_copy(update={"calibration": 120})
    greedy = held_out_in_test(recipe)
    greedy = greedy.model_copy(update={"data": greedy.data.model_copy(update={"splits": sizes})})
    with pytest.raises(DataError, match=r"'known' \(split 'test'\) has 150 images, .* leave none to test on"):
        prepare(greedy, 0, data_dir, display)


def test_more_images_than_there_are_is_refused(tiny: Alter, data_dir: Path, display: Display) -> None:
    with pytest.raises(DataError, match="ask for 5130 images in all, but there are 400"):
        prepare(tiny({"data.id": "known", "data.splits": {**SIZES, "train": 5000}}), 0, data_dir, display)


def test_the_seed_draws_the_splits_and_nothing_else(recipe: Recipe, data_dir: Path, display: Display) -> None:
    first, again, other = (prepare(recipe, seed, data_dir, display) for seed in (0, 0, 1))
    for name, part in first.parts.items():
        np.testing.assert_array_equal(part.images, again.parts[name].images)
    assert first.record == again.record
    assert first.record["sha256"] == other.record["sha256"]
    assert first.record["splits"] != other.record["splits"]
    assert rows(first.parts["train"].images) != rows(other.parts["train"].images)
    np.testing.assert_array_equal(first.parts["test"].images, other.parts["test"].images)


def test_strangers_are_the_same_for_every_seed_and_no_more_than_the_limit(
    recipe: Recipe, data_dir: Path, display: Display
) -> None:
    found = [
        ood_sets(recipe, prepare(recipe, seed, data_dir, display).parts["test"], data_dir, display) for seed in (0, 1)
    ]
    assert list(found[0]) == ["unknown", CORRUPTED, itself("known")]
    assert {name: len(images) for name, images in found[0].items()} == {
        "unknown": 50,
        CORRUPTED: 50,
        itself("known"): 75,
    }
    for name, images in found[0].items():
        np.testing.assert_array_equal(images, found[1][name])


def test_strangers_go_through_the_models_own_preprocessing(recipe: Recipe, data_dir: Path, display: Display) -> None:
    test = prepare(recipe, 0, data_dir, display).parts["test"]
    found = ood_sets(recipe, test, data_dir, display)
    unknown = np.asarray(load("unknown", "test", data_dir).images)
    assert unknown.shape == (80, 32, 32)
    conformed = preprocess_batch(unknown, recipe.input.spec)
    assert found["unknown"].shape == (50, 16, 16, 3)
    assert rows(found["unknown"]) <= rows(conformed)


def test_corrupted_images_are_changed_test_images_and_optional(
    recipe: Recipe, data_dir: Path, display: Display
) -> None:
    test = prepare(recipe, 0, data_dir, display).parts["test"]
    corrupted = ood_sets(recipe, test, data_dir, display)[CORRUPTED]
    assert not rows(corrupted) & rows(test.images)
    without = recipe.model_copy(update={"data": recipe.data.model_copy(update={"corrupted": False})})
    assert CORRUPTED not in ood_sets(without, test, data_dir, display)


@pytest.mark.parametrize("colour", ["RGB", "L"])
@pytest.mark.parametrize("side", [16, 23])
def test_the_known_set_by_the_strangers_path_is_the_test_set_to_the_pixel(
    colour: str, side: int, tiny: Alter, data_dir: Path, display: Display
) -> None:
    channels = 3 if colour == "RGB" else 1
    resized = tiny(
        {
            "data.id": "known",
            "data.splits": SIZES,
            "data.ood": [],
            "input.colour": colour,
            "input.height": side,
            "input.width": side,
            "input.mean": [0.5] * channels,
            "input.std": [0.5] * channels,
        }
    )
    test = prepare(resized, 0, data_dir, display).parts["test"]
    found = ood_sets(resized, test, data_dir, display)[itself("known")]
    assert found.shape == (75, side, side, channels)
    assert rows(found) <= rows(test.images)


def _folder(root: Path, classes: tuple[str, ...], n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    for name in classes:
        (root / name).mkdir(parents=True)
        for index in range(n):
            pixels = rng.integers(0, 256, (12, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{index}.png")


def _of_folder(tiny: Alter, root: Path) -> Recipe:
    sizes = {"train": 8, "validation": 4, "fit": 4, "calibration": 4}
    return tiny({"data.id": f"folder:{root}", "data.ood": [], "data.splits": sizes})


def test_a_folder_of_splits_is_read_like_any_other_set(tiny: Alter, tmp_path: Path, display: Display) -> None:
    _folder(tmp_path / "train", ("cat", "dog"), 10, seed=0)
    _folder(tmp_path / "test", ("cat", "dog"), 3, seed=1)
    data = prepare(_of_folder(tiny, tmp_path), 0, None, display)
    assert data.classes == ("cat", "dog")
    assert data.parts["test"] == Part(data.parts["test"].images, data.parts["test"].labels)
    assert data.parts["test"].images.shape == (6, 16, 16, 3)
    assert data.parts["test"].labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_folder_without_splits_would_test_on_what_it_trained_on(
    tiny: Alter, tmp_path: Path, display: Display
) -> None:
    _folder(tmp_path, ("cat", "dog"), 10, seed=0)
    with pytest.raises(DataError, match=r"is also its split 'test', image for image.*FOLDER/train/CLASS"):
        prepare(_of_folder(tiny, tmp_path), 0, None, display)


def test_classes_that_differ_between_training_and_test_are_named(tiny: Alter, tmp_path: Path, display: Display) -> None:
    _folder(tmp_path / "train", ("ape", "cat", "dog"), 10, seed=0)
    _folder(tmp_path / "test", ("cat", "dog"), 3, seed=1)
    with pytest.raises(DataError, match="same classes; they differ in ape"):
        prepare(_of_folder(tiny, tmp_path), 0, None, display)


@pytest.mark.parametrize("classes", [("cat",), ("cat", "cat")])
def test_a_set_without_two_different_classes_is_refused(
    classes: tuple[str, ...], tiny: Alter, tmp_path: Path, display: Display
) -> None:
    for split in ("train", "test"):
        images = np.random.default_rng(len(split)).integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
        write_npz(tmp_path, ImageSet("flat", split, images, np.arange(20) % len(classes), classes))
    with pytest.raises(DataError, match=r"'flat' .*has the classes cat.*at least two"):
        prepare(tiny({"data.id": "flat"}), 0, tmp_path, display)


def test_a_set_that_is_not_there_is_named(tiny: Alter, data_dir: Path, display: Display) -> None:
    with pytest.raises(DataError, match=r"'absent' .*was not found"):
        prepare(tiny({"data.id": "absent"}), 0, data_dir, display)
