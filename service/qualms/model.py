"""A bundle opened in this process: images in, results out, without a server."""

from os import PathLike, fspath
from pathlib import Path
from typing import TypeAlias, TypedDict, Unpack, overload

import numpy as np
from numpy.typing import NDArray
from PIL import ImageOps
from PIL.Image import Image

from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import Bundle, open_bundle
from qualms.bundle.parts import Guarantee
from qualms.bundle.runtime import GraphRunner, check_golden
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.results import AlphaDetail, Result, ResultBuilder
from qualms.decisions.verdicts import Decider, decide
from qualms.errors import ImageError, first_line
from qualms.images.observed import observe, relative_size
from qualms.images.preprocess import conform, preprocess, preprocess_array

ImageLike: TypeAlias = str | PathLike[str] | bytes | NDArray[np.uint8] | Image
"""the path of an image file, its bytes, uint8 pixels of shape (H, W) or (H, W, C), or a PIL image"""
Images: TypeAlias = list[ImageLike] | tuple[ImageLike, ...]


class Selection(TypedDict, total=False):
    """The fields of an OperatingPoint, as keyword arguments."""

    score: str
    target_fpr: float
    guarantee: Guarantee
    target_risk: float
    coverage: float


def open_model(model: str | PathLike[str] | None = None, *, threads: int = 0) -> "Model":
    """Open a bundle by its path, or an embedded model by its name; the default model without an argument.

    `threads` is the number of threads of ONNX Runtime; 0 lets it choose. The model runs on the CPU.
    """
    return Model(open_bundle(resolve_model(None if model is None else fspath(model))), threads)


class Model:
    """A verified bundle that is ready to predict; make one with `open_model`."""

    def __init__(self, bundle: Bundle, threads: int = 0) -> None:
        self.bundle = bundle
        self._runner = GraphRunner(bundle.graph, threads)
        check_golden(self._runner, bundle.manifest)
        self._decider = Decider(bundle.manifest)
        self._builder = ResultBuilder(bundle.manifest, self._runner.outputs)

    @property
    def classes(self) -> list[str]:
        """Names of the K classes."""
        return self.bundle.manifest.classes

    @overload
    def predict(
        self,
        images: ImageLike,
        *,
        explain: bool = False,
        alpha: AlphaDetail = "all",
        **operating_point: Unpack[Selection],
    ) -> Result: ...

    @overload
    def predict(
        self, images: Images, *, explain: bool = False, alpha: AlphaDetail = "all", **operating_point: Unpack[Selection]
    ) -> list[Result]: ...

    def predict(
        self,
        images: ImageLike | Images,
        *,
        explain: bool = False,
        alpha: AlphaDetail = "all",
        **operating_point: Unpack[Selection],
    ) -> Result | list[Result]:
        """One result for one image, or a list of results for a list of images.

        Without keyword arguments the verdicts are those of the manifest's operating point; `score`, `target_fpr`,
        `guarantee` and `target_risk` select another one, and `coverage` adds a prediction set. With `explain`, each result
        has an explanation. `alpha` is how much of α a result has: `all` entries, however many classes there are, the ten
        largest with their classes (`top10`), or `none`. Raises
        OperatingPointError if the calibration does not support the operating point, ExplanationError if the model was made
        with an earlier version and cannot explain its flags, ParameterError if `alpha` is none of these values, and
        ImageError if an image cannot be used.
        """
        point = OperatingPoint(**operating_point)
        self._decider.rule(point)  # an unsupported operating point is an error even without images
        if explain:
            self._builder.check_explainable()
        alpha = self._builder.alpha_detail(alpha)
        if not isinstance(images, list | tuple):
            return self._results([images], point, explain, alpha)[0]
        return self._results(images, point, explain, alpha) if images else []

    def _results(self, images: Images, point: OperatingPoint, explain: bool, alpha: AlphaDetail) -> list[Result]:
        inputs = self._inputs(images)
        outputs = self._runner(np.stack([pixels for pixels, _ in inputs]))
        sizes = [size for _, size in inputs]
        results: dict[str, list[Result]] = {}
        for size in set(sizes):
            rule = self._decider.rule(point, size)
            nested = self._builder.nested(rule, explain=explain, alpha=alpha)
            rows = self._builder.rows(outputs, rule, decide(rule, outputs), explain=explain, alpha=alpha)
            results[size] = [Result.model_validate(nested(row)) for row in rows]
        return [results[size][row] for row, size in enumerate(sizes)]

    def _inputs(self, images: Images) -> list[tuple[NDArray[np.uint8], str]]:
        """Every image as the model's input, and its size relative to it."""
        inputs = []
        for index, image in enumerate(images):
            try:
                inputs.append(self._input(image))
            except ImageError as error:
                name = f"{image}: " if isinstance(image, str | PathLike) else f"images[{index}]: "
                raise ImageError(name + str(error), reason=error.reason) from error
        return inputs

    def _input(self, image: ImageLike) -> tuple[NDArray[np.uint8], str]:
        """One image as the model's input, (H, W, C), through the same preprocessing as the service."""
        spec = self.bundle.manifest.input
        if isinstance(image, np.ndarray):
            return preprocess_array(image, spec), observe(image, spec).size
        if isinstance(image, Image):
            try:
                upright = ImageOps.exif_transpose(image)
            except Exception as error:  # Pillow reads files lazily, and its decoders raise many kinds of errors
                raise ImageError(f"The image is damaged: {first_line(error)}.") from None
            return conform(upright, spec), relative_size(*image.size, spec)
        if not isinstance(image, bytes):
            try:
                image = Path(image).read_bytes()
            except OSError as error:
                raise ImageError(f"The file cannot be read: {error.strerror}.") from None
        return preprocess(image, spec), observe(image, spec).size
