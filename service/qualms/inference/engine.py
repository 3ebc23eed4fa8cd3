"""A model loaded on a device: checked against its golden vectors, with a cost per batch size that its runs teach."""

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.file import Bundle
from qualms.bundle.runtime import INPUT, Outputs, check_golden, check_outputs, onnxruntime, required_outputs
from qualms.bundle.sessions import failure, is_out_of_memory, open_session, shrinking_run
from qualms.errors import BundleError, QualmsError, first_line
from qualms.inference.cost import CostCurve, CostLearner
from qualms.machine.cpu import available_cores
from qualms.settings import Device

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_log = logging.getLogger("qualms.engine")


class DeviceError(QualmsError):
    """The requested device cannot be used."""


class Engine:
    """One ONNX Runtime session; `run` may be called from one thread at a time."""

    cost: CostCurve
    """seconds per batch, as learned so far; replaced as a whole"""
    max_batch: int = 1
    """the largest batch to form at present"""

    def __init__(
        self,
        bundle: Bundle,
        device: Device = "cpu",
        threads: int | None = None,
        max_batch: int = 64,
        max_run_seconds: float = math.inf,
        clock: Callable[[], float] = time.perf_counter,
        max_memory: int | None = None,
    ) -> None:
        """The attribute `max_batch` grows up to the argument while larger batches gain throughput (`qualms.inference.cost`).

        It stays below sizes whose runs take longer than `max_run_seconds`. `max_memory`: bytes of main memory that all tensors
        of a run may take; None for no limit. A batch has fewer images if that many would need more, and a model that cannot
        run one image is refused. The attribute `bundle` has no graph, which would take as much memory as the session.
        """
        self.bundle = bundle
        self._limits = max_batch, max_run_seconds
        self._max_memory = max_memory
        self._clock = clock
        threads = threads or available_cores()
        session, provider = _open(bundle.graph, device, threads, max_memory)
        try:
            self._use(session, provider)
        except BundleError as error:
            if device != "auto" or provider != CUDA:
                raise
            _log.warning("CUDA is available but does not work; running on the CPU", extra={"reason": str(error)})
            self._use(*_open(bundle.graph, "cpu", threads, max_memory))
        self.bundle = replace(bundle, graph=b"")
        _log.info("nodes by execution provider", extra={"model": bundle.manifest.name, "nodes": self.nodes()})

    def _use(self, session: Any, provider: str) -> None:
        """Check the inputs, outputs and golden vectors of a session; the golden images also show the cost of one image."""
        self.session, self.provider = session, provider
        self.outputs = [output.name for output in session.get_outputs()]
        _check_names([tensor.name for tensor in session.get_inputs()], self.outputs, self.bundle)
        self._learner = CostLearner(*self._limits)
        self._shrink = False
        """whether the next run should free the memory that a larger batch needed"""
        try:
            check_golden(self._run_one_by_one, self.bundle.manifest)
        except QualmsError:
            raise
        except Exception as error:  # the errors of ONNX Runtime have no common base class
            raise BundleError(f"{self.bundle.path} cannot be run on {provider}: {first_line(error)}.") from error

    def nodes(self) -> dict[str, int]:
        """The number of nodes that each execution provider runs, counted before nodes are fused.

        With `auto`, nodes that CUDA cannot run are on the CPU, and each costs copies between the devices.
        """
        counts = Counter[str]()
        for part in self.session.get_provider_graph_assignment_info():
            counts[part.ep_name] += len(part.get_nodes())
        return dict(counts)

    def run(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        """Outputs in the order of `self.outputs` for images (N, H, W, C)."""
        started = self._clock()
        try:
            values = self._run(images)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            if len(images) > 1:
                self._learner.too_large(len(images))
                self._publish()
                return self._run_in_halves(images)
            reason = failure(error, self._max_memory)
            raise BundleError(f"{self.bundle.path} cannot be run on one image: {reason}.") from error
        self._learner.observe(len(images), self._clock() - started)
        self._publish()
        return values

    def run_all(self, images: NDArray[np.uint8]) -> Outputs:
        """Outputs by name."""
        return dict(zip(self.outputs, self.run(images), strict=True))

    def _run(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        feed = {INPUT: images}
        if self._shrink:
            self._shrink = False
            shrunk: list[NDArray[Any]] = self.session.run(self.outputs, feed, shrinking_run(onnxruntime()))
            return shrunk
        values: list[NDArray[Any]] = self.session.run(self.outputs, feed)
        return values

    def _run_in_halves(self, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
        half = (len(images) + 1) // 2
        parts = self.run(images[:half]), self.run(images[half:])
        return [np.concatenate(values) for values in zip(*parts, strict=True)]

    def _run_one_by_one(self, images: NDArray[np.uint8]) -> Outputs:
        """Outputs by name; a batch would make the session allocate memory that single images do not need."""
        parts = [self.run(image[np.newaxis]) for image in images]
        return {name: np.concatenate(values) for name, *values in zip(self.outputs, *parts, strict=True)}

    def _publish(self) -> None:
        """Set `cost` and `max_batch` to what was learned; other threads read them."""
        learner = self._learner
        if learner.changed:
            learner.changed = False
            self._shrink = self.provider == CPU and learner.max_batch < self.max_batch
            self.cost, self.max_batch = learner.cost, learner.max_batch


def _check_names(inputs: Sequence[str], outputs: Sequence[str], bundle: Bundle) -> None:
    if list(inputs) != [INPUT]:
        raise BundleError(
            f"{bundle.path} is not usable: its graph has the inputs {', '.join(inputs)}; accepted is {INPUT} alone."
        )
    check_outputs(outputs, bundle.manifest)
    for name in required_outputs(bundle.manifest):
        if name not in bundle.manifest.golden.outputs:
            raise BundleError(f"{bundle.path} is not usable: it has no golden vectors of {name}.")


def _open(graph: bytes, device: Device, threads: int, max_memory: int | None) -> tuple[Any, str]:
    """A session on the requested device, and the execution provider it runs on."""
    ort = onnxruntime()
    _check_wheels(device)
    available = CUDA in ort.get_available_providers()
    if device == "cuda" and not available:
        raise DeviceError("Device 'cuda' is not available: this ONNX Runtime has no CUDA; install 'qualms[gpu]'.")
    if device != "cpu" and available:
        session = _open_cuda(ort, graph, threads, max_memory, strict=device == "cuda")
        if session is not None:
            return session, CUDA
    options = _options(ort, threads)
    try:
        return open_session(ort, graph, options, [CPU], max_memory=max_memory), CPU
    except Exception as error:
        raise BundleError(f"ONNX Runtime cannot load the graph: {failure(error, max_memory)}.") from error


def _open_cuda(ort: Any, graph: bytes, threads: int, max_memory: int | None, *, strict: bool) -> Any:
    """A session that runs on CUDA; if that is impossible, None, or DeviceError with `strict`.

    ONNX Runtime falls back to the CPU silently, so the session's actual provider is checked.
    """
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()  # loads CUDA and cuDNN libraries that are installed as Python packages
    options = _options(ort, threads)
    if strict:
        options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    # TF32 rounds factors to 10 bits of mantissa, so scores would differ from the calibrated ones.
    cuda = (CUDA, {"use_tf32": "0", "cudnn_conv_algo_search": "HEURISTIC"})
    try:
        providers = [cuda] if strict else [cuda, CPU]
        session = open_session(ort, graph, options, providers, max_memory=max_memory)
        reason = "" if session.get_providers()[0] == CUDA else "ONNX Runtime fell back to the CPU"
    except Exception as error:
        session, reason = None, first_line(error)
    if not reason:
        return session
    if strict:
        raise DeviceError(f"Device 'cuda' does not work: {reason}.")
    _log.warning("CUDA is available but does not work; running on the CPU", extra={"reason": reason})
    return None


def _options(ort: Any, threads: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    # Spinning threads would take the cores that decoding and the event loop need.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")  # for Engine.nodes
    return options


def _check_wheels(device: Device) -> None:
    """Both distributions install the module `onnxruntime`; if both are installed, CUDA is not available."""
    installed = {name for name in ("onnxruntime", "onnxruntime-gpu") if _is_installed(name)}
    if len(installed) < 2:
        return
    if device == "cuda":
        raise DeviceError(
            "Both onnxruntime and onnxruntime-gpu are installed, which disables CUDA; remove onnxruntime."
        )
    _log.warning("both onnxruntime and onnxruntime-gpu are installed, which disables CUDA")


def _is_installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
