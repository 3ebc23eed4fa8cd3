"""Calibrated uncertainty for image classifiers, in Python and over HTTP.

    import qualms

    model = qualms.open_model("mnist")              # an embedded model, or the path of a bundle
    result = model.predict("digit.png")             # or a list of paths, bytes, arrays or PIL images
    print(result.prediction.label, result.ood.flag, result.trust.accept)

    with qualms.Client("http://127.0.0.1:8000") as client:   # the same over HTTP; AsyncClient for asyncio
        result = client.predict("digit.png")

    fitted = qualms.fit(network, train, held_out)   # your own classifier; needs PyTorch (the extra `train`)
    fitted.save("model.onnx")

Sub-packages: `bundle` (the model file), `images` (preprocessing), `decisions` (flag and trust), `inference` (batching),
`web` (the HTTP service), `telemetry` (metrics, logs), `client`, `bench`, `demo`. Training is the package `qualms_training`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qualms.client.async_client import AsyncClient
    from qualms.client.errors import ClientError, DeadlineError, ProblemError, ReplyError, UnreachableError
    from qualms.client.sync_client import Client
    from qualms.errors import ImageError, QualmsError
    from qualms.fitting import Fitted, fit
    from qualms.model import Model, open_model
    from qualms.replies import Result

__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "DeadlineError",
    "Fitted",
    "ImageError",
    "Model",
    "ProblemError",
    "QualmsError",
    "ReplyError",
    "Result",
    "UnreachableError",
    "fit",
    "open_model",
]

_MODULES = {
    "AsyncClient": "qualms.client.async_client",
    "Client": "qualms.client.sync_client",
    "ClientError": "qualms.client.errors",
    "DeadlineError": "qualms.client.errors",
    "Fitted": "qualms.fitting",
    "ImageError": "qualms.errors",
    "Model": "qualms.model",
    "ProblemError": "qualms.client.errors",
    "QualmsError": "qualms.errors",
    "ReplyError": "qualms.client.errors",
    "Result": "qualms.replies",
    "UnreachableError": "qualms.client.errors",
    "fit": "qualms.fitting",
    "open_model": "qualms.model",
}


def __getattr__(name: str) -> object:
    """Import public names on first use, so that `import qualms` and the command line start quickly."""
    if name not in _MODULES:
        raise AttributeError(f"module 'qualms' has no attribute {name!r}")
    try:
        value: object = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as error:
        from qualms.entry import EXTRAS, missing_extra  # noqa: PLC0415  # rare
        from qualms.errors import ExtraMissingError  # noqa: PLC0415

        module = (error.name or "").partition(".")[0]
        if module not in EXTRAS:
            raise
        raise ExtraMissingError(missing_extra(f"qualms.{name}", module)) from error
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
