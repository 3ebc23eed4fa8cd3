"""Fit a classifier from Python: `qualms.fit` runs training, and `Fitted` is the calibrated result.

Training is the package `qualms_training`, which is imported when `fit` is called, so that `import qualms` needs no PyTorch.
"""

import shutil
from collections.abc import Callable, Sequence
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, Literal, Unpack, overload

from qualms.bundle.file import open_bundle
from qualms.decisions.operating_point import Selection
from qualms.errors import ExtraMissingError, QualmsError
from qualms.files import atomic_path
from qualms.model import ImageLike, Images, Model
from qualms.replies import Result

_TRAINING = "qualms_training.own_model.from_objects"


def fit(
    model: Any,
    train: Any,
    held_out: Any = None,
    *,
    input: Any = None,  # noqa: A002  # the word of the manifest and of recipes
    classes: Sequence[str] | None = None,
    ood: Sequence[str | PathLike[str]] = (),
    name: str = "model",
    out: str | PathLike[str] | None = None,
    taps: Sequence[str] | None = None,
    logits: str | None = None,
    target_fpr: float = 0.01,
    target_risk: float = 0.05,
    as_sent: Sequence[str] = (),
    form: Literal["worst", "by-size", "mixture"] = "worst",
    epochs: int = 20,
    seed: int = 0,
    allow_chance: bool = False,
    device: Literal["auto", "cpu", "cuda"] = "auto",
) -> "Fitted":
    """Put calibrated uncertainty on a trained classifier; its predictions do not change, and neither does `model`.

    model: a `torch.nn.Module` from normalised images (N, C, H, W) to logits (N, K).
    train: the images that the model was trained on, or others like them: a folder of class folders, a torch `Dataset` that yields
        PIL images or uint8 arrays (H, W, C) with labels, or a pair of arrays, uint8 (N, H, W, C) and integers (N,).
    held_out: images that the model was not trained on, in the same forms; thresholds are calibrated on some of them, and the
        report uses others. Without it, `train` is divided, which is valid only if the model has seen none of these images.
    input: the model's input: a dict with `height`, `width`, `mean` and `std`, and optionally `colour`, `resize`, `fit` and
        `shorter_side`; or torchvision's `weights.transforms()`, timm's `resolve_model_data_config(model)` or a Hugging Face image
        processor; by default the model's own configuration (timm's `pretrained_cfg`).
    classes: names in the order of the logits; by default those of the data.
    ood: OOD sets for the report: folders of images (str or Path), or names of data sets.
    out: folder of the run, which continues there if it was interrupted; by default a temporary one.
    taps, logits: modules to read features from, and the key of the logits, where the automatic choice is wrong.
    target_fpr, target_risk: the default false-alarm rate, and error rate of accepted predictions.
    as_sent, form: encodings in which images will be sent, such as `jpeg:75-95`, and the form of the guarantee.
    allow_chance: go on if the model's accuracy on held-out images is near chance.
    """
    try:
        run = import_module(_TRAINING).fit_objects
    except ModuleNotFoundError as error:
        raise ExtraMissingError(
            f"qualms.fit needs {error.name}, which is not installed: run pip install 'qualms[cpu,train]'."
        ) from error
    bundle, report = run(
        model,
        train,
        held_out,
        input=input,
        classes=classes,
        ood=ood,
        name=name,
        out=None if out is None else Path(out),
        taps=taps,
        logits=logits,
        target_fpr=target_fpr,
        target_risk=target_risk,
        as_sent=as_sent,
        form=form,
        epochs=epochs,
        seed=seed,
        allow_chance=allow_chance,
        device=device,
    )
    return Fitted(bundle, report)


class Fitted:
    """A classifier with calibrated uncertainty, as `fit` returns it: call it with images, save it, print its report."""

    def __init__(self, file: Path, report: Callable[[bool], None]) -> None:
        self._file = file
        self._report = report
        self.model = Model(open_bundle(file))

    def report(self, *, all: bool = False) -> None:  # noqa: A002  # as the option --all of the command
        """Print the rows that decide, as `qualms fit` does; with `all`, every table."""
        self._report(all)

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the bundle, one ONNX file, for `qualms serve` and `qualms.open_model`."""
        target = Path(path)
        try:
            with atomic_path(target) as temporary:
                shutil.copyfile(self._file, temporary)
        except OSError as error:
            raise QualmsError(f"File {target} cannot be written: {error.strerror}.") from error
        return target

    @overload
    def __call__(self, images: ImageLike, **operating_point: Unpack[Selection]) -> Result: ...

    @overload
    def __call__(self, images: Images, **operating_point: Unpack[Selection]) -> list[Result]: ...

    def __call__(self, images: ImageLike | Images, **operating_point: Unpack[Selection]) -> Result | list[Result]:
        """One result for one image, a list of results for a list of images, as `qualms.Model.predict`."""
        return self.model.predict(images, **operating_point)
