"""Run a bundle's graph in ONNX Runtime: for calibration, evaluation and checks, the way it will be served."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.bundle import golden
from qualms.bundle.manifest import Manifest
from qualms.errors import BundleError, ExtraMissingError, first_line

INPUT = "image"
GOLDEN_TOLERANCE = 1e-4
"""relative; looser than float32 rounding, far tighter than any wrong kernel"""

Outputs = dict[str, NDArray[Any]]


def onnxruntime() -> ModuleType:
    """The runtime module, or a sentence that says which extra brings it."""
    try:
        import onnxruntime as module  # noqa: PLC0415
    except ImportError:
        raise ExtraMissingError(
            "ONNX Runtime is not installed: run pip install 'qualms[cpu]', or 'qualms[gpu]' on a machine with CUDA."
        ) from None
    return module  # type: ignore[no-any-return]


class GraphRunner:
    """A graph loaded on the CPU; call it with uint8 images (N, H, W, C)."""

    def __init__(self, graph: bytes, threads: int = 0) -> None:
        ort = onnxruntime()
        options = ort.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        try:
            self.session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        except Exception as error:
            raise BundleError(f"ONNX Runtime does not take the graph: {first_line(error)}.") from None
        self.outputs = [output.name for output in self.session.get_outputs()]
        if INPUT not in {given.name for given in self.session.get_inputs()}:
            raise BundleError(f"The graph has no input named {INPUT}.")

    def __call__(
        self, images: NDArray[np.uint8], batch: int = 256, progress: Callable[[int], None] | None = None
    ) -> Outputs:
        """All outputs, each (N, …), computed `batch` images at a time; `progress` hears of each batch's size."""
        parts: list[list[NDArray[Any]]] = []
        for start in range(0, len(images), batch):
            part = images[start : start + batch]
            parts.append(self.session.run(self.outputs, {INPUT: part}))
            if progress:
                progress(len(part))
        if not parts:
            raise ValueError("There are no images to run.")
        columns = zip(self.outputs, zip(*parts, strict=True), strict=True)
        return {name: np.concatenate(values) for name, values in columns}


def check_golden(runner: Callable[[NDArray[np.uint8]], Outputs], manifest: Manifest) -> None:
    """Run the golden inputs and compare; BundleError names the output that differs most."""
    images = golden.draw(manifest.input, manifest.golden.count)
    if golden.digest(images) != manifest.golden.input_sha256:
        raise BundleError("The golden inputs drawn by this program are not those the bundle was made with.")
    found = runner(images)
    if missing := sorted(set(manifest.golden.outputs) - set(found)):
        raise BundleError(f"The graph lacks the output {missing[0]}.")
    differences = {name: _difference(found[name], want) for name, want in manifest.golden.outputs.items()}
    worst = max(differences, key=lambda name: differences[name])
    if not differences[worst] <= GOLDEN_TOLERANCE:
        raise BundleError(
            f"The golden vectors are not reproduced: {worst} differs by {differences[worst]:.1e}, "
            f"and {GOLDEN_TOLERANCE:.0e} is allowed."
        )


def _difference(found: NDArray[Any], want: NDArray[np.float32]) -> float:
    """Largest difference, relative above 1 and absolute below it; infinite where shapes or finiteness differ."""
    if found.shape != want.shape or not np.isfinite(found).all():
        return float("inf")
    return float(np.max(np.abs(found - want) / np.maximum(1.0, np.abs(want))))
