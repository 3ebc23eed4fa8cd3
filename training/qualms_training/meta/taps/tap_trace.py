"""One pass through a base: which modules ran, what they returned, and which of them returned the same values.

Activations are not kept. A tensor is recognised by its storage, its place there and its version, which counts changes in
place; a weak reference to the storage prevents that its address is used again.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.hooks import RemovableHandle


@dataclass(frozen=True)
class Value:
    """A tensor that may have been freed."""

    shape: tuple[int, ...]
    """with the batch axis"""
    stride: tuple[int, ...]
    offset: int
    version: int
    storage: StorageWeakRef = field(repr=False)

    def same_values(self, other: "Value | None") -> bool:
        """Whether both are the same numbers, possibly in another shape."""
        return (
            other is not None
            and self.storage == other.storage
            and (self.offset, self.version) == (other.offset, other.version)
            and torch.Size(self.shape).numel() == torch.Size(other.shape).numel()
        )


@dataclass(frozen=True)
class Call:
    """One call of one module."""

    name: str
    module: nn.Module
    input: Value | None
    """the first tensor among the arguments, before the call"""
    output: Value | None
    """see `first_tensor`"""
    returned: str
    """what the module returned, for messages"""

    @property
    def is_reshape(self) -> bool:
        """Whether the module returned its input, possibly in another shape."""
        return self.output is not None and self.output.same_values(self.input)

    @property
    def is_identity(self) -> bool:
        """Whether the module returned its input unchanged: a dropout, for example."""
        return self.is_reshape and self.input is not None and self.output is not None and self._layout_is_kept()

    def _layout_is_kept(self) -> bool:
        assert self.input is not None
        assert self.output is not None
        return (self.input.shape, self.input.stride) == (self.output.shape, self.output.stride)


@dataclass(frozen=True)
class Trace:
    """All calls of the submodules of a base in one pass, in the order in which they finished."""

    calls: list[Call]
    logits: Value | None
    """the output of the base; None if it is not a tensor"""
    images: int
    """N"""
    size: tuple[int, int]
    """height and width of the images"""

    @property
    def runs(self) -> Counter[str]:
        """Number of calls by name of module."""
        return Counter(call.name for call in self.calls)

    def usable(self) -> list[tuple[Call, Value]]:
        """The calls whose module can be a tap, each with its output (N, ...)."""
        runs = self.runs
        return [
            (call, call.output)
            for call in self.calls
            if runs[call.name] == 1 and call.output is not None and self.has_row_per_image(call.output)
        ]

    def has_row_per_image(self, value: Value) -> bool:
        """Whether the first of at least two axes is the batch."""
        return len(value.shape) >= 2 and value.shape[0] == self.images


def trace(base: nn.Module, example: Tensor) -> Trace:
    """Run `base` in evaluation mode on images (N, C, H, W)."""
    calls: list[Call] = []
    handles = [
        handle for name, module in base.named_modules() if name for handle in _attach(name, module, calls.append)
    ]
    try:
        with torch.inference_mode(False), torch.no_grad():
            output = base.eval()(example.clone())
    finally:
        for handle in handles:
            handle.remove()
    logits = _value(output) if isinstance(output, Tensor) else None
    return Trace(calls, logits, example.shape[0], (example.shape[-2], example.shape[-1]))


def first_tensor(output: object) -> Tensor | None:
    """The feature that a module returned: its output, or the first element of a tuple; None if that is not a tensor."""
    if isinstance(output, tuple | list) and output:
        output = output[0]
    return output if isinstance(output, Tensor) else None


def first_argument(args: tuple[object, ...], kwargs: dict[str, object]) -> Tensor | None:
    """The first tensor among the arguments of a call, positional ones first."""
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)


def describe(value: object) -> str:
    """The value that a module returned, for messages."""
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _attach(name: str, module: nn.Module, add: Callable[[Call], None]) -> list[RemovableHandle]:
    given: list[Value | None] = []  # a stack, since a module may call itself

    def before(_: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        tensor = first_argument(args, kwargs)
        given.append(None if tensor is None else _value(tensor))

    def after(_: nn.Module, args: tuple[object, ...], output: object) -> None:
        tensor = first_tensor(output)
        add(Call(name, module, given.pop(), None if tensor is None else _value(tensor), describe(output)))

    return [module.register_forward_pre_hook(before, with_kwargs=True), module.register_forward_hook(after)]


def _value(tensor: Tensor) -> Value:
    return Value(
        tuple(tensor.shape),
        tuple(tensor.stride()),
        int(tensor.storage_offset()),
        0 if tensor.is_inference() else tensor._version,
        StorageWeakRef(tensor.untyped_storage()),  # type: ignore[no-untyped-call]  # of PyTorch
    )
