"""How many channels a network's first layer takes."""

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

_CONVOLUTIONS = (torch.ops.aten.conv2d.default, torch.ops.aten.convolution.default, torch.ops.aten._convolution.default)


def expected_channels(module: nn.Module) -> int | None:
    """Channels of the images that `module` takes: those of its first convolution or patch embedding; None without one."""
    if isinstance(module, GraphModule):
        return _of_graph(module)
    return next((layer.in_channels for layer in module.modules() if isinstance(layer, nn.Conv2d)), None)


def _of_graph(module: GraphModule) -> int | None:
    """From the first convolution of a graph of ATen operators, whose weights are (channels out, channels in / groups, …)."""
    for node in module.graph.nodes:
        if node.op == "call_function" and node.target in _CONVOLUTIONS and node.args[1].op == "get_attr":
            weight = _attribute(module, str(node.args[1].target))
            groups = node.args[6] if node.target is torch.ops.aten.conv2d.default and len(node.args) > 6 else 1
            return int(weight.shape[1]) * int(groups)
    return None


def _attribute(module: nn.Module, path: str) -> Tensor:
    owner, _, name = path.rpartition(".")
    value = getattr(module.get_submodule(owner), name)
    assert isinstance(value, Tensor)
    return value
