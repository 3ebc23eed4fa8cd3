"""Dirichlet densities of three classes, drawn on the simplex.

Colours show the density relative to that of the uniform distribution. A density that is too narrow to be seen is drawn a
second time, in a magnified part of the simplex.
"""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import AsinhNorm
from matplotlib.figure import Figure
from matplotlib.tri import Triangulation
from numpy.typing import NDArray
from scipy.stats import dirichlet

CORNERS = np.array([[0.5, math.sqrt(0.75)], [0.0, 0.0], [1.0, 0.0]])
"""positions of the first, second and third class: top, left, right"""
INSET = 0.36 * CORNERS + (0.74, 0.60)
"""corners of the magnified part, to the right of the top"""
NORM = AsinhNorm(linear_width=0.5, vmin=-10, vmax=10)
"""common logarithm of the relative density to the range of colours"""
COLOURS = "RdBu_r"
"""colour map: white is the uniform density, red is above, blue below"""
BANDS = NORM.inverse(np.linspace(0, 1, 81))
"""limits of the bands of one colour; with bands, the picture is a smaller file than with continuous colours"""
NARROW = 0.02
"""a density is magnified if the largest standard deviation of its components is below this"""
LEAST_DECADES, MOST_DECADES = 0.1, 40
"""a line for each factor of ten is drawn if the logarithms of the density differ by at least and at most this much"""
STEPS = 120
"""number of intervals of the grid along each side of the simplex"""


def relative_log_density(points: NDArray[np.float64], alpha: NDArray[np.float64]) -> NDArray[np.float64]:
    """Common logarithm of the density of Dir(α) over the uniform density, at points (M, K), for α (K,); (M,)."""
    return np.asarray(dirichlet.logpdf(points.T, alpha) - math.lgamma(len(alpha))) / math.log(10)


def magnification(alpha: NDArray[np.float64]) -> int:
    """The factor by which the simplex is magnified so that Dir(α) can be seen, a round number; 1 if it need not be."""
    spread = math.sqrt(dirichlet.var(alpha).max())
    if spread > NARROW:
        return 1
    largest = 1 / (6 * spread)  # the magnified simplex is at least six standard deviations wide
    power = int(10 ** math.floor(math.log10(largest)))
    return max(step * power for step in (1, 2, 5) if step * power <= largest)


def magnified(points: NDArray[np.float64], alpha: NDArray[np.float64], factor: int) -> NDArray[np.float64]:
    """Points (M, 3) of the simplex to points (M, 3) of a `factor` times smaller simplex around the mean of Dir(α).

    The smaller simplex lies within the whole one, so that it is not centred on a mean near an edge.
    """
    if factor == 1:
        return points
    corner = np.maximum(alpha / alpha.sum() - 1 / (3 * factor), 0.0)
    return np.asarray(corner * (1 - 1 / factor) / corner.sum() + points / factor)


def draw_density(axes: Axes, alpha: NDArray[np.float64], labels: Sequence[str]) -> None:
    """Draw Dir(α) for α (3,), with the names of its classes at the corners and a dot at its mean."""
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set(xlim=(-0.12, 1.12), ylim=(-0.1, 0.98))
    offsets = np.array([[0.0, 0.07], [-0.08, -0.03], [0.08, -0.03]])
    for (x, y), label in zip(CORNERS + offsets, labels, strict=True):
        axes.text(x, y, label, ha="center", va="center", fontsize=11)
    _draw_triangle(axes, alpha, 1, CORNERS)
    factor = magnification(alpha)
    if factor > 1:
        axes.plot(*np.array([alpha / alpha.sum() @ CORNERS, INSET[1]]).T, color="0.4", linewidth=0.8, linestyle=":")
        _draw_triangle(axes, alpha, factor, INSET)
        axes.text(INSET[0, 0], INSET[1, 1] - 0.06, f"× {factor:,}", ha="center", va="center", fontsize=8)


def add_colour_bar(figure: Figure, axes: Sequence[Axes]) -> None:
    """Add the scale of the colours, which is the same for all densities."""
    ticks = [-10, -3, -1, 0, 1, 3, 10]
    bar = figure.colorbar(ScalarMappable(NORM, COLOURS), ax=axes, ticks=ticks, aspect=40, shrink=0.8, extend="both")
    bar.ax.set_yticklabels([f"$10^{{{tick}}}$" if tick else "1" for tick in ticks], fontsize=9)
    bar.set_label("density relative to the uniform distribution", fontsize=9)


def _draw_triangle(axes: Axes, alpha: NDArray[np.float64], factor: int, corners: NDArray[np.float64]) -> None:
    grid = _grid()
    inside = (STEPS * grid + 1 / 3) / (STEPS + 1)  # a density may be infinite at the edges
    values = relative_log_density(magnified(inside, alpha, factor), alpha)
    mesh = Triangulation(*(grid @ corners).T)
    axes.tricontourf(mesh, values, levels=BANDS, cmap=COLOURS, norm=NORM, extend="both")
    low, high = float(values.min()), float(values.max())
    if LEAST_DECADES < high - low < MOST_DECADES and math.ceil(low) <= high:
        levels = range(math.ceil(low), math.floor(high) + 1)
        axes.tricontour(mesh, values, levels=levels, colors="black", linewidths=0.4, linestyles="solid", alpha=0.5)
    axes.fill(*corners.T, facecolor="none", edgecolor="0.25", linewidth=0.9)
    start = magnified(np.zeros((1, 3)), alpha, factor)[0]
    mean = (alpha / alpha.sum() - start) * factor
    axes.plot(*(mean @ corners), "o", color="black", markersize=3)


def _grid() -> NDArray[np.float64]:
    """All points of the simplex whose coordinates are multiples of 1 / STEPS, (M, 3)."""
    first, second = np.mgrid[: STEPS + 1, : STEPS + 1].reshape(2, -1)
    points = np.column_stack([first, second, STEPS - first - second])
    return points[points[:, 2] >= 0] / STEPS
