"""Arrays, folders and torch datasets become image sets; normalised tensors are refused with the remedy."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from qualms.images.input_spec import InputSpec
from qualms_training.data import dataset as dataset_module
from qualms_training.data.dataset import ImageSet
from qualms_training.data.lazy_images import LazyImages
from qualms_training.data.sources.objects import CHECKED_LABELS, as_image_set, as_pixels
from qualms_training.errors import DataError
from qualms_training.models.libraries.torchvision_compat import import_torchvision

SPEC = InputSpec(height=8, width=8)
PIXELS = np.random.default_rng(0).integers(0, 256, (6, 10, 12, 3), np.uint8)
LABELS = np.array([0, 1, 2, 0, 1, 2])


class Items(Dataset[Any]):
    """A dataset of given items."""

    def __init__(self, images: list[Any], **attributes: Any) -> None:
        self.images, self.reads = images, 0
        for name, value in attributes.items():
            setattr(self, name, value)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        return self.images[index], int(LABELS[index])


class Rows(Dataset[Any]):
    """Like a dataset of Hugging Face: items are dicts, a name gives a whole column, and `features` has the class names."""

    def __init__(self, image_key: str = "image", label_key: str = "label") -> None:
        self.column_names, self.reads = [image_key, label_key], 0
        self.features = {image_key: object(), label_key: SimpleNamespace(names=["a", "b", "c"])}

    def __len__(self) -> int:
        return len(PIXELS)

    def __getitem__(self, index: int | str) -> Any:
        if isinstance(index, str):
            return [*PIXELS] if index == self.column_names[0] else LABELS.tolist()
        self.reads += 1
        return dict(zip(self.column_names, (Image.fromarray(PIXELS[index]), int(LABELS[index])), strict=True))


def image_set(data: Any, spec: InputSpec | None = SPEC) -> ImageSet:
    return as_image_set(data, name="mine", split="train", spec=spec)


def conformed(data: Any) -> NDArray[np.uint8]:
    return image_set(data).conformed(SPEC)


EXPECTED = ImageSet("mine", "train", PIXELS, LABELS, ("0", "1", "2"))


@pytest.mark.parametrize(
    "data",
    [
        (PIXELS, LABELS),
        (torch.from_numpy(PIXELS), torch.from_numpy(LABELS)),
        (PIXELS.transpose(0, 3, 1, 2), LABELS.astype(np.uint8)),
        Items([Image.fromarray(one) for one in PIXELS]),
        Items(list(PIXELS)),
        Items([torch.from_numpy(one.transpose(2, 0, 1).copy()) for one in PIXELS]),
        Items([Image.fromarray(one).convert("RGBA") for one in PIXELS]),
        TensorDataset(torch.from_numpy(PIXELS), torch.from_numpy(LABELS)),
        ([Image.fromarray(one) for one in PIXELS], LABELS.tolist()),
        (list(PIXELS), torch.from_numpy(LABELS)),
        EXPECTED,
    ],
    ids=[
        "arrays",
        "tensors",
        "channels first",
        "PIL",
        "uint8",
        "uint8 tensors",
        "RGBA",
        "labels as tensors",
        "lists of PIL",
        "list of arrays",
        "image set",
    ],
)
def test_all_forms_of_the_same_images_have_the_same_pixels_and_labels(data: Any) -> None:
    images = image_set(data)
    np.testing.assert_array_equal(images.conformed(SPEC), EXPECTED.conformed(SPEC))
    np.testing.assert_array_equal(images.labels, LABELS)
    assert (images.name, images.split, images.classes) == ("mine", "train", ("0", "1", "2"))
    assert images.digest() == image_set(data).digest()


def test_a_folder_is_read_by_path(tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        Image.fromarray(PIXELS[0]).save(tmp_path / name / "0.png")
    for path in (tmp_path, str(tmp_path)):
        images = image_set(path)
        assert images.classes == ("cat", "dog")
        assert len(images) == 2


@pytest.mark.parametrize("attributes", [{}, {"targets": LABELS.tolist()}, {"targets": torch.from_numpy(LABELS)}])
def test_labels_are_read_without_images_where_the_dataset_lists_them(attributes: Any) -> None:
    items = Items(list(PIXELS), classes=["a", "b", "c"], **attributes)
    images = image_set(items)
    assert items.reads == (5 if attributes else 7)  # some are compared with the list
    np.testing.assert_array_equal(images.labels, LABELS)
    assert images.classes == ("a", "b", "c")


def test_images_of_a_dataset_are_read_when_they_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dataset_module, "LAZY_BYTES", 0)
    items = Items(list(PIXELS), targets=LABELS)
    pixels = image_set(items).pixels(SPEC)
    assert isinstance(pixels, LazyImages)
    assert items.reads == 5
    np.testing.assert_array_equal(pixels[2:4], EXPECTED.conformed(SPEC)[2:4])


def test_digests_depend_on_pixels_and_labels() -> None:
    changed = PIXELS.copy()
    changed[5, 0, 0, 0] ^= 1
    sets: list[Any] = [Items(list(PIXELS)), Items(list(changed)), (PIXELS, LABELS[::-1].copy())]
    assert len({image_set(one).digest() for one in sets}) == 3


def test_a_subset_of_a_subset_selects_images_and_labels() -> None:
    subset = Subset(Subset(Items(list(PIXELS), targets=LABELS, classes=["a", "b", "c"]), [5, 3, 1]), [2, 0])
    images = image_set(subset)
    assert images.labels.tolist() == [1, 2]
    assert images.classes == ("a", "b", "c")
    np.testing.assert_array_equal(images.conformed(SPEC), EXPECTED.conformed(SPEC, [1, 5]))


def test_a_list_of_labels_that_the_dataset_changes_is_not_believed() -> None:
    class Renumbered(Items):
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image, 2 - label

    class OwnSubset(Subset[Any]):
        def __getitem__(self, index: Any) -> Any:
            image, label = super().__getitem__(index)  # type: ignore[no-untyped-call]
            return image, 2 - label

        def __getitems__(self, indices: list[int]) -> list[Any]:
            return [self[index] for index in indices]

    items = Renumbered(list(PIXELS), targets=LABELS)
    np.testing.assert_array_equal(image_set(items).labels, 2 - LABELS)
    subset = OwnSubset(Items(list(PIXELS), targets=LABELS), [0, 1, 2])
    np.testing.assert_array_equal(image_set(subset).labels, 2 - LABELS[:3])


@pytest.mark.parametrize("label", [np.eye(3)[0], torch.eye(3)[1]])
def test_one_hot_labels_are_refused_with_the_way_to_numbers(label: Any) -> None:
    class OneHot(Items):
        def __getitem__(self, index: int) -> Any:
            return self.images[index], label

    with pytest.raises(DataError, match=r"yields labels of shape \(3,\); accepted is one integer .*label\.argmax\(\)"):
        image_set(OneHot(list(PIXELS)))


@pytest.fixture
def image_folder(tmp_path: Path) -> Path:
    for index, image in enumerate(PIXELS):
        folder = tmp_path / "abc"[LABELS[index]]
        folder.mkdir(exist_ok=True)
        Image.fromarray(image).save(folder / f"{index}.png")
    return tmp_path


def test_an_image_folder_without_a_transform_is_read_as_files(image_folder: Path) -> None:
    datasets = import_torchvision().datasets
    plain = datasets.ImageFolder(str(image_folder))
    images = image_set(Subset(plain, [1, 4]))
    assert images.images == (image_folder / "a/3.png", image_folder / "c/2.png")
    assert images.labels.tolist() == [0, 2]
    assert images.classes == ("a", "b", "c")

    class Mirrored(datasets.ImageFolder):  # type: ignore[misc,name-defined]
        def __getitem__(self, index: int) -> Any:
            image, label = super().__getitem__(index)
            return image.transpose(Image.Transpose.FLIP_LEFT_RIGHT), label

    mirrored = image_set(Mirrored(str(image_folder))).images
    assert not isinstance(mirrored, tuple)
    np.testing.assert_array_equal(mirrored[0], PIXELS[0, :, ::-1])
    turned = datasets.ImageFolder(str(image_folder), transform=lambda image: image.rotate(180))
    pixels = image_set(turned).images
    assert not isinstance(pixels, tuple)
    np.testing.assert_array_equal(pixels[0], PIXELS[0, ::-1, ::-1])


def test_concatenated_datasets_have_the_classes_that_they_share() -> None:
    items, other = (Items(list(PIXELS), classes=classes) for classes in (["a", "b", "c"], ["b", "a", "c"]))
    assert image_set(ConcatDataset([items, Subset(items, [1, 4])])).classes == ("a", "b", "c")
    assert image_set(ConcatDataset([items, other])).classes == ("0", "1", "2")


@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (
            Items([torch.zeros(3, 224, 224)]),
            [
                "yields float32 tensors of shape (3, 224, 224): qualms normalises images itself",
                "remove ToTensor",
                "folder",
            ],
        ),
        (Items([np.zeros((8, 8, 3), np.float64)]), ["yields float64 arrays of shape (8, 8, 3)"]),
        (Items([np.zeros((5, 8, 8), np.uint8)]), ["shape (5, 8, 8); accepted are shapes (H, W)"]),
        (Items(["text"]), ["yields objects of type str; accepted are PIL images"]),
        ((PIXELS / 255, LABELS), ["has images of float64: qualms normalises images itself", "uint8"]),
        ((PIXELS[..., :2], LABELS), ["has images of shape (6, 10, 12, 2); accepted is (N, H, W)"]),
        ((PIXELS, LABELS.astype(float)), ["has labels of float64 and shape (6,); accepted are integers"]),
        ((PIXELS, LABELS[:3]), ["6 images but labels of shape (3,)"]),
        ([PIXELS[0]] * 3, ["yields uint8 arrays of shape (10, 12, 3); accepted is a pair (image, label)"]),
        (Items([]), ["has 0 images"]),
        (iter([]), ["an iterable without an index; accepted is a folder of class folders"]),
        (DataLoader(Items(list(PIXELS))), ["is of type DataLoader", "without an index: give its attribute `dataset`"]),
        ((list(PIXELS), LABELS[:3].tolist()), ["has 6 images and 3 labels"]),
        (3, ["is of type int, not a Dataset"]),
    ],
)
def test_the_error_for_unusable_data_names_what_is_accepted(data: Any, parts: list[str]) -> None:
    with pytest.raises(DataError, match=r"^Data set 'mine' \(split 'train'\)") as caught:
        image_set(data)
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("shape", "tensor", "colour", "expected"),
    [
        ((3, 8, 3), False, "RGB", (3, 8, 3)),
        ((3, 8, 3), True, "RGB", (8, 3, 3)),
        ((3, 8, 1), True, "L", (3, 8, 1)),
        ((1, 8, 9), True, "L", (8, 9, 1)),
        ((8, 9), False, "L", (8, 9)),
    ],
)
def test_the_order_of_axes_is_that_of_the_kind_where_both_are_possible(
    shape: tuple[int, ...], tensor: bool, colour: Any, expected: tuple[int, ...]
) -> None:
    array = np.zeros(shape, np.uint8)
    spec = InputSpec(height=8, width=8, colour=colour)
    assert as_pixels(torch.from_numpy(array) if tensor else array, "It yields", spec).shape == expected


@pytest.mark.parametrize("keys", [("image", "label"), ("img", "labels")])
def test_items_that_are_dicts_have_images_and_labels(keys: tuple[str, str]) -> None:
    rows = Rows(*keys)
    images = image_set(rows)
    assert rows.reads <= 1 + CHECKED_LABELS, "labels are read from their column"
    assert images.classes == ("a", "b", "c")
    assert images.labels.tolist() == LABELS.tolist()
    assert np.array_equal(images.conformed(SPEC), EXPECTED.conformed(SPEC))
    assert image_set(Subset(rows, [1, 2])).labels.tolist() == [1, 2]


def test_dicts_with_other_keys_are_refused_with_the_remedy() -> None:
    with pytest.raises(DataError, match="yields dicts with the keys image, fine_label; .* rename them"):
        image_set(Rows("image", "fine_label"))
    with pytest.raises(DataError, match=r"is a dict of train, test: give one of them"):
        image_set({"train": Rows(), "test": Rows()})
