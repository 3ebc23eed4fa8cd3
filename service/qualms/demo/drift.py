"""Simulated drift of the demo's camera: less contrast and more sensor noise, with a strength (dose) from 0 to 1."""

import math

import numpy as np
from numpy.typing import NDArray

_START = 0.05
"""share of a period before the drift begins, so that its beginning is visible on a dashboard"""
_DURATION = 0.35
"""share of a period that the drift lasts; the images are clean afterwards, so that its end is visible"""
_NOISE = 90.0
"""standard deviation of the noise at dose 1, in grey levels"""
_FOG = 0.6
"""weight of the grey level of fog at dose 1"""
_FOG_GREY = 160.0


def dose_at(seconds: float, period: float) -> float:
    """Dose at a time, from 0 to 1: it rises and falls smoothly once per period and is 0 otherwise."""
    phase = (seconds / period % 1.0 - _START) / _DURATION
    return math.sin(math.pi * phase) ** 2 if 0.0 < phase < 1.0 else 0.0


def drift(image: NDArray[np.uint8], dose: float, rng: np.random.Generator) -> NDArray[np.uint8]:
    """The image (H, W) with a dose of drift; with dose 0, the same array."""
    if dose == 0.0:
        return image
    foggy = image + _FOG * dose * (_FOG_GREY - image)
    return np.clip(foggy + rng.normal(0.0, _NOISE * dose, image.shape), 0, 255).astype(np.uint8)
