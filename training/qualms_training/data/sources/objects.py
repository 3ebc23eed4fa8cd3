"""Images that are objects in Python: arrays, a torch Dataset, a folder or an image set, all as an `ImageSet`.

Images are preprocessed as the service does it, so they are given as they are stored: PIL images, or uint8 pixels before any
normalisation. Nothing of torch is imported: a Dataset is anything with a length that yields (image, label).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qualms.images.input_spec import InputSpec
from qualms.images.pillow_decoder import flatten
from qualms_training.data.dataset import ImageSet
from qualms_training.data.sources.folder import SUFFIXES
from qualms_training.data.sources.own_images import read_labelled_images
from qualms_training.errors import DataError

_CHANNELS = (1, 3, 4)
CHECKED_LABELS = 4
"""labels that are compared with those that the dataset yields before its list of labels is believed"""
_ACCEPTED = (
    "a folder of class folders, (images, labels) as uint8 array (N, H, W, C) and integers (N,), or a Dataset that yields "
    "(PIL image or uint8 array (H, W, C), label)"
)
_IMAGE_KEYS, _LABEL_KEYS = ("image", "img"), ("label", "labels")
"""of items that are dicts, such as those of Hugging Face datasets"""


def as_image_set(data: Any, *, name: str, split: str, spec: InputSpec | None = None) -> ImageSet:
    """The images and labels of `data` under a name and a split.

    data: a folder (str or Path) or NAME-SPLIT.npz file, a pair (images, labels) of arrays, uint8 (N, H, W) or (N, H, W, C) and
    integers (N,), a pair of lists of what a Dataset yields, a Dataset that yields (image, label) with a PIL image or uint8
    pixels (H, W), (H, W, C) or (C, H, W), a `torch.utils.data.Subset` of one, a Dataset that yields dicts with the keys image
    and label, such as those of Hugging Face, or an `ImageSet`. spec: the model's input; its colour decides between (H, W, C)
    and (C, H, W) where both are possible. Images of a Dataset are read when they are used, one
    at a time, because a Dataset need not be thread-safe; those of torchvision's ImageFolder without a transform are read as
    files, on all cores.
    """
    title = f"Data set {name!r} (split {split!r})"
    if isinstance(data, ImageSet):
        return ImageSet(name, split, data.images, data.labels, data.classes)
    if isinstance(data, str | Path):
        images = read_labelled_images(Path(data).expanduser(), split)
        return ImageSet(name, split, images.images, images.labels, images.classes)
    if isinstance(data, tuple | list) and len(data) == 2 and hasattr(data[0], "shape"):
        return _from_arrays(title, name, split, data[0], data[1])
    if _is_pair_of_lists(data):
        if len(data[0]) != len(data[1]):
            raise DataError(
                f"{title} has {len(data[0])} images and {len(data[1])} labels; accepted is one label per image."
            )
        data = list(zip(*data, strict=True))
    if isinstance(data, Mapping):
        raise DataError(f"{title} is a dict of {', '.join(map(str, data))}: give one of them; accepted is {_ACCEPTED}.")
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__"):
        kind = "an iterable without an index" if hasattr(data, "__iter__") else "not a Dataset"
        if hasattr(data, "dataset"):
            kind += ": give its attribute `dataset`"
        raise DataError(f"{title} is of type {type(data).__name__}, {kind}; accepted is {_ACCEPTED}.")
    if len(data) == 0:
        raise DataError(f"{title} has 0 images; at least 1 is needed.")
    return _from_dataset(title, name, split, data, spec)


def _is_pair_of_lists(data: Any) -> bool:
    """Whether `data` is a list of images and their labels, rather than a Dataset of two pairs (image, label)."""
    if not (isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], list | tuple) and data[0]):
        return False
    labels = data[1]
    return _is_image(data[0][0]) and hasattr(labels, "__len__") and bool(len(labels)) and not _is_image(labels[0])


def _is_image(value: Any) -> bool:
    return isinstance(value, Image.Image) or len(getattr(value, "shape", ())) > 1


class DatasetImages:
    """The images of a Dataset, read one at a time; a source of `qualms_training.data.dataset.Images`."""

    def __init__(self, dataset: Any, title: str, spec: InputSpec | None) -> None:
        self._dataset, self._title, self._spec = dataset, title, spec
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int, /) -> NDArray[np.uint8]:
        """Image `index`, (H, W) or (H, W, C)."""
        return as_pixels(self.item(index)[0], f"{self._title} yields", self._spec)

    def item(self, index: int) -> tuple[Any, Any]:
        """Image and label as the Dataset yields them."""
        with self._lock:
            item = self._dataset[index]
        if isinstance(item, Mapping):
            image_key, label_key = (_key_of(item, keys, self._title) for keys in (_IMAGE_KEYS, _LABEL_KEYS))
            return item[image_key], item[label_key]
        if not isinstance(item, tuple | list) or len(item) < 2:
            raise DataError(f"{self._title} yields {_description(item)}; accepted is a pair (image, label).")
        return item[0], item[1]


def _key_of(item: Mapping[str, Any], accepted: tuple[str, ...], title: str) -> str:
    """The first accepted key that an item has."""
    key = next((key for key in accepted if key in item), None)
    if key is None:
        raise DataError(
            f"{title} yields dicts with the keys {', '.join(map(str, item))}; needed are {' or '.join(_IMAGE_KEYS)} and "
            f"{' or '.join(_LABEL_KEYS)}: rename them, for example by dataset.rename_column."
        )
    return key


def as_pixels(image: Any, subject: str, spec: InputSpec | None = None) -> NDArray[np.uint8]:
    """An image as uint8 pixels (H, W) or (H, W, C); `subject` begins the error's sentence."""
    if isinstance(image, Image.Image):
        return np.array(flatten(image))
    if not hasattr(image, "shape") or not hasattr(image, "dtype"):
        raise DataError(f"{subject} {_description(image)}; accepted are PIL images and uint8 arrays (H, W, C).")
    if str(image.dtype).removeprefix("torch.") != "uint8":
        raise DataError(
            f"{subject} {_description(image)}: qualms normalises images itself; remove ToTensor and Normalize from the "
            "dataset's transform so that it yields PIL images or uint8 arrays, or give the folder."
        )
    is_tensor = str(image.dtype).startswith("torch.")
    pixels = np.asarray(image.cpu() if is_tensor else image)
    channels_last = pixels.ndim == 2 or (pixels.ndim == 3 and pixels.shape[-1] in _CHANNELS)
    channels_first = pixels.ndim == 3 and pixels.shape[0] in _CHANNELS
    if channels_first and channels_last and pixels.ndim == 3:
        channels_first = is_tensor and (spec is None or pixels.shape[0] == spec.channels)
        channels_last = not channels_first
    if channels_last:
        return np.ascontiguousarray(pixels)
    if channels_first:
        return np.ascontiguousarray(pixels.transpose(1, 2, 0))
    raise DataError(
        f"{subject} {_description(image)}; accepted are shapes (H, W), (H, W, C) and (C, H, W), C = 1, 3 or 4."
    )


def _from_arrays(title: str, name: str, split: str, images: Any, labels: Any) -> ImageSet:
    pixels, numbers = (np.asarray(one.cpu() if hasattr(one, "cpu") else one) for one in (images, labels))
    if pixels.dtype != np.uint8:
        raise DataError(
            f"{title} has images of {pixels.dtype}: qualms normalises images itself; give uint8 pixels of shape (N, H, W) or "
            "(N, H, W, C) before any normalisation."
        )
    if pixels.ndim == 4 and pixels.shape[-1] not in _CHANNELS and pixels.shape[1] in _CHANNELS:
        pixels = pixels.transpose(0, 2, 3, 1)
    if pixels.ndim not in (3, 4) or (pixels.ndim == 4 and pixels.shape[-1] not in _CHANNELS):
        raise DataError(
            f"{title} has images of shape {pixels.shape}; accepted is (N, H, W) or (N, H, W, C) with C = 1, 3 or 4."
        )
    return ImageSet(name, split, pixels, _as_labels(title, numbers), _default_classes(numbers))


def _from_dataset(title: str, name: str, split: str, dataset: Any, spec: InputSpec | None) -> ImageSet:
    whole, indices = _unwrapped(dataset)
    source = DatasetImages(dataset, title, spec)
    source[0]  # an unusable kind of image is reported before all labels are read
    labels = _as_labels(title, np.asarray(_labels(title, whole, indices, source)))
    classes = _class_names(whole) or _default_classes(labels)
    paths = _paths(whole, indices)
    return ImageSet(name, split, source if paths is None else paths, labels, classes)


def _class_names(dataset: Any) -> tuple[str, ...]:
    """The names of a dataset's classes, or those that all parts of a concatenation share; empty if it has none."""
    if _is_of(dataset, "torch.utils.data.dataset", "__getitem__") and hasattr(dataset, "datasets"):
        shared = {_class_names(_unwrapped(part)[0]) for part in dataset.datasets}
        return shared.pop() if len(shared) == 1 else ()
    given = getattr(dataset, "classes", None)
    features = getattr(dataset, "features", None)
    if given is None and isinstance(features, Mapping):  # of a Hugging Face dataset
        given = next((getattr(features[key], "names", None) for key in _LABEL_KEYS if key in features), None)
    return tuple(map(str, given)) if isinstance(given, list | tuple) else ()


def _unwrapped(dataset: Any) -> tuple[Any, NDArray[np.int64]]:
    """The innermost dataset of nested subsets, and the indices of the images in it.

    Subsets are those of torch itself, because others may change images or labels.
    """
    indices = np.arange(len(dataset))
    while _is_of(dataset, "torch.utils.data.dataset", "__getitem__") and hasattr(dataset, "indices"):
        indices = np.asarray(dataset.indices, dtype=np.int64)[indices]
        dataset = dataset.dataset
    return dataset, indices


def _is_of(dataset: Any, module: str, method: str) -> bool:
    """Whether a method of a dataset is that of a class in `module`, not overridden in a class of the user."""
    return bool(getattr(getattr(type(dataset), method, None), "__module__", None) == module)


def _labels(title: str, whole: Any, indices: NDArray[np.int64], source: DatasetImages) -> Any:
    """The labels, without reading images where the dataset has a list of them."""
    if getattr(whole, "target_transform", None) is None:
        targets = getattr(whole, "targets", None)
        if targets is None and (samples := _samples(whole)) is not None:
            targets = [label for _, label in samples]
        columns = getattr(whole, "column_names", None)
        if targets is None and isinstance(columns, list):  # a Hugging Face dataset
            targets = next((list(whole[key]) for key in _LABEL_KEYS if key in columns), None)
        if targets is not None and len(targets) == len(whole) and np.ndim(targets) == 1:
            listed = np.asarray(targets)[indices]
            checked = np.unique(np.linspace(0, len(source) - 1, CHECKED_LABELS).astype(int)).tolist()
            if all(np.array_equal(listed[index], source.item(index)[1]) for index in checked):
                return listed
    labels = [source.item(index)[1] for index in range(len(source))]
    shapes = {tuple(np.shape(label)) for label in labels}  # np.size takes the method of a tensor for its size
    if shape := next((one for one in shapes if math.prod(one) != 1), None):
        raise DataError(
            f"{title} yields labels of shape {shape}; accepted is one integer per image, such as label.argmax() of a "
            "one-hot vector."
        )
    return [label.item() if hasattr(label, "item") else label for label in labels]


def _samples(whole: Any) -> Sequence[Any] | None:
    """The list of (path, label) of a dataset of files such as torchvision's ImageFolder; None for any other."""
    samples = getattr(whole, "samples", None)
    if not isinstance(samples, list) or not samples or len(samples) != len(whole):
        return None
    is_pair = isinstance(samples[0], tuple | list) and len(samples[0]) == 2 and isinstance(samples[0][0], str | Path)
    return samples if is_pair else None


def _paths(whole: Any, indices: NDArray[np.int64]) -> tuple[Path, ...] | None:
    """The files of a dataset that yields them unchanged; None for any other."""
    samples = _samples(whole)
    unchanged = all(getattr(whole, name, None) is None for name in ("transform", "transforms"))
    unchanged &= _is_of(whole, "torchvision.datasets.folder", "__getitem__")
    if samples is None or not unchanged or getattr(whole.loader, "__name__", "") != "default_loader":
        return None
    paths = tuple(Path(samples[index][0]) for index in indices.tolist())
    return paths if all(path.suffix.lower() in SUFFIXES for path in paths) else None


def _as_labels(title: str, labels: NDArray[Any]) -> NDArray[np.int64]:
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(
            f"{title} has labels of {labels.dtype} and shape {labels.shape}; accepted are integers of shape (N,)."
        )
    return labels.astype(np.int64)


def _default_classes(labels: NDArray[Any]) -> tuple[str, ...]:
    return tuple(map(str, range(int(labels.max()) + 1))) if labels.size and labels.dtype.kind in "iu" else ()


def _description(image: Any) -> str:
    if hasattr(image, "shape") and hasattr(image, "dtype"):
        kind = "tensors" if str(image.dtype).startswith("torch.") else "arrays"
        return f"{str(image.dtype).removeprefix('torch.')} {kind} of shape {tuple(image.shape)}"
    return f"objects of type {type(image).__name__}"
