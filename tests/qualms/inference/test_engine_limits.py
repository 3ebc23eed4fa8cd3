"""The engine's limit on memory: fewer images in a batch, or a model that is refused."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
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


def test_batches_have_only_as_many_images_as_fit_into_the_memory(hungry: Bundle) -> None:
    assert Engine(hungry, threads=1, max_batch=64).max_batch == 64
    engine = Engine(hungry, threads=1, max_batch=64, max_memory=LIMIT)
    assert engine.max_batch == 16
    assert engine.cost.sizes == (1, 2, 4, 8, 16)


def test_a_model_whose_golden_images_do_not_fit_into_the_memory_is_refused(hungry: Bundle) -> None:
    with pytest.raises(BundleError) as caught:
        Engine(hungry, threads=1, max_memory=2**22)
    assert str(caught.value) == (
        f"{hungry.path} cannot be run on 8 images: it needs more than the 4,194,304 bytes of memory that it may take."
    )


def test_a_later_run_beyond_the_limit_is_a_bundle_error_and_the_engine_still_works(hungry: Bundle) -> None:
    engine = Engine(hungry, threads=1, max_batch=4, max_memory=LIMIT)
    images = np.zeros((64, *hungry.manifest.input.shape), np.uint8)
    with pytest.raises(BundleError, match="cannot be run on 64 images: it needs more than the 33,554,432 bytes"):
        engine.run(images)
    assert len(engine.run(images[:4])[0]) == 4


def test_a_sufficient_limit_changes_nothing(bundle: Bundle) -> None:
    limited, free = (Engine(bundle, threads=1, max_batch=8, max_memory=limit) for limit in (LIMIT, None))
    assert limited.max_batch == free.max_batch == 8
    images = np.full((3, *bundle.manifest.input.shape), 7, np.uint8)
    for name, values in free.run_all(images).items():
        np.testing.assert_array_equal(limited.run_all(images)[name], values)
