import os
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import onnx
import onnxruntime
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper

from qualms.bundle.golden import draw
from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import GraphRunner, Images, batch_size, check_golden, check_outputs
from qualms.errors import BundleError, ExtraMissingError

DrawImages = Callable[[int, int], NDArray[np.uint8]]


def changed(manifest: Manifest, **outputs: NDArray[np.float32]) -> Manifest:
    """The manifest with other golden outputs."""
    golden = manifest.golden.model_copy(update={"outputs": {**manifest.golden.outputs, **outputs}})
    return manifest.model_copy(update={"golden": golden})


def with_spread(manifest: Manifest, score: str, spread: float) -> Manifest:
    """The manifest whose reference has this spread of a score."""
    reference = manifest.reference
    quantiles = {**reference.quantiles, score: np.interp(reference.levels, [0.16, 0.84], [-spread, spread]).tolist()}
    return manifest.model_copy(update={"reference": reference.model_copy(update={"quantiles": quantiles})})


def one_node_graph(input_name: str, output_name: str) -> bytes:
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Cast", [input_name], [output_name], to=TensorProto.FLOAT)],
        "one",
        [value(input_name, TensorProto.UINT8, ["N", 6, 5, 3])],
        [value(output_name, TensorProto.FLOAT, ["N", 6, 5, 3])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


# Running


def test_every_output_has_one_row_per_image(runner: GraphRunner, manifest: Manifest, draw_images: DrawImages) -> None:
    outputs = runner(draw_images(0, 5))
    vectors = ("base_probabilities", "probabilities", "alpha", "meta_alpha")
    assert {name: values.shape for name, values in outputs.items()} == {
        "prediction": (5,),
        **dict.fromkeys(vectors, (5, 3)),
        **dict.fromkeys(manifest.scores, (5,)),
        "fused_terms": (5, 2),
    }
    assert {values.dtype for name, values in outputs.items() if name != "prediction"} == {np.dtype(np.float32)}
    assert outputs["prediction"].dtype == np.int64


@pytest.mark.parametrize("batch", [1, 3, 7, 8, 100])
def test_batched_outputs_equal_one_run_of_onnx_runtime(
    graph: bytes, runner: GraphRunner, draw_images: DrawImages, batch: int
) -> None:
    images = draw_images(0, 7)
    session = onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    expected = dict(zip(names, session.run(names, {"image": images}), strict=True))
    outputs = runner(images, batch=batch)
    assert list(outputs) == names
    for name in names:
        np.testing.assert_allclose(outputs[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("shape", "size"),
    [((5, 32, 32, 3), 256), ((5, 224, 224, 3), 16), ((5, 384, 384, 3), 5), ((5, 4000, 4000, 3), 1)],
)
def test_batches_of_large_images_are_smaller(shape: tuple[int, ...], size: int) -> None:
    assert batch_size(np.broadcast_to(np.uint8(0), shape)) == size


def test_images_are_read_one_batch_at_a_time(
    runner: GraphRunner, draw_images: DrawImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    images = draw_images(0, 7)
    slices = list[slice]()

    class Lazy:
        shape = images.shape

        def __len__(self) -> int:
            return len(images)

        def __getitem__(self, rows: slice) -> NDArray[np.uint8]:
            slices.append(rows)
            return images[rows]

    monkeypatch.setattr("qualms.bundle.runtime.BATCH_VALUES", 3 * images[0].size)
    outputs = runner(Lazy())
    assert slices == [slice(0, 3), slice(3, 6), slice(6, 9)]
    for name, expected in runner(images, batch=7).items():
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)


def test_progress_is_called_with_the_size_of_each_batch(runner: GraphRunner, draw_images: DrawImages) -> None:
    sizes: list[int] = []
    runner(draw_images(0, 7), batch=3, progress=sizes.append)
    assert sizes == [3, 3, 1]


def test_an_empty_array_of_images_is_refused(runner: GraphRunner, draw_images: DrawImages) -> None:
    with pytest.raises(ValueError, match="There are no images to run"):
        runner(draw_images(0, 0))


# Graphs that cannot be run


@pytest.mark.parametrize("cut", [0, 10, 200])
def test_a_damaged_graph_is_a_bundle_error(graph: bytes, cut: int) -> None:
    with pytest.raises(BundleError, match=r"^ONNX Runtime cannot load the graph: .*[^.]\.$"):
        GraphRunner(graph[:cut])


def test_an_unknown_operator_is_a_bundle_error(model: onnx.ModelProto) -> None:
    odd = onnx.ModelProto()
    odd.CopyFrom(model)
    odd.graph.node[0].op_type = "NoSuchOperator"
    with pytest.raises(BundleError, match=r"ONNX Runtime cannot load the graph: .*NoSuchOperator"):
        GraphRunner(odd.SerializeToString())


def test_an_onnx_runtime_error_without_a_message_is_reported_by_its_class(
    graph: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(onnxruntime, "InferenceSession", fail)
    with pytest.raises(BundleError, match=r"^ONNX Runtime cannot load the graph: MemoryError\.$"):
        GraphRunner(graph)


def test_a_graph_without_the_input_image_is_a_bundle_error() -> None:
    with pytest.raises(BundleError, match=r"^The graph has no input named image\.$"):
        GraphRunner(one_node_graph("pixels", "alpha"))


def test_missing_onnx_runtime_names_the_extra(graph: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ExtraMissingError) as caught:
        GraphRunner(graph)
    assert str(caught.value) == (
        "ONNX Runtime is not installed: run pip install 'qualms[cpu]', or 'qualms[gpu]' on a machine with CUDA."
    )


# Golden vectors


def test_the_exported_graph_reproduces_its_golden_vectors(runner: GraphRunner, manifest: Manifest) -> None:
    check_golden(runner, manifest)
    check_golden(runner, Manifest.from_json(manifest.to_json()))


def test_the_output_that_differs_most_is_named(runner: GraphRunner, manifest: Manifest) -> None:
    golden = manifest.golden.outputs
    wrong = changed(
        manifest,
        entropy=golden["entropy"] + np.float32(0.01),
        max_probability=golden["max_probability"] + np.float32(0.25),
    )
    with pytest.raises(BundleError) as caught:
        check_golden(runner, wrong)
    assert str(caught.value) == (
        "The golden vectors are not reproduced: max_probability differs by 2.5e-01, at most 2e-03 is allowed."
    )


def test_a_different_prediction_is_detected(runner: GraphRunner, manifest: Manifest) -> None:
    prediction = manifest.golden.outputs["prediction"].copy()
    prediction[-1] = (prediction[-1] + 1) % 3
    with pytest.raises(BundleError, match="reproduced: 1 of 8 predictions differ"):
        check_golden(runner, changed(manifest, prediction=prediction))


def test_large_values_are_compared_by_relative_difference(runner: GraphRunner, manifest: Manifest) -> None:
    alpha = manifest.golden.outputs["alpha"]
    assert alpha.max() > 10
    manifest = with_spread(manifest, "log_precision", 0)
    check_golden(runner, changed(manifest, alpha=alpha * np.float32(1 + 5e-4)))
    with pytest.raises(BundleError, match=r"alpha differs by 5\..*at most 1e-03 is allowed"):
        check_golden(runner, changed(manifest, alpha=alpha * np.float32(1 + 5e-3)))


def test_alpha_may_differ_by_a_hundredth_of_the_spread_of_its_logarithm(
    runner: GraphRunner, manifest: Manifest
) -> None:
    alpha = manifest.golden.outputs["alpha"] * np.float32(1 + 5e-3)
    check_golden(runner, changed(with_spread(manifest, "log_precision", 1), alpha=alpha))
    with pytest.raises(BundleError, match="alpha differs by 5"):
        check_golden(runner, changed(with_spread(manifest, "log_precision", 0.2), alpha=alpha))


def test_equally_likely_classes_may_be_predicted_instead(runner: GraphRunner, manifest: Manifest) -> None:
    prediction = manifest.golden.outputs["prediction"].copy()
    prediction[0] = (prediction[0] + 1) % 3
    tied = np.full_like(manifest.golden.outputs["base_probabilities"], 1 / 3)
    outputs = runner(draw(manifest.input, manifest.golden.count))
    likely = changed(manifest, prediction=prediction, base_probabilities=tied)
    check_golden(lambda _: {**outputs, "base_probabilities": tied}, likely)
    with pytest.raises(BundleError, match="1 of 8 predictions differ"):
        check_golden(lambda _: outputs, changed(likely, base_probabilities=tied * np.array([0.5, 1, 2], np.float32)))


@pytest.mark.parametrize("wrong", [-1.0, 3.0, 1e9])
def test_a_class_that_does_not_exist_is_a_different_prediction(
    runner: GraphRunner, manifest: Manifest, wrong: float
) -> None:
    prediction = manifest.golden.outputs["prediction"].copy()
    prediction[0] = wrong
    with pytest.raises(BundleError, match="1 of 8 predictions differ"):
        check_golden(runner, changed(manifest, prediction=prediction))


def test_another_shape_is_an_infinite_difference(runner: GraphRunner, manifest: Manifest) -> None:
    wrong = changed(manifest, entropy=manifest.golden.outputs["entropy"][:-1])
    with pytest.raises(BundleError, match="entropy differs by inf"):
        check_golden(runner, wrong)


def test_nan_outputs_are_detected(manifest: Manifest) -> None:
    class Broken(GraphRunner):
        def __init__(self) -> None:
            """Nothing to load."""

        def __call__(self, images: Images, *_: object) -> dict[str, NDArray[np.float32]]:
            return {**manifest.golden.outputs, "entropy": np.full(len(images), np.nan, np.float32)}

    with pytest.raises(BundleError, match="entropy differs by inf"):
        check_golden(Broken(), manifest)


def test_an_output_that_only_the_golden_vectors_have_is_named(runner: GraphRunner, manifest: Manifest) -> None:
    outputs = {**manifest.golden.outputs, "extra": manifest.golden.outputs["entropy"]}
    golden = manifest.golden.model_copy(update={"outputs": outputs})
    with pytest.raises(BundleError, match=r"^The graph lacks the output extra\.$"):
        check_golden(runner, manifest.model_copy(update={"golden": golden}))


def outputs_without(runner: GraphRunner, *missing: str) -> list[str]:
    return [name for name in runner.outputs if name not in missing]


@pytest.mark.parametrize("name", ["prediction", "probabilities", "entropy", "fused_terms", "meta_alpha"])
def test_a_missing_output_is_named_with_the_outputs(runner: GraphRunner, manifest: Manifest, name: str) -> None:
    outputs = outputs_without(runner, name)
    check_outputs(runner.outputs, manifest)
    with pytest.raises(BundleError) as caught:
        check_outputs(outputs, manifest)
    assert str(caught.value) == f"The graph of tiny has no output {name}; it has {', '.join(outputs)}."


@pytest.mark.parametrize(("name", "use"), [("fused", "flag"), ("predicted_error", "trust")])
def test_a_missing_operating_score_is_named_before_other_outputs(
    runner: GraphRunner, manifest: Manifest, name: str, use: str
) -> None:
    outputs = outputs_without(runner, "prediction", name)
    with pytest.raises(BundleError) as caught:
        check_outputs(outputs, manifest)
    assert str(caught.value) == (
        f"The graph of tiny has no output {name}, which its manifest names as the {use} score; "
        f"it has {', '.join(outputs)}."
    )


def test_the_outputs_of_an_explanation_are_not_required_of_earlier_bundles(
    earlier_graph: bytes, earlier_manifest: Manifest
) -> None:
    check_golden(GraphRunner(earlier_graph), earlier_manifest)


def test_different_golden_inputs_are_refused(runner: GraphRunner, manifest: Manifest) -> None:
    golden = manifest.golden.model_copy(update={"input_sha256": "0" * 64})
    with pytest.raises(BundleError, match=r"^The golden inputs differ from those the bundle was exported with\.$"):
        check_golden(runner, manifest.model_copy(update={"golden": golden}))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux has affinity masks")
def test_a_runner_has_one_thread_per_core_of_the_affinity_mask_or_as_many_as_given() -> None:
    program = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle
from qualms.bundle.runtime import GraphRunner
graph = open_bundle(resolve_model("demo")).graph
print([GraphRunner(graph, *threads).session.get_session_options().intra_op_num_threads for threads in ((), (3,))])
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[1, 3]"
