"""What goes wrong with the demo's camera, by dose: fog lifts the black, ink fades, the sensor starts to hiss."""

import math

import numpy as np
from numpy.typing import NDArray

_CALM = 0.05
"""share of a cycle before the drift sets in, so that its beginning can be seen"""
_HUMP = 0.35
"""share of a cycle that the drift lasts; the rest is calm, so that its end can be seen"""
_HISS = 90.0
_FOG = 0.6


def dose_at(seconds: float, period: float) -> float:
    """Dose from 0 to 1 at a time: a smooth hump once a period, nothing before and after it."""
    place = (seconds / period % 1.0 - _CALM) / _HUMP
    return math.sin(math.pi * place) ** 2 if 0.0 < place < 1.0 else 0.0


def drift(image: NDArray[np.uint8], dose: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    """The image (H, W) with a dose of drift; with none, the very same pixels."""
    if dose == 0.0:
        return image
    foggy = image + _FOG * dose * (160.0 - image)
    return np.clip(foggy + rng.normal(0.0, _HISS * dose, image.shape), 0, 255).astype(np.uint8)
