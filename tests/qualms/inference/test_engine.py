"""The engine: measured cost, checked outputs, and the choice of the device."""

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray

from qualms.bundle.file import Bundle
from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import GraphRunner
from qualms.bundle.sessions import shrinking_run
from qualms.errors import BundleError, QualmsError
from qualms.inference import engine as module
from qualms.inference.cost import REJECTION_TRIALS
from qualms.inference.engine import CPU, CUDA, DeviceError, Engine

Change = Callable[[Callable[[Any], None]], Bundle]


@pytest.fixture
def altered(bundle: Bundle, model: onnx.ModelProto) -> Change:
    """change → the bundle with a changed graph and an unchanged manifest."""

    def alter(change: Callable[[Any], None]) -> Bundle:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        change(copy.graph)
        return replace(bundle, graph=copy.SerializeToString())

    return alter


class CudaRuntime:
    """An ONNX Runtime with CUDA: its sessions run on the CPU and report `provider`."""

    def __init__(self, *, provider: str = CUDA, error: Exception | None = None, wrong: bool = False) -> None:
        self.provider, self.error, self.wrong = provider, error, wrong
        self.opened: list[tuple[Any, Any]] = []
        self.preloaded = False
        self.SessionOptions = onnxruntime.SessionOptions

    def get_available_providers(self) -> list[str]:
        return [CUDA, CPU]

    def preload_dlls(self) -> None:
        self.preloaded = True

    def InferenceSession(self, graph: bytes, options: Any, providers: list[Any]) -> Any:  # noqa: N802
        self.opened.append((options, providers))
        if providers == [CPU]:
            return onnxruntime.InferenceSession(graph, options, providers=[CPU])
        recorded = onnxruntime.SessionOptions()
        recorded.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        real = onnxruntime.InferenceSession(graph, recorded, providers=[CPU])
        if self.error is not None:
            raise self.error

        def run(names: None, feed: dict[str, Any]) -> list[NDArray[Any]]:
            values: list[NDArray[Any]] = real.run(names, feed)
            return [value + 1 for value in values] if self.wrong else values

        def placed() -> list[Any]:
            """All nodes but the first on CUDA."""
            parts = real.get_provider_graph_assignment_info()
            return [
                SimpleNamespace(ep_name=CUDA if part else CPU, get_nodes=parts[part].get_nodes)
                for part in range(len(parts))
            ]

        return SimpleNamespace(
            get_providers=lambda: [self.provider],
            get_inputs=real.get_inputs,
            get_outputs=real.get_outputs,
            get_provider_graph_assignment_info=placed,
            run=run,
        )


@pytest.fixture
def cuda_runtime(monkeypatch: pytest.MonkeyPatch) -> Callable[..., CudaRuntime]:
    """options of CudaRuntime → the runtime that engines use from now on."""

    def use(**options: Any) -> CudaRuntime:
        runtime = CudaRuntime(**options)
        monkeypatch.setattr(module, "onnxruntime", lambda: runtime)
        return runtime

    return use


@pytest.fixture
def cpu_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines use ONNX Runtime without CUDA, on any machine."""
    runtime = SimpleNamespace(
        get_available_providers=lambda: [CPU],
        SessionOptions=onnxruntime.SessionOptions,
        InferenceSession=onnxruntime.InferenceSession,
    )
    monkeypatch.setattr(module, "onnxruntime", lambda: runtime)


# Cost


class RunClock:
    """A clock that only runs advance: by `seconds` of the batch's size."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
        self.now = 0.0
        self.sizes: list[int] = []
        run = Engine._run

        def timed_run(engine: Engine, images: NDArray[np.uint8]) -> list[NDArray[Any]]:
            self.now += seconds(len(images))
            self.sizes.append(len(images))
            return run(engine, images)

        monkeypatch.setattr(Engine, "_run", timed_run)

    def __call__(self) -> float:
        return self.now


def serve(engine: Engine, runs: int) -> None:
    """Run batches as large as the engine allows."""
    for _ in range(runs):
        engine.run(np.zeros((engine.max_batch, *engine.bundle.manifest.input.shape), np.uint8))


def test_only_single_images_are_run_at_start(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = RunClock(monkeypatch, lambda size: 0.1 * size)
    engine = Engine(bundle, threads=1, max_batch=64, clock=clock)
    assert clock.sizes == bundle.manifest.golden.count * [1]
    assert (engine.max_batch, engine.cost.sizes) == (2, (1,))
    assert engine.cost(1) == pytest.approx(0.1)


def test_cost_and_batch_size_are_learned_from_runs(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = RunClock(monkeypatch, lambda size: 1 + 0.1 * size)
    engine = Engine(bundle, threads=1, max_batch=8, clock=clock)
    serve(engine, 12)
    assert (engine.max_batch, engine.cost.sizes) == (8, (1, 2, 4, 8))
    assert engine.cost.seconds == pytest.approx((1.1, 1.2, 1.4, 1.8))


def test_batches_are_limited_to_the_maximal_run_time(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = RunClock(monkeypatch, lambda size: 0.1 * size + 0.05)
    engine = Engine(bundle, threads=1, max_batch=64, max_run_seconds=0.5, clock=clock)
    serve(engine, 20)
    assert engine.max_batch == 4
    assert max(clock.sizes) == 8, "larger batches are not tried"


def test_memory_of_a_batch_size_that_gained_nothing_is_freed(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    freed = list[object]()

    def recorded(ort: Any) -> Any:
        freed.append(shrinking_run(ort))
        return freed[-1]

    monkeypatch.setattr(module, "shrinking_run", recorded)
    engine = Engine(bundle, threads=1, max_batch=8, clock=RunClock(monkeypatch, lambda size: 0.1 * size))
    serve(engine, REJECTION_TRIALS)
    assert (engine.max_batch, freed) == (1, [])
    serve(engine, 5)
    assert len(freed) == 1


# Outputs


def test_outputs_are_those_of_the_graph(
    bundle: Bundle, runner: GraphRunner, draw_images: Callable[[int, int], NDArray[np.uint8]]
) -> None:
    engine, images = Engine(bundle, threads=1, max_batch=2), draw_images(3, 5)
    outputs, expected = engine.run_all(images), runner(images)
    assert outputs.keys() == expected.keys()
    for name, values in outputs.items():
        np.testing.assert_array_equal(values, expected[name])
    assert [value.shape[0] for value in engine.run(images)] == [5] * len(engine.outputs)


@pytest.mark.parametrize("name", ["prediction", "base_probabilities", "alpha", "mutual_information", "precision"])
def test_a_missing_output_is_an_error_that_names_it(altered: Change, name: str) -> None:
    def drop(graph: Any) -> None:
        graph.output.remove(next(output for output in graph.output if output.name == name))

    with pytest.raises(BundleError, match=rf"^The graph of tiny has no output {name}; it has "):
        Engine(altered(drop), threads=1)


@pytest.mark.parametrize("name", ["prediction", "alpha", "base_probabilities", "entropy"])
def test_an_output_without_golden_vectors_is_an_error_that_names_it(
    bundle: Bundle, manifest: Manifest, name: str
) -> None:
    outputs = {other: values for other, values in manifest.golden.outputs.items() if other != name}
    golden = manifest.golden.model_copy(update={"outputs": outputs})
    unchecked = replace(bundle, manifest=manifest.model_copy(update={"golden": golden}))
    with pytest.raises(BundleError, match=rf"is not usable: it has no golden vectors of {name}\.$"):
        Engine(unchecked, threads=1)


def test_another_input_name_is_an_error(altered: Change) -> None:
    def rename(graph: Any) -> None:
        graph.input[0].name = graph.node[0].input[0] = "pixels_in"

    with pytest.raises(BundleError, match="its graph has the inputs pixels_in; accepted is image alone"):
        Engine(altered(rename), threads=1)


def test_a_graph_with_another_input_size_is_an_error(altered: Change) -> None:
    def widen(graph: Any) -> None:
        graph.input[0].type.tensor_type.shape.dim[1].dim_value += 1

    with pytest.raises(BundleError, match="cannot be run on CPUExecutionProvider: .*"):
        Engine(altered(widen), threads=1)


def test_a_graph_that_cannot_be_loaded_is_an_error(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"^ONNX Runtime cannot load the graph: .*\.$"):
        Engine(replace(bundle, graph=b"nothing"), threads=1)


def test_golden_vectors_that_are_not_reproduced_are_an_error(bundle: Bundle, manifest: Manifest) -> None:
    outputs = {**manifest.golden.outputs, "alpha": manifest.golden.outputs["alpha"] * np.float32(1.01)}
    golden = manifest.golden.model_copy(update={"outputs": outputs})
    damaged = replace(bundle, manifest=manifest.model_copy(update={"golden": golden}))
    with pytest.raises(BundleError, match="golden vectors are not reproduced: alpha differs"):
        Engine(damaged, threads=1)


# Devices


def test_the_cpu_session_has_the_requested_threads_and_they_do_not_spin(
    bundle: Bundle, cuda_runtime: Callable[..., CudaRuntime]
) -> None:
    runtime = cuda_runtime()
    engine = Engine(bundle, "cpu", threads=3, max_batch=1)
    assert engine.provider == CPU
    ((options, providers),) = runtime.opened
    assert providers == [CPU]
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_the_default_number_of_threads_is_that_of_the_available_cores(
    bundle: Bundle, cuda_runtime: Callable[..., CudaRuntime], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = cuda_runtime()
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    Engine(bundle, "cpu", max_batch=1)
    assert runtime.opened[0][0].intra_op_num_threads == 2


@pytest.mark.usefixtures("cpu_runtime")
def test_cuda_that_is_not_available_is_an_error_that_names_the_extra_to_install(bundle: Bundle) -> None:
    with pytest.raises(DeviceError, match=r"^Device 'cuda' is not available: .*; install 'qualms\[gpu\]'\.$") as caught:
        Engine(bundle, "cuda", threads=1)
    assert isinstance(caught.value, QualmsError)


@pytest.mark.usefixtures("cpu_runtime")
def test_auto_without_cuda_uses_the_cpu(bundle: Bundle) -> None:
    assert Engine(bundle, "auto", threads=1, max_batch=1).provider == CPU


def test_auto_uses_cuda_if_it_works(bundle: Bundle, cuda_runtime: Callable[..., CudaRuntime]) -> None:
    runtime = cuda_runtime()
    assert Engine(bundle, "auto", threads=1, max_batch=1).provider == CUDA
    assert runtime.preloaded
    ((_, ((name, options), fallback)),) = runtime.opened
    assert (name, fallback) == (CUDA, CPU)
    assert options["use_tf32"] == "0"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"provider": CPU}, "ONNX Runtime fell back to the CPU"),
        ({"error": RuntimeError("libcudnn is missing\nat line 3")}, "libcudnn is missing"),
        ({"error": RuntimeError()}, "RuntimeError"),
        ({"wrong": True}, "golden vectors are not reproduced"),
    ],
)
def test_auto_falls_back_to_the_cpu_and_logs_the_reason_if_cuda_does_not_work(
    bundle: Bundle,
    cuda_runtime: Callable[..., CudaRuntime],
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    reason: str,
) -> None:
    cuda_runtime(**options)
    with caplog.at_level(logging.WARNING, "qualms.engine"):
        engine = Engine(bundle, "auto", threads=1, max_batch=1)
    assert engine.provider == CPU
    (record,) = caplog.records
    assert "running on the CPU" in record.getMessage()
    assert reason in record.__dict__["reason"]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"provider": CPU}, "ONNX Runtime fell back to the CPU"),
        ({"error": RuntimeError("libcudnn is missing\nat line 3")}, "libcudnn is missing"),
    ],
)
def test_requested_cuda_that_does_not_work_is_an_error_with_the_reason(
    bundle: Bundle, cuda_runtime: Callable[..., CudaRuntime], options: dict[str, Any], reason: str
) -> None:
    runtime = cuda_runtime(**options)
    with pytest.raises(DeviceError, match=rf"^Device 'cuda' does not work: {reason}\.$"):
        Engine(bundle, "cuda", threads=1)
    ((session_options, ((name, _),)),) = runtime.opened
    assert name == CUDA
    assert session_options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"


def test_requested_cuda_with_wrong_results_is_an_error_and_not_replaced_by_the_cpu(
    bundle: Bundle, cuda_runtime: Callable[..., CudaRuntime]
) -> None:
    cuda_runtime(wrong=True)
    with pytest.raises(BundleError, match="golden vectors are not reproduced"):
        Engine(bundle, "cuda", threads=1)


@pytest.mark.parametrize("installed", [{"onnxruntime", "onnxruntime-gpu"}, {"onnxruntime"}, {"onnxruntime-gpu"}, set()])
def test_both_distributions_of_onnx_runtime_are_a_warning_or_with_cuda_an_error(
    bundle: Bundle,
    cuda_runtime: Callable[..., CudaRuntime],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    installed: set[str],
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise metadata.PackageNotFoundError(name)
        return "1.0"

    cuda_runtime()
    monkeypatch.setattr(metadata, "version", version)
    with caplog.at_level(logging.WARNING, "qualms.engine"):
        assert Engine(bundle, "cpu", threads=1, max_batch=1).provider == CPU
    if len(installed) < 2:
        assert not caplog.records
        assert Engine(bundle, "cuda", threads=1, max_batch=1).provider == CUDA
    else:
        assert "both onnxruntime and onnxruntime-gpu are installed, which disables CUDA" in caplog.text
        with pytest.raises(DeviceError, match=r"^Both onnxruntime and onnxruntime-gpu .*; remove onnxruntime\.$"):
            Engine(bundle, "cuda", threads=1)


@pytest.mark.parametrize("device", ["cpu", "auto"])
def test_the_number_of_nodes_by_provider_is_logged(
    bundle: Bundle,
    model: onnx.ModelProto,
    cuda_runtime: Callable[..., CudaRuntime],
    caplog: pytest.LogCaptureFixture,
    device: Any,
) -> None:
    cuda_runtime()
    with caplog.at_level(logging.INFO, "qualms.engine"):
        engine = Engine(bundle, device, threads=1, max_batch=1)
    (record,) = caplog.records
    assert (record.getMessage(), record.__dict__["model"]) == ("nodes by execution provider", "tiny")
    total = len(model.graph.node)
    assert (
        record.__dict__["nodes"] == engine.nodes() == ({CPU: total} if device == "cpu" else {CPU: 1, CUDA: total - 1})
    )


def test_a_real_gpu_gives_the_results_of_the_cpu(
    bundle: Bundle, draw_images: Callable[[int, int], NDArray[np.uint8]]
) -> None:
    try:
        engine = Engine(bundle, "cuda", threads=1, max_batch=4)
    except DeviceError as error:
        pytest.skip(f"no GPU to test on: {error}")
    assert engine.provider == CUDA
    images = draw_images(3, 7)
    expected = Engine(bundle, "cpu", threads=1, max_batch=1).run_all(images)
    for name, values in engine.run_all(images).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-5)
