"""All hostile files by name."""

from qualms.bench.attacks.files import bmp, gif, jpeg, jpeg_metadata, png, tiff, webp  # noqa: F401  (importing them registers files)
from qualms.bench.attacks.files.definition import FILES

__all__ = ["FILES"]
