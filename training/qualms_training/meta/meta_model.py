"""The meta-model: from what the frozen base saw at its taps to z = log α, the evidence for each class.

Two forms. PublishedMeta is the paper's: every unit of a tap goes into a wide linear layer. PooledMeta first
reduces each tap over space, which removes almost all of those weights. Both take features that Reduce has
already made flat, so that the reduction is done once when features are cached, and again inside the graph.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from qualms_training.errors import RecipeError
from qualms_training.recipe import MetaSection

CENTRE, RADIUS = 1.0, 11.0  # z stays within [-10, 12]; the optimum, log(1 + 1/λ), is well inside
TINY = 1e-6  # a tap that varies less than this is constant
ROWS = 4096  # of features taken to double precision at once

Statistic = Literal["mean", "max", "std"]


class MetaModel(nn.Module):
    """The base of both forms: `forward` takes one reduced feature (N, D) a tap and returns z (N, K)."""

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Reduced features, one (N, D) a tap, to z = log α (N, K)."""
        raise NotImplementedError


class Reduce(nn.Module):
    """A tap (N, C, H, W) made flat, without parameters: all its units, or statistics of its channels.

    `flatten` keeps every unit. `pool` takes `statistics` over each cell of a `grid` x `grid` partition of the
    image (cells of ⌈H/grid⌉ x ⌈W/grid⌉ pixels, those at the far edges smaller): (N, C·statistics·cells).
    Where there is no space to pool over, (N, D) or (N, C, 1, 1), the units are kept as they are.
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
        """What tells this reduction from every other, for the name of a cache."""
        return "flatten" if self.kind == "flatten" else f"pool-{self.grid}-{'-'.join(self.statistics)}"

    def forward(self, feature: Tensor) -> Tensor:
        """One tap (N, ...) to (N, D)."""
        if self._keeps(tuple(feature.shape[1:])):
            return feature.flatten(1)
        return torch.cat([self._statistic(name, feature) for name in self.statistics], dim=1).flatten(1)

    def output_shape(self, shape: tuple[int, ...]) -> tuple[int]:
        """What a tap of this shape becomes, both without the batch axis."""
        if self._keeps(shape):
            return (math.prod(shape),)
        cells = math.prod(math.ceil(size / math.ceil(size / self.grid)) for size in shape[1:])
        return (shape[0] * len(self.statistics) * cells,)

    def _keeps(self, shape: tuple[int, ...]) -> bool:
        if self.kind == "flatten" or len(shape) == 1 or shape[1:] == (1, 1):
            return True
        if len(shape) != 3:
            raise RecipeError(f"A tap of shape {shape} cannot be pooled; accepted are (C, H, W) and (D,).")
        return False

    def _statistic(self, name: Statistic, feature: Tensor) -> Tensor:
        if name == "mean":
            return self._mean(feature)
        if name == "max":
            return self._max(feature)
        centred = feature - feature.mean((2, 3), keepdim=True)  # or the two squares below would cancel
        return (self._mean(centred.square()) - self._mean(centred).square()).clamp(min=0).sqrt()

    def _mean(self, feature: Tensor) -> Tensor:
        if self.grid == 1:
            return feature.mean((2, 3))
        return F.avg_pool2d(feature, self._cell(feature), ceil_mode=True, count_include_pad=False)

    def _max(self, feature: Tensor) -> Tensor:
        if self.grid == 1:
            return feature.amax((2, 3))
        return F.max_pool2d(feature, self._cell(feature), ceil_mode=True)

    def _cell(self, feature: Tensor) -> tuple[int, int]:
        return math.ceil(feature.shape[2] / self.grid), math.ceil(feature.shape[3] / self.grid)


class PairMax(nn.Module):
    """The paper's P: the larger of each two adjacent units."""

    def forward(self, x: Tensor) -> Tensor:
        """Units (N, 2D) to (N, D)."""
        return x.reshape(-1, x.shape[1] // 2, 2).amax(2)


class SoftClamp(nn.Module):
    """Keep z smoothly within [-10, 12], so that α and every score of it stay finite."""

    def forward(self, z: Tensor) -> Tensor:
        """Any z (N, K) to one within the range, nearly unchanged in its middle."""
        return CENTRE + RADIUS * torch.tanh((z - CENTRE) / RADIUS)


class PublishedMeta(MetaModel):
    """The paper's form: a branch a tap as a recipe spells it, and a linear layer on all of them.

    A branch such as `8192-P-512-10` reads: linear to 8192 units, PairMax, linear to 512, linear to K = 10; a
    ReLU follows every linear layer of a branch, the last included.
    """

    def __init__(
        self, tap_shapes: Sequence[tuple[int, ...]], classes: int, branches: Sequence[str], seed: int = 0
    ) -> None:
        super().__init__()
        if len(branches) != len(tap_shapes):
            raise RecipeError(
                f"The meta-model has {len(branches)} branches for {len(tap_shapes)} taps; it takes one branch a tap."
            )
        with _seeded(seed):
            self.branches = nn.ModuleList(
                _branch(spec, math.prod(shape), classes) for spec, shape in zip(branches, tap_shapes, strict=True)
            )
            self.combine = nn.Linear(len(branches) * classes, classes)
        self.clamp = SoftClamp()

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Flat features, one (N, D) a tap, to z = log α (N, K)."""
        meta = [branch(x.flatten(1)) for branch, x in zip(self.branches, features, strict=True)]
        z: Tensor = self.clamp(self.combine(torch.cat(meta, dim=1)))
        return z


class Scale(nn.Module):
    """A tap divided by one number, its usual spread on the training data.

    One number for the whole tap: standardising each feature by itself would blow up those that hardly vary in
    training, and the meta-model would extrapolate wildly on strangers in which they do.
    """

    spread: Tensor  # ()

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(()))

    def fit(self, features: Tensor) -> None:
        """Measure the mean of the features' standard deviations on (n, D)."""
        mean = sum(rows.double().sum(0) for rows in torch.split(features, ROWS)) / len(features)
        squares = sum((rows.double() - mean).square().sum(0) for rows in torch.split(features, ROWS))
        spread = torch.as_tensor(squares / len(features)).sqrt().mean()
        self.spread.copy_(torch.where(spread < TINY, 1.0, spread))

    def forward(self, x: Tensor) -> Tensor:
        """Features (N, D) to (N, D)."""
        return x / self.spread


class PooledMeta(MetaModel):
    """The small form: scale each pooled tap, a short MLP on it, and a linear layer on all of them."""

    def __init__(
        self, pooled_shapes: Sequence[tuple[int, ...]], classes: int, hidden: Sequence[int], seed: int = 0
    ) -> None:
        super().__init__()
        if not pooled_shapes or any(width < 1 for width in hidden):
            raise RecipeError(
                f"The meta-model has {len(pooled_shapes)} taps and hidden layers of {list(hidden)} units; "
                "it takes one tap or more and layers of one unit or more."
            )
        widths = [math.prod(shape) for shape in pooled_shapes]
        self.scales = nn.ModuleList(Scale() for _ in widths)
        with _seeded(seed):
            self.branches = nn.ModuleList(_mlp([width, *hidden, classes]) for width in widths)
            self.combine = nn.Linear(len(widths) * classes, classes)
        self.clamp = SoftClamp()

    def fit_scales(self, features: Sequence[Tensor]) -> None:
        """Measure the spread of training features, one (n, D) a tap."""
        for module, tap in zip(self.scales, features, strict=True):
            assert isinstance(module, Scale)
            module.fit(tap)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Pooled features, one (N, D) a tap, to z = log α (N, K)."""
        taps = zip(self.branches, self.scales, features, strict=True)
        meta = [branch(scale(x)) for branch, scale, x in taps]
        z: Tensor = self.clamp(self.combine(torch.cat(meta, dim=1)))
        return z


def build_meta(section: MetaSection, widths: Sequence[tuple[int, ...]], classes: int, seed: int) -> MetaModel:
    """An untrained meta-model of the recipe's form for reduced taps of these widths."""
    if section.form == "published":
        return PublishedMeta(widths, classes, section.branches, seed)
    return PooledMeta(widths, classes, section.hidden, seed)


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """Weights drawn in here depend on `seed` alone, and draws outside do not notice."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _mlp(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers between these widths with a ReLU between each two.

    None after the last, unlike the published form: a branch whose outputs all die would give every image one α.
    """
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _branch(spec: str, width: int, classes: int) -> nn.Sequential:
    """The layers that a branch string such as `P-8192-P-512-10` spells, from `width` units to `classes`."""
    layers: list[nn.Module] = []
    for token in spec.split("-"):
        if token == "P":
            if width % 2:
                raise RecipeError(f"Branch {spec!r} pairs {width} units; P takes an even number of them.")
            layers.append(PairMax())
            width //= 2
        elif token.isascii() and token.isdigit() and int(token) > 0:
            layers += [nn.Linear(width, int(token)), nn.ReLU()]
            width = int(token)
        else:
            raise RecipeError(f"Branch {spec!r} has the token {token!r}; accepted are numbers of units and P.")
    if spec.rpartition("-")[2] != str(classes):
        raise RecipeError(f"Branch {spec!r} must end in {classes}, the number of classes.")
    return nn.Sequential(*layers)


def _check_reduction(kind: str, grid: int, statistics: Sequence[str]) -> None:
    if kind not in ("flatten", "pool"):
        raise RecipeError(f"Reduction {kind!r} is not known; accepted are 'flatten' and 'pool'.")
    if grid < 1:
        raise RecipeError(f"A pooling grid of {grid} was asked for; accepted is 1 or more.")
    if not statistics or len(set(statistics)) < len(statistics) or set(statistics) - {"mean", "max", "std"}:
        raise RecipeError(
            f"Pooling statistics {list(statistics)} were asked for; "
            "accepted are one or more of 'mean', 'max' and 'std', each once."
        )
