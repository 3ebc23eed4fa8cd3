"""`/status` and the counts behind it."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from qualms.telemetry.recent_flags import INTERVAL_SECONDS, INTERVALS, RecentFlags
from qualms.web.status import is_above


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_images_are_counted_in_their_interval_and_forgotten_after_the_last_one() -> None:
    clock = Clock()
    recent = RecentFlags(clock)
    recent.add(5, 1)
    clock.now += INTERVAL_SECONDS
    recent.add(3, 0)
    recent.add(4, 2)
    assert [(one.images, one.flagged) for one in recent.intervals()[-2:]] == [(5, 1), (7, 2)]
    clock.now += (INTERVALS - 1) * INTERVAL_SECONDS
    counts = [one.images for one in recent.intervals()]
    assert counts == [7] + [0] * (INTERVALS - 1)
    clock.now += 10 * INTERVALS * INTERVAL_SECONDS
    assert [one.images for one in recent.intervals()] == [0] * INTERVALS


@pytest.mark.parametrize(
    ("flagged", "images", "above"),
    [(0, 0, False), (1, 1, False), (2, 2, True), (1, 100, False), (10, 1000, False), (30, 1000, True)],
)
def test_a_rate_is_above_its_bound_only_if_chance_does_not_explain_it(flagged: int, images: int, above: bool) -> None:
    assert is_above(flagged, images, bound=0.012) is above


def test_the_status_has_the_images_that_were_served(
    start_service: Callable[..., httpx.Client], encode: Callable[..., bytes], draw_images: Callable[[int, int], Any]
) -> None:
    client = start_service()
    for image in draw_images(3, 4):
        assert client.post("/predict", content=encode(image), headers={"content-type": "image/png"}).status_code == 200
    status = client.get("/status").json()
    assert (status["ready"], status["reason"]) == (True, None)
    (model,) = status["models"]
    assert (model["name"], sum(model["recent"]["images"])) == ("tiny", 4)
    assert model["recent"]["rate"] == sum(model["recent"]["flagged"]) / 4
    assert model["target_fpr"] <= model["rate_bound"] * 3
