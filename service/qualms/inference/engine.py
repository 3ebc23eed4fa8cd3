"""A model on a device: loaded, checked against its golden vectors, warm, and with a known cost."""

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.file import Bundle
from qualms.bundle.runtime import INPUT, Outputs, check_golden, onnxruntime
from qualms.errors import BundleError, QualmsError, first_line
from qualms.inference.cpu import available_cores
from qualms.settings import Device

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_WARM_UP_RUNS = 3
_log = logging.getLogger("qualms.engine")


class DeviceError(QualmsError):
    """The device that was asked for cannot be used."""


@dataclass(frozen=True)
class CostCurve:
    """How long a batch takes: measured at some sizes, straight lines between them."""

    sizes: tuple[int, ...]
    seconds: tuple[float, ...]

    def __call__(self, rows: int) -> float:
        """Seconds for one batch of `rows`; beyond the largest measured size, in proportion."""
        table = self._table
        return table[rows] if rows < len(table) else table[-1] * rows / self.sizes[-1]

    @cached_property
    def _table(self) -> list[float]:
        """Seconds by rows: admission looks here twice a request."""
        return [float(value) for value in np.interp(range(self.sizes[-1] + 1), self.sizes, self.seconds)]


class Engine:
    """One ONNX Runtime session; `run` may be called from one thread at a time."""

    def __init__(
        self,
        bundle: Bundle,
        device: Device = "cpu",
        threads: int | None = None,
        max_batch: int = 64,
        longest_run: float = math.inf,
    ) -> None:
        """Batches hold at most `max_batch` images, fewer where that many would take over `longest_run` seconds."""
        self.bundle = bundle
        self.max_batch = max_batch
        self._longest_run = longest_run
        threads = threads or available_cores()
        session, provider = _open(bundle.graph, device, threads)
        try:
            self._use(session, provider)
        except BundleError as error:
            if device != "auto" or provider != CUDA:
                raise
            _log.warning("CUDA is offered but does not work; running on the CPU", extra={"reason": str(error)})
            self._use(*_open(bundle.graph, "cpu", threads))

    def _use(self, session: Any, provider: str) -> None:
        """Adopt a session once it takes our input, gives every output, and reproduces the golden vectors."""
        self.session, self.provider = session, provider
        self.outputs = [output.name for output in session.get_outputs()]
        _check_names([given.name for given in session.get_inputs()], self.outputs, self.bundle)
        try:
            check_golden(self.run_all, self.bundle.manifest)
            self.cost = self._measure()
            self.max_batch = self.cost.sizes[-1]
        except QualmsError:
            raise
        except Exception as error:  # ONNX Runtime has no common class for what a run may raise
            raise BundleError(f"{self.bundle.path} cannot be run on {provider}: {first_line(error)}.") from error

    def run(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Outputs in the order of `self.outputs` for images (N, H, W, C)."""
        values: list[NDArray[Any]] = self.session.run(self.outputs, {INPUT: images})
        return values

    def run_all(self, images: NDArray[np.uint8]) -> Outputs:
        """Outputs by name."""
        return dict(zip(self.outputs, self.run(images), strict=True))

    def _measure(self) -> CostCurve:
        """Median time of a few runs at each power of two: warms every size up and learns what it costs.

        It stops at the first size that takes too long, and batches stay below that.
        """
        most = self.max_batch
        sizes, seconds = list[int](), list[float]()
        for size in sorted({min(1 << power, most) for power in range(most.bit_length() + 1)}):
            taken = self._time(size)
            if sizes and taken > self._longest_run:
                break
            sizes.append(size)
            seconds.append(taken)
        return CostCurve(tuple(sizes), tuple(_increasing(seconds)))

    def _time(self, size: int) -> float:
        images = np.zeros((size, *self.bundle.manifest.input.shape), np.uint8)
        seconds = []
        for _ in range(_WARM_UP_RUNS + 1):
            start = time.perf_counter()
            self.run(images)
            seconds.append(time.perf_counter() - start)
        return float(np.median(seconds[1:]))  # the first run of a size also allocates


def _increasing(values: Sequence[float]) -> list[float]:
    """A larger batch never costs less; where noise says so, the larger time stands."""
    return [float(value) for value in np.maximum.accumulate(values)]


def _check_names(inputs: Sequence[str], outputs: Sequence[str], bundle: Bundle) -> None:
    if list(inputs) != [INPUT]:
        raise BundleError(f"{bundle.path} is not usable: its graph takes {', '.join(inputs)}, not {INPUT} alone.")
    for name in ("prediction", "base_probabilities", "probabilities", "alpha", *bundle.manifest.scores):
        if name not in outputs:
            raise BundleError(f"{bundle.path} is not usable: its graph lacks the output {name}.")
        if name not in bundle.manifest.golden.outputs:
            raise BundleError(f"{bundle.path} is not usable: it has no golden vectors of {name} to check it by.")


def _open(graph: bytes, device: Device, threads: int) -> tuple[Any, str]:
    """A session on the device that was asked for, and the provider it really runs on."""
    ort = onnxruntime()
    _check_wheels(device)
    offered = CUDA in ort.get_available_providers()
    if device == "cuda" and not offered:
        raise DeviceError("Device 'cuda' was asked for, but this ONNX Runtime has no CUDA; install 'qualms[gpu]'.")
    if device != "cpu" and offered:
        session = _open_cuda(ort, graph, threads, strict=device == "cuda")
        if session is not None:
            return session, CUDA
    options = _options(ort, threads)
    try:
        return ort.InferenceSession(graph, options, providers=[CPU]), CPU
    except Exception as error:
        raise BundleError(f"ONNX Runtime does not take the graph: {first_line(error)}.") from error


def _open_cuda(ort: Any, graph: bytes, threads: int, *, strict: bool) -> Any:
    """A session that really runs on CUDA; if there is none: None, or DeviceError when `strict`.

    ONNX Runtime falls back to the CPU without a word, so the session is asked what it got.
    """
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # finds the CUDA and cuDNN libraries that came as Python packages
    options = _options(ort, threads)
    if strict:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    # TF32 rounds products to ten bits: scores would no longer be those that were calibrated.
    cuda = (CUDA, {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"})
    try:
        session = ort.InferenceSession(graph, options, providers=[cuda] if strict else [cuda, CPU])
        reason = "" if session.get_providers()[0] == CUDA else "ONNX Runtime fell back to the CPU"
    except Exception as error:
        session, reason = None, first_line(error)
    if not reason:
        return session
    if strict:
        raise DeviceError(f"Device 'cuda' was asked for and does not work: {reason}.")
    _log.warning("CUDA is offered but does not work; running on the CPU", extra={"reason": reason})
    return None


def _options(ort: Any, threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Spinning threads would take the cores that decoding and the event loop need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _check_wheels(device: Device) -> None:
    """Both wheels own the module `onnxruntime`, and installed together the CPU one wins."""
    installed = {name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)}
    if len(installed) < 2:
        return
    if device == "cuda":
        raise DeviceError("Both onnxruntime and onnxruntime-gpu are installed, and the first hides CUDA; remove it.")
    _log.warning("both onnxruntime and onnxruntime-gpu are installed; the first hides CUDA")


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
