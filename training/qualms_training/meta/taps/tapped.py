"""Taps: the outputs of named modules inside a frozen base, read without changing the base."""

import copy
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from qualms_training.errors import ModelError, did_you_mean
from qualms_training.meta.taps.tap_choice import INPUT_SUFFIX, TapDescription, choose_taps, describe_taps, list_taps
from qualms_training.meta.taps.tap_layout import canonical
from qualms_training.meta.taps.tap_trace import describe, first_argument, first_tensor, trace

__all__ = ["TapDescription", "Tapped", "choose_taps", "describe_taps", "list_taps", "open_head", "tap_shapes"]


class Tapped(nn.Module):
    """A frozen base that also returns the outputs of its named modules.

    `forward` takes images (N, C, H, W) and returns logits (N, K) and one feature (N, ...) per tap, in the order of
    `names`. A name is that of a module, or `NAME:input` for the input of module NAME. Of a module that returns a tuple,
    the feature is the first element. The module is always in evaluation mode, and exports to ONNX like the base itself.
    """

    def __init__(self, base: nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        _check_names(base, names)
        self.base = base
        self.names = list(names)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.eval()

    def train(self, mode: bool = True) -> Self:
        """Ignore `mode` and stay in evaluation mode, so that a parent's `train` does not change the frozen base."""
        return super().train(False)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Normalised images (N, C, H, W) to logits (N, K) and the tap features.

        A feature is (N, D), (N, T, D) or (N, C, H, W), to which (N, H, W, C) is permuted.
        """
        with _recorded(self.base, self.names) as recorded:
            logits = self.base(x)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise ModelError(f"The base returned {describe(logits)}; it must return logits (N, K).")
        return logits, [self._feature(name, recorded[name], x) for name in self.names]

    def _feature(self, name: str, recorded: list[object], x: Tensor) -> Tensor:
        """The feature of tap `name`; ModelError unless it has one row per image and a fixed shape."""
        if len(recorded) != 1:
            raise ModelError(f"Tap {name!r} ran {len(recorded)} times in one pass; a tap must run exactly once.")
        feature = recorded[0]
        if not isinstance(feature, Tensor) or feature.ndim < 2 or feature.shape[0] != x.shape[0]:
            raise ModelError(
                f"Tap {name!r} returned {describe(feature)} for {x.shape[0]} images; a tap must return one tensor, or a "
                "tuple that begins with one, whose first axis is the batch."
            )
        feature = canonical(feature, (x.shape[-2], x.shape[-1]))
        shape = tuple(feature.shape[1:])
        if shape != self._shapes.get(name, shape):
            raise ModelError(
                f"Tap {name!r} changed its shape from {self._shapes[name]} to {shape}; "
                "the shape of a tap must depend on neither the batch nor the image."
            )
        if not torch.compiler.is_exporting():  # during export, sizes may be symbols that are invalid afterwards
            self._shapes[name] = shape
        return feature


def tap_shapes(base: nn.Module, names: Sequence[str], example: Tensor) -> list[tuple[int, ...]]:
    """Shape of each tap without its batch axis, for images like `example` (N, C, H, W)."""
    tapped = Tapped(base, names)
    with torch.no_grad():
        tapped(torch.cat([example, example]))  # two batch sizes, since a shape must not depend on the batch
        _, features = tapped(example)
    return [tuple(feature.shape[1:]) for feature in features]


def open_head(base: nn.Module, example: Tensor) -> tuple[nn.Module, str, nn.Linear]:
    """A copy of `base` in which the input of its last linear layer can be tapped, the tap's name, and that layer.

    The layer must take (N, D) and return the logits.
    """
    linear = [call.name for call in trace(base, example).calls if isinstance(call.module, nn.Linear)]
    if not linear or not _returns_logits(base, linear[-1], example):
        raise ModelError(f"The logits of {type(base).__name__} must be the output of a linear layer.")
    opened = copy.deepcopy(base)
    layer = opened.get_submodule(linear[-1])
    assert isinstance(layer, nn.Linear)
    opened.set_submodule(linear[-1], nn.Sequential(nn.Identity(), layer))
    return opened.eval(), f"{linear[-1]}.0", layer


def _returns_logits(base: nn.Module, name: str, example: Tensor) -> bool:
    with torch.no_grad(), _recorded(base, [name]) as recorded:
        logits = base(example)
    output = recorded[name][-1]
    return isinstance(output, Tensor) and torch.equal(output, logits)


@contextmanager
def _recorded(base: nn.Module, names: Sequence[str]) -> Iterator[dict[str, list[object]]]:
    """Record the values of the taps `names` inside the context, one per call of the module.

    Tensors are cloned, so that later layers cannot overwrite them in place.
    """
    recorded: dict[str, list[object]] = {name: [] for name in names}
    handles = [_attach(base, name, values) for name, values in recorded.items()]
    try:
        yield recorded
    finally:
        for handle in handles:
            handle.remove()


def _attach(base: nn.Module, name: str, values: list[object]) -> RemovableHandle:
    def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        tensor = first_argument(args, kwargs)
        values.append(None if tensor is None else tensor.clone())

    def after(_: nn.Module, args: tuple[object, ...], output: object) -> None:
        tensor = first_tensor(output)
        values.append(output if tensor is None else tensor.clone())

    module = base.get_submodule(name.removesuffix(INPUT_SUFFIX))
    if name.endswith(INPUT_SUFFIX):
        return module.register_forward_pre_hook(before, with_kwargs=True)
    return module.register_forward_hook(after)


def _check_names(base: nn.Module, names: Sequence[str]) -> None:
    if not names:
        raise ModelError(f"The list of taps for {type(base).__name__} is empty; at least one module name is needed.")
    modules = [name for name, _ in base.named_modules(remove_duplicate=False) if name]
    for name, count in Counter(names).items():
        if count > 1:
            raise ModelError(f"Tap {name!r} is listed {count} times; each tap may be listed once.")
        if name.removesuffix(INPUT_SUFFIX) not in modules:
            raise ModelError(
                f"Tap {name!r} is not a module of {type(base).__name__}; "
                f"`qualms taps MODEL` lists the accepted ones{did_you_mean(name, modules)}"
            )
