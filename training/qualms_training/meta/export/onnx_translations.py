"""ONNX forms of PyTorch operators without computation on shapes.

The exporter's own forms derive sizes from the batch size with Shape, Concat and Slice. ONNX Runtime runs such nodes on the
CPU even if the rest of the graph runs on a GPU. All sizes but the batch size are known here.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from onnxscript import ir, opset18

op: Any = opset18  # its operators take values of the exporter, which are not what their annotations name


def expand(self: Any, size: Sequence[Any], implicit: bool = False) -> Any:
    """`expand`, also of a tensor (1, ...) to the batch size, such as the class token of a ViT."""
    given = [1] * (len(size) - len(self.shape)) + list(self.shape)
    sizes = [axis if old == 1 and axis != -1 else 1 for old, axis in zip(given, size, strict=True)]  # 1 keeps an axis
    symbolic = [axis for axis in sizes if not isinstance(axis, int)]
    if not symbolic:
        return op.Expand(self, op.Constant(value_ints=sizes))
    batch = _batch_of(symbolic[0]) if len(symbolic) == 1 and symbolic[0] is sizes[0] else None
    if batch is None:
        return op.Expand(self, op.Concat(*[_length_one(axis) for axis in sizes], axis=0))
    is_boolean = self.dtype == ir.DataType.BOOL
    if any(axis != 1 for axis in sizes[1:]):
        self = op.Expand(self, op.Constant(value_ints=[1, *sizes[1:]]))
    # A condition (N, 1, ...) makes Where repeat its two equal arguments N times, whatever the values of the batch are.
    axes = list(range(1, len(batch.shape)))
    corner = op.Slice(batch, _ints([0] * len(axes)), _ints([1] * len(axes)), _ints(axes)) if axes else batch
    condition = op.Reshape(op.Cast(corner, to=ir.DataType.BOOL), _ints([-1] + [1] * (len(sizes) - 1)))
    if is_boolean:  # for which ONNX Runtime has no Where
        return op.Or(self, op.Xor(condition, condition))
    return op.Where(condition, self, self)


def view(self: Any, size: Sequence[Any]) -> Any:
    """`view` and `reshape`; one size that depends on the batch size is derived from the others."""
    unknown = [axis for axis in size if not isinstance(axis, int) or axis == -1]
    if len(unknown) > 1:
        return op.Reshape(self, op.Concat(*[_length_one(axis) for axis in size], axis=0))
    return op.Reshape(self, _ints([axis if isinstance(axis, int) else -1 for axis in size]))


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """softmax(Q Kᵀ · scale + mask) V for Q (..., L, E), K (..., S, E) and V (..., S, D), all but the first axis known."""
    if enable_gqa:
        raise NotImplementedError("attention with fewer key heads than query heads is not translated")
    rank, kind = len(query.shape), query.dtype.numpy()
    factor = np.array(math.sqrt(scale or 1 / math.sqrt(int(query.shape[-1]))), kind)
    # Each factor is scaled by the root, as PyTorch does, so that the products do not overflow in half precision.
    scaled = op.Constant(value=ir.tensor(factor))
    swapped = op.Transpose(key, perm=[*range(rank - 2), rank - 1, rank - 2])
    scores = op.MatMul(op.Mul(query, scaled), op.Mul(swapped, scaled))
    if is_causal:
        allowed = np.tri(int(query.shape[-2]), int(key.shape[-2]), dtype=bool)
        scores = op.Add(scores, op.Constant(value=ir.tensor(np.where(allowed, 0, -np.inf).astype(kind))))
    elif attn_mask is not None and attn_mask.dtype == ir.DataType.BOOL:
        scores = op.Where(attn_mask, scores, op.Constant(value=ir.tensor(np.array(-np.inf, kind))))
    elif attn_mask is not None:
        scores = op.Add(scores, attn_mask)
    return op.MatMul(op.Softmax(scores, axis=-1), value)


TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.ops.aten.expand.default: expand,
    torch.ops.aten.view.default: view,
    torch.ops.aten._unsafe_view.default: view,
    torch.ops.aten.reshape.default: view,
    torch.ops.aten.scaled_dot_product_attention.default: scaled_dot_product_attention,
}
"""for `custom_translation_table` of torch.onnx.export"""


def _batch_of(size: Any) -> Any:
    """The tensor (N, ...) from whose first axis the exporter derived a size; None if it was derived otherwise."""
    squeeze = size.producer()
    shape = squeeze.inputs[0].producer() if squeeze is not None and squeeze.op_type == "Squeeze" else None
    if shape is None or shape.op_type != "Shape" or shape.attributes["start"].value != 0:
        return None
    return shape.inputs[0]


def _ints(values: Sequence[int]) -> Any:
    return op.Constant(value_ints=list(values))


def _length_one(size: Any) -> Any:
    """A size as a tensor (1)."""
    return _ints([size]) if isinstance(size, int) else op.Reshape(size, _ints([1]))
