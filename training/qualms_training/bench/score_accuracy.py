"""Accuracy of the exported scores against arithmetic with sixty digits, over the whole range of α."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import mpmath
import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor, nn

from qualms.bundle.runtime import INPUT, GraphRunner
from qualms_training.console import Display
from qualms_training.meta.dirichlet import DirichletScores, dirichlet_scores, is_largest, joined_scores
from qualms_training.meta.export.onnx_export import to_onnx
from qualms_training.meta.joined_alpha import EVIDENCE_PER_CLASS, MIN_EVIDENCE

CLASS_COUNTS = (2, 3, 10, 100, 1000)
LOWEST, HIGHEST = 1e-6, 1e6
"""range of the meta-model's α"""
DIGITS = 60
META_SCORE = "meta_mutual_information"

Exact = Callable[[NDArray[np.float32]], dict[str, mpmath.mpf]]
"""the exact scores of one row of a graph's input"""


class _MetaScores(nn.Module):
    def forward(self, z: Tensor) -> DirichletScores:
        return dirichlet_scores(z)


class _JoinedScores(nn.Module):
    """The classes' z are both log α of the meta-model and logits of the network that predicts, as in transfer."""

    def forward(self, z: Tensor) -> tuple[Tensor, ...]:
        logits, evidence = z[:, :-1].double(), z[:, -1:].double().exp()
        alpha, total = 1.0 + evidence * logits.softmax(dim=-1), logits.shape[-1] + evidence
        scores, meta_information = joined_scores(
            alpha, total, logits.exp(), logits.exp().sum(dim=-1, keepdim=True), is_largest(logits)
        )
        return *scores, meta_information


def scores_model(classes: int) -> bytes:
    """The scores of Dir(α) alone as ONNX: input z = log α (N, K) float32, outputs as in a bundle."""
    return to_onnx(_MetaScores(), np.zeros((2, classes), np.float32), DirichletScores._fields)


def joined_scores_model(classes: int) -> bytes:
    """The scores of α = 1 + n·p alone as ONNX: input (N, K + 1) float32, the logits of p and log n; outputs as in a bundle."""
    return to_onnx(_JoinedScores(), np.zeros((2, classes + 1), np.float32), [*DirichletScores._fields, META_SCORE])


def bench_scores(display: Display | None = None) -> dict[str, float]:
    """Print the largest error of each score for each K; return the largest over all K and both kinds of α, by score."""
    display = display or Display()
    kinds: dict[str, tuple[Callable[[int], bytes], Callable[[int], Iterator[NDArray[np.float32]]], Exact]] = {
        f"α from {LOWEST:g} to {HIGHEST:g}": (scores_model, patterns, exact_meta_scores),
        f"α = 1 + n·p, n from {MIN_EVIDENCE:g} to {2 * EVIDENCE_PER_CLASS:g} K": (
            *(joined_scores_model, joined_patterns, exact_joined_scores),
        ),
    }
    largest: dict[str, float] = {}
    for kind, (model, rows, exact) in kinds.items():
        errors = {
            classes: largest_errors(model(classes), np.stack(list(rows(classes))), exact, display)
            for classes in CLASS_COUNTS
        }
        display.console.print(_table(kind, errors))
        for by_score in errors.values():
            largest.update({name: max(error, largest.get(name, 0.0)) for name, error in by_score.items()})
    return largest


def _table(kind: str, errors: Mapping[int, Mapping[str, float]]) -> Table:
    table = Table(
        title=f"Largest error of the exported scores, {kind}: |x − exact| / max(1, |exact|)", title_justify="left"
    )
    for column in ("score", *(f"K = {classes}" for classes in errors)):
        table.add_column(column, justify="left" if column == "score" else "right")
    for name in next(iter(errors.values())):
        table.add_row(name, *(f"{by_score[name]:.1e}" for by_score in errors.values()))
    return table


def exact_meta_scores(z: NDArray[np.float32]) -> dict[str, mpmath.mpf]:
    """The scores of α = exp(z) for one z (K,)."""
    with mpmath.workdps(DIGITS):
        return exact_scores([mpmath.exp(mpmath.mpf(float(value))) for value in z])


def exact_joined_scores(row: NDArray[np.float32]) -> dict[str, mpmath.mpf]:
    """The scores of α = 1 + n·p for one row (K + 1,) of logits and log n, and the mutual information of exp(logits)."""
    with mpmath.workdps(DIGITS):
        *powers, evidence = (mpmath.exp(mpmath.mpf(float(value))) for value in row)
        total = mpmath.fsum(powers)
        joined = exact_scores([1 + evidence * power / total for power in powers])
        return {**joined, META_SCORE: exact_scores(powers)["mutual_information"]}


def exact_scores(alpha: Sequence[mpmath.mpf]) -> dict[str, mpmath.mpf]:
    """The textbook formulas for one α (K,), in mpmath with sixty digits."""
    with mpmath.workdps(DIGITS):
        total, classes = mpmath.fsum(alpha), len(alpha)
        p = [a / total for a in alpha]
        largest = max(range(classes), key=lambda k: alpha[k])
        # Many rows have the same α in many classes.
        digammas = {a: mpmath.digamma(a) for a in set(alpha)}
        log_gammas = {a: mpmath.loggamma(a) for a in set(alpha)}
        entropy = -mpmath.fsum(q * mpmath.log(q) for q in p)
        expected = mpmath.digamma(total + 1) - mpmath.fsum(
            q * (digammas[a] + 1 / a) for q, a in zip(p, alpha, strict=True)
        )
        differential = (
            mpmath.fsum(log_gammas[a] for a in alpha)
            - mpmath.loggamma(total)
            + (total - classes) * mpmath.digamma(total)
            - mpmath.fsum((a - 1) * digammas[a] for a in alpha)
        )
        return {
            "entropy": entropy,
            "max_probability": p[largest],
            "mutual_information": entropy - expected,
            "differential_entropy": differential,
            "precision": total,
            "log_precision": mpmath.log(total),
            "expected_entropy": expected,
            "error_probability": mpmath.fsum(q for k, q in enumerate(p) if k != largest),
        }


def patterns(classes: int) -> Iterator[NDArray[np.float32]]:
    """Values of z (K,) across the range: flat, one class far above or below, evenly spread, and random."""
    low, high = np.log(LOWEST), np.log(HIGHEST)
    for level in np.linspace(low, high, 9):
        yield np.full(classes, level, np.float32)
        yield np.r_[high, np.full(classes - 1, level)].astype(np.float32)
        yield np.r_[low, np.full(classes - 1, level)].astype(np.float32)
        yield np.r_[level, np.zeros(classes - 1)].astype(np.float32)
    yield np.linspace(low, high, classes, dtype=np.float32)
    rng = np.random.default_rng(0)
    for _ in range(6):
        yield rng.uniform(low, high, classes).astype(np.float32)


def joined_patterns(classes: int) -> Iterator[NDArray[np.float32]]:
    """`patterns` as logits (K,), each followed by one value of log n; the values take turns across the range of n."""
    low, high = np.log(MIN_EVIDENCE), np.log(2 * EVIDENCE_PER_CLASS * classes)
    levels = np.linspace(low, high, 5)
    for index, logits in enumerate(patterns(classes)):
        yield np.r_[logits, levels[index % len(levels)]].astype(np.float32)
        yield np.r_[logits, levels[(index + 2) % len(levels)]].astype(np.float32)


def largest_errors(model: bytes, rows: NDArray[np.float32], exact: Exact, display: Display) -> dict[str, float]:
    """By score: the largest |x − exact| / max(1, |exact|) of the outputs of `model` for `rows` (N, D)."""
    runner = GraphRunner(model)
    outputs = dict(zip(runner.outputs, runner.session.run(None, {INPUT: rows}), strict=True))
    largest: dict[str, float] = {}
    with display.bar(f"{rows.shape[1]} inputs", len(rows)) as advance:
        for index, row in enumerate(rows):
            for name, value in exact(row).items():
                error = abs(mpmath.mpf(float(outputs[name][index])) - value) / max(1, abs(value))
                largest[name] = max(largest.get(name, 0.0), float(error))
            advance(1)
    return largest
