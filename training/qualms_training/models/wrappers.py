"""Modules around a network that compute the same: those of torch.compile, DataParallel and averaged weights."""

from typing import TypeVar

from torch import nn
from torch.optim.swa_utils import AveragedModel

M = TypeVar("M", bound=nn.Module)
_WITH_MODULE = (nn.DataParallel, nn.parallel.DistributedDataParallel, AveragedModel)


def unwrapped(module: nn.Module) -> nn.Module:
    """The network that `module` runs, or `module` itself if it is no wrapper."""
    inner = (
        module.module if isinstance(module, _WITH_MODULE) else getattr(module, "_orig_mod", None)
    )  # of torch.compile
    return unwrapped(inner) if isinstance(inner, nn.Module) else module


def unwrap_parts(module: M) -> M:
    """`module` with the wrappers of its parts removed in place: a compiled part needs a compiler and minutes."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if (inner := unwrapped(child)) is not child:
                setattr(parent, name, inner)
    return module
