"""Normalisation and the reduction of taps agree with NumPy."""

from typing import Any, cast

import numpy as np
import pytest
import torch

from qualms_training.errors import RecipeError
from qualms_training.meta.extractor import Normalise, Reduce

MEAN, STD = [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]


def test_normalisation_is_pixels_over_255_minus_mean_divided_by_deviation() -> None:
    images = np.random.default_rng(0).integers(0, 256, (3, 5, 7, 3), dtype=np.uint8)
    actual = Normalise(MEAN, STD)(torch.from_numpy(images))
    expected = ((images / 255 - MEAN) / STD).transpose(0, 3, 1, 2)
    assert actual.shape == (3, 3, 5, 7)
    assert actual.dtype == torch.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("pixel", "value"), [(0, -1.0), (255, 1.0)])
def test_normalised_black_and_white_are_exact(pixel: int, value: float) -> None:
    images = torch.full((1, 2, 2, 1), pixel, dtype=torch.uint8)
    np.testing.assert_allclose(Normalise([0.5], [0.5])(images), value, rtol=1e-6)


def test_normalisation_has_buffers_and_no_parameters() -> None:
    module = Normalise(MEAN, STD)
    assert not list(module.parameters())
    assert set(module.state_dict()) == {"scale", "shift"}


@pytest.mark.parametrize("grid", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [(8, 8), (7, 5), (3, 2)])
def test_pooling_agrees_with_numpy_on_every_cell(grid: int, size: tuple[int, int]) -> None:
    feature = torch.randn(2, 3, *size) + 100
    array = feature.double().numpy()
    steps = [-(-side // grid) for side in size]
    cells = [
        array[:, :, top : top + steps[0], left : left + steps[1]]
        for top in range(0, size[0], steps[0])
        for left in range(0, size[1], steps[1])
    ]
    expected = [
        np.stack([measure(cell, axis=(2, 3)) for cell in cells], axis=2).reshape(2, -1)
        for measure in (np.mean, np.max, np.std)
    ]
    reduce = Reduce("pool", grid, ("mean", "max", "std"))
    reduced = reduce(feature)
    np.testing.assert_allclose(reduced.numpy(), np.concatenate(expected, axis=1), rtol=1e-5, atol=2e-3)
    assert reduced.shape[1:] == reduce.output_shape((3, *size))


@pytest.mark.parametrize("kind", ["flatten", "pool"])
@pytest.mark.parametrize("shape", [(5,), (5, 1, 1)])
def test_a_tap_without_spatial_extent_is_only_flattened(kind: Any, shape: tuple[int, ...]) -> None:
    feature = torch.randn(2, *shape)
    reduce = Reduce(kind, grid=2)
    assert torch.equal(reduce(feature), feature.reshape(2, 5))
    assert reduce.output_shape(shape) == (5,)


def test_flatten_keeps_every_unit_in_order() -> None:
    feature = torch.randn(2, 3, 4, 5)
    assert torch.equal(Reduce("flatten")(feature), feature.reshape(2, 60))
    assert Reduce("flatten").output_shape((3, 4, 5)) == (60,)


def test_reductions_have_different_keys() -> None:
    reductions = [Reduce("flatten"), Reduce(), Reduce(grid=2), Reduce(statistics=("mean",))]
    assert [reduce.key for reduce in reductions] == [
        "flatten",
        "pool-1-mean-max",
        "pool-2-mean-max",
        "pool-1-mean",
    ]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"kind": "sum"}, "Reduction 'sum' is unknown; accepted are 'flatten' and 'pool'"),
        ({"grid": 0}, "The pooling grid is 0; it must be 1 or more"),
        (
            {"statistics": ["mode"]},
            r"The pooling statistics are \['mode'\]; accepted are one or more of",
        ),
        ({"statistics": []}, r"The pooling statistics are \[\]"),
        ({"statistics": ["max", "max"]}, r"\['max', 'max'\]; .* each once"),
    ],
)
def test_invalid_reductions_are_refused(arguments: dict[str, object], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        Reduce(**cast(Any, arguments))


@pytest.mark.parametrize("count", [2, 5, 197])
def test_tokens_are_pooled_to_the_class_token_and_the_mean(count: int) -> None:
    tokens = torch.randn(2, count, 3)
    reduced = Reduce("pool", grid=2)(tokens)
    assert torch.equal(reduced[:, :3], tokens[:, 0])
    np.testing.assert_allclose(reduced[:, 3:], tokens.double().mean(1), rtol=1e-5, atol=1e-6)
    assert Reduce("pool", grid=2).output_shape((count, 3)) == (6,)


@pytest.mark.parametrize("count", [4, 196])
def test_a_square_of_tokens_without_a_class_token_is_pooled_to_mean_and_maximum(count: int) -> None:
    tokens = torch.randn(2, count, 3)
    reduced = Reduce("pool")(tokens)
    assert torch.equal(reduced[:, 3:], tokens.amax(1))
    np.testing.assert_allclose(reduced[:, :3], tokens.double().mean(1), rtol=1e-5, atol=1e-6)
    assert Reduce("pool").output_shape((count, 3)) == (6,)


@pytest.mark.parametrize(
    ("kind", "shape"), [("pool", (1, 3)), ("pool", (9, 1)), ("flatten", (4, 3)), ("flatten", (5, 3))]
)
def test_a_single_token_is_only_flattened_and_flatten_keeps_all_tokens(kind: Any, shape: tuple[int, int]) -> None:
    tokens = torch.randn(2, *shape)
    assert torch.equal(Reduce(kind)(tokens), tokens.reshape(2, -1))
    assert Reduce(kind).output_shape(shape) == (shape[0] * shape[1],)


def test_pooling_refuses_taps_of_more_axes() -> None:
    with pytest.raises(RecipeError, match=r"A tap of shape \(4, 16, 8, 8\) cannot be pooled; accepted are"):
        Reduce("pool").output_shape((4, 16, 8, 8))
