"""Splits of a user's folder are found by name, or made by dividing its images, and share no image."""

from pathlib import Path

import numpy as np
import pytest

from qualms_training.data import load
from qualms_training.data.layout import find_layout, plan_splits
from qualms_training.errors import DataError


def fill(top: Path, count: int, classes: tuple[str, ...] = ("cat", "dog")) -> None:
    """`count` files in each class folder; no test here decodes them."""
    for name in classes:
        (top / name).mkdir(parents=True)
        for index in range(count):
            (top / name / f"{index}.png").touch()


def paths(root: Path, split: str, suffix: str = "") -> set[Path]:
    images = load(f"folder:{root}{suffix}", split).images
    assert isinstance(images, tuple)
    return set(images)


def below(*folders: Path) -> set[Path]:
    return {file for folder in folders for file in folder.rglob("*.png")}


@pytest.mark.parametrize("train", ["train", "training", "Train"])
@pytest.mark.parametrize("test", ["val", "valid", "validation", "dev", "test", "testing", "eval"])
def test_usual_names_of_splits_are_understood(train: str, test: str, tmp_path: Path) -> None:
    fill(tmp_path / train, 3)
    fill(tmp_path / test, 2)
    assert paths(tmp_path, "train") == below(tmp_path / train)
    assert paths(tmp_path, "test") == below(tmp_path / test)


def test_validation_images_are_held_out_only_on_request_if_there_are_test_images(tmp_path: Path) -> None:
    for name in ("train", "val", "test"):
        fill(tmp_path / name, 3)
    assert paths(tmp_path, "test") == below(tmp_path / "test")
    assert paths(tmp_path, "test", "#val+test") == below(tmp_path / "val", tmp_path / "test")
    assert paths(tmp_path, "train", "#val+test") == below(tmp_path / "train")


def test_pooled_folders_may_have_different_classes(tmp_path: Path) -> None:
    fill(tmp_path / "train", 2, ("ape", "cat", "dog"))
    fill(tmp_path / "val", 2, ("cat", "dog"))
    fill(tmp_path / "test", 2, ("ape", "dog"))
    pooled = load(f"folder:{tmp_path}#val+test", "test")
    assert pooled.classes == ("ape", "cat", "dog")
    assert isinstance(pooled.images, tuple)
    assert [pooled.classes[label] for label in pooled.labels] == [path.parent.name for path in pooled.images]


def test_pooling_needs_all_three_folders(tmp_path: Path) -> None:
    fill(tmp_path / "train", 2)
    fill(tmp_path / "val", 2)
    with pytest.raises(DataError, match="lacks one of train, val and test"):
        load(f"folder:{tmp_path}#val+test", "test")


@pytest.mark.parametrize("inside", ["", "train", "val"])
def test_the_only_folder_of_classes_is_divided_by_class(inside: str, tmp_path: Path) -> None:
    fill(tmp_path / inside, 5, ("cat", "dog", "owl"))
    train, test = (load(f"folder:{tmp_path}", split) for split in ("train", "test"))
    assert np.bincount(train.labels).tolist() == [3, 3, 3]
    assert np.bincount(test.labels).tolist() == [2, 2, 2]
    assert paths(tmp_path, "train") | paths(tmp_path, "test") == below(tmp_path)
    assert train.classes == test.classes == ("cat", "dog", "owl")


def test_the_division_does_not_depend_on_the_place_and_is_not_that_of_the_names(tmp_path: Path) -> None:
    divisions = []
    for place in ("here", "elsewhere"):
        fill(tmp_path / place, 40)
        divisions.append({path.relative_to(tmp_path / place) for path in paths(tmp_path / place, "test")})
    assert divisions[0] == divisions[1]
    numbers = [int(path.stem) for path in divisions[0] if path.parent.name == "cat"]
    assert 10 < np.mean(numbers) < 30


@pytest.mark.parametrize("name", ["train", "test", "val"])
def test_a_class_with_the_name_of_a_split_is_a_class(name: str, tmp_path: Path) -> None:
    fill(tmp_path, 4, ("bus", name))
    assert load(f"folder:{tmp_path}", "train").classes == tuple(sorted(("bus", name)))
    (tmp_path / "split").mkdir()
    fill(tmp_path / "split/train", 4, ("bus", name))
    fill(tmp_path / "split/test", 4, ("bus", name))
    assert len(load(f"folder:{tmp_path / 'split'}", "test")) == 8


def test_two_folders_for_one_split_are_an_error(tmp_path: Path) -> None:
    for name in ("train", "val", "valid"):
        fill(tmp_path / name, 2)
    with pytest.raises(DataError, match="both val and valid, which mean the same split"):
        load(f"folder:{tmp_path}", "test")


@pytest.mark.parametrize("name", ["validate", "heldout", "test_set"])
def test_held_out_images_are_not_taken_from_the_only_split_beside_a_folder_of_another_name(
    name: str, tmp_path: Path
) -> None:
    fill(tmp_path / "train", 2)
    fill(tmp_path / name, 2)
    with pytest.raises(DataError, match=f"has the split train and the folder {name}, .*; name it train, val or test"):
        find_layout(tmp_path)


def test_a_split_without_class_folders_beside_the_only_split_is_an_error(tmp_path: Path) -> None:
    fill(tmp_path / "train", 2)
    (tmp_path / ".cache" / "thumbnails").mkdir(parents=True)
    assert find_layout(tmp_path).undivided == tmp_path / "train"
    (tmp_path / "val").mkdir()
    with pytest.raises(DataError, match="has the split train, and val without class folders; put its images into"):
        find_layout(tmp_path)


def test_other_splits_are_an_error(tmp_path: Path) -> None:
    fill(tmp_path, 2)
    with pytest.raises(DataError, match="has no split 'fit'; accepted are train and test"):
        load(f"folder:{tmp_path}", "fit")


def test_one_image_per_class_cannot_be_divided(tmp_path: Path) -> None:
    fill(tmp_path, 1)
    with pytest.raises(DataError, match="has 2 images and no split folders; each class needs two or more"):
        load(f"folder:{tmp_path}", "test")


def test_a_base_that_saw_the_training_images_is_calibrated_on_the_others(tmp_path: Path) -> None:
    fill(tmp_path / "train", 300)
    fill(tmp_path / "val", 300)
    plan = plan_splits(find_layout(tmp_path), weights_saw="all")
    assert (plan.id, plan.held_out) == (f"folder:{tmp_path}", "test")
    assert plan.splits == {"train": 540, "validation": 60, "fit": 120, "calibration": 299}
    assert plan.test == 600 - 120 - 299
    assert plan.explanation[0].startswith(
        f"The base may have seen {tmp_path / 'train'}, so fit, calibration and test images come from {tmp_path / 'val'}"
    )
    assert "540 images train the meta-model" in plan.explanation[-1]


def test_a_base_that_saw_none_of_the_images_is_calibrated_on_training_images(tmp_path: Path) -> None:
    fill(tmp_path / "train", 600)
    fill(tmp_path / "test", 100)
    plan = plan_splits(find_layout(tmp_path), weights_saw="other-data")
    assert plan.held_out == "train"
    assert sum(plan.splits.values()) == 1200
    assert plan.test == 200
    assert f"all images of {tmp_path / 'test'} are test images" in plan.explanation[0]


def test_too_few_training_images_are_supplemented_by_test_images(tmp_path: Path) -> None:
    fill(tmp_path / "train", 100)
    fill(tmp_path / "test", 300)
    plan = plan_splits(find_layout(tmp_path), weights_saw="other-data")
    assert plan.held_out == "test"
    assert "has too few images for all splits" in plan.explanation[0]


@pytest.mark.parametrize(("test", "pooled"), [(150, True), (1000, False)])
def test_validation_images_are_added_to_few_test_images(test: int, pooled: bool, tmp_path: Path) -> None:
    fill(tmp_path / "train", 200)
    fill(tmp_path / "val", 150)
    fill(tmp_path / "test", test)
    plan = plan_splits(find_layout(tmp_path), weights_saw="all")
    assert plan.id.endswith("#val+test") == pooled
    assert ("is added to it" if pooled else "is not used") in plan.explanation[1]
    assert plan.test + plan.splits["fit"] + plan.splits["calibration"] == len(load(plan.id, "test"))


@pytest.mark.parametrize(("saw", "warned"), [("all", True), ("other-data", False)])
def test_dividing_a_folder_states_when_the_calibration_is_valid(saw: str, warned: bool, tmp_path: Path) -> None:
    fill(tmp_path, 400)
    plan = plan_splits(find_layout(tmp_path), weights_saw=saw)  # type: ignore[arg-type]
    assert plan.held_out == "test"
    assert "has no split folders" in plan.explanation[0]
    text = " ".join(plan.explanation)
    assert ("valid only if the base was not trained on these images" in text) == warned


def test_the_error_for_too_few_images_lists_how_many_each_split_needs(tmp_path: Path) -> None:
    fill(tmp_path / "train", 100)
    fill(tmp_path / "test", 100)
    with pytest.raises(DataError) as caught:
        plan_splits(find_layout(tmp_path), weights_saw="all")
    for part in (
        f"Folder {tmp_path / 'test'} has 200 images, and at least 381 are needed",
        "32 to combine scores, 299 to calibrate (a confident false-alarm rate of 1 %), 50 to test",
        "add 181 or more, or choose a higher rate (--target-fpr)",
    ):
        assert part in str(caught.value)
    assert plan_splits(find_layout(tmp_path), weights_saw="all", target_fpr=0.05).splits["calibration"] == 80
    assert plan_splits(find_layout(tmp_path), weights_saw="all", guarantee="marginal").splits["calibration"] == 99
