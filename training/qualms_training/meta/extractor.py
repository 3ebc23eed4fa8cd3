"""The frozen part of the graph: normalisation, base, taps and their reduction."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.errors import RecipeError
from qualms_training.meta.taps.tapped import Tapped
from qualms_training.recipe import MetaSection

Statistic = Literal["mean", "max", "std"]


class Normalise(nn.Module):
    """uint8 images (N, H, W, C) to float32 (N, C, H, W): (x / 255 − mean) / std.

    Normalisation is part of the graph, so that callers pass raw pixels.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        scale = 1.0 / (255.0 * torch.tensor(std, dtype=torch.float64))
        shift = torch.tensor(mean, dtype=torch.float64) / torch.tensor(std, dtype=torch.float64)
        self.scale: Tensor
        self.shift: Tensor
        self.register_buffer("scale", scale.float())
        self.register_buffer("shift", shift.float())

    def forward(self, images: Tensor) -> Tensor:
        """Normalised images, channels-last in memory, which is the fastest layout for convolutions on a CPU.

        The permutation comes first because ONNX Runtime multiplies a plane by one number much faster than every pixel
        by three.
        """
        planes = images.permute(0, 3, 1, 2).float()
        return planes * self.scale[:, None, None] - self.shift[:, None, None]


class Reduce(nn.Module):
    """Flatten a tap (N, ...) without parameters: all its units, or statistics of its channels.

    `flatten` keeps every unit. `pool` computes `statistics` of (N, C, H, W) over each cell of a `grid` x `grid` partition
    of the image (cells of ⌈H/grid⌉ x ⌈W/grid⌉ pixels; cells at the right and bottom edges may be smaller), which gives
    (N, C·statistics·cells). Of tokens (N, T, D) it gives the first, which is the class token, and the mean of all,
    (N, 2·D). T tokens without a class token are those of a square image if T is a square number of at least 4; their
    mean and maximum are used, (N, 2·D). A tap without spatial extent, (N, D), (N, C, 1, 1), (N, 1, D) or (N, D, 1), is
    only flattened.
    """

    def __init__(
        self,
        kind: Literal["flatten", "pool"] = "pool",
        grid: int = 1,
        statistics: Sequence[Statistic] = ("mean", "max"),
    ) -> None:
        super().__init__()
        _check_reduction(kind, grid, statistics)
        self.kind = kind
        self.grid = grid
        self.statistics = tuple(statistics)

    @property
    def key(self) -> str:
        """A name that differs between reductions, for the key of the feature cache."""
        return "flatten" if self.kind == "flatten" else f"pool-{self.grid}-{'-'.join(self.statistics)}"

    def forward(self, feature: Tensor) -> Tensor:
        """One tap (N, ...) to (N, D)."""
        if self._only_flattens(tuple(feature.shape[1:])):
            return feature.flatten(1)
        if feature.ndim == 3:
            mean = feature.mean(1)
            return torch.cat([mean, feature.amax(1)] if _is_square(feature.shape[1]) else [feature[:, 0], mean], dim=1)
        statistics = {"mean": self._mean, "max": self._max, "std": self._deviation}
        return torch.cat([statistics[name](feature) for name in self.statistics], dim=1).flatten(1)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int]:
        """The shape after reduction of a tap of this shape, both without the batch axis."""
        if self._only_flattens(shape):
            return (math.prod(shape),)
        if len(shape) == 2:
            return (2 * shape[1],)
        cells = math.prod(math.ceil(size / math.ceil(size / self.grid)) for size in shape[1:])
        return (shape[0] * len(self.statistics) * cells,)

    def _only_flattens(self, shape: tuple[int, ...]) -> bool:
        if self.kind == "flatten" or len(shape) == 1 or shape[1:] == (1, 1) or (len(shape) == 2 and 1 in shape):
            return True
        if len(shape) > 3:
            raise RecipeError(f"A tap of shape {shape} cannot be pooled; accepted are (C, H, W), (T, D) and (D,).")
        return False

    def _mean(self, feature: Tensor) -> Tensor:
        if self.grid == 1:
            return feature.mean((2, 3), keepdim=True)
        return F.avg_pool2d(feature, self._cell(feature), ceil_mode=True, count_include_pad=False)

    def _max(self, feature: Tensor) -> Tensor:
        if self.grid == 1:
            return feature.amax((2, 3), keepdim=True)
        return F.max_pool2d(feature, self._cell(feature), ceil_mode=True)

    def _deviation(self, feature: Tensor) -> Tensor:
        """Standard deviations, from a product and a mean because ONNX Runtime is slower at norms and powers."""
        centred = feature - feature.mean((2, 3), keepdim=True)  # avoids cancellation between the squares below
        variance = self._mean(centred * centred)
        if self.grid > 1:  # a cell's mean differs from the image's
            offset = self._mean(centred)
            variance = (variance - offset * offset).clamp(min=0)
        return variance.sqrt()

    def _cell(self, feature: Tensor) -> tuple[int, int]:
        return math.ceil(feature.shape[2] / self.grid), math.ceil(feature.shape[3] / self.grid)


class Extractor(nn.Module):
    """Images to logits and reduced taps."""

    def __init__(self, normalise: Normalise, tapped: Tapped, reduce: Reduce) -> None:
        super().__init__()
        self.normalise = normalise
        self.tapped = tapped
        self.reduce = reduce

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """uint8 (N, H, W, C) to logits (N, K) and one (N, D_j) per tap."""
        logits, taps = self.tapped(self.normalise(images))
        return logits, [self.reduce(tap) for tap in taps]


def build_reduce(section: MetaSection) -> Reduce:
    """The reduction for the recipe's form of meta-model."""
    return Reduce("flatten") if section.form == "published" else Reduce("pool", section.grid, section.statistics)


def _is_square(tokens: int) -> bool:
    return tokens >= 4 and math.isqrt(tokens) ** 2 == tokens


def _check_reduction(kind: str, grid: int, statistics: Sequence[str]) -> None:
    if kind not in ("flatten", "pool"):
        raise RecipeError(f"Reduction {kind!r} is unknown; accepted are 'flatten' and 'pool'.")
    if grid < 1:
        raise RecipeError(f"The pooling grid is {grid}; it must be 1 or more.")
    if not statistics or len(set(statistics)) < len(statistics) or set(statistics) - {"mean", "max", "std"}:
        raise RecipeError(
            f"The pooling statistics are {list(statistics)}; "
            "accepted are one or more of 'mean', 'max' and 'std', each once."
        )
