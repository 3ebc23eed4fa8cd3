"""Measure the false discovery rate of `qualms score --target-fdr` on real images.

    QUALMS_DATA=FOLDER python -m tests.qualms.score.report.false_discovery_campaign cifar10 svhn

Every repetition draws, without replacement, calibration images and 900 in-distribution images from the test set of the embedded
model's data, and 100 images from the OOD set. Three tables are printed: calibration sets redrawn, several calibration sets that
are each kept for all repetitions, and the calibration set in the bundle.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle
from qualms.bundle.runtime import GraphRunner
from qualms.bundle.scores import as_uncertainty
from qualms.decisions.flag import p_values
from qualms.decisions.verdicts import Decider
from qualms.images.preprocess import preprocess_batch
from qualms.score.report.false_discovery import choose_rejections

TARGETS = (0.05, 0.1, 0.2)
NAIVE_RATE = 0.01
IN_DISTRIBUTION, OOD = 900, 100
FIXED_SETS = 50
CHUNK = 256


class Images:
    """Uncertainty (N,) of the flag score for in-distribution and OOD images."""

    def __init__(self, model: str, ood: str, data: Path, most: int) -> None:
        self.manifest = (bundle := open_bundle(resolve_model(model))).manifest
        self.spec, self.score = self.manifest.input, self.manifest.operating.score
        self._runner = GraphRunner(bundle.graph)
        # Both are the test sets, which neither training nor calibration has used.
        self.known, self.known_size = self._uncertainty(data / f"{model}-test.npz", most)
        self.unknown, self.unknown_size = self._uncertainty(data / f"{ood}-test.npz", most)

    def _uncertainty(self, path: Path, most: int) -> tuple[NDArray[np.float64], str]:
        with np.load(path, allow_pickle=False) as file:
            images = file["images"]
        chosen = np.random.default_rng(0).permutation(len(images))[:most]
        values = [
            self._runner(preprocess_batch(images[chosen[start : start + CHUNK]], self.spec))[self.score]
            for start in range(0, len(chosen), CHUNK)
        ]
        height, width = images.shape[1:3]
        larger = height > self.spec.height or width > self.spec.width
        smaller = height < self.spec.height or width < self.spec.width
        size = "larger" if larger else "smaller" if smaller else "same"
        return as_uncertainty(np.concatenate(values), self.manifest.scores[self.score].direction), size


Shares = NDArray[np.float64]
"""(len(TARGETS) + 1, 2): false share among the flagged, and share of the OOD images that are flagged; last, the naive flag"""


def shares(p_known: NDArray[np.float64], p_unknown: NDArray[np.float64], n: int) -> Shares:
    """The shares of one repetition."""
    p = np.concatenate([p_known, p_unknown])
    is_ood = np.arange(len(p)) >= len(p_known)
    flags = [choose_rejections(p, target, n).flags(p) for target in TARGETS]
    rows = [*flags, p <= NAIVE_RATE]
    return np.array([[(one & ~is_ood).sum() / max(one.sum(), 1), one[is_ood].mean()] for one in rows])


def repeat(make: Callable[[np.random.Generator], Shares], repetitions: int, seed: int) -> NDArray[np.float64]:
    """(repetitions, len(TARGETS) + 1, 2)."""
    random = np.random.default_rng(seed)
    return np.array([make(random) for _ in range(repetitions)])


def redrawn(images: Images, n: int) -> Callable[[np.random.Generator], Shares]:
    """One repetition with calibration images of its own."""

    def once(random: np.random.Generator) -> Shares:
        known = images.known[random.permutation(len(images.known))[: n + IN_DISTRIBUTION]]
        return _with(np.sort(known[:n]), known[n:], images, random)

    return once


def fixed(images: Images, n: int, seed: int) -> Callable[[np.random.Generator], Shares]:
    """One repetition with the calibration images of `seed`; the others are drawn from the remaining images."""
    order = np.random.default_rng(seed).permutation(len(images.known))
    calibration, rest = np.sort(images.known[order[:n]]), images.known[order[n:]]

    def once(random: np.random.Generator) -> Shares:
        return _with(calibration, random.choice(rest, IN_DISTRIBUTION, replace=False), images, random)

    return once


def _with(
    calibration: NDArray[np.float64], known: NDArray[np.float64], images: Images, random: np.random.Generator
) -> Shares:
    unknown = random.choice(images.unknown, OOD, replace=False)
    return shares(p_values(known, calibration), p_values(unknown, calibration), len(calibration))


def bundled(images: Images) -> tuple[Callable[[np.random.Generator], Shares], int]:
    """One repetition with the bundle's own calibration set, each image by the rule of its size; and the set's size."""
    decider = Decider(images.manifest)
    rules = [decider.rule(size=size) for size in (images.known_size, images.unknown_size)]

    def once(random: np.random.Generator) -> Shares:
        known = random.choice(images.known, IN_DISTRIBUTION, replace=False)
        unknown = random.choice(images.unknown, OOD, replace=False)
        return shares(p_values(known, rules[0].calibration), p_values(unknown, rules[1].calibration), rules[0].flag.n)

    return once, rules[0].flag.n


def report(title: str, results: NDArray[np.float64]) -> None:
    """Print mean, standard error and power; results (R, len(TARGETS) + 1, 2)."""
    print(f"\n{title}\n\n| flag | mean false share | ± standard error | OOD flagged |\n|---|---|---|---|")
    names = [*(f"FDR {100 * target:g} %" for target in TARGETS), f"{100 * NAIVE_RATE:g} % false alarms"]
    for row, name in enumerate(names):
        false, true = results[:, row, 0], results[:, row, 1]
        error = false.std(ddof=1) / np.sqrt(len(false))
        print(f"| {name} | {100 * false.mean():.2f} % | {100 * error:.2f} % | {100 * true.mean():.1f} % |")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("model", choices=["cifar10", "mnist"])
    parser.add_argument("ood", help="name of an OOD set in QUALMS_DATA, such as svhn")
    parser.add_argument("--calibration", type=int, default=2000, help="calibration images that are drawn")
    parser.add_argument("--repetitions", type=int, default=200)
    parser.add_argument("--images", type=int, default=10_000, help="images that are scored of each set, at most")
    options = parser.parse_args()
    images, n = Images(options.model, options.ood, Path(os.environ["QUALMS_DATA"]), options.images), options.calibration
    many = options.repetitions
    report(f"{n:,} calibration images, redrawn {many} times", repeat(redrawn(images, n), many, seed=18))
    means = np.array([repeat(fixed(images, n, seed), many, seed=18).mean(axis=0) for seed in range(FIXED_SETS)])
    report(f"{FIXED_SETS} fixed sets of {n:,} calibration images, {many} times each", means)
    for row, target in enumerate(TARGETS):
        false = 100 * means[:, row, 0]
        above = (false > 100 * target).sum()
        print(f"FDR {100 * target:g} %: from {false.min():.2f} to {false.max():.2f} %, above target for {above} sets")
    once, own = bundled(images)
    report(f"The {own:,} calibration images of the bundle, {many} times", repeat(once, many, seed=18))


if __name__ == "__main__":
    main()
