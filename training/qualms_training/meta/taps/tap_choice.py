"""The choice of taps: ends of stages or evenly spaced blocks, and the penultimate feature."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor, nn

from qualms_training.errors import ModelError
from qualms_training.meta.taps.tap_layout import Layout, canonical_shape, grid_of, layout_of
from qualms_training.meta.taps.tap_trace import Call, Trace, Value, trace
from qualms_training.models.opaque import LOGITS, PENULTIMATE

INPUT_SUFFIX = ":input"
"""`NAME:input` is the tap of the first tensor that module NAME is called with"""
MAX_STAGES = 4
"""more taps besides the penultimate feature cost time and memory and add little"""
SHRINK = 2 / 3
"""a stride of 2 reduces a side to this share or less; an unpadded convolution leaves more"""

MAIN_SHARE = 0.8
"""a list of blocks may have this share of the weights of another list and be preferred because it is longer"""


@dataclass(frozen=True)
class TapDescription:
    """One module of a base as a tap: its shape, and whether and why it is chosen."""

    name: str
    shape: tuple[int, ...]
    """of what the module returns, without the batch axis; empty if it cannot be tapped"""
    layout: Layout
    chosen: bool
    reason: str
    """why it was chosen or not"""


def choose_taps(base: nn.Module, example: Tensor) -> list[str]:
    """Choose taps automatically for images like `example` (N, C, H, W).

    A network that down-samples the image in steps is tapped at the end of each resolution, of which the four coarsest
    count. The tap is the last of the least nested modules, so a whole stage is preferred to the layers inside it. A
    network of equal blocks, such as a ViT, is tapped at four evenly spaced blocks. The last tap is the penultimate
    feature: the module that computes the input of the layer that returns the logits, or else that input itself.
    """
    return list(_choose(base, trace(base, example)))


def describe_taps(base: nn.Module, example: Tensor) -> list[TapDescription]:
    """Every module that ran, in the order in which they finish, and why it is or is not a tap that is chosen.

    `NAME:input` is listed before module NAME if it is chosen. Nothing is chosen if `choose_taps` raises ModelError.
    """
    traced = trace(base, example)
    try:
        chosen = _choose(base, traced)
    except ModelError:
        chosen = {}
    described: dict[str, TapDescription] = {}
    for call in traced.calls:
        name = call.name + INPUT_SUFFIX
        if name in chosen and name not in described and call.input is not None:
            shape = call.input.shape[1:]
            described[name] = TapDescription(name, shape, layout_of(shape, traced.size), True, chosen[name])
        if call.name not in described:
            described[call.name] = _describe(call, traced, chosen)
    return list(described.values())


def list_taps(base: nn.Module, example: Tensor) -> list[tuple[str, tuple[int, ...]]]:
    """Every module that can be tapped, in the order in which they finish, and the shape of the tap without the batch axis."""
    traced = trace(base, example)
    return [(call.name, canonical_shape(value.shape[1:], traced.size)) for call, value in traced.usable()]


def _choose(base: nn.Module, traced: Trace) -> dict[str, str]:
    """The reason of each chosen tap, by name."""
    stages, blocks = _stages(traced), _repeated_blocks(traced)
    chosen = _spaced(blocks) if _consists_of(blocks, stages, base, traced) else _last_stages(stages)
    penultimate = _penultimate(traced)
    if not penultimate and len(chosen) < 2:
        raise ModelError(
            f"No taps could be chosen for {type(base).__name__}: it neither down-samples images in steps, nor repeats "
            "blocks, nor computes its logits by a linear layer. Name modules as taps = [...] in the recipe or with "
            "--taps; `qualms taps MODEL` lists them."
        )
    values = [call.output for call in traced.calls if call.name in chosen]
    for name, (value, reason) in penultimate.items():
        if not any(value.same_values(other) for other in values):
            chosen[name] = reason
    return chosen


def _stages(traced: Trace) -> dict[tuple[int, int], Call]:
    """The module that ends each down-sampled resolution, from the finest to the coarsest above 1x1, by (H, W)."""
    usable = traced.usable()
    parts = {call.name for call, _ in usable if not _is_trunk(call, traced)}
    last: dict[tuple[int, int], tuple[int, Call]] = {}
    for call, value in usable:
        size = grid_of(value.shape[1:], traced.size)
        if size is None or call.is_reshape or _is_dropout(call.module) or _is_padding(call.module):
            continue
        depth = _depth(call.name, parts)
        if depth <= last.get(size, (depth, call))[0]:
            last[size] = depth, call
    sizes = sorted({traced.size, *(size for size in last if not _is_detail(size, last))}, reverse=True)
    return {
        size: last[size][1]
        for finer, size in pairwise(sizes)
        if size != (1, 1) and min(size[0] / finer[0], size[1] / finer[1]) <= SHRINK
    }


def _is_trunk(call: Call, traced: Trace) -> bool:
    """Whether the module down-samples more than once, so that it contains whole stages."""
    before = grid_of(call.input.shape[1:], traced.size) if call.input else None
    after = _grid(call, traced)
    if before is None or after is None or after == (1, 1):  # a head that averages over the whole image is no trunk
        return False
    return min(after[0] / before[0], after[1] / before[1]) <= SHRINK**2


def _is_detail(size: tuple[int, int], last: dict[tuple[int, int], tuple[int, Call]]) -> bool:
    """Whether a less nested module has almost this resolution: windows of attention may be laid out as an image."""
    return any(
        depth < last[size][0] and SHRINK < min(other[0] / size[0], other[1] / size[1]) < 1 / SHRINK
        for other, (depth, _) in last.items()
    )


def _last_stages(stages: dict[tuple[int, int], Call]) -> dict[str, str]:
    return {
        call.name: f"end of the resolution {size[0]} x {size[1]}" for size, call in list(stages.items())[-MAX_STAGES:]
    }


def _repeated_blocks(traced: Trace) -> list[Call]:
    """Modules of one class and output shape in one container: of the lists with most of the weights, the longest."""
    lists: dict[tuple[str, type[nn.Module], tuple[int, ...]], list[Call]] = {}
    for call, value in traced.usable():
        if layout_of(value.shape[1:], traced.size) not in ("flat", "other") and not call.is_reshape:
            lists.setdefault((call.name.rpartition(".")[0], type(call.module), value.shape), []).append(call)
    repeated = [calls for calls in lists.values() if len(calls) > 1 and _weights(calls) > 0]
    most = max((_weights(calls) for calls in repeated), default=0)
    return max((calls for calls in repeated if _weights(calls) >= MAIN_SHARE * most), key=len, default=[])


def _consists_of(blocks: list[Call], stages: dict[tuple[int, int], Call], base: nn.Module, traced: Trace) -> bool:
    """Whether the network is a list of equal blocks rather than a sequence of resolutions.

    The tokens of such a network have one resolution, although convolutions may down-sample the image in steps before.
    """
    if not blocks or len(stages) < 2:
        return bool(blocks)
    resolutions = [call for call in stages.values() if _layout(call, traced) == "tokens"]
    is_main_part = 2 * _weights(blocks) > sum(parameter.numel() for parameter in base.parameters())
    return _layout(blocks[0], traced) == "tokens" and len(resolutions) < 2 and is_main_part


def _spaced(blocks: list[Call]) -> dict[str, str]:
    """At most four evenly spaced blocks, of which the last is the last block."""
    count = min(MAX_STAGES, len(blocks))
    indices = [math.ceil((number + 1) * len(blocks) / count) - 1 for number in range(count)]
    return {blocks[index].name: f"block {index + 1} of {len(blocks)}" for index in indices}


def _penultimate(traced: Trace) -> dict[str, tuple[Value, str]]:
    """The input of each layer that computes the logits and the reason to choose it, by name of the tap.

    The tap is the last module that returned this input, possibly in another shape, else the input of the layer.
    """
    found: dict[str, tuple[Value, str]] = {}
    usable = [(call, value) for call, value in traced.usable() if not _is_same_as_input(call)]
    for head in _heads(traced):
        if head.input is None or not traced.has_row_per_image(head.input):
            continue
        before = usable[: next(i for i, (call, _) in enumerate([*usable, (head, None)]) if call is head)]
        sources = [call.name for call, value in before if value.same_values(head.input)]
        name = sources[-1] if sources else head.name + INPUT_SUFFIX
        found[name] = head.input, f"penultimate: the input of {head.name}"
    return found or _exposed(traced)


def _exposed(traced: Trace) -> dict[str, tuple[Value, str]]:
    """The feature that the graph of a TorchScript or torch.export file exposes."""
    reasons = {
        PENULTIMATE: "penultimate: the input of the file's last linear layer",
        LOGITS: "the logits: nothing else is known",
    }
    return {
        call.name: (call.output, reasons[call.name])
        for call in traced.calls
        if isinstance(call.module, nn.Identity) and call.name in reasons and call.output is not None
    }


def _heads(traced: Trace) -> list[Call]:
    """The layers that compute the logits: the one that returns them, or those (at most two) with outputs of their shape.

    Layers are linear or, if none is, 1x1 convolutions. If no output has the shape of the logits, the last linear layer
    that returns (N, D) is used.
    """
    once = [call for call, _ in traced.usable()]
    linear = [
        call for call in once if isinstance(call.module, nn.Linear) and call.output and len(call.output.shape) == 2
    ]
    if returned := [call for call in linear if call.output and call.output.same_values(traced.logits)]:
        return returned[-1:]
    shape = traced.logits.shape if traced.logits else ()
    if alike := [call for call in linear if call.output and call.output.shape == shape]:
        return alike[-2:]
    if linear:
        return linear[-1:]
    convolutions = [call for call in once if isinstance(call.module, nn.Conv2d) and set(call.module.kernel_size) == {1}]
    return [call for call in convolutions if call.output and call.output.shape[:2] == shape][-1:]


def _describe(call: Call, traced: Trace, chosen: dict[str, str]) -> TapDescription:
    value, runs = call.output, traced.runs[call.name]
    if value is None or runs > 1 or not traced.has_row_per_image(value):
        reason = f"runs {runs} times" if runs > 1 else f"returns {call.returned} for {traced.images} images"
        return TapDescription(call.name, (), "other", False, reason)
    layout = layout_of(value.shape[1:], traced.size)
    reason = chosen.get(call.name) or next(_reasons_against(call, value, traced, chosen))
    return TapDescription(call.name, value.shape[1:], layout, call.name in chosen, reason)


def _reasons_against(call: Call, value: Value, traced: Trace, chosen: dict[str, str]) -> Iterator[str]:
    """Every reason for which a usable module was not chosen, the most specific one first."""
    if _is_same_as_input(call):
        yield f"{type(call.module).__name__.lower()}: the same values as its input"
    if _is_padding(call.module):
        yield "padding"
    if value.same_values(traced.logits):
        yield "the logits"
    taps = [other for other in traced.calls if other.name in chosen]
    yield from (f"the same values as {tap.name}, which is chosen" for tap in taps if value.same_values(tap.output))
    size = grid_of(value.shape[1:], traced.size)
    outer = max(
        (tap for tap in taps if call.name.startswith(f"{tap.name}.")), key=lambda tap: len(tap.name), default=None
    )
    if outer is not None and _grid(outer, traced) == size:
        yield f"inside {outer.name}, which is chosen"
    if size == traced.size:
        yield "the resolution of the image, which is not down-sampled"
    if size is not None:
        ends = [tap for tap in taps if _grid(tap, traced) == size]
        yield from (f"{tap.name} is chosen for the resolution {size[0]} x {size[1]}" for tap in reversed(ends))
    blocks = [block.name for block in _repeated_blocks(traced)]
    for number, name in enumerate(blocks if chosen.keys() & set(blocks) else [], start=1):
        if f"{call.name}.".startswith(f"{name}."):
            yield f"in block {number} of {len(blocks)}, of which {MAX_STAGES} are chosen"
    yield "not the end of a chosen stage or block, nor the penultimate feature"


def _is_same_as_input(call: Call) -> bool:
    return call.is_identity or _is_dropout(call.module)


def _is_dropout(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd)


def _is_padding(module: nn.Module) -> bool:
    """Whether the module only pads: torch's layers, and those of other libraries by the name of their class."""
    return "pad" in type(module).__name__.lower() and next(module.parameters(), None) is None


def _depth(name: str, containers: set[str]) -> int:
    """Number of `containers` that contain this module."""
    parts = name.split(".")
    return sum(".".join(parts[:count]) in containers for count in range(1, len(parts)))


def _weights(calls: list[Call]) -> int:
    return sum(parameter.numel() for call in calls for parameter in call.module.parameters())


def _layout(call: Call, traced: Trace) -> Layout:
    assert call.output is not None
    return layout_of(call.output.shape[1:], traced.size)


def _grid(call: Call, traced: Trace) -> tuple[int, int] | None:
    return grid_of(call.output.shape[1:], traced.size) if call.output else None
