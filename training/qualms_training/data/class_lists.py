"""The order of a model's classes: read from a file, and applied to images whose classes are in another order."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qualms_training.data.dataset import ImageSet
from qualms_training.errors import DataError, did_you_mean

_ACCEPTED = (
    "one name per line, a JSON list of names, or a JSON object such as "
    "{'0': 'cat'}, {'0': ['n02123045', 'tabby']} or {'cat': 0}"
)


def read_class_list(path: Path) -> list[str]:
    """Class names in the order of a model's logits, from a text or JSON file.

    Of ImageNet's class index, whose entries are pairs such as ["n01440764", "tench"], the first of each pair is used, because
    ImageNet's class folders have these names. Of a Hugging Face config.json, `id2label` is used.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"The list of classes {path} cannot be read ({error}); accepted is {_ACCEPTED}.") from error
    if text.lstrip().startswith(("[", "{")):
        names = _from_json(path, text)
    else:
        names = [line.strip() for line in text.splitlines() if line.strip()]
    check_class_list(names, f"The list of classes {path}")
    return names


def check_class_list(names: list[str], title: str) -> None:
    """DataError if the list is too short or has a name twice."""
    if len(names) < 2:
        raise DataError(f"{title} has {len(names)} names; at least two are needed.")
    if len(set(names)) < len(names):
        repeated = next(name for name in names if names.count(name) > 1)
        raise DataError(f"{title} has the name {repeated!r} more than once; each class needs its own name.")


def in_class_order(images: ImageSet, classes: list[str]) -> ImageSet:
    """The same images with labels that are indices into `classes`, which may also name classes without images."""
    check_class_list(classes, "The list of classes")
    position = {name: index for index, name in enumerate(classes)}
    if unknown := [name for name in images.classes if name not in position]:
        raise DataError(
            f"{images.title} has the class {unknown[0]!r}, which is not in the list of the model's {len(classes):,} classes"
            f"{did_you_mean(unknown[0], classes)}"
        )
    order = np.array([position[name] for name in images.classes], dtype=np.int64)
    return ImageSet(images.name, images.split, images.images, order[images.labels], tuple(classes))


def name_numbers(train: ImageSet, test: ImageSet, classes: Sequence[str] | None) -> tuple[ImageSet, ImageSet]:
    """Both sets, of which those whose labels are numbers without names have `classes` as names, or the numbers of both.

    DataError if one set has names, the other has not, and `classes` is None.
    """
    unnamed = [one for one in (train, test) if has_numbers(one)]
    if not unnamed:
        return train, test
    numbers = max((one.classes for one in unnamed), key=len)
    if len(unnamed) == 1 and classes is None:
        named = test if unnamed[0] is train else train
        raise DataError(
            f"{unnamed[0].title} has labels without names, and {named.title} has the classes {', '.join(named.classes[:3])}"
            f"{', …' if len(named.classes) > len(named.classes[:3]) else ''}: give `classes`, the names in the order of the logits."
        )
    names = numbers if classes is None else tuple(classes)
    if set(numbers) <= set(names) and classes is not None:  # the numbers are names, in the order of the logits
        return train, test
    first, second = (
        ImageSet(one.name, one.split, one.images, one.labels, names) if has_numbers(one) else one
        for one in (train, test)
    )
    return first, second


def has_numbers(images: ImageSet) -> bool:
    """Whether the classes are the numbers from 0, as of labels without names."""
    return images.classes == tuple(map(str, range(len(images.classes))))


def missing_classes(images: ImageSet) -> list[str]:
    """Names of classes without an image."""
    present = set(np.unique(images.labels).tolist())
    return [name for label, name in enumerate(images.classes) if label not in present]


def _from_json(path: Path, text: str) -> list[str]:
    try:
        document = json.loads(text)
    except ValueError as error:
        raise DataError(f"The list of classes {path} is not valid JSON ({error}); accepted is {_ACCEPTED}.") from error
    if isinstance(document, dict):
        document = _ordered(document.get("id2label", document))
    if not isinstance(document, list) or not all(isinstance(name := _name(entry), str) and name for entry in document):
        raise DataError(f"The list of classes {path} is not a list of names; accepted is {_ACCEPTED}.")
    return [_name(entry) for entry in document]


def _ordered(document: Any) -> list[Any] | None:
    """The names of {index: name} or {name: index} by index; None if the indices are not 0 to K − 1."""
    if not isinstance(document, dict):
        return None
    if all(isinstance(value, int) for value in document.values()):
        document = {str(index): name for name, index in document.items()}
    names = [document.get(str(index)) for index in range(len(document))]
    return None if any(name is None for name in names) else names


def _name(entry: Any) -> Any:
    return entry[0] if isinstance(entry, list) and entry else entry
