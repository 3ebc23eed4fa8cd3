"""The state that the stages of one run share: settings, data, objects made so far, and the record of finished stages.

A stage is up to date if its product exists and stages.json has the fingerprint of the stage's present inputs. So an
interrupted run continues where it stopped, and after a change of the recipe only the affected stages run again.
Bases and features are in a cache folder, in files named after the fingerprint of their inputs, so recipes can share them.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from qualms.cluster.connection import ClusterOptions
from qualms_training.console import Display
from qualms_training.data import DataSource
from qualms_training.data.prepare import PreparedData, prepare
from qualms_training.errors import QualmsError
from qualms_training.files import save_json
from qualms_training.meta.extractor import Normalise
from qualms_training.recipe import Recipe

T = TypeVar("T")


@dataclass
class RunContext:
    """One run of one recipe with one seed."""

    recipe: Recipe
    seed: int
    folder: Path
    cache: Path
    data_dir: DataSource
    device: torch.device
    display: Display
    only: str | None = None
    """run this stage alone; it is an error if the product of an earlier stage is missing"""
    allow_chance: bool = False
    """go on if the accuracy of a base with given weights is near chance"""
    given_base: nn.Module | None = None
    """a model that is a Python object, in place of the one that the recipe names"""
    cluster: ClusterOptions | None = None
    """the Ray cluster that runs the frozen base; None for this machine"""
    _objects: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def data(self) -> PreparedData:
        """The in-distribution splits."""
        return prepare(self.recipe, self.seed, self.data_dir, self.display)

    @cached_property
    def normalise(self) -> Normalise:
        """The normalisation at the start of the graph."""
        return Normalise(self.recipe.input.mean, self.recipe.input.std)

    @property
    def bundle_file(self) -> Path:
        """The bundle, the product of the run."""
        return self.folder / "model.onnx"

    @property
    def graph_file(self) -> Path:
        """The exported graph, without manifest."""
        return self.folder / "graph.onnx"

    def get_or_make(self, name: str, make: Callable[[], T]) -> T:
        """The object called `name`; `make` is called the first time only."""
        if name not in self._objects:
            self._objects[name] = make()
        return cast(T, self._objects[name])

    def with_base(self, base: nn.Module, recipe: Recipe | None = None) -> "RunContext":
        """A copy with the same data, another base and optionally another recipe, and no other objects made yet."""
        other = replace(self, recipe=recipe or self.recipe, _objects={"base": base})
        other.data = self.data
        return other

    def is_up_to_date(self, stage: str, fingerprint: str, *products: Path) -> bool:
        """Whether the products of `stage` exist and were made from the inputs with this fingerprint."""
        return all(product.exists() for product in products) and self._stage_record().get(stage) == fingerprint

    def record_stage(self, stage: str, fingerprint: str) -> None:
        """Record that `stage` has finished with these inputs."""
        save_json(self.folder / "stages.json", {**self._stage_record(), stage: fingerprint})

    def clear_stage_record(self) -> None:
        """Record that no stage has finished."""
        save_json(self.folder / "stages.json", {})

    def check_may_run(self, stage: str) -> None:
        """Raise QualmsError if the work of `stage` is needed now, but the run is limited to another stage."""
        if self.only not in (None, stage):
            raise QualmsError(
                f"Stage {self.only!r} needs the product of stage {stage!r}, which is missing or outdated in "
                f"{self.folder}; run --stage {stage} first, or all stages without --stage."
            )

    def _stage_record(self) -> dict[str, str]:
        """Fingerprints of the finished stages; empty if the file is missing or damaged."""
        try:
            record = json.loads((self.folder / "stages.json").read_text())
        except (OSError, ValueError):
            return {}
        return cast(dict[str, str], record) if isinstance(record, dict) else {}
