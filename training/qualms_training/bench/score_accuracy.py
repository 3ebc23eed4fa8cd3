"""Accuracy of the exported scores against arithmetic with sixty digits, over the whole range of α."""

from collections.abc import Iterator

import mpmath
import numpy as np
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor, nn

from qualms.bundle.runtime import INPUT, GraphRunner
from qualms_training.console import Display
from qualms_training.meta.dirichlet import DirichletScores, dirichlet_scores
from qualms_training.meta.onnx_export import to_onnx

CLASS_COUNTS = (2, 3, 10, 100, 1000)
LOWEST, HIGHEST = 1e-6, 1e6
SCORES = tuple(name for name in DirichletScores._fields if name not in ("alpha", "probabilities"))


class _Scores(nn.Module):
    def forward(self, z: Tensor) -> DirichletScores:
        return dirichlet_scores(z)


def scores_model(classes: int) -> bytes:
    """The scores alone as ONNX: input z = log α (N, K) float32, outputs as in a bundle."""
    return to_onnx(_Scores(), np.zeros((2, classes), np.float32), DirichletScores._fields)


def bench_scores(display: Display | None = None) -> dict[str, float]:
    """Print the largest error of each score for each K; return the largest over all K by score."""
    display = display or Display()
    errors = {classes: _largest_errors(classes, display) for classes in CLASS_COUNTS}
    table = Table(
        title=f"Largest error of the exported scores, α from {LOWEST:g} to {HIGHEST:g}: |x − exact| / max(1, |exact|)",
        title_justify="left",
    )
    for column in ("score", *(f"K = {classes}" for classes in CLASS_COUNTS)):
        table.add_column(column, justify="left" if column == "score" else "right")
    for name in SCORES:
        table.add_row(name, *(f"{errors[classes][name]:.1e}" for classes in CLASS_COUNTS))
    display.console.print(table)
    return {name: max(by_score[name] for by_score in errors.values()) for name in SCORES}


def exact_scores(log_alpha: NDArray[np.float32]) -> dict[str, mpmath.mpf]:
    """The textbook formulas for one z (K,), in mpmath with sixty digits."""
    with mpmath.workdps(60):
        alpha = [mpmath.exp(mpmath.mpf(float(z))) for z in log_alpha]
        total, classes = mpmath.fsum(alpha), len(alpha)
        p = [a / total for a in alpha]
        largest = max(range(classes), key=lambda k: alpha[k])
        entropy = -mpmath.fsum(q * mpmath.log(q) for q in p)
        expected = mpmath.digamma(total + 1) - mpmath.fsum(
            q * mpmath.digamma(a + 1) for q, a in zip(p, alpha, strict=True)
        )
        differential = (
            mpmath.fsum(mpmath.loggamma(a) for a in alpha)
            - mpmath.loggamma(total)
            + (total - classes) * mpmath.digamma(total)
            - mpmath.fsum((a - 1) * mpmath.digamma(a) for a in alpha)
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


def _largest_errors(classes: int, display: Display) -> dict[str, float]:
    cases = np.stack(list(patterns(classes)))
    session = GraphRunner(scores_model(classes)).session
    outputs = dict(zip(DirichletScores._fields, session.run(None, {INPUT: cases}), strict=True))
    largest = dict.fromkeys(SCORES, 0.0)
    with display.bar(f"K = {classes}", len(cases)) as advance:
        for row, z in enumerate(cases):
            exact_values = exact_scores(z)
            for name in SCORES:
                exact = exact_values[name]
                error = abs(mpmath.mpf(float(outputs[name][row])) - exact) / max(1, abs(exact))
                largest[name] = max(largest[name], float(error))
            advance(1)
    return largest
