"""Read the TOML files of recipes and benchmarks, write files atomically, and fingerprint values."""

import hashlib
import json
import tomllib
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from qualms.files import atomic_path, write_bytes
from qualms_training.errors import RecipeError


def toml_names(folder: Traversable) -> list[str]:
    """Names, without the suffix, of the TOML files in `folder`."""
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_toml(name_or_path: str, folder: Traversable, kind: str) -> dict[str, Any]:
    """The content of `folder/NAME.toml`, or of any file whose path ends in .toml.

    `kind` is the word for such a file in error messages, for example "recipe".
    """
    file: Traversable = Path(name_or_path)
    if not name_or_path.endswith(".toml"):
        if name_or_path not in toml_names(folder):
            names = ", ".join(toml_names(folder))
            raise RecipeError(f"There is no {kind} {name_or_path!r}; give one of {names}, or a path to a .toml file.")
        file = folder / f"{name_or_path}.toml"
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"{kind.capitalize()} {name_or_path} is not valid TOML: {error}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"{kind.capitalize()} {name_or_path} cannot be read: {error}.") from None


def save_torch(path: Path, value: Any) -> None:
    """torch.save, atomically."""
    import torch  # noqa: PLC0415  # recipes can be listed without torch

    with atomic_path(path) as temporary:
        torch.save(value, temporary)


def save_json(path: Path, value: Any) -> None:
    """Write indented JSON, atomically."""
    save_text(path, json.dumps(value, indent=2, sort_keys=False) + "\n")


def save_text(path: Path, text: str) -> None:
    """Write UTF-8 text, atomically."""
    write_bytes(path, text.encode())


def fingerprint(*parts: Any) -> str:
    """A short digest of JSON-serialisable values: equal values, equal fingerprint."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:24]
