"""The base trainer learns, augments by crops and mirroring only, and returns logits in order."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from qualms_training.data.sources.synthetic import draw_shapes
from qualms_training.fitting.base_trainer import crop_and_flip, predict_logits, train_base
from qualms_training.fitting.loop import Hooks, Progress
from qualms_training.meta.extractor import Normalise
from qualms_training.models import build
from qualms_training.recipe import BaseSection

CPU = torch.device("cpu")
NORMALISE = Normalise([0.5] * 3, [0.5] * 3)
DRAWN = draw_shapes(400, seed=5)
IMAGES = np.asarray(DRAWN.images)


def new_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build("small", 4, 3, 16, 16)


def train(model: nn.Module, folder: Path, **changes: Any) -> Progress:
    section = BaseSection.model_validate({"model": "small", "epochs": 6, "batch": 32, "lr": 0.05, **changes})
    return train_base(
        model,
        NORMALISE,
        IMAGES,
        DRAWN.labels,
        section,
        seed=1,
        checkpoint=folder / "checkpoint.pt",
        fingerprint="mine",
        device=CPU,
        hooks=Hooks(),
    )


@pytest.mark.parametrize("changes", [{}, {"optimizer": "adam", "lr": 5e-3}])
def test_it_learns_the_shapes(changes: dict[str, Any], tmp_path: Path) -> None:
    model = new_model()
    before = predict_logits(model, NORMALISE, IMAGES, CPU).argmax(axis=1)
    progress = train(model, tmp_path, **changes)
    after = predict_logits(model, NORMALISE, IMAGES, CPU).argmax(axis=1)
    assert (before == DRAWN.labels).mean() < 0.5
    assert (after == DRAWN.labels).mean() > 0.6
    losses = [row["loss"] for row in progress.history]
    assert len(losses) == 6
    assert losses[-1] < 0.7 * losses[0]


def test_equal_seeds_give_equal_weights(tmp_path: Path) -> None:
    models = [new_model(), new_model()]
    for index, model in enumerate(models):
        torch.manual_seed(index)  # earlier draws must not matter
        train(model, tmp_path / str(index), epochs=1, augment="crop-flip")
    for left, right in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(left, right)


def test_augmentation_changes_the_weights(tmp_path: Path) -> None:
    plain, augmented = new_model(), new_model()
    train(plain, tmp_path / "a", epochs=1)
    train(augmented, tmp_path / "b", epochs=1, augment="crop-flip")
    assert not torch.equal(next(plain.parameters()), next(augmented.parameters()))


def _every_crop(image: torch.Tensor) -> dict[bytes, tuple[int, int, bool]]:
    """All possible results of padding (H, W, C) by four, cropping and mirroring."""
    height, width, _ = image.shape
    padded = torch.zeros(height + 8, width + 8, image.shape[2], dtype=image.dtype)
    padded[4:-4, 4:-4] = image
    crops = {}
    for top in range(9):
        for left in range(9):
            crop = padded[top : top + height, left : left + width]
            crops[crop.numpy().tobytes()] = (top, left, False)
            crops[crop.flip(1).contiguous().numpy().tobytes()] = (top, left, True)
    return crops


def test_augmentation_makes_crops_and_mirror_images_only() -> None:
    image = torch.from_numpy(np.random.default_rng(0).integers(1, 256, (6, 5, 3), dtype=np.uint8))
    possible = _every_crop(image)
    assert len(possible) == 162
    batch = image.expand(3000, -1, -1, -1)
    made = crop_and_flip(batch, torch.Generator().manual_seed(0))
    assert made.shape == batch.shape
    assert made.dtype == torch.uint8
    seen = [possible[one.contiguous().numpy().tobytes()] for one in made]  # a KeyError means any other result
    assert len(set(seen)) == 162  # every position occurs, mirrored and not
    assert 0.45 < np.mean([mirrored for _, _, mirrored in seen]) < 0.55


def test_augmentation_is_a_function_of_the_generator() -> None:
    images = torch.from_numpy(IMAGES[:8])
    first = crop_and_flip(images, torch.Generator().manual_seed(3))
    again = crop_and_flip(images, torch.Generator().manual_seed(3))
    other = crop_and_flip(images, torch.Generator().manual_seed(4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_logits_do_not_depend_on_the_batch_and_use_evaluation_mode() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(16 * 16 * 3, 4)).train()
    whole = predict_logits(model, NORMALISE, IMAGES[:20], CPU)
    parts = np.concatenate([predict_logits(model, NORMALISE, IMAGES[rows], CPU) for rows in (slice(7), slice(7, 20))])
    assert whole.shape == (20, 4)
    assert whole.dtype == np.float32
    np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-5)


def test_the_criterion_can_be_replaced(tmp_path: Path) -> None:
    """A loss that rewards the first class for every label makes it the only prediction."""
    model = new_model()
    section = BaseSection.model_validate({"model": "small", "epochs": 1, "batch": 32, "lr": 0.05})
    train_base(
        model,
        NORMALISE,
        IMAGES,
        DRAWN.labels,
        section,
        seed=1,
        checkpoint=tmp_path / "checkpoint.pt",
        fingerprint="mine",
        device=CPU,
        criterion=lambda logits, _: -logits.log_softmax(dim=1)[:, 0].mean(),
        clip_norm=1.0,
    )
    assert (predict_logits(model, NORMALISE, IMAGES, CPU).argmax(axis=1) == 0).all()
