"""Densities on the simplex are those of Dir(α); narrow ones are magnified so that they can be seen."""

import io
import math

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image
from scipy.stats import beta, dirichlet, kstest

from qualms_training.paper.toy.simplex_plot import (
    CORNERS,
    INSET,
    add_colour_bar,
    draw_density,
    magnification,
    magnified,
    relative_log_density,
)

SHARP = np.array([51_000.0, 1.1, 1.05])
INSIDE = np.array([3_000.0, 2_000.0, 1_000.0])


def test_the_density_is_that_of_the_closed_form_and_of_scipy() -> None:
    points = np.random.default_rng(0).dirichlet(np.ones(3), 50)
    alpha = np.array([4.0, 2.0, 0.5])
    constant = math.gamma(alpha.sum()) / math.prod(map(math.gamma, alpha))
    density = constant * np.prod(points ** (alpha - 1), axis=1)
    assert 10 ** relative_log_density(points, alpha) * 2 == pytest.approx(density)
    assert 10 ** relative_log_density(points, alpha) * 2 == pytest.approx(dirichlet.pdf(points.T, alpha))


def test_the_uniform_distribution_has_the_relative_density_one() -> None:
    points = np.random.default_rng(0).dirichlet(np.ones(3), 50)
    assert relative_log_density(points, np.ones(3)) == pytest.approx(0)


def test_three_classes_renormalised_follow_the_dirichlet_of_their_own_alpha() -> None:
    alpha = np.array([9.8, 1.04, 1.03, 0.6, 3.0, 1.0, 2.5])
    chosen = alpha[:3]
    draws = np.random.default_rng(0).dirichlet(alpha, 20_000)[:, :3]
    total = draws.sum(axis=1, keepdims=True)
    parts = draws / total
    for index in range(3):
        marginal = beta(chosen[index], chosen.sum() - chosen[index])
        assert kstest(parts[:, index], marginal.cdf).pvalue > 0.01
        assert kstest(draws[:, index], marginal.cdf).pvalue < 1e-6  # not without the renormalisation
    entropy = -np.mean(relative_log_density(parts, chosen) * math.log(10) + math.log(2))
    assert entropy == pytest.approx(dirichlet.entropy(chosen), abs=0.02)
    # The three classes' share of the whole, which the panel does not show, says nothing about their proportions.
    assert abs(np.corrcoef(parts[:, 0], total[:, 0])[0, 1]) < 0.03


@pytest.mark.parametrize("alpha", [[1.0, 1.0, 1.0], [9.8, 1.0, 1.0], [0.5, 0.5, 0.5], [40.0, 30.0, 20.0]])
def test_wide_densities_are_not_magnified(alpha: list[float]) -> None:
    assert magnification(np.array(alpha)) == 1


@pytest.mark.parametrize("alpha", [SHARP, INSIDE, np.array([1.0, 1e6, 1e6]), np.array([1e8, 1.0, 1.0])])
def test_the_magnified_part_lies_within_the_simplex_and_contains_most_of_the_mass(alpha: NDArray[np.float64]) -> None:
    factor = magnification(alpha)
    corners = magnified(np.eye(3), alpha, factor)
    assert (corners >= 0).all()
    assert corners.sum(axis=1) == pytest.approx(1)
    assert np.ptp(corners, axis=0) == pytest.approx(1 / factor)
    draws = np.random.default_rng(0).dirichlet(alpha, 4000)
    positions = (draws - magnified(np.zeros((1, 3)), alpha, factor)) * factor
    assert np.mean((positions >= 0).all(axis=1)) > 0.8
    spread = positions.std(axis=0).max()
    assert 0.05 < spread < 0.2  # neither a dot nor larger than the triangle


def test_without_magnification_points_are_unchanged() -> None:
    points = np.random.default_rng(0).dirichlet(np.ones(3), 20)
    assert magnified(points, np.array([3.0, 2.0, 1.0]), 1) == pytest.approx(points)


def colour_at(alpha: NDArray[np.float64], position: NDArray[np.float64]) -> NDArray[np.float64]:
    """The colour drawn at a position of the panel, as red, green and blue from 0 to 1."""
    figure = Figure(figsize=(3, 3))
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    draw_density(axes, alpha, ["a", "b", "c"])
    with io.BytesIO() as file:
        figure.savefig(file)
        pixels = np.asarray(Image.open(file).convert("RGB"))
    x, y = axes.transData.transform(position)
    return np.asarray(pixels[len(pixels) - 1 - round(y), round(x)] / 255)


def test_a_flat_density_is_white_and_a_narrow_one_blue_with_a_red_magnified_part() -> None:
    below_the_dot = CORNERS.mean(axis=0) - (0, 0.1)
    assert colour_at(np.ones(3), below_the_dot) == pytest.approx(1, abs=0.05)
    red, _, blue = colour_at(SHARP, below_the_dot)
    assert blue > 2 * red
    in_the_inset = INSET.mean(axis=0) - (0, 0.07)
    red, _, blue = colour_at(SHARP, in_the_inset)
    assert red > 2 * blue
    assert colour_at(np.ones(3), in_the_inset) == pytest.approx(to_rgb("white"))


@pytest.mark.parametrize("alpha", [[1e-4, 1e-4, 1e-4], [1e-4, 1.0, 1e5], [1e8, 1e8, 1.0]])
def test_extreme_alphas_are_drawn_without_warnings(alpha: list[float]) -> None:
    figure = Figure()
    axes = figure.subplots()
    draw_density(axes, np.array(alpha), ["a", "b", "c"])
    add_colour_bar(figure, [axes])
    figure.draw_without_rendering()
