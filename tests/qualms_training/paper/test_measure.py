"""Metrics of verdicts, against scikit-learn on the same numbers."""

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from qualms_training.errors import ModelError
from qualms_training.paper.measure import measure
from qualms_training.paper.method import Verdict

RNG = np.random.default_rng(0)
LABELS = RNG.integers(3, size=200)


def verdict(n: int, shift: float, wrong: int = 0) -> Verdict:
    predictions = LABELS.copy() if n == 200 else np.zeros(n, dtype=np.int64)
    predictions[:wrong] = (predictions[:wrong] + 1) % 3
    doubts = np.random.default_rng(n + wrong).normal(size=n) + shift
    doubts[:wrong] += 1
    return Verdict(predictions, {"doubt": doubts})


def test_strangers_and_errors_are_detected_as_scikit_learn_says() -> None:
    test, far = verdict(200, 0.0, wrong=30), verdict(100, 1.0)
    base = verdict(200, 0.0, wrong=50).predictions
    found = measure({"test": test, "far": far}, LABELS, base)
    both = np.concatenate([test.scores["doubt"], far.scores["doubt"]])
    assert found.ood["far"]["doubt"].auroc == pytest.approx(100 * roc_auc_score(np.arange(300) >= 200, both))
    assert found.ood["far"]["doubt"].aupr == pytest.approx(100 * average_precision_score(np.arange(300) >= 200, both))
    for errors, count in ((found.own_errors, 30), (found.base_errors, 50)):
        wrong = np.arange(200) < count
        assert errors["doubt"].auroc == pytest.approx(100 * roc_auc_score(wrong, test.scores["doubt"]))
    assert (found.error_rate, found.base_error_rate) == (15.0, 25.0)


def test_without_errors_there_is_nothing_to_detect() -> None:
    found = measure({"test": verdict(200, 0.0)}, LABELS, LABELS)
    assert (found.own_errors, found.base_errors, found.ood) == ({}, {}, {})


def test_a_column_made_of_test_images_is_compared_with_the_others_alone() -> None:
    test = verdict(200, 0.0)
    half = np.arange(200) < 100
    test.scores["doubt"][~half] += 50
    same = Verdict(test.predictions[half], {"doubt": test.scores["doubt"][half]})
    verdicts = {"test": test, "itself": same}
    assert measure(verdicts, LABELS, LABELS, {"itself": ~half}).ood["itself"]["doubt"].auroc == 0
    assert measure(verdicts, LABELS, LABELS, {"itself": half}).ood["itself"]["doubt"].auroc == 50


def test_a_score_that_is_not_finite_is_an_error() -> None:
    test = verdict(200, 0.0)
    test.scores["doubt"][3] = np.nan
    with pytest.raises(ModelError, match=r"'doubt' on 'test' is not finite"):
        measure({"test": test}, LABELS, LABELS)


def test_a_base_that_does_not_predict_makes_no_errors_to_detect() -> None:
    found = measure({"test": verdict(200, 0.0, wrong=30)}, LABELS, None)
    assert (found.error_rate, found.base_error_rate) == (15.0, None)
    assert found.own_errors
    assert found.base_errors == {}
