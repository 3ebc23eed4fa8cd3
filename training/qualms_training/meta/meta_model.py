"""The meta-model: from the tapped features of the frozen base to z = log α, the evidence for each class.

There are two forms. In PublishedMeta, the paper's, every unit of a tap feeds a wide linear layer. PooledMeta takes taps
that were pooled over space, which removes almost all of those weights. Both take features that `Reduce` has flattened,
so cached features are stored reduced, and the graph contains the same reduction.
"""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms_training.errors import RecipeError
from qualms_training.recipe import MetaSection

CENTRE, RADIUS = 1.0, 11.0  # z stays within [-10, 12]; the optimum, log(1 + 1/λ), is well inside
TINY = 1e-6  # standard deviation below which a tap counts as constant
ROWS = 4096  # rows of features converted to double precision at once
MAX_BRANCH_OUTPUTS = 8_000_000
"""weights of the last layer up to which every branch of the pooled form has an output for each class"""


class MetaModel(nn.Module):
    """The base class of both forms."""

    combine: nn.Linear
    clamp: nn.Module

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Reduced features, one (N, D) per tap, to z = log α (N, K)."""
        raise NotImplementedError

    @torch.no_grad()
    def folded(self) -> Self:
        """A copy that computes the same with fewer nodes: the clamp's shift and scale are part of the last linear layer."""
        copied = copy.deepcopy(self)
        copied.combine.weight /= RADIUS
        copied.combine.bias.copy_((copied.combine.bias - CENTRE) / RADIUS)
        copied.clamp = ScaledTanh()
        return copied


class PairMax(nn.Module):
    """The paper's P: the maximum of each pair of adjacent units."""

    def forward(self, x: Tensor) -> Tensor:
        """Units (N, 2D) to (N, D)."""
        return x.reshape(-1, x.shape[1] // 2, 2).amax(2)


class ScaledTanh(nn.Module):
    """The range [-10, 12] from any number."""

    def forward(self, x: Tensor) -> Tensor:
        """(N, K) to (N, K)."""
        return CENTRE + RADIUS * torch.tanh(x)


class SoftClamp(ScaledTanh):
    """Limit z smoothly to [-10, 12], so that α and all its scores are finite."""

    def forward(self, z: Tensor) -> Tensor:
        """Any z (N, K) to the range; values near its middle hardly change."""
        return super().forward((z - CENTRE) / RADIUS)


class PublishedMeta(MetaModel):
    """The paper's form: one branch per tap, as written in the recipe, and a linear layer on all of them.

    The branch `8192-P-512-10` means: linear to 8192 units, PairMax, linear to 512, linear to K = 10. A ReLU follows
    every linear layer of a branch, including the last.
    """

    def __init__(
        self, tap_shapes: Sequence[tuple[int, ...]], classes: int, branches: Sequence[str], seed: int = 0
    ) -> None:
        super().__init__()
        if len(branches) != len(tap_shapes):
            raise RecipeError(
                f"The meta-model has {len(branches)} branches for {len(tap_shapes)} taps; it takes one branch per tap."
            )
        with _seeded(seed):
            self.branches = nn.ModuleList(
                _branch(spec, math.prod(shape), classes) for spec, shape in zip(branches, tap_shapes, strict=True)
            )
            self.combine = nn.Linear(len(branches) * classes, classes)
        self.clamp = SoftClamp()

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Flat features, one (N, D) per tap, to z = log α (N, K)."""
        meta = [branch(x.flatten(1)) for branch, x in zip(self.branches, features, strict=True)]
        z: Tensor = self.clamp(self.combine(torch.cat(meta, dim=1)))
        return z


class Scale(nn.Module):
    """Division of a tap by one number, the mean standard deviation of its features on the training data.

    Each feature could be standardised by itself, but that would amplify features that hardly vary in training, and the
    meta-model would extrapolate wildly on OOD images in which they do vary.
    """

    spread: Tensor  # ()

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("spread", torch.ones(()))

    def fit(self, features: Tensor | NDArray[Any]) -> None:
        """Set the mean of the features' standard deviations on (n, D); memory-mapped features are read in parts."""
        mean = sum(rows.sum(0) for rows in _parts(features)) / len(features)
        squares = sum((rows - mean).square().sum(0) for rows in _parts(features))
        spread = torch.as_tensor(squares / len(features)).sqrt().mean()
        self.spread.copy_(torch.where(spread < TINY, 1.0, spread))

    def forward(self, x: Tensor) -> Tensor:
        """Features (N, D) to (N, D)."""
        return x / self.spread


class PooledMeta(MetaModel):
    """The small form: a scale and a short MLP for each pooled tap, and a linear layer on all of them.

    A branch ends in an output for each of the K classes, as in the published form. The layer on top then has K·K weights
    for each of the T taps: 5 million for 1,000 classes and five taps, and two billion for 21,000. From MAX_BRANCH_OUTPUTS
    on, branches end in their last hidden layer instead. Both are the same functions, since no ReLU separates the two layers.
    """

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
            if len(widths) * classes * classes <= MAX_BRANCH_OUTPUTS:
                self.branches = nn.ModuleList(_mlp([width, *hidden, classes]) for width in widths)
                self.units = [classes] * len(widths)
            else:
                self.branches = nn.ModuleList(_mlp([width, *hidden], ends_in_relu=True) for width in widths)
                self.units = [[width, *hidden][-1] for width in widths]
            self.combine = nn.Linear(sum(self.units), classes)
        self.clamp = SoftClamp()

    @torch.no_grad()
    def folded(self) -> Self:
        """A copy with one linear layer from the last hidden layers of all branches to the classes.

        The scales are part of the first linear layers, too. Products of weights are computed in float64.
        """
        copied = super().folded()
        weight, bias = copied.combine.weight.double(), copied.combine.bias.double()
        blocks = list(torch.split(weight, self.units, dim=1))
        for index, (branch, scale) in enumerate(zip(copied.branches, copied.scales, strict=True)):
            assert isinstance(branch, nn.Sequential)
            assert isinstance(scale, Scale)
            if len(branch) and isinstance(last := branch[-1], nn.Linear):
                bias += blocks[index] @ last.bias.double()
                blocks[index] = blocks[index] @ last.weight.double()
                del branch[-1]
            first = branch[0] if len(branch) else None
            if isinstance(first, nn.Linear):
                first.weight /= scale.spread
            else:
                blocks[index] = blocks[index] / scale.spread
            scale.spread.fill_(1.0)
        copied.units = [block.shape[1] for block in blocks]
        copied.combine = _linear(torch.cat(blocks, dim=1), bias)
        return copied

    def fit_scales(self, features: Sequence[Tensor | NDArray[Any]]) -> None:
        """Set the scales from training features, one (n, D) per tap, which may be memory-mapped."""
        for module, tap in zip(self.scales, features, strict=True):
            assert isinstance(module, Scale)
            module.fit(tap)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Pooled features, one (N, D) per tap, to z = log α (N, K)."""
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
    """Weights drawn in this context depend on `seed` alone, and later draws outside it are unaffected."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _parts(features: Tensor | NDArray[Any]) -> Iterator[Tensor]:
    """The rows (n, D) in parts, in double precision."""
    for start in range(0, len(features), ROWS):
        part = features[start : start + ROWS]
        yield part.double() if isinstance(part, Tensor) else torch.from_numpy(np.array(part, dtype=np.float64))


def _linear(weight: Tensor, bias: Tensor) -> nn.Linear:
    """A float32 layer with these weights (outputs, inputs) and bias (outputs,)."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta").to_empty(device=weight.device)
    layer.weight.copy_(weight)
    layer.bias.copy_(bias)
    return layer


def _mlp(widths: Sequence[int], *, ends_in_relu: bool = False) -> nn.Sequential:
    """Linear layers between these widths, with a ReLU between each two.

    Unlike the published form, no ReLU follows a last layer with an output for each class, since a branch whose outputs are
    all zero would give the same α to every image.
    """
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following), nn.ReLU()]
    return nn.Sequential(*(layers if ends_in_relu else layers[:-1]))


def _branch(spec: str, width: int, classes: int) -> nn.Sequential:
    """The layers of a branch string like `P-8192-P-512-10`, from `width` units to `classes`."""
    layers: list[nn.Module] = []
    for token in spec.split("-"):
        if token == "P":
            if width % 2:
                raise RecipeError(f"Branch {spec!r} applies P to {width} units; P needs an even number of units.")
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
