"""Flags with a threshold for each predicted class.

One threshold for all images guarantees the false-alarm rate of all of them together; that of images predicted as one class
may be higher. The predicted class is a function of the image, so images predicted as a class are exchangeable with the
calibration images predicted as that class, and the confident rule of `qualms.decisions.flag` holds within the class.

A class needs as many calibration images as the confident rule does. Classes with fewer are pooled, and if the pool is
still too small, the smallest of the other classes join it. The guarantee then holds for the images of the pool together.
Which classes are pooled depends only on the numbers of images, not on their scores, so it does not affect the guarantee.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from qualms.bundle.scores import Direction, as_uncertainty
from qualms.decisions.flag import FlagPoint, choose_flag_point, p_values, smallest_n

ByClass: TypeAlias = list[npt.NDArray[np.float64]]
"""by predicted class: uncertainty of the calibration images, ascending"""


def sort_by_class(uncertainty: npt.NDArray[np.float64], predictions: npt.NDArray[np.int32], classes: int) -> ByClass:
    """Divide the uncertainty (n,) of calibration images by their predicted class (n,)."""
    order = np.lexsort((uncertainty, predictions))
    counts = np.bincount(predictions, minlength=classes)
    return np.split(uncertainty[order], np.cumsum(counts)[:-1])


@dataclass(frozen=True, eq=False)
class ClassGroup:
    """Classes that share a threshold: one class, or the pool."""

    classes: tuple[int, ...]
    point: FlagPoint
    """of the setting with the largest threshold"""
    points: tuple[FlagPoint, ...]
    """of every setting"""
    ascending: tuple[npt.NDArray[np.float64], ...]
    """by setting: uncertainty of the calibration images predicted as one of the classes"""

    @property
    def rate_bound(self) -> float:
        """Largest of the settings."""
        return max(point.rate_bound for point in self.points)

    @property
    def n(self) -> int:
        """Number of calibration images, in the setting with the fewest."""
        return min(map(len, self.ascending))

    def p_values(self, uncertainty: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """p-values (N,) of images predicted as one of the classes; the largest over the settings."""
        largest: npt.NDArray[np.float64] = np.max([p_values(uncertainty, one) for one in self.ascending], axis=0)
        return largest


@dataclass(frozen=True)
class _ClassPoint(FlagPoint):
    """The loosest threshold of several groups of classes."""

    groups: tuple[ClassGroup, ...] = field(default=(), compare=False)

    @property
    def rate_bound(self) -> float:
        """Largest of the groups."""
        return max(group.rate_bound for group in self.groups)


class ClassFlags:
    """The thresholds of all predicted classes."""

    def __init__(self, samples: Sequence[ByClass], *, score: str, direction: Direction, target_fpr: float) -> None:
        """`samples` has one entry per setting; OperatingPointError if all calibration images together are too few."""
        counts = np.array([[len(one) for one in sample] for sample in samples])
        needed = smallest_n(target_fpr, "by-class") if 0 < target_fpr < 1 else 1.0

        def group(members: tuple[int, ...]) -> ClassGroup:
            ascending = tuple(
                sample[members[0]] if len(members) == 1 else np.sort(np.concatenate([sample[i] for i in members]))
                for sample in samples
            )
            points = tuple(
                choose_flag_point(one, score=score, direction=direction, target_fpr=target_fpr, guarantee="by-class")
                for one in ascending
            )
            loosest = max(points, key=lambda point: float(as_uncertainty(point.threshold, direction)))
            return ClassGroup(members, loosest, points, ascending)

        self.groups = [group(members) for members in group_classes(counts, needed)]
        self.group_of = np.zeros(counts.shape[1], np.intp)
        for index, one in enumerate(self.groups):
            self.group_of[list(one.classes)] = index
        self._direction = direction
        self._n = int(counts[0].sum())

    @cached_property
    def point(self) -> FlagPoint:
        """All thresholds as one point with the loosest threshold; its rate bound is the largest of all groups."""
        points = [group.point for group in self.groups]
        loosest = max(points, key=lambda point: float(as_uncertainty(point.threshold, self._direction)))
        return _ClassPoint(
            score=loosest.score,
            direction=self._direction,
            target_fpr=loosest.target_fpr,
            guarantee="by-class",
            k=sum(point.k for point in points),
            n=self._n,
            threshold=loosest.threshold,
            groups=tuple(self.groups),
        )

    @cached_property
    def thresholds(self) -> npt.NDArray[np.float64]:
        """(K,) raw threshold of each predicted class."""
        return np.array([group.point.threshold for group in self.groups])[self.group_of]

    def limits(self, predictions: npt.NDArray[np.integer]) -> npt.NDArray[np.float64]:
        """(N,) threshold of each image as uncertainty; images with strictly more uncertainty are flagged."""
        limits: npt.NDArray[np.float64] = as_uncertainty(self.thresholds, self._direction)[predictions]
        return limits

    def p_values(
        self, uncertainty: npt.NDArray[np.float64], predictions: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.float64]:
        """p-values (N,) among the calibration images of each image's group."""
        result = np.empty(len(uncertainty))
        groups = self.group_of[predictions]
        for index in np.unique(groups):
            rows = groups == index
            result[rows] = self.groups[index].p_values(uncertainty[rows])
        return result


def group_classes(counts: npt.NDArray[np.integer], needed: float) -> list[tuple[int, ...]]:
    """Groups of classes that have at least `needed` images in every setting, unless all classes together have fewer.

    counts (S, K): calibration images predicted as each class, by setting.
    """
    fewest = counts.min(axis=0)
    order = sorted(range(len(fewest)), key=lambda index: (fewest[index], index))
    pooled = [index for index in order if fewest[index] < needed]
    others = order[len(pooled) :]
    while pooled and others and counts[:, pooled].sum(axis=1).min() < needed:
        pooled.append(others.pop(0))
    groups: list[tuple[int, ...]] = [(index,) for index in sorted(others)]
    return [*groups, tuple(sorted(pooled))] if pooled else groups
