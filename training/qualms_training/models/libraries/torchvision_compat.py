"""Import torchvision, also if its wheel was built for CUDA and torch's was not.

The compiled operators are missing in such an installation. torchvision then raises an error at import, although its
data sets, transforms and models need none of them. Declaring the two operators that it looks up avoids the error.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

from qualms.errors import first_line
from qualms_training.errors import ExtraMissingError

_MISSING_OPERATOR = "operator torchvision::nms does not exist"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declarations: list[Any] = []  # torch removes the operators of a Library that is garbage-collected


def import_torchvision() -> ModuleType:
    """Import torchvision; ExtraMissingError names the extra that installs it."""
    try:
        return _import_with_operators()
    except (ImportError, RuntimeError, OSError) as error:
        raise ExtraMissingError(
            f"torchvision cannot be imported ({first_line(error)}); install it with `pip install 'qualms[train]'`."
        ) from error


def _import_with_operators() -> ModuleType:
    try:
        return importlib.import_module("torchvision")
    except RuntimeError as error:
        if _MISSING_OPERATOR not in str(error):
            raise
    _declare_operators()
    _remove_partial_import()
    return importlib.import_module("torchvision")


def _declare_operators() -> None:
    library = importlib.import_module("torch.library").Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}{_SCHEMA}")
    _declarations.append(library)


def _remove_partial_import() -> None:
    for name in [name for name in sys.modules if name == "torchvision" or name.startswith("torchvision.")]:
        del sys.modules[name]
