"""The models that come with the package, and how a user's word becomes a file."""

from importlib import resources
from pathlib import Path

from qualms.errors import BundleError

DEFAULT = "mnist"


def available() -> list[str]:
    """Names of the embedded models."""
    return sorted(path.stem for path in _folder().glob("*.onnx"))


def resolve(model: str | None) -> Path:
    """The file of an embedded model by name, or any path; the default model for None."""
    name = model or DEFAULT
    embedded = _folder() / f"{name}.onnx"
    if name in available():
        return embedded
    path = Path(name)
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a null byte is a ValueError
        known = ", ".join(available()) or "none"
        raise BundleError(f"There is no file {name!r}, and the embedded models are {known}.") from None
    except OSError as error:
        raise BundleError(f"{name} cannot be read: {error.strerror}.") from None
    return path


def _folder() -> Path:
    return Path(str(resources.files("qualms") / "models"))
