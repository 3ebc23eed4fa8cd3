import numpy as np
import pytest

from qualms.demo.digits import draw
from qualms.demo.drift import dose_at, drift


def test_no_dose_leaves_every_pixel() -> None:
    image = draw(3, np.random.default_rng(0))
    assert drift(image, 0.0, np.random.default_rng(0)) is image


def test_a_larger_dose_moves_the_image_further() -> None:
    image = draw(3, np.random.default_rng(0)).astype(float)
    moved = [
        float(np.abs(drift(image.astype(np.uint8), dose, np.random.default_rng(1)) - image).mean())
        for dose in (0.1, 0.3, 0.6, 1.0)
    ]
    assert moved == sorted(moved)
    assert moved[0] > 1


def test_a_period_is_calm_then_drifts_up_and_down_then_is_calm_again() -> None:
    doses = [dose_at(second, 100.0) for second in range(101)]
    assert doses[:6] == [0.0] * 6
    assert doses[41:] == [0.0] * 60
    assert max(doses) == pytest.approx(1.0, abs=0.01)
    peak = int(np.argmax(doses))
    assert doses[5 : peak + 1] == sorted(doses[5 : peak + 1])
    assert doses[peak:41] == sorted(doses[peak:41], reverse=True)
    assert dose_at(722.0, 100.0) == pytest.approx(dose_at(22.0, 100.0))
