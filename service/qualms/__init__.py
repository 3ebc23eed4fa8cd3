"""Calibrated uncertainty for image classifiers, in Python and over HTTP.

    import qualms

    model = qualms.open_model("mnist")              # an embedded model, or the path of a bundle
    result = model.predict("digit.png")             # or a list of paths, bytes, arrays or PIL images
    print(result.prediction.label, result.ood.flag, result.trust.accept)

Sub-packages: `bundle` (the model file), `images` (preprocessing), `decisions` (flag and trust), `inference` (batching),
`web` (the HTTP service), `telemetry` (metrics, logs), `bench`, `demo`. Training is the package `qualms_training`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qualms.decisions.results import Result
    from qualms.errors import QualmsError
    from qualms.model import Model, open_model

__all__ = ["Model", "QualmsError", "Result", "open_model"]

_MODULES = {
    "Model": "qualms.model",
    "QualmsError": "qualms.errors",
    "Result": "qualms.decisions.results",
    "open_model": "qualms.model",
}


def __getattr__(name: str) -> object:
    """Import public names on first use, so that `import qualms` and the command line start quickly."""
    if name not in _MODULES:
        raise AttributeError(f"module 'qualms' has no attribute {name!r}")
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
