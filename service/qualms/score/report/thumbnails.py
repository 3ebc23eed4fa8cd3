"""Small JPEG copies of images, for pages."""

import base64
import io

from PIL import Image

from qualms.errors import ImageError
from qualms.images.pillow_decoder import decode, flatten

SIDE = 192
"""pixels of the longer side"""
_SHRINK_FROM_ASPECT = 3
"""longer images are cropped, so that their shorter side stays visible"""
_QUALITY = 80
_MAX_FILE_BYTES = 64 * 2**20


def thumbnail_uri(data: bytes) -> str | None:
    """An image file as a data URI of at most SIDE × SIDE pixels; None if the image cannot be decoded.

    The JPEG is made from pixels alone, so no metadata of the file, such as a place, is copied.
    """
    if len(data) > _MAX_FILE_BYTES:
        return None
    try:
        image = flatten(decode(data, min_jpeg_side=2 * SIDE))
        image = _crop(image)
        # Small images are enlarged by whole factors, so that their pixels stay sharp.
        factor = SIDE // max(image.size)
        if factor > 1:
            image = image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
        else:
            image.thumbnail((SIDE, SIDE))
        # A new image has no metadata, which Pillow would otherwise write.
        clean = Image.new(image.mode, image.size)
        clean.paste(image)
        file = io.BytesIO()
        clean.save(file, "JPEG", quality=_QUALITY, optimize=True)
    except (ImageError, MemoryError, OSError, ValueError):
        return None
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


def _crop(image: Image.Image) -> Image.Image:
    longest = _SHRINK_FROM_ASPECT * min(image.size)
    width, height = min(image.width, longest), min(image.height, longest)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image if (width, height) == image.size else image.crop((left, top, left + width, top + height))
