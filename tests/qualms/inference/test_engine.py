import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from qualms.bundle.file import Bundle
from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import GraphRunner
from qualms.errors import BundleError, QualmsError
from qualms.inference import engine as module
from qualms.inference.engine import CPU, CUDA, CostCurve, DeviceError, Engine

ADVICE = "install 'qualms[gpu]'"


@pytest.fixture
def altered(bundle: Bundle, model: onnx.ModelProto) -> Callable[[Callable[[Any], None]], Bundle]:
    """The bundle with its graph changed, as if it had been calibrated like that."""

    def alter(change: Callable[[Any], None]) -> Bundle:
        copy = onnx.ModelProto()
        copy.CopyFrom(model)
        change(copy.graph)
        return replace(bundle, graph=copy.SerializeToString())

    return alter


class Runtime:
    """ONNX Runtime as it looks where CUDA is offered: real sessions on the CPU, under whatever name is wanted."""

    def __init__(self, *, gets: str = CUDA, error: Exception | None = None, wrong: bool = False) -> None:
        self.gets, self.error, self.wrong = gets, error, wrong
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
        real = onnxruntime.InferenceSession(graph, providers=[CPU])
        if self.error is not None:
            raise self.error

        def run(names: None, feed: dict[str, Any]) -> list[NDArray[Any]]:
            values: list[NDArray[Any]] = real.run(names, feed)
            return [value + 1 for value in values] if self.wrong else values

        return SimpleNamespace(
            get_providers=lambda: [self.gets], get_inputs=real.get_inputs, get_outputs=real.get_outputs, run=run
        )


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Runtime]:
    """Pretend that ONNX Runtime offers CUDA."""

    def pretend(**how: Any) -> Runtime:
        runtime = Runtime(**how)
        monkeypatch.setattr(module, "onnxruntime", lambda: runtime)
        return runtime

    return pretend


@pytest.fixture
def not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime as it is, but without CUDA even where there is one."""
    runtime = SimpleNamespace(
        get_available_providers=lambda: [CPU],
        SessionOptions=onnxruntime.SessionOptions,
        InferenceSession=onnxruntime.InferenceSession,
    )
    monkeypatch.setattr(module, "onnxruntime", lambda: runtime)


# Cost


def test_cost_is_straight_between_sizes_and_in_proportion_beyond_them() -> None:
    cost = CostCurve((1, 4, 8), (1.0, 2.5, 6.5))
    assert [cost(rows) for rows in (1, 2, 4, 6, 8)] == [1.0, 1.5, 2.5, 4.5, 6.5]
    assert cost(16) == 13.0


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=8))
def test_noise_in_the_measurement_never_makes_a_larger_batch_cheaper(seconds: list[float]) -> None:
    sizes = tuple(2**power for power in range(len(seconds)))
    cost = CostCurve(sizes, tuple(module._increasing(seconds)))
    costs = [cost(rows) for rows in range(1, 2 * sizes[-1] + 2)]
    assert all(later >= earlier * (1 - 1e-12) for earlier, later in zip(costs, costs[1:], strict=False))
    assert cost(1) == seconds[0]


@pytest.mark.parametrize(("max_batch", "sizes"), [(1, (1,)), (8, (1, 2, 4, 8)), (11, (1, 2, 4, 8, 11))])
def test_cost_is_measured_up_to_the_largest_batch(bundle: Bundle, max_batch: int, sizes: tuple[int, ...]) -> None:
    engine = Engine(bundle, threads=1, max_batch=max_batch)
    assert (engine.max_batch, engine.cost.sizes) == (max_batch, sizes)
    assert engine.cost.seconds[0] > 0
    assert list(engine.cost.seconds) == sorted(engine.cost.seconds)


def test_a_batch_that_would_take_too_long_is_not_made(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = list[int]()

    def time_of(_: Engine, size: int) -> float:
        measured.append(size)
        return 0.1 * size

    monkeypatch.setattr(Engine, "_time", time_of)
    engine = Engine(bundle, max_batch=64, longest_run=0.5)
    assert (engine.max_batch, engine.cost.sizes) == (4, (1, 2, 4))
    assert measured == [1, 2, 4, 8], "what is larger still is not even tried"
    assert Engine(bundle, max_batch=64, longest_run=0.01).max_batch == 1


# Outputs


def test_outputs_are_those_of_the_graph(
    bundle: Bundle, runner: GraphRunner, draw_images: Callable[[int, int], NDArray[np.uint8]]
) -> None:
    engine, images = Engine(bundle, threads=1, max_batch=2), draw_images(3, 5)
    found, want = engine.run_all(images), runner(images)
    assert found.keys() == want.keys()
    for name, values in found.items():
        np.testing.assert_array_equal(values, want[name])
    assert [value.shape[0] for value in engine.run(images)] == [5] * len(engine.outputs)


@pytest.mark.parametrize("name", ["prediction", "base_probabilities", "alpha", "mutual_information", "precision"])
def test_a_missing_output_is_named(altered: Callable[[Callable[[Any], None]], Bundle], name: str) -> None:
    def drop(graph: Any) -> None:
        graph.output.remove(next(output for output in graph.output if output.name == name))

    with pytest.raises(BundleError, match=rf"its graph lacks the output {name}\.$"):
        Engine(altered(drop), threads=1)


@pytest.mark.parametrize("name", ["prediction", "alpha", "base_probabilities", "entropy"])
def test_an_output_that_no_golden_vector_checks_is_not_served(bundle: Bundle, manifest: Manifest, name: str) -> None:
    outputs = {other: values for other, values in manifest.golden.outputs.items() if other != name}
    golden = manifest.golden.model_copy(update={"outputs": outputs})
    unchecked = replace(bundle, manifest=manifest.model_copy(update={"golden": golden}))
    with pytest.raises(BundleError, match=rf"is not usable: it has no golden vectors of {name} to check it by\.$"):
        Engine(unchecked, threads=1)


def test_another_input_is_a_sentence(altered: Callable[[Callable[[Any], None]], Bundle]) -> None:
    def rename(graph: Any) -> None:
        graph.input[0].name = graph.node[0].input[0] = "picture"

    with pytest.raises(BundleError, match="its graph takes picture, not image alone"):
        Engine(altered(rename), threads=1)


def test_a_graph_of_another_size_is_a_sentence(altered: Callable[[Callable[[Any], None]], Bundle]) -> None:
    def widen(graph: Any) -> None:
        graph.input[0].type.tensor_type.shape.dim[1].dim_value += 1

    with pytest.raises(BundleError, match="cannot be run on CPUExecutionProvider: .*"):
        Engine(altered(widen), threads=1)


def test_bytes_that_are_no_graph_are_a_sentence(bundle: Bundle) -> None:
    with pytest.raises(BundleError, match=r"^ONNX Runtime does not take the graph: .*\.$"):
        Engine(replace(bundle, graph=b"nothing"), threads=1)


def test_golden_vectors_that_are_not_reproduced_stop_the_engine(bundle: Bundle, manifest: Manifest) -> None:
    outputs = {**manifest.golden.outputs, "alpha": manifest.golden.outputs["alpha"] * np.float32(1.01)}
    golden = manifest.golden.model_copy(update={"outputs": outputs})
    damaged = replace(bundle, manifest=manifest.model_copy(update={"golden": golden}))
    with pytest.raises(BundleError, match="golden vectors are not reproduced: alpha differs"):
        Engine(damaged, threads=1)


# Devices


def test_the_cpu_is_used_with_as_many_threads_as_are_asked_for_and_none_of_them_spins(
    bundle: Bundle, offered: Callable[..., Runtime]
) -> None:
    runtime = offered()
    engine = Engine(bundle, "cpu", threads=3, max_batch=1)
    assert engine.provider == CPU
    ((options, providers),) = runtime.opened
    assert providers == [CPU]
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (3, 1)
    assert options.get_session_config_entry("session.intra_op.allow_spinning") == "0"


def test_threads_are_the_available_cores_unless_they_are_set(
    bundle: Bundle, offered: Callable[..., Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = offered()
    monkeypatch.setattr(module, "available_cores", lambda: 2)
    Engine(bundle, "cpu", max_batch=1)
    assert runtime.opened[0][0].intra_op_num_threads == 2


@pytest.mark.usefixtures("not_offered")
def test_cuda_without_cuda_is_a_sentence_that_says_what_to_install(bundle: Bundle) -> None:
    with pytest.raises(DeviceError) as caught:
        Engine(bundle, "cuda", threads=1)
    assert ADVICE in str(caught.value)
    assert isinstance(caught.value, QualmsError)


@pytest.mark.usefixtures("not_offered")
def test_auto_without_cuda_is_the_cpu(bundle: Bundle) -> None:
    assert Engine(bundle, "auto", threads=1, max_batch=1).provider == CPU


def test_auto_takes_cuda_where_it_works(bundle: Bundle, offered: Callable[..., Runtime]) -> None:
    runtime = offered()
    assert Engine(bundle, "auto", threads=1, max_batch=1).provider == CUDA
    assert runtime.preloaded
    ((_, ((name, options), fallback)),) = runtime.opened
    assert (name, fallback) == (CUDA, CPU)
    assert options["use_tf32"] == "0"


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"gets": CPU}, "ONNX Runtime fell back to the CPU"),
        ({"error": RuntimeError("libcudnn is missing\nat line 3")}, "libcudnn is missing"),
        ({"error": RuntimeError()}, "RuntimeError"),
        ({"wrong": True}, "golden vectors are not reproduced"),
    ],
)
def test_auto_falls_back_where_cuda_does_not_really_work_and_says_so(
    bundle: Bundle,
    offered: Callable[..., Runtime],
    caplog: pytest.LogCaptureFixture,
    how: dict[str, Any],
    reason: str,
) -> None:
    offered(**how)
    with caplog.at_level(logging.WARNING, "qualms.engine"):
        engine = Engine(bundle, "auto", threads=1, max_batch=1)
    assert engine.provider == CPU
    (record,) = caplog.records
    assert "running on the CPU" in record.getMessage()
    assert reason in record.__dict__["reason"]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"gets": CPU}, "ONNX Runtime fell back to the CPU"),
        ({"error": RuntimeError("libcudnn is missing\nat line 3")}, "libcudnn is missing"),
    ],
)
def test_cuda_that_does_not_really_work_is_a_sentence(
    bundle: Bundle, offered: Callable[..., Runtime], how: dict[str, Any], reason: str
) -> None:
    runtime = offered(**how)
    with pytest.raises(DeviceError, match=rf"^Device 'cuda' was asked for and does not work: {reason}\.$"):
        Engine(bundle, "cuda", threads=1)
    ((options, ((name, _),)),) = runtime.opened
    assert name == CUDA
    assert options.get_session_config_entry("session.disable_cpu_ep_fallback") == "1"


def test_cuda_that_computes_something_else_is_not_replaced_by_the_cpu(
    bundle: Bundle, offered: Callable[..., Runtime]
) -> None:
    offered(wrong=True)
    with pytest.raises(BundleError, match="golden vectors are not reproduced"):
        Engine(bundle, "cuda", threads=1)


def test_both_wheels_are_a_warning_or_for_cuda_a_refusal(
    bundle: Bundle, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_is_installed", lambda _: True)
    with caplog.at_level(logging.WARNING, "qualms.engine"):
        assert Engine(bundle, "cpu", threads=1, max_batch=1).provider == CPU
    assert "both onnxruntime and onnxruntime-gpu are installed" in caplog.text
    with pytest.raises(DeviceError, match=r"^Both onnxruntime and onnxruntime-gpu are installed.*remove it\.$"):
        Engine(bundle, "cuda", threads=1)


def test_a_distribution_is_installed_or_not() -> None:
    assert module._is_installed("numpy")
    assert not module._is_installed("no-such-distribution")


def test_a_real_gpu_answers_like_the_cpu(bundle: Bundle, draw_images: Callable[[int, int], NDArray[np.uint8]]) -> None:
    try:
        engine = Engine(bundle, "cuda", threads=1, max_batch=4)
    except DeviceError as error:
        pytest.skip(f"no GPU to test on: {error}")
    assert engine.provider == CUDA
    images = draw_images(3, 7)
    want = Engine(bundle, "cpu", threads=1, max_batch=1).run_all(images)
    for name, values in engine.run_all(images).items():
        np.testing.assert_allclose(values, want[name], rtol=1e-4, atol=1e-5)
