"""Errors that only training raises; their base class and the whole tree are in qualms.errors."""

from collections.abc import Iterable
from difflib import get_close_matches

from qualms.errors import DataError, ExtraMissingError, QualmsError

__all__ = [
    "ConversionError",
    "DataError",
    "ExportError",
    "ExtraMissingError",
    "ModelError",
    "QualmsError",
    "RecipeError",
    "did_you_mean",
]


class RecipeError(QualmsError):
    """A recipe has an unknown key or an invalid value."""


class ModelError(QualmsError):
    """A model's weights, taps or architecture cannot be used."""


class ExportError(QualmsError):
    """The model cannot be exported, or the exported graph does not agree with PyTorch."""


class ConversionError(QualmsError):
    """A run folder is too old, damaged or unfinished."""


def did_you_mean(name: str, accepted: Iterable[str]) -> str:
    """The end of an error sentence: `; did you mean 'a' or 'b'?` for accepted names similar to `name`, else a full stop."""
    close = get_close_matches(name, list(accepted), n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
