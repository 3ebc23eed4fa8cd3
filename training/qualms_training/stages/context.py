"""One run of one recipe with one seed: what its stages share, and the ledger of what is done.

A stage is done when its product exists and the ledger records the fingerprint of the inputs the stage has now.
So an interrupted run picks up where it stopped, and a changed recipe redoes what the change touches and no more.
Bases and features live in a cache folder under the fingerprint of their inputs, where other recipes find them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from qualms_training.console import Display
from qualms_training.data.prepare import PreparedData, prepare
from qualms_training.errors import QualmsError
from qualms_training.files import save_json
from qualms_training.meta.normalise import Normalise
from qualms_training.recipe import Recipe

T = TypeVar("T")


@dataclass
class RunContext:
    """Where a run reads and writes, and the inputs that several stages use."""

    recipe: Recipe
    seed: int
    folder: Path
    cache: Path
    data_dir: Path | None
    device: torch.device
    display: Display
    only: str | None = None
    """run this stage alone, and refuse where an earlier one has left nothing"""
    _memory: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def data(self) -> PreparedData:
        """The in-distribution splits."""
        return prepare(self.recipe, self.seed, self.data_dir, self.display)

    @cached_property
    def normalise(self) -> Normalise:
        """The graph's first nodes."""
        return Normalise(self.recipe.input.mean, self.recipe.input.std)

    @property
    def bundle_file(self) -> Path:
        """The product of it all."""
        return self.folder / "model.onnx"

    @property
    def graph_file(self) -> Path:
        """The exported graph, before it is calibrated."""
        return self.folder / "graph.onnx"

    def once(self, name: str, make: Callable[[], T]) -> T:
        """What `make` returns, made the first time only."""
        if name not in self._memory:
            self._memory[name] = make()
        return cast(T, self._memory[name])

    def around(self, base: nn.Module, recipe: Recipe | None = None) -> "RunContext":
        """The same run on the same data with another base, or also another recipe for it, and nothing made yet."""
        other = replace(self, recipe=recipe or self.recipe, _memory={"base": base})
        other.data = self.data
        return other

    def done(self, stage: str, mark: str, *products: Path) -> bool:
        """Whether `stage` has made its products from the inputs that `mark` stands for."""
        return all(product.exists() for product in products) and self._ledger().get(stage) == mark

    def record(self, stage: str, mark: str) -> None:
        """Enter a finished stage into the ledger."""
        save_json(self.folder / "stages.json", {**self._ledger(), stage: mark})

    def forget(self) -> None:
        """Enter into the ledger that nothing is done."""
        save_json(self.folder / "stages.json", {})

    def must_make(self, stage: str) -> None:
        """Called by a stage that has to do its work now: refuse if another one was asked for alone."""
        if self.only not in (None, stage):
            raise QualmsError(
                f"Stage {self.only!r} needs what stage {stage!r} makes, and {self.folder} does not hold it; "
                f"run --stage {stage} first, or all stages without --stage."
            )

    def _ledger(self) -> dict[str, str]:
        """The mark of every finished stage; a ledger that cannot be read records nothing."""
        try:
            found = json.loads((self.folder / "stages.json").read_text())
        except (OSError, ValueError):
            return {}
        return cast(dict[str, str], found) if isinstance(found, dict) else {}
