import numpy as np
import pytest

from qualms.demo.digits import draw
from qualms.demo.drift import dose_at, drift


def test_dose_zero_changes_no_pixel() -> None:
    image = draw(3, np.random.default_rng(0))
    assert drift(image, 0.0, np.random.default_rng(0)) is image


def test_a_larger_dose_changes_the_image_more() -> None:
    image = draw(3, np.random.default_rng(0)).astype(float)
    changes = [
        float(np.abs(drift(image.astype(np.uint8), dose, np.random.default_rng(1)) - image).mean())
        for dose in (0.1, 0.3, 0.6, 1.0)
    ]
    assert changes == sorted(changes)
    assert changes[0] > 1


def test_the_dose_rises_and_falls_once_per_period_and_is_zero_before_and_after() -> None:
    doses = [dose_at(second, 100.0) for second in range(101)]
    assert doses[:6] == [0.0] * 6
    assert doses[41:] == [0.0] * 60
    assert max(doses) == pytest.approx(1.0, abs=0.01)
    peak = int(np.argmax(doses))
    assert doses[5 : peak + 1] == sorted(doses[5 : peak + 1])
    assert doses[peak:41] == sorted(doses[peak:41], reverse=True)
    assert dose_at(722.0, 100.0) == pytest.approx(dose_at(22.0, 100.0))
