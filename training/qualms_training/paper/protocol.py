"""Two ways to show data to a network: the fair one, and the mismatch behind the published figures.

Both start from the same uint8 pixels, which the one preprocessing path made. They differ only in the normalisation
that follows: `fair` has one for everything; `as-published` has one for in-distribution images, another for
strangers and none for noise, so that a network can tell the sets apart by their scale alone.
"""

from enum import StrEnum

from qualms_training.meta.normalise import Normalise
from qualms_training.recipe import InputSection


class Protocol(StrEnum):
    """Which of the two."""

    fair = "fair"
    as_published = "as-published"


class Role(StrEnum):
    """What a data set is in a table; the published protocol normalises by it."""

    known = "known"
    """in-distribution, whatever the split"""
    stranger = "stranger"
    """another data set"""
    noise = "noise"
    """made of in-distribution images: the Corrupted set, and the noisy copies that training stops by"""


def normaliser(protocol: Protocol, role: Role, section: InputSection) -> Normalise:
    """From uint8 pixels to network input for a set of this role."""
    if protocol is Protocol.fair or role is Role.known:
        return Normalise(section.mean, section.std)
    level, spread = (0.5, 0.5) if role is Role.stranger else (0.0, 1.0)
    return Normalise([level] * section.channels, [spread] * section.channels)
