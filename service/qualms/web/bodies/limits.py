"""What a parsed request consists of, and the maximum of it."""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from qualms.web.problems import Kind, Problem

ImageInput: TypeAlias = bytes | NDArray[np.uint8]
"""the bytes of an image file, or pixels of shape (H, W) or (H, W, 1|3|4)"""


@dataclass(frozen=True, slots=True)
class Limits:
    """Maximum contents of a request."""

    body_bytes: int
    images: int
    json_depth: int
    json_numbers: int = 2**22
    """values in the arrays of a JSON body"""


def too_many_images(limits: Limits) -> Problem:
    """413: the body has more images than the limit."""
    return Problem.refused(Kind.TOO_LARGE, "images", "There are too many images", f"at most {limits.images:,}")
