"""Every node of every exported graph has a CUDA kernel and stays on the GPU, in every release of the table."""

import importlib.util

import numpy as np
import pytest
from torch import Tensor, nn

from qualms.bundle.embedded import available, resolve_model
from qualms_training.bench.gpu_table import NETWORKS, export, networks
from qualms_training.bench.large_bundles import large_recipe
from qualms_training.bench.random_networks import random_graph, random_images
from qualms_training.gpu import kernels
from qualms_training.gpu.placement import optimise, place, read_graph
from qualms_training.meta.export.onnx_export import to_onnx
from qualms_training.meta.flag_score import generalised_entropy, predicted

pytestmark = pytest.mark.slow

ON_SHAPES = {"Shape", "Size", "Range", "ConstantOfShape"}


def assert_runs_on_cuda_alone(data: bytes) -> None:
    """As exported, and as ONNX Runtime optimises the graph before it places nodes."""
    for graph in (read_graph(data), read_graph(optimise(data))):
        assert not ON_SHAPES & {node.operator for node in graph.nodes}
        for release in kernels.all_releases():
            placement = place(graph, release)
            assert placement.without_kernel == (), f"without a kernel in {release.release}"
            assert placement.cpu_preferred == (), f"on the CPU with {release.release}"


@pytest.mark.parametrize("name", NETWORKS)
def test_every_node_runs_on_cuda(name: str) -> None:
    if name == "EfficientNet-Lite0" and importlib.util.find_spec("efficientnet_lite_pytorch") is None:
        pytest.skip("EfficientNet-Lite0 needs the packages of the extra transfer")
    assert_runs_on_cuda_alone(export(dict(networks())[name]))


@pytest.mark.parametrize("name", available())
def test_every_node_of_an_embedded_model_runs_on_cuda(name: str) -> None:
    assert_runs_on_cuda_alone(resolve_model(name).read_bytes())


class GeneralisedEntropy(nn.Module):
    """The part of the flag score that takes another path for many classes."""

    def forward(self, logits: Tensor) -> Tensor:
        return generalised_entropy(predicted(logits.double()))


def test_the_flag_score_of_many_classes_runs_on_cuda() -> None:
    data = to_onnx(GeneralisedEntropy(), np.zeros((2, 1000), np.float32), ["entropy"])
    assert "TopK" in {node.operator for node in read_graph(data).nodes}
    assert_runs_on_cuda_alone(data)


@pytest.mark.parametrize(
    ("model", "side"),
    [("torchvision:resnet50", 64), ("torchvision:vit_b_16", 224), ("torchvision:convnext_tiny", 64)],
)
def test_every_node_of_an_imagenet_network_runs_on_cuda(model: str, side: int) -> None:
    recipe = large_recipe("random-weights", {"base": {"model": model, "epochs": 1, "lr": 0.1}}, side)
    graph = random_graph(recipe, 1000)
    assert_runs_on_cuda_alone(to_onnx(graph, random_images(recipe, 2), graph.outputs))
