"""The engine's limit on memory: fewer images in a batch, or a model that is refused."""

import sys
from dataclasses import replace

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from qualms.bundle.file import Bundle
from qualms.errors import BundleError
from qualms.inference.engine import Engine

LIMIT = 32 * 2**20


@pytest.fixture
def hungry(bundle: Bundle, model: onnx.ModelProto) -> Bundle:
    """A bundle whose runs need 1 MiB for each image, and give the same outputs."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    for node in copy.graph.node:
        node.output[:] = ["plain_fused" if name == "fused" else name for name in node.output]
    copy.graph.node.extend(
        [
            helper.make_node("Unsqueeze", ["plain_fused", "last"], ["column"]),
            helper.make_node("Tile", ["column", "repeats"], ["repeated"]),
            helper.make_node("ReduceMax", ["repeated"], ["fused"], axes=[1], keepdims=0),
        ]
    )
    copy.graph.initializer.append(numpy_helper.from_array(np.array([1, 2**18]), "repeats"))
    return replace(bundle, graph=copy.SerializeToString())


def zeros(bundle: Bundle, count: int) -> NDArray[np.uint8]:
    return np.zeros((count, *bundle.manifest.input.shape), np.uint8)


def test_a_batch_that_does_not_fit_into_the_memory_is_run_in_parts_and_its_size_not_tried_again(hungry: Bundle) -> None:
    engine = Engine(hungry, threads=1, max_batch=64, max_memory=LIMIT)
    images = np.random.default_rng(0).integers(0, 256, (64, *hungry.manifest.input.shape), dtype=np.uint8)
    outputs = engine.run_all(images)
    assert {len(values) for values in outputs.values()} == {64}
    one = engine.run_all(images[63:])
    np.testing.assert_allclose(outputs["fused"][63:], one["fused"], rtol=1e-5)
    for _ in range(20):
        engine.run(zeros(hungry, engine.max_batch))
    assert engine.max_batch <= 16


def test_a_model_whose_image_does_not_fit_into_the_memory_is_refused(hungry: Bundle) -> None:
    with pytest.raises(BundleError) as caught:
        Engine(hungry, threads=1, max_memory=2**19)
    assert str(caught.value) == (
        f"{hungry.path} cannot be run on one image: it needs more than the 524,288 bytes of memory that it may take."
    )


def test_a_sufficient_limit_changes_nothing(bundle: Bundle) -> None:
    limited, free = (Engine(bundle, threads=1, max_batch=8, max_memory=limit) for limit in (LIMIT, None))
    images = np.full((3, *bundle.manifest.input.shape), 7, np.uint8)
    for name, values in free.run_all(images).items():
        np.testing.assert_array_equal(limited.run_all(images)[name], values)


def test_the_engine_does_not_keep_the_bytes_of_the_graph(bundle: Bundle) -> None:
    graph = bytes(bytearray(bundle.graph))  # an object of its own
    references = sys.getrefcount(graph)
    engine = Engine(replace(bundle, graph=graph), threads=1)
    assert sys.getrefcount(graph) == references
    assert engine.bundle.digest == bundle.digest
