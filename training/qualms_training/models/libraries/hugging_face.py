"""Image classifiers of the package transformers, from a folder or from the Hugging Face Hub."""

import importlib
import json
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from qualms.errors import first_line
from qualms_training.errors import ExtraMissingError, ModelError
from qualms_training.models.libraries.external import make_torchvision_importable
from qualms_training.models.libraries.hub import hub_failure, hub_or_cache
from qualms_training.models.libraries.input_defaults import InputDefaults, from_hugging_face_config

PREPROCESSOR = "preprocessor_config.json"
_GENERIC_NAME = re.compile(r"LABEL_\d+")


def from_hugging_face(name: str) -> nn.Module:
    """The image classifier in folder `name`, or of that name on the Hub; ModelError if it lacks trained weights."""
    transformers = _import_transformers(name)
    _check_folder(name)
    with _hub(name) as unreachable:
        try:
            model, loading = transformers.AutoModelForImageClassification.from_pretrained(
                name, output_loading_info=True, local_files_only=Path(name).is_dir()
            )
        except Exception as error:  # several download libraries, each with exceptions of its own
            raise _cannot_load(name, error, unreachable) from error
    if missing := sorted(loading["missing_keys"]):
        raise ModelError(
            f"Model 'transformers:{name}' has no trained weights for {len(missing)} tensors (first: {missing[0]!r}); "
            "it must be trained as an image classifier before."
        )
    assert isinstance(model, nn.Module)
    return model


def with_random_weights(name: str, classes: int | None) -> nn.Module:
    """The architecture of a Hugging Face model, with its own number of classes if `classes` is None."""
    transformers = _import_transformers(name)
    with _hub(name) as unreachable:
        try:
            config = transformers.AutoConfig.from_pretrained(name, local_files_only=Path(name).is_dir())
            if classes is not None and classes != config.num_labels:
                config.num_labels = classes  # replaces id2label too
            model = transformers.AutoModelForImageClassification.from_config(config)
        except Exception as error:
            raise _cannot_load(name, error, unreachable) from error
    assert isinstance(model, nn.Module)
    return model


def class_names(module: nn.Module) -> tuple[str, ...] | None:
    """The classes of a model's `config.id2label`; None if they are LABEL_0 and so on, or if there are none."""
    labels: object = getattr(getattr(module, "config", None), "id2label", None)
    if not isinstance(labels, Mapping) or not labels:
        return None
    names = tuple(str(labels[index]) for index in sorted(labels))
    return None if all(_GENERIC_NAME.fullmatch(name) for name in names) else names


def input_defaults(name: str) -> InputDefaults | None:
    """The input by the model's preprocessor_config.json; None without one."""
    file = _file(name, PREPROCESSOR)
    if file is None:
        return None
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelError(f"File {str(file)!r} is not JSON ({first_line(error)}).") from error
    if not isinstance(config, dict):
        raise ModelError(f"File {str(file)!r} must hold an object, not {type(config).__name__}.")
    try:
        return from_hugging_face_config(config)
    except (TypeError, ValueError, KeyError) as error:  # values of other types, or too few of them
        raise ModelError(
            f"File {str(file)!r} has a size, image_mean, image_std or other value that is not usable ({first_line(error)})."
        ) from error


def _file(name: str, file: str) -> Path | None:
    if Path(name).is_dir():
        return Path(name) / file if (Path(name) / file).is_file() else None
    found: Any = None
    with hub_or_cache(), suppress(OSError):  # a model without this file
        found = importlib.import_module("transformers.utils").cached_file(name, file)
    return None if found is None else Path(found)


def _import_transformers(name: str) -> ModuleType:
    make_torchvision_importable()
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise ExtraMissingError(
            f"Model 'transformers:{name}' needs transformers, which is not installed; `pip install transformers` adds it."
        ) from error


def _check_folder(name: str) -> None:
    folder = Path(name)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ModelError(
            f"Folder {name!r} has no config.json; a folder written by save_pretrained, with config.json, model.safetensors "
            f"and {PREPROCESSOR}, is accepted."
        )


def _hub(name: str) -> AbstractContextManager[str | None]:
    """`hub_or_cache` for models that are not a folder."""
    return nullcontext() if Path(name).is_dir() else hub_or_cache()


def _cannot_load(name: str, error: Exception, unreachable: str | None) -> ModelError:
    return ModelError(
        f"Model 'transformers:{name}' cannot be loaded ({hub_failure(error, unreachable)}); without a network, give a folder "
        f"with its config.json, model.safetensors and {PREPROCESSOR}."
    )
