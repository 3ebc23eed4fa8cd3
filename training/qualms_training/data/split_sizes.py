"""Sizes of the splits for a number of images: enough for the guarantees, and more where there are more images."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from qualms.bundle.parts import Guarantee
from qualms.decisions.flag import smallest_n
from qualms_training.errors import DataError

HeldOut: TypeAlias = Literal["train", "test"]
MIN_FIT = 32
"""what `qualms_training.meta.surprisal` needs"""
MIN_VALIDATION, MIN_TRAIN, MIN_TEST = 50, 50, 50
MAX_TRAIN = 50_000
"""images that train the meta-model; it is small, and features of more images would take hours"""
MAX_VALIDATION, MAX_FIT, MAX_CALIBRATION = 2_000, 2_000, 5_000


@dataclass(frozen=True)
class Sizes:
    """Number of images in each split."""

    held_out: HeldOut
    splits: dict[str, int]
    """train, validation, fit and calibration"""
    test: int


def plan_sizes(
    train: int,
    test: int,
    *,
    held_out: HeldOut,
    target_fpr: float,
    guarantee: Guarantee = "confident",
    titles: tuple[str, str] = ("The training data", "The held-out data"),
) -> Sizes:
    """Sizes for `train` and `test` images, of which `held_out` are the source of the splits fit and calibration.

    DataError if there are too few images; `titles` name both sets there.
    """
    needed = {"fit": MIN_FIT, "calibration": smallest_calibration(target_fpr, guarantee)}
    caps = {"train": MAX_TRAIN, "validation": MAX_VALIDATION, "fit": MAX_FIT, "calibration": MAX_CALIBRATION}
    least = {"train": MIN_TRAIN, "validation": MIN_VALIDATION, **needed, "test": MIN_TEST}
    caps["calibration"] = max(caps["calibration"], needed["calibration"])
    if held_out == "test":
        _check(titles[0], train, {name: least[name] for name in ("train", "validation")}, target_fpr, guarantee)
        _check(titles[1], test, {name: least[name] for name in ("fit", "calibration", "test")}, target_fpr, guarantee)
        splits = {"validation": _share(train, 0.1, "validation", least, caps)}
        splits["train"] = min(caps["train"], train - splits["validation"])
        splits |= _held_out_shares(test, least, caps)
        rest = test - splits["fit"] - splits["calibration"]
    else:
        _check(
            titles[0],
            train,
            {name: least[name] for name in ("train", "validation", "fit", "calibration")},
            target_fpr,
            guarantee,
        )
        _check(titles[1], test, {"test": MIN_TEST}, target_fpr, guarantee)
        splits = {name: _share(train, 0.1, name, least, caps) for name in ("validation", "fit", "calibration")}
        splits["train"] = min(caps["train"], train - sum(splits.values()))
        rest = test
    return Sizes(held_out, {name: splits[name] for name in ("train", "validation", "fit", "calibration")}, rest)


def _held_out_shares(count: int, least: dict[str, int], caps: dict[str, int]) -> dict[str, int]:
    """Fit and calibration out of `count` images: a fifth and two fifths, but calibration and test have precedence over fit."""
    calibration = _share(count, 0.4, "calibration", least, caps)
    room = count - calibration - least["test"]
    return {"fit": max(least["fit"], min(_share(count, 0.2, "fit", least, caps), room)), "calibration": calibration}


def _share(count: int, share: float, name: str, least: dict[str, int], caps: dict[str, int]) -> int:
    return min(caps[name], max(least[name], round(share * count)))


def _check(title: str, count: int, least: dict[str, int], target_fpr: float, guarantee: Guarantee) -> None:
    total = sum(least.values())
    if count >= total:
        return
    reasons = {
        "train": "to train the meta-model",
        "validation": "to stop its training",
        "fit": "to combine scores",
        "calibration": f"to calibrate (a {guarantee} false-alarm rate of {100 * target_fpr:g} %)",
        "test": "to test",
    }
    parts = ", ".join(f"{size:,} {reasons[name]}" for name, size in least.items())
    remedy = f"add {total - count:,} or more"
    if "calibration" in least:
        remedy += ", or choose a higher rate (--target-fpr)"
    raise DataError(f"{title} has {count:,} images, and at least {total:,} are needed: {parts}; {remedy}.")


def smallest_calibration(target_fpr: float, guarantee: Guarantee) -> int:
    """The smallest number of calibration images for a false-alarm rate."""
    return int(min(smallest_n(target_fpr, guarantee), 1e15))
