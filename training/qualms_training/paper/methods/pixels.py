"""A control: statistics of the normalised pixels, which should not separate similar sets under a correct protocol.

If these statistics separate an in-distribution set from itself, the difference comes from the protocol and not from the
images.
"""

from dataclasses import dataclass

import numpy as np
import torch

from qualms_training.paper.inputs import ImageInputs, Images
from qualms_training.paper.method import ImageMethod, MethodOutput

ROWS = 2048
"""images normalised at once"""


@dataclass
class Pixels(ImageMethod):
    """Standard deviation and largest absolute value of the normalised image; no class is predicted.

    Small values count as uncertain, because the published protocol scales OOD images and noise to a smaller range.
    """

    def fit(self, inputs: ImageInputs) -> int:
        """Nothing to learn."""
        return 0

    def score(self, images: Images) -> MethodOutput:
        """Both statistics, negated; the class is always −1."""
        parts = [
            images.normalise.cpu()(torch.from_numpy(images.pixels[start : start + ROWS])).flatten(1).double()
            for start in range(0, len(images.pixels), ROWS)
        ]
        scores = {
            "pixel_deviation": -torch.cat([part.std(dim=1) for part in parts]).numpy(),
            "pixel_maximum": -torch.cat([part.abs().amax(dim=1) for part in parts]).numpy(),
        }
        return MethodOutput(np.full(len(images.pixels), -1, dtype=np.int64), scores)
