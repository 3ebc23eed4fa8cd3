"""A test whether p-values are those of in-distribution images, which respects that the calibration set is finite.

p-values of in-distribution images are uniform only on average over calibration sets. Given one set of n images they deviate
from uniform by about 1/√n, and a test for uniform p-values would reject every set of images that is large enough. So this is a
test with two samples, as Smirnov's: m images and n calibration images come from the same distribution. It is one-sided: the
statistic D is the largest excess of the share of p-values at or below p over p itself, because only an excess of small p-values
is evidence of OOD images or drift, and p-values are larger than uniform if scores are equal or the guarantee is that of the worst
of several encodings. P(D ≥ d) is about exp(−2·N·d²) with 1/N = 1/m + 1/n.

With thresholds by predicted class, the share of images at or below p is a mean over groups of classes with weights w_g and n_g
calibration images each, and 1/n is the sum of w_g²/n_g.
"""

import math
from dataclasses import dataclass

import numpy as np

from qualms.score.report.p_value_counts import PValueCounts

SIGNIFICANT = 0.001
"""one in a thousand runs on in-distribution images is reported wrongly, as for alerts (`FlagPoint.rate_bound`)"""


@dataclass(frozen=True)
class Uniformity:
    """The largest excess of small p-values, and how often in-distribution images have such an excess."""

    excess: float
    """D: share of the images with p-values at or below `at`, minus `at`"""
    at: float
    significance: float
    """probability of such an excess if all images are in-distribution"""

    @property
    def is_excessive(self) -> bool:
        """Whether in-distribution images are no plausible explanation."""
        return self.significance < SIGNIFICANT

    @property
    def sentence(self) -> str:
        """The outcome in words."""
        chance = "below 1e-12" if self.significance < 1e-12 else f"{self.significance:.2g}"
        if self.is_excessive:
            return (
                f"too many small p-values: {100 * (self.at + self.excess):.3g} % are at or below {self.at:.3g} (probability of "
                f"such an excess for in-distribution images: {chance}); some images are OOD, or the images have drifted"
            )
        return f"no excess of small p-values beyond chance (largest {100 * self.excess:.2g} %, probability {chance})"


def compare_with_uniform(counts: PValueCounts, inverse_n: float) -> Uniformity | None:
    """Compare counted p-values with those of in-distribution images; None without p-values.

    `inverse_n` is 1/n, or with thresholds by predicted class the sum of w_g²/n_g.
    """
    if counts.total == 0:
        return None
    excess = np.cumsum(counts.counts) / counts.total - counts.values
    largest = int(np.argmax(excess))
    size = 1 / (1 / counts.total + inverse_n)
    value = max(0.0, float(excess[largest]))
    return Uniformity(value, float(counts.values[largest]), math.exp(-2 * size * value**2))
