"""The order of classes is read from text or JSON, and labels follow it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qualms_training.data import load
from qualms_training.data.class_lists import in_class_order, missing_classes, name_numbers, read_class_list
from qualms_training.data.dataset import ImageSet
from qualms_training.errors import DataError


def images() -> ImageSet:
    return ImageSet("pets", "test", np.zeros((3, 4, 4), np.uint8), np.array([0, 1, 1]), ("cat", "dog"))


@pytest.mark.parametrize(
    "text",
    [
        "dog\ncat\n",
        "\ufeffdog\r\n\r\ncat",
        json.dumps(["dog", "cat"]),
        json.dumps({"0": "dog", "1": "cat"}),
        json.dumps({"1": ["cat", "a pet"], "0": ["dog", "another"]}),
        json.dumps({"cat": 1, "dog": 0}),
        json.dumps({"id2label": {"0": "dog", "1": "cat"}, "label2id": {}}),
    ],
)
def test_lists_are_read_from_text_and_json(text: str, tmp_path: Path) -> None:
    (tmp_path / "classes").write_text(text)
    assert read_class_list(tmp_path / "classes") == ["dog", "cat"]


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("only", "has 1 names; at least two"),
        ("cat\ndog\ncat", "has the name 'cat' more than once"),
        ("[1, 2]", "is not a list of names; accepted is one name per line"),
        ('{"0": "cat", "2": "dog"}', "is not a list of names"),
        ("[unquoted]", "is not valid JSON"),
    ],
)
def test_the_error_for_an_unusable_list_names_the_file(document: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "classes.json").write_text(document)
    with pytest.raises(DataError, match=r"The list of classes .*classes\.json") as caught:
        read_class_list(tmp_path / "classes.json")
    assert message in str(caught.value)


def test_the_error_for_a_missing_list_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.txt cannot be read"):
        read_class_list(tmp_path / "nowhere.txt")


def test_labels_follow_the_list_which_may_have_more_classes() -> None:
    ordered = in_class_order(images(), ["dog", "horse", "cat"])
    assert ordered.labels.tolist() == [2, 0, 0]
    assert ordered.classes == ("dog", "horse", "cat")
    assert missing_classes(ordered) == ["horse"]
    assert missing_classes(images()) == []


@pytest.mark.parametrize(
    ("classes", "message"),
    [
        (["cat", "dogs"], "class 'dog', which is not in the list .* did you mean 'dogs'"),
        (["a", "a"], "'a' more than once"),
    ],
)
def test_a_class_that_is_not_in_the_list_is_named(classes: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        in_class_order(images(), classes)


def test_any_data_set_can_be_loaded_in_another_order() -> None:
    drawn = load("shapes", "test")
    reversed_order = load("shapes", "test", classes=list(drawn.classes)[::-1])
    np.testing.assert_array_equal(reversed_order.labels, 3 - drawn.labels)


def numbered(*labels: int, split: str = "train") -> ImageSet:
    names = tuple(map(str, range(max(labels) + 1)))
    return ImageSet("arrays", split, np.zeros((len(labels), 4, 4), np.uint8), np.array(labels), names)


def test_labels_without_names_have_the_numbers_of_both_sets() -> None:
    train, test = name_numbers(numbered(0, 1, 2), numbered(0, 1, split="test"), None)
    assert train.classes == test.classes == ("0", "1", "2")
    assert test.split == "test"


def test_labels_without_names_are_named_by_the_given_classes() -> None:
    train, test = name_numbers(numbered(0, 1, 2), numbered(1, 0), ["cat", "dog", "cow"])
    assert train.classes == test.classes == ("cat", "dog", "cow")
    assert test.labels.tolist() == [1, 0]
    with pytest.raises(DataError, match="labels from 0 to 2; with 2 classes"):
        name_numbers(numbered(0, 1, 2), numbered(0, 1), ["cat", "dog"])


def test_names_that_are_numbers_keep_their_labels_for_another_order() -> None:
    train, _ = name_numbers(numbered(0, 1), numbered(0, 1), ["1", "0"])
    assert in_class_order(train, ["1", "0"]).labels.tolist() == [1, 0]


def test_labels_without_names_beside_named_ones_need_names() -> None:
    train, test = name_numbers(numbered(1, 0), images(), ["dog", "cat"])
    assert (train.classes, test.classes) == (("dog", "cat"), ("cat", "dog"))
    for pair in ((numbered(0, 1), images()), (images(), numbered(0, 1))):
        with pytest.raises(DataError, match="labels without names, and .* has the classes cat, dog: give `classes`"):
            name_numbers(*pair, None)


def test_sets_with_names_are_not_renamed() -> None:
    train, _ = name_numbers(images(), images(), ["cow", "pig"])
    assert train.classes == ("cat", "dog")
