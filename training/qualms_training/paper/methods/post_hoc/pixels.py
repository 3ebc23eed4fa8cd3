"""A control: statistics of the pixels that a network is shown, which no honest protocol lets tell much apart.

Where an in-distribution set is told from itself by these, the protocol and not the method found the difference.
"""

from dataclasses import dataclass

import numpy as np
import torch

from qualms_training.paper.material import Pictures, Shown
from qualms_training.paper.method import OnImages, Verdict

ROWS = 2048  # images normalised at once


@dataclass
class Pixels(OnImages):
    """Standard deviation and largest absolute value of the normalised image; no class is predicted.

    Small values are the doubtful ones: the published paths of strangers and noise shrink their images.
    """

    def fit(self, pictures: Pictures) -> int:
        """Nothing to learn."""
        return 0

    def score(self, shown: Shown) -> Verdict:
        """Both statistics; the class is −1 throughout."""
        parts = [
            shown.normalise.cpu()(torch.from_numpy(shown.images[start : start + ROWS])).flatten(1).double()
            for start in range(0, len(shown.images), ROWS)
        ]
        scores = {
            "pixel_deviation": -torch.cat([part.std(dim=1) for part in parts]).numpy(),
            "pixel_maximum": -torch.cat([part.abs().amax(dim=1) for part in parts]).numpy(),
        }
        return Verdict(np.full(len(shown.images), -1, dtype=np.int64), scores)
