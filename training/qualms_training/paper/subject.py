"""A frozen base and its data under one protocol: makes what methods are given, each forward pass once."""

import copy
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import nn

from qualms_training.data.noise import NOISES, apply_noise
from qualms_training.data.prepare import CORRUPTED
from qualms_training.fitting.feature_cache import Extractor, Features, cached_features
from qualms_training.meta.taps import Tapped, open_head
from qualms_training.paper.material import Frozen, Head, Known, Labelled, Pictures, Shown, View
from qualms_training.paper.protocol import Protocol, Role, normaliser
from qualms_training.stages import base
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import example, extractor

OUTLIERS = 10_000
"""training images that noisy copies are made of for whole-network methods"""


@dataclass(frozen=True)
class Subject:
    """One base, its splits and strangers; `seed` is the methods' own."""

    context: RunContext
    protocol: Protocol
    seed: int
    strangers: dict[str, NDArray[np.uint8]]
    """the columns of the tables, (N, H, W, C) each"""

    @property
    def test_labels(self) -> NDArray[np.int64]:
        """(N,)"""
        return self.context.data.parts["test"].labels

    def shown(self) -> dict[str, Shown]:
        """What is scored: the test set, as `test`, and every column."""
        found = {"test": self._show(self.context.data.parts["test"].images, Role.known)}
        for name, images in self.strangers.items():
            found[name] = self._show(images, Role.noise if name == CORRUPTED else Role.stranger)
        return found

    def views(self) -> dict[str, View]:
        """The same as the frozen base sees them."""
        shown = self.shown()
        return self.context.once(f"views, {self.protocol}", lambda: {name: self.view(shown[name]) for name in shown})

    def frozen(self, folder: Path) -> Frozen:
        """What a post-hoc method learns from; it keeps checkpoints in `folder`."""
        return Frozen(
            train=self._known("train"),
            validation=self._known("validation"),
            fit=self._known("fit"),
            noisy=self.context.once(f"noisy, {self.protocol}, {self.seed}", self._noisy_views),
            fit_noise=lambda: self.noise("fit"),
            head=self.head,
            classes=len(self.context.data.classes),
            recipe=self.context.recipe,
            seed=self.seed,
            folder=folder,
            device=self.context.device,
        )

    def noise(self, split: str) -> dict[str, View]:
        """Noisy copies of a split by kind: what scores are combined by on `fit`, and compared by on `validation`."""

        def make() -> dict[str, View]:
            images = self.context.data.parts[split].images
            noisy = {
                kind: apply_noise(images, [kind], np.random.default_rng([self.context.seed, 20, at]))
                for at, kind in enumerate(NOISES)
            }
            return {kind: self.view(self._show(found, Role.noise)) for kind, found in noisy.items()}

        return self.context.once(f"noise of {split}, {self.protocol}", make)

    def validation(self) -> Known:
        """Images and labels that the base has not seen, and that choices are made by."""
        return self._known("validation")

    def pictures(self, folder: Path) -> Pictures:
        """What a method on images learns from; it keeps checkpoints and weights in `folder`."""
        parts = self.context.data.parts
        known = {name: Labelled(self._show(parts[name].images, Role.known), parts[name].labels) for name in parts}
        return Pictures(
            train=known["train"],
            validation=known["validation"],
            outliers=lambda: [self._show(images, Role.noise) for images in self._noisy("train", OUTLIERS)],
            new_network=self._new_network,
            copy_of_base=lambda: copy.deepcopy(base.frozen_base(self.context)).requires_grad_(True),
            recipe=self.context.recipe,
            seed=self.seed,
            folder=folder,
            device=self.context.device,
        )

    def view(self, shown: Shown) -> View:
        """What the frozen base says about images, computed once and kept on disk."""
        context, (opened, penultimate, _) = self.context, self._opened
        names = extractor(context).tapped.names
        whole = Extractor(shown.normalise, Tapped(opened, [*names, penultimate]), extractor(context).reduce).eval()
        with context.display.bar("the base's one pass", len(shown.images)) as advance:
            found = cached_features(whole, shown.images, context.cache / "features", context.device, progress=advance)
        return View(Features(found.taps[:-1], found.logits, found.folder), found.taps[-1])

    @property
    def head(self) -> Head:
        """The base's last linear layer."""
        _, _, layer = self._opened
        weight = layer.weight.detach().cpu().double().numpy()
        bias = np.zeros(len(weight)) if layer.bias is None else layer.bias.detach().cpu().double().numpy()
        return Head(weight, bias)

    @property
    def _opened(self) -> tuple[nn.Module, str, nn.Linear]:
        context = self.context
        return context.once("open head", lambda: open_head(base.frozen_base(context).cpu(), example(context)))

    def _new_network(self) -> nn.Module:
        own = replace(self.context, seed=self.seed)
        own.data = self.context.data
        return base.new_base(own)

    def _known(self, split: str) -> Known:
        part = self.context.data.parts[split]
        view = self.context.once(f"view of {split}", lambda: self.view(self._show(part.images, Role.known)))
        return Known(view, part.labels)

    def _noisy_views(self) -> list[View]:
        return [self.view(self._show(images, Role.noise)) for images in self._noisy("validation")]

    def _noisy(self, split: str, limit: int | None = None) -> list[NDArray[np.uint8]]:
        meta, images = self.context.recipe.meta, self.context.data.parts[split].images[:limit]
        return [
            apply_noise(images, kinds, np.random.default_rng([self.seed, draw]))
            for kinds in meta.stop_noise
            for draw in range(meta.noise_draws)
        ]

    def _show(self, images: NDArray[np.uint8], role: Role) -> Shown:
        return Shown(images, normaliser(self.protocol, role, self.context.recipe.input))
