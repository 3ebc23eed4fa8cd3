"""Run a bundle's graph in ONNX Runtime without a server: for `qualms.open_model`, calibration, evaluation and checks.

`GraphRunner` runs any number of images on the CPU, in batches that are smaller for larger images. `qualms.inference.engine`
is its counterpart in the service: it chooses the device and learns how long each batch size takes.
"""

import math
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from qualms.bundle import golden
from qualms.bundle.agreement import accepted_difference, differing_predictions, largest_difference
from qualms.bundle.manifest import Manifest
from qualms.bundle.sessions import failure, is_out_of_memory, open_session
from qualms.errors import BundleError, ExtraMissingError
from qualms.machine.cpu import available_cores

INPUT = "image"
CUDA = "CUDAExecutionProvider"

BATCH_VALUES, MAX_BATCH = 2_500_000, 256
"""input values and images of one batch: 256 images of 32 × 32 × 3, 16 of 224 × 224 × 3. Larger batches are hardly faster on a
CPU, and intermediate tensors take about a hundred times the memory of the input."""

Outputs = dict[str, NDArray[Any]]


class Images(Protocol):
    """uint8 images (N, H, W, C): an array, or a sequence that reads the images of a slice when it is asked for them."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, H, W, C)"""

    def __len__(self) -> int: ...

    def __getitem__(self, rows: slice, /) -> NDArray[np.uint8]: ...


def batch_size(images: Images) -> int:
    """Number of images that a network should be given at once."""
    return min(MAX_BATCH, max(1, BATCH_VALUES // max(1, math.prod(images.shape[1:]))))


def onnxruntime() -> ModuleType:
    """Import ONNX Runtime; ExtraMissingError names the extra to install if it is missing."""
    try:
        import onnxruntime as module  # noqa: PLC0415
    except ImportError:
        raise ExtraMissingError(
            "ONNX Runtime is not installed: run pip install 'qualms[cpu]', or 'qualms[gpu]' on a machine with CUDA."
        ) from None
    return module  # type: ignore[no-any-return]


class GraphRunner:
    """A graph loaded on the CPU or, with `cuda`, on a GPU, called with uint8 images (N, H, W, C)."""

    def __init__(self, graph: bytes, threads: int = 0, max_memory: int | None = None, *, cuda: bool = False) -> None:
        """`threads`: 0 for one per available core. `max_memory`: bytes that all tensors of a run may take; None for no limit."""
        ort = onnxruntime()
        self._max_memory = max_memory
        options = ort.SessionOptions()
        # By default, ONNX Runtime starts a thread per core of the machine, also where the process may use fewer.
        options.intra_op_num_threads = threads or available_cores()
        options.log_severity_level = 3
        providers: list[Any] = [_cuda(ort, options)] if cuda else ["CPUExecutionProvider"]
        try:
            self.session = open_session(ort, graph, options, providers, max_memory=max_memory)
        except Exception as error:
            raise BundleError(f"ONNX Runtime cannot load the graph: {failure(error, max_memory)}.") from None
        if cuda and self.session.get_providers()[0] != CUDA:
            raise BundleError("CUDA does not work on this machine: ONNX Runtime fell back to the CPU.")
        self.outputs = [output.name for output in self.session.get_outputs()]
        if INPUT not in {node.name for node in self.session.get_inputs()}:
            raise BundleError(f"The graph has no input named {INPUT}.")

    def __call__(
        self, images: Images, batch: int | None = None, progress: Callable[[int], None] | None = None
    ) -> Outputs:
        """All outputs, each (N, …), computed `batch` images at a time; `progress` is called with each batch's size.

        The default is `batch_size(images)`. Images are read by slices, one batch at a time.
        """
        batch = batch or batch_size(images)
        parts: list[list[NDArray[Any]]] = []
        for start in range(0, len(images), batch):
            part = images[start : start + batch]
            parts.append(self._run(part))
            if progress:
                progress(len(part))
        if not parts:
            raise ValueError("There are no images to run.")
        columns = zip(self.outputs, zip(*parts, strict=True), strict=True)
        return {name: np.concatenate(values) for name, values in columns}

    def _run(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        try:
            values: list[NDArray[Any]] = self.session.run(self.outputs, {INPUT: images})
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            raise BundleError(
                f"The graph cannot be run on {len(images)} images: {failure(error, self._max_memory)}."
            ) from error
        return values


def _cuda(ort: Any, options: Any) -> tuple[str, dict[str, str]]:
    """The provider of CUDA with the precision that the calibration has; no node may run on the CPU."""
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # loads CUDA and cuDNN libraries that are installed as Python packages
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    return CUDA, {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"}


def required_outputs(manifest: Manifest) -> list[str]:
    """Names of the outputs that a bundle's graph must have."""
    joined = ("fused_terms", "meta_alpha", "meta_mutual_information") if manifest.alpha == "joined" else ()
    names = ("prediction", "base_probabilities", "probabilities", "alpha", *manifest.scores, *joined)
    return list(dict.fromkeys(names))


def check_outputs(outputs: Collection[str], manifest: Manifest) -> None:
    """BundleError if one of `required_outputs` is not among the graph's `outputs`."""
    uses = {manifest.operating.trust_score: "the trust score", manifest.operating.score: "the flag score"}
    missing = [name for name in required_outputs(manifest) if name not in outputs]
    if missing:
        first = min(missing, key=lambda name: name not in uses)
        use = f", which its manifest names as {uses[first]}" if first in uses else ""
        raise BundleError(f"The graph of {manifest.name} has no output {first}{use}; it has {', '.join(outputs)}.")


def check_golden(runner: Callable[[NDArray[np.uint8]], Outputs], manifest: Manifest) -> None:
    """Compare the outputs on the golden inputs with the stored ones; BundleError names the output that differs most."""
    images = golden.draw(manifest.input, manifest.golden.count)
    if golden.digest(images) != manifest.golden.input_sha256:
        raise BundleError("The golden inputs differ from those the bundle was exported with.")
    outputs = runner(images)
    check_outputs(outputs, manifest)
    if missing := sorted(set(manifest.golden.outputs) - set(outputs)):
        raise BundleError(f"The graph lacks the output {missing[0]}.")
    if wrong := _differing_classes(outputs, manifest):
        raise BundleError(f"The golden vectors are not reproduced: {wrong} of {len(images)} predictions differ.")
    differences, accepted = dict[str, float](), dict[str, float]()
    for name, expected in manifest.golden.outputs.items():
        if name != "prediction":
            allowed = accepted_difference(name, expected, _spread(name, manifest))
            differences[name], accepted[name] = largest_difference(outputs[name], expected, allowed)
    worst = max(differences, key=lambda name: differences[name] / accepted[name], default=None)
    if worst is not None and not differences[worst] <= accepted[worst]:
        raise BundleError(
            f"The golden vectors are not reproduced: {worst} differs by {differences[worst]:.1e}, "
            f"at most {accepted[worst]:.0e} is allowed."
        )


def _differing_classes(outputs: Outputs, manifest: Manifest) -> int:
    """The number of golden images of another class; equally likely ones may differ."""
    golden_outputs = manifest.golden.outputs
    if "prediction" not in golden_outputs:
        return 0
    kinds = ("base_probabilities",) if manifest.prediction == "base" else ("meta_alpha", "alpha")
    probabilities = next((golden_outputs[kind] for kind in kinds if kind in golden_outputs), np.zeros((0, 0)))
    return differing_predictions(outputs["prediction"], golden_outputs["prediction"], probabilities)


def _spread(name: str, manifest: Manifest) -> float:
    """Half the distance of a score's 16 % and 84 % quantiles on known images; 0 for outputs that are no scores."""
    score = {"alpha": "log_precision", "meta_alpha": "log_precision", "fused_terms": "fused"}.get(name, name)
    quantiles = manifest.reference.quantiles.get(score)
    if quantiles is None:
        return 0.0
    low, high = np.interp([0.16, 0.84], manifest.reference.levels, quantiles)
    return float(high - low) / 2
