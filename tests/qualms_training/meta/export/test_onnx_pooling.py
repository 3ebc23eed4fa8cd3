"""Pooling is exported without computation on shapes, and agrees with PyTorch."""

import numpy as np
import onnx
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms.bundle.runtime import GraphRunner
from qualms_training.meta.export.onnx_export import OPSET, to_onnx
from qualms_training.meta.extractor import Normalise, Reduce, Statistic

SIDE = 9
STATISTICS: tuple[Statistic, ...] = ("mean", "max", "std")
ON_SHAPES = {"Shape", "Size", "Range", "ConstantOfShape", "Gather", "GatherND", "Expand"}


class Pooled(nn.Module):
    """Normalised images, channels-last in memory, through one pooling module."""

    def __init__(self, pool: nn.Module) -> None:
        super().__init__()
        self.normalise = Normalise([0.4, 0.5, 0.6], [0.2, 0.3, 0.4])
        self.pool = pool

    def forward(self, image: Tensor) -> Tensor:
        pooled: Tensor = self.pool(self.normalise(image))
        return pooled.flatten(1)


def images(count: int) -> NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (count, SIDE, SIDE, 3), dtype=np.uint8)


def exported(pool: nn.Module) -> tuple[list[str], NDArray[np.float32], NDArray[np.float32]]:
    """The operators of the graph, and the outputs of ONNX Runtime and PyTorch for five images."""
    module = Pooled(pool).eval()
    data = to_onnx(module, images(2), ["pooled"])
    model = onnx.load_from_string(data)
    assert [entry.version for entry in model.opset_import if entry.domain == ""] == [OPSET]
    with torch.inference_mode():
        expected = module(torch.from_numpy(images(5))).numpy()
    return [node.op_type for node in model.graph.node], GraphRunner(data)(images(5))["pooled"], expected


@pytest.mark.parametrize("size", [1, 3, (1, 3), 2, (4, 9), 12])
def test_adaptive_average_pooling_agrees_with_torch_and_does_not_compute_on_shapes(size: int) -> None:
    operators, actual, expected = exported(nn.AdaptiveAvgPool2d(size))
    assert not ON_SHAPES & set(operators)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("grid", [1, 2, 3])
def test_reductions_agree_with_torch_and_do_not_compute_on_shapes(grid: int) -> None:
    operators, actual, expected = exported(Reduce("pool", grid, STATISTICS))
    assert not ON_SHAPES & set(operators)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_statistics_of_the_whole_image_share_their_mean() -> None:
    operators, _, _ = exported(Reduce("pool", 1, STATISTICS))
    assert sorted(operators[4:]) == sorted(  # the first four normalise
        ["ReduceMean", "ReduceMax", "Sub", "Mul", "ReduceMean", "Sqrt", "Concat", "Reshape"]
    )
