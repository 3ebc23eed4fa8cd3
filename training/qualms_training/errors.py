"""The errors only training can raise; their parent and the whole tree are in qualms.errors."""

from qualms.errors import DataError, ExtraMissingError, QualmsError

__all__ = ["DataError", "ExportError", "ExtraMissingError", "ModelError", "QualmsError", "RecipeError"]


class RecipeError(QualmsError):
    """A recipe has an unknown key or an impossible value."""


class ModelError(QualmsError):
    """A model's weights, taps or architecture are not usable."""


class ExportError(QualmsError):
    """The exported graph does not agree with PyTorch, so it was not given its final name."""
