"""A bundle opened in this process: images in, results out, without a server."""

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import TypeAlias, Unpack, overload

import numpy as np
from numpy.typing import NDArray
from PIL import ImageOps
from PIL.Image import Image

from qualms.bundle.file import Bundle
from qualms.bundle.runtime import GraphRunner, check_golden
from qualms.decisions.operating_point import OperatingPoint, Selection
from qualms.decisions.results import ResultBuilder, ResultRow
from qualms.decisions.verdicts import Decider, Rule, decide
from qualms.errors import ImageError, first_line
from qualms.images.observed import observe, relative_size
from qualms.images.preprocess import conform, preprocess, preprocess_array
from qualms.replies import AlphaDetail, Result
from qualms.signing.opening import open_trusted

ImageLike: TypeAlias = str | PathLike[str] | bytes | NDArray[np.uint8] | Image
"""the path of an image file, its bytes, uint8 pixels of shape (H, W) or (H, W, C), or a PIL image"""
Images: TypeAlias = list[ImageLike] | tuple[ImageLike, ...]


def open_model(
    model: str | PathLike[str] | None = None, *, threads: int = 0, trusted_keys: str | PathLike[str] | None = None
) -> "Model":
    """Open a bundle by its path, or an embedded model by its name; the default model without an argument.

    `threads` is the number of threads of ONNX Runtime; 0 for one per available core. The model runs on the CPU. With
    `trusted_keys`, a file of public keys, a bundle has to be signed with one of them.
    """
    bundle = open_trusted(
        None if model is None else fspath(model), None if trusted_keys is None else fspath(trusted_keys)
    )
    return Model(bundle, threads)


class Model:
    """A verified bundle that is ready to predict; make one with `open_model`."""

    def __init__(self, bundle: Bundle, threads: int = 0, *, cuda: bool = False) -> None:
        self.bundle = bundle
        self._runner = GraphRunner(bundle.graph, threads, cuda=cuda)
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
        pixels, sizes = np.stack([pixels for pixels, _ in inputs]), [size for _, size in inputs]
        return [
            Result.model_validate(self._builder.nested(rule, explain=explain, alpha=alpha)(row))
            for rule, row in self.rows(pixels, sizes, point, explain=explain, alpha=alpha)
        ]

    def rows(
        self,
        pixels: NDArray[np.uint8],
        sizes: Sequence[str],
        point: OperatingPoint,
        *,
        explain: bool = False,
        alpha: AlphaDetail = "all",
    ) -> list[tuple[Rule, ResultRow]]:
        """The rule and the values of each result, for images (N, H, W, C) whose size was relative to the input as in `sizes`.

        `fields` gives the field of each value.
        """
        outputs = self._runner(pixels)
        by_size: dict[str, tuple[Rule, list[ResultRow]]] = {}
        for size in set(sizes):
            rule = self._decider.rule(point, size)
            by_size[size] = rule, self._builder.rows(outputs, rule, decide(rule, outputs), explain=explain, alpha=alpha)
        return [(by_size[size][0], by_size[size][1][row]) for row, size in enumerate(sizes)]

    def rule(self, point: OperatingPoint) -> Rule:
        """The rule of an operating point for images of any size; OperatingPointError if it is not supported."""
        return self._decider.rule(point)

    def fields(self, rule: Rule, *, explain: bool = False, alpha: AlphaDetail = "all") -> list[str]:
        """The path of the field of each value that `rows` returns."""
        return self._builder.fields(rule, explain=explain, alpha=alpha)

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
