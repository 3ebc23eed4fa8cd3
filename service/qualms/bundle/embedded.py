"""The models that are installed with the package, and how a name or a path is resolved to a file."""

from importlib import resources
from pathlib import Path

from qualms.errors import BundleError

DEFAULT = "mnist"


def available() -> list[str]:
    """Names of the embedded models."""
    return sorted(path.stem for path in _folder().glob("*.onnx"))


def resolve_model(model: str | None) -> Path:
    """Path of the embedded model of this name (the default model for None), or `model` itself as a path."""
    name = model or DEFAULT
    embedded = _folder() / f"{name}.onnx"
    if name in available():
        return embedded
    path = Path(name)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a null byte in the name raises ValueError
        names = ", ".join(available()) or "none"
        raise BundleError(f"There is no file {name!r}; the embedded models are {names}.") from None
    except OSError as error:
        raise BundleError(f"{name} cannot be read: {error.strerror}.") from None
    return path


def is_embedded(path: Path) -> bool:
    """Whether a path that `resolve_model` returned is that of an embedded model."""
    return path.parent == _folder()


def _folder() -> Path:
    return Path(str(resources.files("qualms") / "models"))
