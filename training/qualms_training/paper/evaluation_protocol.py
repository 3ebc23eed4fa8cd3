"""The two evaluation protocols: `fair`, and `as-published`, which repeats a mismatch of the authors' evaluation.

Both start from the same preprocessed uint8 pixels and differ only in the normalisation that follows. `fair` normalises
all images in the same way. `as-published` normalises in-distribution images with the recipe's mean and standard
deviation, OOD images with 0.5 and 0.5, and noisy images not at all, so a network can separate the sets by their scale
alone.
"""

from enum import StrEnum

from qualms_training.meta.extractor import Normalise
from qualms_training.recipe import InputSection


class Protocol(StrEnum):
    """How images are normalised in an evaluation."""

    fair = "fair"
    as_published = "as-published"


class Role(StrEnum):
    """Role of a data set in a table; it selects the normalisation under `as-published`."""

    in_distribution = "in-distribution"
    """any split of the in-distribution data"""
    ood = "ood"
    """another data set"""
    noise = "noise"
    """noisy copies of in-distribution images: the Corrupted set, and the copies used for early stopping"""


def normaliser(protocol: Protocol, role: Role, section: InputSection) -> Normalise:
    """The normalisation from uint8 pixels to network input for a set of this role."""
    if protocol is Protocol.fair or role is Role.in_distribution:
        return Normalise(section.mean, section.std)
    mean, std = (0.5, 0.5) if role is Role.ood else (0.0, 1.0)
    return Normalise([mean] * section.channels, [std] * section.channels)
