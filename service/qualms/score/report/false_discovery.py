"""Flags with a controlled false discovery rate: the expected share of in-distribution images among the flagged ones.

A threshold with a false-alarm rate of 1 % flags 1 % of the in-distribution images, however few OOD images there are: among
10,000 images with 50 OOD ones, at least half of the flags may be false. The procedure of Benjamini and Hochberg (1995)
chooses the threshold from all p-values together: with m images, it is the largest p-value p that satisfies p ≤ q·r/m, where r
is the number of images with at most that p-value, and q is the target. Images with equal p-values are all flagged or none is.

Which p-values: those of `qualms.decisions.flag`, p = (1 + #{sᵢ ≥ s})/(n + 1). They do not depend on the operating point: the
guarantees `marginal` and `confident` choose different thresholds for the same p-values. For an in-distribution image that is
exchangeable with the calibration images, P(p ≤ t) ≤ t for every t (with equality on the grid of 1/(n + 1) if no scores are
equal), so no correction is needed. A p-value that holds with 95 % confidence given the calibration set, from the `confident`
rule, would not be better here: it would be larger, and BH would flag fewer images for a guarantee that BH does not need.

Why BH holds: the p-values of a run share one calibration set and are dependent, but positively (PRDS on the in-distribution
images; Bates, Candès, Lei, Romano and Sesia 2023, theorem 2), and under PRDS BH keeps the rate at or below q·m₀/m, m₀ being the
number of in-distribution images (Benjamini and Yekutieli 2001). The same holds with p-values by predicted class: the groups of
classes have disjoint calibration images and are independent given the predicted classes. If the calibration images were sent in
several settings (the forms `worst` and `by-size`), the p-value is the largest of the settings'. It is then still at least
uniform, but PRDS is proved only if the settings order the images alike; FALSE_DISCOVERIES.md has the measured rates.

The control is marginal: the rate is at most q on average over calibration sets and images. With one given calibration set it
may be higher or lower, the more so the smaller the set is.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qualms.errors import OperatingPointError
from qualms.score.report.p_value_counts import PValueCounts

_ROUNDING = 1 + 1e-12
"""Compensates rounding: 3/10 of 10 images are 3, but products of such fractions may be slightly smaller."""


@dataclass(frozen=True)
class Rejections:
    """The images that are flagged at a target false discovery rate."""

    target: float
    n_images: int
    """m: images with a p-value"""
    n_calibration: int
    threshold: float
    """an image is flagged iff its p-value is at most this; 0 if none is"""
    rejected: int
    """number of flagged images"""
    at_smallest: int
    """number of images that have the smallest possible p-value, 1/(n + 1)"""

    def flags(self, p_values: NDArray[np.float64]) -> NDArray[np.bool_]:
        """(N,) whether images with these p-values (N,) are flagged."""
        return p_values <= self.threshold

    @property
    def fewest(self) -> int:
        """Fewest images that can be flagged: so many must have the smallest possible p-value if no others are flagged."""
        return max(1, math.ceil(self.n_images / (self.target * _ROUNDING * (self.n_calibration + 1))))

    @property
    def possible(self) -> bool:
        """Whether any p-values of these images could lead to a flag: the smallest possible one must be at most the target."""
        return self.fewest <= max(self.n_images, 1)

    @property
    def needed(self) -> int:
        """Calibration images with which a single image among these could be flagged."""
        return _calibration_images(self.n_images, self.target, 1)

    @property
    def sentence(self) -> str:
        """The outcome in words, with what it guarantees or why nothing is flagged."""
        rate, n = f"{100 * self.target:g} %", f"{self.n_calibration:,}"
        if self.n_images == 0:
            return f"No image has a p-value, so none is flagged at a false discovery rate of {rate}."
        if not self.possible:
            least = _calibration_images(1, self.target, 1)
            return (
                f"No image can be flagged at a false discovery rate of {rate} with {n} calibration images: the smallest "
                f"possible p-value, 1/{self.n_calibration + 1:,}, is above {self.target:g}. At least {least:,} calibration "
                f"images are needed, and {self.needed:,} to flag a single one of these {_images(self.n_images)}."
            )
        if self.rejected:
            return (
                f"{_images(self.rejected)} of {self.n_images:,} flagged (p ≤ {self.threshold:.3g}): at most {rate} of the "
                "flagged images are in-distribution, on average over calibration sets; with the present one the share may be "
                "higher or lower."
            )
        if self.fewest == 1:
            return (
                f"No image is flagged at a false discovery rate of {rate}: no p-value is small enough among those of "
                f"{_images(self.n_images)}; a single image is flagged if it has at most {self.target / self.n_images:.3g}."
            )
        few = self.at_smallest
        return (
            f"No image is flagged at a false discovery rate of {rate}: with {n} calibration images, fewer than "
            f"{self.fewest:,} of {_images(self.n_images)} cannot be flagged, and {few:,} {'has' if few == 1 else 'have'} the "
            f"smallest possible p-value, 1/{self.n_calibration + 1:,}. To flag {max(few, 1):,} of so "
            f"many, {_calibration_images(self.n_images, self.target, max(few, 1)):,} calibration images are needed."
        )


def choose_rejections(p_values: NDArray[np.float64], target: float, n_calibration: int) -> Rejections:
    """Apply the procedure of Benjamini and Hochberg to conformal p-values (m,).

    OperatingPointError if the target is not in (0, 1), ValueError if a p-value is not in (0, 1]. `n_calibration` is the number of
    calibration images that the p-values are ranks among; with thresholds by class, that of the largest group.
    """
    counts = PValueCounts()
    counts.add(p_values)
    return choose_from_counts(counts, target, n_calibration)


def choose_from_counts(counts: PValueCounts, target: float, n_calibration: int) -> Rejections:
    """`choose_rejections` from counted p-values, for any number of images in constant memory."""
    check_target(target)
    if n_calibration < 1:
        raise ValueError(f"There must be at least 1 calibration image, not {n_calibration}.")
    values, cumulative, m = counts.values, np.cumsum(counts.counts), counts.total
    passing = np.flatnonzero(values * m <= target * cumulative * _ROUNDING)
    last = passing[-1] if len(passing) else None
    smallest = 1 / (n_calibration + 1)
    return Rejections(
        target=target,
        n_images=m,
        n_calibration=n_calibration,
        threshold=0.0 if last is None else float(values[last]),
        rejected=0 if last is None else int(cumulative[last]),
        at_smallest=int(counts.counts[values <= smallest * _ROUNDING].sum()),
    )


def check_target(target: float) -> None:
    """Raise OperatingPointError unless the target false discovery rate is in (0, 1)."""
    if not 0.0 < target < 1.0:
        raise OperatingPointError(
            f"The target false discovery rate must lie strictly between 0 and 1, not {target}.", "target_fdr"
        )


def _calibration_images(n_images: int, target: float, flagged: int) -> int:
    """Smallest n with 1/(n + 1) ≤ target·flagged/n_images."""
    return max(1, math.ceil(n_images / (target * _ROUNDING * flagged)) - 1)


def _images(count: int) -> str:
    return f"{count:,} image{'' if count == 1 else 's'}"
