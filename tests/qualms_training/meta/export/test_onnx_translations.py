"""Attention, expansion and reshapes are exported without computation on shapes, and agree with PyTorch."""

import logging
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qualms.bundle.runtime import INPUT, GraphRunner
from qualms_training.gpu import kernels
from qualms_training.gpu.placement import optimise, place, read_graph
from qualms_training.meta.export.onnx_export import OPSET
from qualms_training.meta.export.onnx_translations import TRANSLATIONS
from qualms_training.models.libraries.torchvision_compat import import_torchvision


def export(module: nn.Module, example: Tensor, monkeypatch: pytest.MonkeyPatch) -> bytes:
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.ERROR)
    with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            module.eval(),
            (example,),
            dynamo=True,
            verbose=False,
            opset_version=OPSET,
            input_names=[INPUT],
            output_names=["output"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            custom_translation_table=TRANSLATIONS,
        )
    assert program is not None
    return bytes(program.model_proto.SerializeToString())


def assert_runs_on_cuda_and_agrees(module: nn.Module, example: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    data = export(module, example, monkeypatch)
    for graph in (read_graph(data), read_graph(optimise(data))):
        assert not {"Shape", "Size", "Range"} & {node.operator for node in graph.nodes}
        assert all(place(graph, release).runs_on_cuda_alone for release in kernels.all_releases())
    runner = GraphRunner(data)
    for images in (example[:1], torch.cat([example, example, example])):
        with torch.inference_mode():
            expected = module(images).numpy()
        np.testing.assert_allclose(runner(images.numpy())["output"], expected, rtol=1e-4, atol=1e-5)


class ClassToken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return torch.cat([self.token.expand(x.shape[0], -1, -1), tokens], dim=1)


class Attention(nn.Module):
    """Attention with the mask that a test specifies."""

    def __init__(self, mask: Tensor | None = None, *, causal: bool = False, scale: float | None = None) -> None:
        super().__init__()
        self.mask: Tensor | None
        self.register_buffer("mask", mask)
        self.causal, self.scale = causal, scale

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = torch.tensor_split(x.reshape(x.shape[0], 2, 4, -1).transpose(2, 3), [6, 11], dim=2)
        mask = None if self.mask is None else self.mask.expand(x.shape[0], -1, -1, -1)
        return F.scaled_dot_product_attention(query, key, value, mask, is_causal=self.causal, scale=self.scale)


class Normalised(nn.Module):
    """Expands norms (N, C, 1) whose first axis is the batch already."""

    def forward(self, x: Tensor) -> Tensor:
        windows = x.reshape(x.shape[0] * 2, 4, -1)
        return F.normalize(windows, dim=-1).reshape(x.shape[0], -1)


IMAGES = torch.randn(2, 8, 4, 4, generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize(
    "module",
    [
        ClassToken(),
        Attention(),
        Attention(causal=True),
        Attention(scale=0.3),
        Attention(torch.randn(1, 1, 6, 5)),
        Attention(torch.ones(1, 1, 6, 5).tril().bool()),
        Normalised(),
    ],
)
def test_operators_run_on_cuda_and_agree_with_torch(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_runs_on_cuda_and_agrees(module, IMAGES, monkeypatch)


@pytest.mark.slow
def test_a_vision_transformer_runs_on_cuda_and_agrees_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    vit = import_torchvision().models.VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=5)
    nn.init.normal_(vit.heads.head.weight)
    assert_runs_on_cuda_and_agrees(vit, torch.randn(2, 3, 16, 16), monkeypatch)


def test_a_class_token_is_expanded_exactly_whatever_the_pixels_are(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ClassToken()
    runner = GraphRunner(export(module, IMAGES, monkeypatch))
    output = runner(np.full((3, 8, 4, 4), np.nan, np.float32))["output"]
    np.testing.assert_array_equal(output[:, 0], module.token.detach().expand(3, -1, -1)[:, 0])
