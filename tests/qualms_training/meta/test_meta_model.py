"""Meta-models have the published or the pooled structure and size, and equal seeds give equal weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from qualms_training.errors import RecipeError
from qualms_training.meta.extractor import Reduce
from qualms_training.meta.meta_model import MetaModel, PairMax, PooledMeta, PublishedMeta, Scale, SoftClamp

LENET = ([(6, 14, 14), (16, 5, 5)], 10, ["120-84-10", "120-84-10"])
VGG16 = (
    [(64, 16, 16), (128, 8, 8), (256, 4, 4), (512, 2, 2), (512, 1, 1)],
    10,
    [
        "8192-P-2048-P-512-P-10",
        "4096-P-1024-P-256-10",
        "2048-P-512-256-10",
        "1024-P-256-10",
        "256-10",
    ],
)
WRN = (
    [(128, 16, 16), (128, 16, 16), (256, 8, 8), (256, 8, 8), (256, 1, 1)],
    100,
    [
        "P-8192-P-2048-P-512-P-100",
        "P-8192-P-2048-P-512-P-100",
        "P-4096-P-1024-P-256-100",
        "P-4096-P-1024-P-256-100",
        "100",
    ],
)


def count(model: nn.Module) -> int:
    return sum(weight.numel() for weight in model.parameters())


@pytest.mark.parametrize(
    ("spec", "published", "pooled"),
    [(LENET, 211_598, 4_454), (VGG16, 190_350_384, 159_728), (WRN, 358_037_416, 197_608)],
    ids=["lenet", "vgg16", "wrn16-4"],
)
def test_parameter_counts_are_the_published_ones_and_pooling_removes_most(
    spec: tuple[list[tuple[int, ...]], int, list[str]], published: int, pooled: int
) -> None:
    shapes, classes, branches = spec
    with torch.device("meta"):
        assert count(PublishedMeta(shapes, classes, branches)) == published
        small = PooledMeta([Reduce("pool").output_shape(shape) for shape in shapes], classes, [64])
        assert count(small) == pooled


def test_published_form_has_a_relu_after_every_layer_and_one_linear_layer_on_top() -> None:
    meta = PublishedMeta([(4,), (2, 1, 2)], 3, ["P-5-3", "3"])
    first, second = torch.randn(6, 4), torch.randn(6, 2, 1, 2)
    weights = dict(meta.named_parameters())

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    paired = torch.maximum(first[:, ::2], first[:, 1::2])
    one = torch.relu(linear("branches.0.3", torch.relu(linear("branches.0.1", paired))))
    two = torch.relu(linear("branches.1.0", second.reshape(6, 4)))
    expected = SoftClamp()(linear("combine", torch.cat([one, two], dim=1)))
    torch.testing.assert_close(meta([first, second]), expected)


@pytest.mark.parametrize(
    ("branches", "sentence"),
    [
        (["120-84-10"], "The meta-model has 1 branches for 2 taps; it takes one branch per tap"),
        (["120-Q-10", "10"], "Branch '120-Q-10' has the token 'Q'; accepted are numbers of units and P"),
        (["120--10", "10"], "Branch '120--10' has the token ''"),
        (["0-10", "10"], "Branch '0-10' has the token '0'"),
        (["P-P-P-10", "10"], "Branch 'P-P-P-10' applies P to 147 units; P needs an even number of units"),
        (["120-84", "10"], "Branch '120-84' must end in 10, the number of classes"),
        (["20-P", "10"], "Branch '20-P' must end in 10"),
    ],
)
def test_the_error_for_an_invalid_branch_names_it(branches: list[str], sentence: str) -> None:
    with pytest.raises(RecipeError, match=sentence):
        PublishedMeta([(1176 // 2,), (400,)], 10, branches)


def test_pooled_form_refuses_no_taps_and_empty_layers() -> None:
    with pytest.raises(RecipeError, match=r"has 0 taps and hidden layers of \[4\] units; it takes one tap"):
        PooledMeta([], 3, [4])
    with pytest.raises(RecipeError, match=r"has 1 taps and hidden layers of \[4, 0\] units"):
        PooledMeta([(8,)], 3, [4, 0])


@pytest.mark.parametrize(
    "make",
    [
        lambda seed: PublishedMeta([(8,), (6,)], 3, ["4-3", "P-3"], seed=seed),
        lambda seed: PooledMeta([(8,), (6,)], 3, [4], seed=seed),
    ],
    ids=["published", "pooled"],
)
def test_equal_seeds_give_equal_weights_and_leave_the_global_generator_unchanged(make: Any) -> None:
    torch.manual_seed(7)
    untouched = torch.rand(1)
    torch.manual_seed(7)
    one: MetaModel = make(1)
    assert torch.equal(torch.rand(1), untouched)
    again, other = make(1), make(2)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), again.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    assert one([torch.zeros(5, 8), torch.zeros(5, 6)]).shape == (5, 3)


def test_pair_max_takes_adjacent_units() -> None:
    assert PairMax()(torch.tensor([[1.0, 5.0, -3.0, -4.0]])).tolist() == [[5.0, -3.0]]


def test_soft_clamp_limits_the_range_and_keeps_its_middle() -> None:
    z = torch.tensor([-1e9, -10.0, 0.0, 1.0, 2.0, 12.0, 1e9], dtype=torch.float64)
    clamped = SoftClamp()(z)
    assert clamped[0] == -10
    assert clamped[-1] == 12
    assert (clamped.diff() > 0).all()
    torch.testing.assert_close(clamped[2:5], z[2:5], atol=0.003, rtol=0)


def test_meta_models_stay_finite_far_from_the_data() -> None:
    meta = PooledMeta([(4,)], 3, [8])
    z = meta([torch.full((2, 4), 1e20)])
    assert ((z >= -10) & (z <= 12)).all()


def test_a_tap_is_divided_by_its_mean_standard_deviation_and_not_centred() -> None:
    rng = np.random.default_rng(0)
    features = (rng.normal(size=(10_000, 3)) * [0.1, 2.0, 0.0] + 300).astype(np.float32)
    module = Scale()
    module.fit(torch.from_numpy(features))
    expected = features.astype(np.float64).std(0).mean()
    assert float(module.spread) == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(module(torch.from_numpy(features)).numpy(), features / expected, rtol=1e-5)


def test_each_half_precision_tap_has_its_own_scale_and_a_constant_tap_is_unchanged() -> None:
    meta = PooledMeta([(4,), (2,)], 3, [])
    taps = [torch.full((5000, 4), 60000.0).half(), torch.randn(5000, 2).half()]
    meta.fit_scales(taps)
    state = meta.state_dict()
    assert float(state["scales.0.spread"]) == 1
    torch.testing.assert_close(state["scales.1.spread"], taps[1].float().std(0, correction=0).mean())


def test_the_base_class_has_no_forward_pass() -> None:
    with pytest.raises(NotImplementedError):
        MetaModel()([torch.zeros(1, 1)])


FORMS: dict[str, Callable[[], MetaModel]] = {
    "pooled": lambda: PooledMeta([(12,), (6,)], 4, [8]),
    "pooled, two hidden layers": lambda: PooledMeta([(12,), (6,)], 4, [8, 5]),
    "pooled, no hidden layer": lambda: PooledMeta([(12,), (6,)], 4, []),
    "published": lambda: PublishedMeta([(12,), (6,)], 4, ["8-4", "4"]),
}


@pytest.mark.parametrize("many_classes", [False, True], ids=["few classes", "many classes"])
@pytest.mark.parametrize("form", FORMS)
def test_the_folded_meta_model_computes_the_same(
    form: str, many_classes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if many_classes:
        monkeypatch.setattr("qualms_training.meta.meta_model.MAX_BRANCH_OUTPUTS", 31)
    torch.manual_seed(0)
    features = [3 + 5 * torch.randn(40, 12), 100 * torch.randn(40, 6)]
    model = FORMS[form]()
    if isinstance(model, PooledMeta):
        model.fit_scales(features)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.testing.assert_close(model.folded()(features), model(features), rtol=1e-5, atol=1e-5)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_folded_pooled_form_has_no_layer_of_classes_times_classes() -> None:
    model = PooledMeta([(12,), (6,)], 100, [8])
    assert count(model) == 12 * 8 + 8 + 6 * 8 + 8 + 2 * (8 * 100 + 100) + 200 * 100 + 100
    assert count(model.folded()) == 12 * 8 + 8 + 6 * 8 + 8 + 16 * 100 + 100


def test_branches_have_no_class_outputs_if_the_last_layer_would_be_too_large() -> None:
    with torch.device("meta"):
        wide, direct = (PooledMeta([(80,)] * taps, 1000, [64]) for taps in (8, 9))
        assert wide.combine.weight.shape == (1000, 8 * 1000)
        assert direct.combine.weight.shape == (1000, 9 * 64)
        assert count(PooledMeta([(1280,)] * 5, 21_000, [64])) < 8_000_000
    model = PooledMeta([(8,), (6,)], 2100, [4])
    assert model([torch.zeros(5, 8), torch.zeros(5, 6)]).shape == (5, 2100)


def test_scales_are_fitted_to_memory_mapped_features(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(5000, 6)).astype(np.float16)
    np.save(tmp_path / "tap.npy", rows)
    mapped, in_memory = Scale(), Scale()
    mapped.fit(np.load(tmp_path / "tap.npy", mmap_mode="r"))
    in_memory.fit(torch.from_numpy(rows))
    assert torch.equal(mapped.spread, in_memory.spread)
