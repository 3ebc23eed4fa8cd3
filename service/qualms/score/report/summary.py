"""The closing summary of a run: flagged images against their bound, the p-values, the classes and the errors.

All counts are taken while the rows pass, so memory does not grow with their number.
"""

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np
from rich.table import Table

from qualms.bundle.manifest import Manifest
from qualms.bundle.parts import Guarantee
from qualms.decisions.binomial import upper_bound
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.decisions.verdicts import Decider, Rule
from qualms.score.report.false_discovery import Rejections
from qualms.score.report.p_value_counts import PValueCounts
from qualms.score.report.summary_table import summary_table
from qualms.score.report.uniformity import SIGNIFICANT, Uniformity, compare_with_uniform
from qualms.score.rows import ERROR, FLAG, P_VALUE, Part

HISTOGRAM_BINS = 20
MAX_CLASSES = 20
"""classes that are listed; the others are one row"""
MAX_ERROR_KINDS = 10
"""kinds of errors that are listed; the others are one row"""
_COUNTED_ERROR_KINDS = 1000
"""kinds of errors that are counted separately, whatever the files contain"""
_OTHER = "other errors"
_CLASS, _ACCEPT = "prediction_index", "trust_accept"


@dataclass(frozen=True)
class ClassCount:
    """The images predicted as one class."""

    label: str
    images: int
    share: float
    """of all images that could be read"""
    calibration_share: float
    """share of the class among the in-distribution images of the model's calibration"""
    flagged: int
    accepted: int


@dataclass(frozen=True)
class SummaryResult:
    """The summary of a run."""

    model: str
    guarantee: Guarantee
    guarantee_text: str
    score: str
    images: int
    """images that could be read"""
    unreadable: int
    errors: tuple[tuple[str, int], ...]
    """kinds of errors with their number of files, the most frequent first"""
    flagged: int
    """images flagged at the operating point"""
    rate_bound: float
    """99.9 % bound of the rate of flagged in-distribution images, given the calibration set"""
    accepted: int | None
    """images whose prediction can be relied on; None if there are no verdicts"""
    rejections: Rejections | None
    """the flags of --target-fdr"""
    n_calibration: int
    histogram: tuple[int, ...]
    """images by p-value, in bins of equal width"""
    uniformity: Uniformity | None
    """None without images"""
    classes: tuple[ClassCount, ...]
    """the most frequent first"""
    more_classes: int
    """predicted classes that are not listed"""
    more_images: int
    """images of these classes"""

    @property
    def total(self) -> int:
        """All files."""
        return self.images + self.unreadable

    @property
    def rate(self) -> float:
        """Share of the images that are flagged at the operating point."""
        return self.flagged / max(self.images, 1)

    @property
    def lowest_rate(self) -> float:
        """99.9 % lower confidence bound of the rate at which such images are flagged (Clopper and Pearson)."""
        if self.flagged == 0:
            return 0.0
        return 1 - upper_bound(self.images - self.flagged, self.images, 1 - SIGNIFICANT)

    @property
    def exceeds_bound(self) -> bool:
        """Whether more images are flagged than in-distribution images and chance explain."""
        return self.lowest_rate > self.rate_bound

    @property
    def rate_sentence(self) -> str:
        """The flag rate against its bound in words."""
        bound = f"{100 * self.rate_bound:.3g} %"
        if self.images == 0:
            return "no image could be read"
        if self.exceeds_bound:
            return (
                f"above the {bound} that in-distribution images reach: the rate is at least {100 * self.lowest_rate:.3g} % "
                "with 99.9 % confidence; some images are OOD, or the images have drifted"
            )
        if self.rate > self.rate_bound:
            return f"above the {bound} that in-distribution images reach, but within chance for so few images"
        return f"within the {bound} that in-distribution images reach"

    def as_table(self) -> Table:
        """The summary for the terminal."""
        return summary_table(self)


class Summary:
    """Counts rows; `finish` makes the summary of all that were added."""

    def __init__(self, manifest: Manifest, point: OperatingPoint = DEFAULT_OPERATING_POINT) -> None:
        """OperatingPointError if the model does not support the operating point."""
        self._manifest = manifest
        self._rule: Rule = Decider(manifest).rule(point)
        self.p_values = PValueCounts()
        """of all images that were added"""
        self._counts = np.zeros((len(manifest.classes), 3), np.int64)
        """by class: images, flagged and accepted ones"""
        self._errors: Counter[str] = Counter()
        self._has_verdicts = False

    @property
    def n_calibration(self) -> int:
        """Calibration images that the p-values are ranks among; with thresholds by class, of the largest group."""
        classes = self._rule.classes
        return self._rule.flag.n if classes is None else max(group.n for group in classes.groups)

    def add(self, part: Part) -> None:
        """Count the rows of a part."""
        columns = part.columns
        errors = columns[ERROR]
        for error in errors:
            if error is not None:
                self._count_error(error)
        if P_VALUE not in columns:
            return
        read = [row for row, error in enumerate(errors) if error is None]
        self.p_values.add([columns[P_VALUE][row] for row in read])
        accepts = [columns[_ACCEPT][row] for row in read]
        self._has_verdicts |= any(accept is not None for accept in accepts)
        counts = np.ones((len(read), 3), np.int64)
        counts[:, 1] = [columns[FLAG][row] for row in read]
        counts[:, 2] = [bool(accept) for accept in accepts]
        np.add.at(self._counts, np.array([columns[_CLASS][row] for row in read], np.intp), counts)

    def finish(self, rejections: Rejections | None = None) -> SummaryResult:
        """The summary; `rejections` are the flags of --target-fdr."""
        flag, manifest = self._rule.flag, self._manifest
        images, flagged, accepted = (int(total) for total in self._counts.sum(axis=0))
        order = [index for index in np.argsort(-self._counts[:, 0], kind="stable") if self._counts[index, 0]]
        rest = order[MAX_CLASSES:]
        return SummaryResult(
            model=f"{manifest.name} {manifest.version}",
            guarantee=flag.guarantee,
            guarantee_text=self._rule.guarantee_text,
            score=flag.score,
            images=images,
            unreadable=self._errors.total(),
            errors=self._error_kinds(),
            flagged=flagged,
            rate_bound=flag.rate_bound,
            accepted=accepted if self._has_verdicts else None,
            rejections=rejections,
            n_calibration=self.n_calibration,
            histogram=_histogram(self.p_values),
            uniformity=compare_with_uniform(self.p_values, self._inverse_n()),
            classes=tuple(self._class_count(index, images) for index in order[:MAX_CLASSES]),
            more_classes=len(rest),
            more_images=int(self._counts[rest, 0].sum()),
        )

    def _class_count(self, index: int, images: int) -> ClassCount:
        count, flagged, accepted = (int(value) for value in self._counts[index])
        share = self._manifest.reference.class_shares[index]
        return ClassCount(self._manifest.classes[index], count, count / images, share, flagged, accepted)

    def _inverse_n(self) -> float:
        """1/n as in `qualms.score.report.uniformity`."""
        classes = self._rule.classes
        if classes is None:
            return 1 / self._rule.flag.n
        images = np.bincount(classes.group_of, weights=self._counts[:, 0]).astype(np.float64)
        weights = images / max(images.sum(), 1)
        return float(sum(weight**2 / group.n for weight, group in zip(weights, classes.groups, strict=True)))

    def _count_error(self, error: str) -> None:
        kind = _kind(error)
        if kind not in self._errors and len(self._errors) >= _COUNTED_ERROR_KINDS:
            kind = _OTHER
        self._errors[kind] += 1

    def _error_kinds(self) -> tuple[tuple[str, int], ...]:
        ordered = [(kind, count) for kind, count in self._errors.most_common() if kind != _OTHER]
        rest = self._errors[_OTHER] + sum(count for _, count in ordered[MAX_ERROR_KINDS:])
        return (*ordered[:MAX_ERROR_KINDS], *([(_OTHER, rest)] if rest else []))


def _kind(error: str) -> str:
    """The error without what differs between files: numbers and details in brackets or quotes."""
    return re.sub(r"\d[\d,.]*\d|\d", "…", re.sub(r" \([^()]*\)|'[^']*'", "", error))[:200]


def _histogram(counts: PValueCounts) -> tuple[int, ...]:
    """(HISTOGRAM_BINS,) the number of p-values in ((b − 1)/B, b/B]."""
    bins = np.ceil(counts.values * HISTOGRAM_BINS - 1e-9).astype(np.int64) - 1
    sums = np.bincount(np.clip(bins, 0, HISTOGRAM_BINS - 1), weights=counts.counts, minlength=HISTOGRAM_BINS)
    return tuple(int(value) for value in sums)
