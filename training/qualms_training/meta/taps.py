"""Taps: the outputs of named modules inside a frozen base, read without changing the base."""

import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn

from qualms_training.errors import ModelError, did_you_mean

MAX_STAGES = 4  # more spatial taps cost time and memory and add little
SHRINK = 2 / 3  # a stride of 2 reduces a side to this share or less; an unpadded convolution leaves more
ASPECT = 1.5  # an output whose aspect ratio differs from the image's by more than this factor is not (N, C, H, W)


class Tapped(nn.Module):
    """A frozen base that also returns the outputs of its named modules.

    `forward` takes images (N, C, H, W) and returns logits (N, K) and one feature (N, ...) per tap, in the order of
    `names`. The module is always in evaluation mode, and exports to ONNX like the base itself.
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
        """Normalised images (N, C, H, W) to logits (N, K) and the tap features (N, ...)."""
        tapped = {name: self.base.get_submodule(name) for name in self.names}
        with _recorded(tapped, copy=True) as calls:
            logits = self.base(x)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise ModelError(f"The base returned {_describe(logits)}; it must return logits (N, K).")
        return logits, [self._feature(name, calls, x.shape[0]) for name in self.names]

    def _feature(self, name: str, calls: "list[_Call]", batch: int) -> Tensor:
        """The output of tap `name`; ModelError unless it has one row per image and a fixed shape."""
        outputs = [call.output for call in calls if call.name == name]
        if len(outputs) != 1:
            raise ModelError(f"Tap {name!r} ran {len(outputs)} times in one pass; a tap must run exactly once.")
        feature = outputs[0]
        if not isinstance(feature, Tensor) or feature.ndim < 2 or feature.shape[0] != batch:
            raise ModelError(
                f"Tap {name!r} returned {_describe(feature)} for {batch} images; "
                "a tap must return one tensor whose first axis is the batch."
            )
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


def list_taps(base: nn.Module, example: Tensor) -> list[tuple[str, tuple[int, ...]]]:
    """Every module that can be tapped, in the order in which they finish, with its shape without the batch axis."""
    return [(call.name, tuple(output.shape[1:])) for call, output in _usable(_trace(base, example), example)]


def choose_taps(base: nn.Module, example: Tensor) -> list[str]:
    """Choose taps automatically: the end of each resolution, and the input of the last linear layer.

    A resolution counts if the image was down-sampled to it. Its tap is the last of its least nested modules, so a whole
    stage is preferred to the layers inside it. At most four resolutions are used, the deepest ones. The last tap is the
    module that computes the input of the last linear layer.
    """
    calls = _trace(base, example)
    chosen = _stages(_usable(calls, example), example)[-MAX_STAGES:]
    penultimate = _source_of_last_linear_input(base, calls, example)
    if penultimate is None and len(chosen) < 2:
        raise ModelError(
            f"No taps could be chosen for {type(base).__name__}, which neither down-samples images in steps nor has a "
            "module that feeds its last linear layer; name modules from qualms_training.meta.taps.list_taps."
        )
    return chosen if penultimate is None or penultimate in chosen else [*chosen, penultimate]


def open_head(base: nn.Module, example: Tensor) -> tuple[nn.Module, str, nn.Linear]:
    """A copy of `base` in which the input of its last linear layer can be tapped, the tap's name, and that layer.

    The layer must take (N, D) and return the logits.
    """
    calls = _trace(base, example)
    linear = [call for call in calls if isinstance(base.get_submodule(call.name), nn.Linear)]
    with torch.no_grad():
        logits = base(example)
    last = linear[-1] if linear else None
    if last is None or not isinstance(last.output, Tensor) or not torch.equal(last.output, logits):
        raise ModelError(f"The logits of {type(base).__name__} must be the output of a linear layer.")
    opened = copy.deepcopy(base)
    layer = opened.get_submodule(last.name)
    assert isinstance(layer, nn.Linear)
    opened.set_submodule(last.name, nn.Sequential(nn.Identity(), layer))
    return opened.eval(), f"{last.name}.0", layer


@dataclass(frozen=True)
class _Call:
    """One call of one module."""

    name: str
    inputs: tuple[object, ...]
    output: object


@contextmanager
def _recorded(modules: Mapping[str, nn.Module], *, copy: bool) -> Iterator[list[_Call]]:
    """Record the calls of `modules` inside the context, in the order in which they finish.

    With `copy`, outputs are cloned, so that later layers cannot overwrite them in place.
    """
    calls: list[_Call] = []

    def attach(name: str, module: nn.Module) -> torch.utils.hooks.RemovableHandle:
        def record(_: nn.Module, inputs: tuple[object, ...], output: object) -> None:
            output = output.clone() if copy and isinstance(output, Tensor) else output
            calls.append(_Call(name, inputs, output))

        return module.register_forward_hook(record)

    handles = [attach(name, module) for name, module in modules.items()]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def _trace(base: nn.Module, example: Tensor) -> list[_Call]:
    """All calls of all submodules of `base` in one pass in evaluation mode."""
    modules = {name: module for name, module in base.named_modules() if name}
    with torch.no_grad(), _recorded(modules, copy=False) as calls:
        base.eval()(example)
    return calls


def _usable(calls: list[_Call], example: Tensor) -> list[tuple[_Call, Tensor]]:
    """The calls whose module can be a tap, each with its output (N, ...)."""
    runs = Counter(call.name for call in calls)
    return [
        (call, call.output)
        for call in calls
        if runs[call.name] == 1
        and isinstance(call.output, Tensor)
        and call.output.ndim >= 2
        and call.output.shape[0] == example.shape[0]
    ]


def _stages(calls: list[tuple[_Call, Tensor]], example: Tensor) -> list[str]:
    """The module that ends each down-sampled resolution, from the finest to the coarsest above 1x1."""
    image = (example.shape[-2], example.shape[-1])
    last: dict[tuple[int, int], str] = {}
    for call, output in calls:
        if output.ndim != 4:
            continue
        size = (output.shape[-2], output.shape[-1])
        stretch = size[0] * image[1] / (size[1] * image[0])
        is_image = 1 / ASPECT <= stretch <= ASPECT and size <= image  # some models enlarge their input first
        if is_image and call.name.count(".") <= last.get(size, call.name).count("."):
            last[size] = call.name
    sizes = sorted({image, *last}, reverse=True)
    return [
        last[size]
        for finer, size in pairwise(sizes)
        if size != (1, 1) and min(size[0] / finer[0], size[1] / finer[1]) <= SHRINK
    ]


def _source_of_last_linear_input(base: nn.Module, calls: list[_Call], example: Tensor) -> str | None:
    """The usable module whose output, possibly reshaped, is the input of the last linear layer that ran."""
    linear = [index for index, call in enumerate(calls) if isinstance(base.get_submodule(call.name), nn.Linear)]
    if not linear:
        return None
    given = next(iter(calls[linear[-1]].inputs), None)  # None if the input was passed by keyword
    sources = [
        call.name
        for call, output in _usable(calls[: linear[-1]], example)
        if isinstance(given, Tensor) and (output.data_ptr(), output.numel()) == (given.data_ptr(), given.numel())
    ]
    return sources[-1] if sources else None


def _check_names(base: nn.Module, names: Sequence[str]) -> None:
    if not names:
        raise ModelError(f"The list of taps for {type(base).__name__} is empty; at least one module name is needed.")
    modules = [name for name, _ in base.named_modules(remove_duplicate=False) if name]
    for name, count in Counter(names).items():
        if count > 1:
            raise ModelError(f"Tap {name!r} is listed {count} times; each tap may be listed once.")
        if name not in modules:
            raise ModelError(
                f"Tap {name!r} is not a module of {type(base).__name__}; "
                f"qualms_training.meta.taps.list_taps lists the accepted ones{did_you_mean(name, modules)}"
            )


def _describe(value: object) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
