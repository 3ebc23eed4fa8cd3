"""Splits share no image, OOD sets are the same for every seed, and all images are preprocessed in the same way."""

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from qualms.images.preprocess import preprocess_batch
from qualms_training.console import Display
from qualms_training.data import dataset, load
from qualms_training.data.dataset import ImageSet
from qualms_training.data.lazy_images import LazyImages, Pixels
from qualms_training.data.prepare import CORRUPTED, LabelledSplit, PreparedData, itself, ood_sets, prepare
from qualms_training.data.sources.npz import write_npz
from qualms_training.data.sources.synthetic import draw_shapes, draw_textures
from qualms_training.errors import DataError
from qualms_training.recipe import Recipe

Alter = Callable[[Mapping[str, Any]], Recipe]
SIZES = {"train": 200, "validation": 40, "fit": 30, "calibration": 60}


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Small synthetic sets: `shapes_id` is in-distribution, `textures_ood` is an OOD set with another image size."""
    for split, n, seed in (("train", 400, 1), ("test", 150, 2)):
        drawn = draw_shapes(n, seed)
        write_npz(tmp_path, ImageSet("shapes_id", split, drawn.images, drawn.labels, drawn.classes))
    drawn = draw_textures(80, 3)
    grey = np.asarray(drawn.images)[:, :, :, 0].repeat(2, axis=1).repeat(2, axis=2)
    write_npz(tmp_path, ImageSet("textures_ood", "test", grey, drawn.labels, drawn.classes))
    return tmp_path


@pytest.fixture
def recipe(tiny: Alter) -> Recipe:
    return tiny({"data.id": "shapes_id", "data.ood": ["textures_ood"], "data.splits": SIZES, "data.limit": 50})


def held_out_in_test(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"held_out": "test"})})


def rows(images: Pixels) -> set[bytes]:
    return {image.tobytes() for image in images[:]}


def assert_disjoint(data: PreparedData) -> None:
    images = [rows(part.images) for part in data.parts.values()]
    assert len(set.union(*images)) == sum(len(part.labels) for part in data.parts.values())


def test_splits_have_the_requested_sizes_share_no_image_and_keep_labels(
    recipe: Recipe, data_dir: Path, display: Display
) -> None:
    data = prepare(recipe, 0, data_dir, display)
    assert {name: len(part.labels) for name, part in data.parts.items()} == {**SIZES, "test": 150}
    assert_disjoint(data)
    whole = load("shapes_id", "train", data_dir)
    label_of = {image.tobytes(): label for image, label in zip(np.asarray(whole.images), whole.labels, strict=True)}
    for name in SIZES:
        part = data.parts[name]
        assert [label_of[image.tobytes()] for image in part.images] == part.labels.tolist()
    np.testing.assert_array_equal(data.parts["test"].labels, load("shapes_id", "test", data_dir).labels)
    assert data.classes == whole.classes


def test_held_out_images_can_come_from_the_test_set(recipe: Recipe, data_dir: Path, display: Display) -> None:
    data = prepare(held_out_in_test(recipe), 0, data_dir, display)
    assert {name: len(part.labels) for name, part in data.parts.items()} == {**SIZES, "test": 150 - 30 - 60}
    assert_disjoint(data)
    train, test = (rows(np.asarray(load("shapes_id", split, data_dir).images)) for split in ("train", "test"))
    for name, part in data.parts.items():
        assert rows(part.images) <= (train if name in ("train", "validation") else test)
    assert [record["n"] for record in data.record["splits"]] == [400, 150]


def test_calibration_that_leaves_no_test_images_is_an_error(recipe: Recipe, data_dir: Path, display: Display) -> None:
    sizes = recipe.data.splits.model_copy(update={"calibration": 120})
    large = held_out_in_test(recipe)
    large = large.model_copy(update={"data": large.data.model_copy(update={"splits": sizes})})
    with pytest.raises(DataError, match=r"'shapes_id' \(split 'test'\) has 150 images, .* leave none to test on"):
        prepare(large, 0, data_dir, display)


def test_splits_larger_than_the_data_are_an_error(tiny: Alter, data_dir: Path, display: Display) -> None:
    with pytest.raises(
        DataError, match=r"need 5,130 images in total \(data.splits\), but there are 400; `qualms init`"
    ):
        prepare(tiny({"data.id": "shapes_id", "data.splits": {**SIZES, "train": 5000}}), 0, data_dir, display)


def test_the_seed_determines_the_splits_only(recipe: Recipe, data_dir: Path, display: Display) -> None:
    first, again, other = (prepare(recipe, seed, data_dir, display) for seed in (0, 0, 1))
    for name, part in first.parts.items():
        np.testing.assert_array_equal(part.images, again.parts[name].images)
    assert first.record == again.record
    assert first.record["sha256"] == other.record["sha256"]
    assert first.record["splits"] != other.record["splits"]
    assert rows(first.parts["train"].images) != rows(other.parts["train"].images)
    np.testing.assert_array_equal(first.parts["test"].images, other.parts["test"].images)


def test_ood_sets_do_not_depend_on_the_seed_and_respect_the_limit(
    recipe: Recipe, data_dir: Path, display: Display
) -> None:
    sets = [
        ood_sets(recipe, prepare(recipe, seed, data_dir, display).parts["test"], data_dir, display) for seed in (0, 1)
    ]
    assert list(sets[0]) == ["textures_ood", CORRUPTED, itself("shapes_id")]
    assert {name: len(images) for name, images in sets[0].items()} == {
        "textures_ood": 50,
        CORRUPTED: 50,
        itself("shapes_id"): 75,
    }
    for name, images in sets[0].items():
        np.testing.assert_array_equal(images, sets[1][name])


def test_ood_sets_are_preprocessed_to_the_models_input(recipe: Recipe, data_dir: Path, display: Display) -> None:
    test = prepare(recipe, 0, data_dir, display).parts["test"]
    sets = ood_sets(recipe, test, data_dir, display)
    ood = np.asarray(load("textures_ood", "test", data_dir).images)
    assert ood.shape == (80, 32, 32)
    conformed = preprocess_batch(ood, recipe.input.spec)
    assert sets["textures_ood"].shape == (50, 16, 16, 3)
    assert rows(sets["textures_ood"]) <= rows(conformed)


def test_the_corrupted_set_differs_from_the_test_set_and_is_optional(
    recipe: Recipe, data_dir: Path, display: Display
) -> None:
    test = prepare(recipe, 0, data_dir, display).parts["test"]
    corrupted = ood_sets(recipe, test, data_dir, display)[CORRUPTED]
    assert not rows(corrupted) & rows(test.images)
    without = recipe.model_copy(update={"data": recipe.data.model_copy(update={"corrupted": False})})
    assert CORRUPTED not in ood_sets(without, test, data_dir, display)


@pytest.mark.parametrize("colour", ["RGB", "L"])
@pytest.mark.parametrize("side", [16, 23])
def test_the_in_distribution_set_loaded_as_an_ood_set_has_the_pixels_of_the_test_set(
    colour: str, side: int, tiny: Alter, data_dir: Path, display: Display
) -> None:
    channels = 3 if colour == "RGB" else 1
    resized = tiny(
        {
            "data.id": "shapes_id",
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
    images = ood_sets(resized, test, data_dir, display)[itself("shapes_id")]
    assert images.shape == (75, side, side, channels)
    assert rows(images) <= rows(test.images)


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


def test_a_folder_with_train_and_test_folders_is_read(tiny: Alter, tmp_path: Path, display: Display) -> None:
    _folder(tmp_path / "train", ("cat", "dog"), 10, seed=0)
    _folder(tmp_path / "test", ("cat", "dog"), 3, seed=1)
    data = prepare(_of_folder(tiny, tmp_path), 0, None, display)
    assert data.classes == ("cat", "dog")
    assert data.parts["test"] == LabelledSplit(
        data.parts["test"].images, data.parts["test"].labels, data.parts["test"].stored
    )
    assert data.parts["test"].images.shape == (6, 16, 16, 3)
    assert data.parts["test"].labels.tolist() == [0, 0, 0, 1, 1, 1]


def test_a_folder_without_splits_is_divided_and_no_image_is_in_two_splits(
    tiny: Alter, tmp_path: Path, display: Display
) -> None:
    _folder(tmp_path, ("cat", "dog"), 20, seed=0)
    data = prepare(_of_folder(tiny, tmp_path), 0, None, display)
    assert_disjoint(data)
    assert np.bincount(data.parts["test"].labels).tolist() == [10, 10]


@pytest.mark.parametrize(("copies", "accepted"), [(1, True), (6, False)])
def test_test_images_that_are_training_images_are_refused_if_they_are_many(
    copies: int, accepted: bool, tiny: Alter, tmp_path: Path
) -> None:
    _folder(tmp_path / "train", ("cat", "dog"), 30, seed=0)
    _folder(tmp_path / "test", ("cat", "dog"), 30, seed=1)
    for name in sorted(path.name for path in (tmp_path / "train/cat").iterdir())[:copies]:
        (tmp_path / "test/cat" / name).write_bytes((tmp_path / "train/cat" / name).read_bytes())
    text = io.StringIO()
    recipe = _of_folder(tiny, tmp_path)
    if accepted:
        prepare(recipe, 0, None, Display(Console(file=text, width=200)))
        assert "1 of the 60 images" in text.getvalue()
        return
    with pytest.raises(DataError, match="6 of the 60 images .* are also images of its split 'train'.* remove them"):
        prepare(recipe, 0, None, Display(Console(file=text)))


def test_classes_that_differ_between_training_and_test_are_named(tiny: Alter, tmp_path: Path, display: Display) -> None:
    _folder(tmp_path / "train", ("ape", "cat", "dog"), 10, seed=0)
    _folder(tmp_path / "test", ("cat", "dog"), 3, seed=1)
    with pytest.raises(
        DataError, match="same classes; they differ in ape. Give both images of each class, or list all"
    ):
        prepare(_of_folder(tiny, tmp_path), 0, None, display)


@pytest.mark.parametrize("classes", [("cat",), ("cat", "cat")])
def test_a_set_without_two_different_classes_is_an_error(
    classes: tuple[str, ...], tiny: Alter, tmp_path: Path, display: Display
) -> None:
    for split in ("train", "test"):
        images = np.random.default_rng(len(split)).integers(0, 256, (20, 16, 16, 3), dtype=np.uint8)
        write_npz(tmp_path, ImageSet("flat", split, images, np.arange(20) % len(classes), classes))
    with pytest.raises(DataError, match=r"'flat' .*has the classes cat.*at least two"):
        prepare(tiny({"data.id": "flat"}), 0, tmp_path, display)


def test_a_missing_set_is_named(tiny: Alter, data_dir: Path, display: Display) -> None:
    with pytest.raises(DataError, match=r"'absent' .*was not found"):
        prepare(tiny({"data.id": "absent"}), 0, data_dir, display)


def test_large_image_files_are_decoded_when_they_are_used(
    tiny: Alter, tmp_path: Path, display: Display, monkeypatch: pytest.MonkeyPatch
) -> None:
    _folder(tmp_path, ("cat", "dog"), 20, seed=0)
    recipe = _of_folder(tiny, tmp_path)
    in_memory = prepare(recipe, 0, None, display)
    sets = ood_sets(recipe, in_memory.parts["test"], None, display)
    monkeypatch.setattr(dataset, "LAZY_BYTES", 0)
    lazy = prepare(recipe, 0, None, display)
    assert lazy.record == in_memory.record
    for name, part in lazy.parts.items():
        assert isinstance(part.images, LazyImages)
        np.testing.assert_array_equal(part.images[:], in_memory.parts[name].images)
    lazy_sets = ood_sets(recipe, lazy.parts["test"], None, display)
    assert {name: len(images) for name, images in lazy_sets.items()} == {name: len(one) for name, one in sets.items()}
    np.testing.assert_array_equal(lazy_sets[itself(recipe.data.id)][:], sets[itself(recipe.data.id)])
    assert lazy_sets[CORRUPTED][:].shape == sets[CORRUPTED].shape


def test_ood_sets_may_have_no_classes(tiny: Alter, tmp_path: Path, display: Display) -> None:
    _folder(tmp_path / "known", ("cat", "dog"), 20, seed=0)
    _folder(tmp_path, ("flat",), 5, seed=1)
    recipe = _of_folder(tiny, tmp_path / "known")
    flat = f"folder:{tmp_path / 'flat'}"
    recipe = recipe.model_copy(update={"data": recipe.data.model_copy(update={"ood": [flat]})})
    test = prepare(recipe, 0, None, display).parts["test"]
    assert ood_sets(recipe, test, None, display)[flat].shape == (5, 16, 16, 3)


def test_labels_follow_the_recipes_classes_and_missing_ones_are_noted(
    tiny: Alter, tmp_path: Path, display: Display, capsys: pytest.CaptureFixture[str]
) -> None:
    _folder(tmp_path, ("cat", "dog"), 20, seed=0)
    recipe = _of_folder(tiny, tmp_path)
    ordered = recipe.model_copy(update={"data": recipe.data.model_copy(update={"classes": ["dog", "cat", "yak"]})})
    data = prepare(ordered, 0, None, Display(Console()))
    assert data.classes == ("dog", "cat", "yak")
    assert data.parts["test"].labels.tolist() == [1] * 10 + [0] * 10
    assert "1 of 3 classes have no training images: yak" in capsys.readouterr().out
