"""The closing summary: counts, the flag rate against its bound, p-values, classes and errors."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.console import Console

from qualms.bundle.file import Bundle
from qualms.bundle.manifest import Manifest
from qualms.decisions.flag import p_values as conformal
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.verdicts import Decider
from qualms.score.report.false_discovery import choose_from_counts
from qualms.score.report.p_value_counts import PValueCounts
from qualms.score.report.summary import MAX_ERROR_KINDS, Summary
from qualms.score.report.uniformity import compare_with_uniform
from qualms.score.rows import Part


def part(
    manifest: Manifest,
    p_values: Sequence[float] | NDArray[np.float64],
    *,
    classes: Sequence[int] | None = None,
    errors: Sequence[str] = (),
) -> Part:
    """Rows with these p-values, flagged as the model's default operating point does, then rows with these errors."""
    flag = Decider(manifest).rule().flag
    indices = [row % len(manifest.classes) for row in range(len(p_values))] if classes is None else list(classes)
    nothing = [None] * len(errors)
    limit = flag.k / (flag.n + 1)
    columns: dict[str, list[Any]] = {
        "path": [f"{row}.png" for row in range(len(p_values) + len(errors))],
        "error": [*([None] * len(p_values)), *errors],
        "prediction_index": [*indices, *nothing],
        "prediction_label": [*(manifest.classes[index] for index in indices), *nothing],
        "ood_flag": [*(bool(p <= limit) for p in p_values), *nothing],
        "ood_p_value": [*map(float, p_values), *nothing],
        "trust_accept": [*(bool(p > 0.2) for p in p_values), *nothing],
    }
    return Part(0, columns)


def printed(summary: Summary, width: int = 100) -> str:
    console = Console(width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(summary.finish().as_table())
    return capture.get()


def grid(random: np.random.Generator, manifest: Manifest, images: int) -> NDArray[np.float64]:
    n = manifest.calibration.n
    return random.integers(1, n + 2, size=images) / (n + 1)


def test_counts_of_several_parts_are_added(manifest: Manifest) -> None:
    summary = Summary(manifest)
    smallest = 1 / (manifest.calibration.n + 1)
    summary.add(part(manifest, [smallest, 0.5, 1.0], classes=[0, 1, 1], errors=["The file is empty."]))
    summary.add(part(manifest, [smallest, 0.1], classes=[1, 1]))
    result = summary.finish()
    assert (result.total, result.images, result.unreadable, result.flagged, result.accepted) == (6, 5, 1, 2, 2)
    assert [(one.label, one.images, one.flagged, one.accepted) for one in result.classes] == [
        (manifest.classes[1], 4, 1, 2),
        (manifest.classes[0], 1, 1, 0),
    ]
    assert result.classes[0].calibration_share == manifest.reference.class_shares[1]
    assert (result.histogram[0], result.histogram[1], result.histogram[9], result.histogram[19]) == (2, 1, 1, 1)
    assert sum(result.histogram) == 5


def test_more_flags_than_in_distribution_images_have_are_reported(manifest: Manifest) -> None:
    summary = Summary(manifest)
    p = np.ones(1000)
    p[:200] = 1 / (manifest.calibration.n + 1)
    summary.add(part(manifest, p))
    result = summary.finish()
    assert result.exceeds_bound
    assert 0.15 < result.lowest_rate < 0.2
    assert "some images are OOD, or the images have drifted" in result.rate_sentence
    assert result.uniformity is not None
    assert result.uniformity.is_excessive
    assert result.uniformity.at == pytest.approx(1 / (manifest.calibration.n + 1))


def test_a_high_rate_of_few_images_is_within_chance(manifest: Manifest) -> None:
    summary = Summary(manifest)
    summary.add(part(manifest, [1 / (manifest.calibration.n + 1), 1.0, 1.0]))
    result = summary.finish()
    assert result.rate > result.rate_bound
    assert not result.exceeds_bound
    assert "within chance for so few images" in result.rate_sentence


def test_in_distribution_images_are_within_the_bound(manifest: Manifest) -> None:
    summary = Summary(manifest)
    summary.add(part(manifest, grid(np.random.default_rng(0), manifest, 2000)))
    result = summary.finish()
    assert result.rate_sentence.startswith("within the ")
    assert result.uniformity is not None
    assert not result.uniformity.is_excessive


def test_the_false_discovery_rate_is_chosen_from_the_counted_p_values(manifest: Manifest) -> None:
    summary = Summary(manifest)
    p = np.ones(100)
    p[:30] = 1 / (manifest.calibration.n + 1)
    summary.add(part(manifest, p))
    rejections = choose_from_counts(summary.p_values, 0.1, summary.n_calibration)
    result = summary.finish(rejections)
    assert result.rejections is not None
    assert result.rejections.rejected == 30


def test_the_summary_of_a_run_without_images_states_that(manifest: Manifest) -> None:
    summary = Summary(manifest)
    summary.add(part(manifest, [], errors=["The file is empty."]))
    assert summary.finish().uniformity is None
    text = printed(summary)
    assert "no image could be read" in text
    assert "1 could not be read" in text


def test_errors_are_counted_by_kind_whatever_their_numbers(manifest: Manifest) -> None:
    summary = Summary(manifest)
    errors = [f"The image of {n:,} bytes is damaged or truncated (chunk {n}); send another." for n in range(5000)]
    summary.add(part(manifest, [0.5], errors=errors))
    assert summary.finish().errors == (("The image of … bytes is damaged or truncated; send another.", 5000),)


def test_the_number_of_listed_error_kinds_is_bounded(manifest: Manifest) -> None:
    summary = Summary(manifest)
    errors = [
        f"kind {chr(ord('a') + n % 26)}{chr(ord('a') + n // 26 % 26)}{chr(ord('a') + n // 676)}" for n in range(3000)
    ]
    summary.add(part(manifest, [0.5], errors=errors))
    result = summary.finish()
    assert len(result.errors) == MAX_ERROR_KINDS + 1
    assert sum(count for _, count in result.errors) == result.unreadable == 3000


def test_the_table_shows_rate_bound_guarantee_p_values_and_classes(manifest: Manifest) -> None:
    summary = Summary(manifest)
    summary.add(part(manifest, grid(np.random.default_rng(0), manifest, 500), errors=["The file is empty."] * 3))
    text = printed(summary)
    for expected in (
        "500 scored, 3 could not be read",
        "3 × The file is empty.",
        "guarantee",
        "at most 1 % of",
        *manifest.classes,
    ):
        assert expected in text
    assert "▇" in text or "█" in text


def test_the_table_neither_obeys_markup_nor_control_characters(manifest: Manifest) -> None:
    summary = Summary(manifest)
    summary.add(part(manifest, [0.5], errors=["[red]x[/nothing] \x1b]0;title\x07"]))
    text = printed(summary)
    assert "[red]x[/nothing]" in text
    assert "\x1b" not in text


def test_many_classes_become_one_row(many_classes_bundle: Bundle) -> None:
    summary = Summary(many_classes_bundle.manifest)
    summary.add(part(many_classes_bundle.manifest, np.ones(150)))
    result = summary.finish()
    assert (len(result.classes), result.more_classes, result.more_images) == (20, 130, 130)
    assert "130 more" in printed(summary)


def test_by_class_thresholds_are_summarised(manifest: Manifest) -> None:
    point = OperatingPoint(guarantee="by-class", target_fpr=0.05)
    summary = Summary(manifest, point)
    summary.add(part(manifest, [0.5, 0.6, 0.7]))
    groups = Decider(manifest).rule(point).classes
    assert groups is not None
    assert summary.n_calibration == max(group.n for group in groups.groups)
    assert summary.finish().guarantee == "by-class"


@pytest.mark.parametrize(("n", "m"), [(200, 100), (500, 5000), (1000, 20_000)])
def test_in_distribution_images_rarely_have_an_excess_of_small_p_values(n: int, m: int) -> None:
    """Calibration sets are redrawn; a test that took p-values as uniform would reject most of the larger sets."""
    random, rejected, naive = np.random.default_rng(n), 0, 0
    for _ in range(400):
        counts = PValueCounts()
        counts.add(conformal(random.random(m), np.sort(random.random(n))))
        result = compare_with_uniform(counts, 1 / n)
        assert result is not None
        rejected += result.significance < 0.05
        naive += np.exp(-2 * m * result.excess**2) < 0.05
    assert rejected <= 400 * 0.05 + 3 * np.sqrt(400 * 0.05 * 0.95)
    assert rejected > 4  # not needlessly strict
    if m > n:
        assert naive > 100


def test_a_few_ood_images_are_an_excess() -> None:
    random = np.random.default_rng(0)
    counts = PValueCounts()
    scores = np.concatenate([random.normal(size=1800), random.normal(4, 1, size=200)])
    counts.add(conformal(scores, np.sort(random.normal(size=1000))))
    result = compare_with_uniform(counts, 1 / 1000)
    assert result is not None
    assert result.is_excessive
    assert result.at < 0.1
