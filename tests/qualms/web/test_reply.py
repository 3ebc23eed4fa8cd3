"""The JSON body of a reply to /predict: the rows of one request, and one computation per batch."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.file import Bundle
from qualms.bundle.manifest import Manifest
from qualms.bundle.runtime import GraphRunner
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT, OperatingPoint
from qualms.decisions.verdicts import Decider, decide
from qualms.inference.batch import Answer, Batch
from qualms.replies import PredictReply
from qualms.web.reply import DEFAULT_QUERY, Query, ReplyWriter

ROWS = 6


@pytest.fixture
def batch(runner: GraphRunner, draw_images: Callable[[int, int], NDArray[np.uint8]]) -> Batch:
    images = draw_images(11, ROWS)
    return Batch(list(runner(images).values()), [(ROWS, 0.001)], 0.0, images)


@pytest.fixture
def writer(bundle: Bundle, runner: GraphRunner) -> ReplyWriter:
    return ReplyWriter(bundle, Decider(bundle.manifest), runner.outputs)


def write(writer: ReplyWriter, answer: Answer, query: Query = DEFAULT_QUERY) -> dict[str, Any]:
    """The parsed body, which agrees with the schema."""
    body = writer.write(answer, query, "r1")
    PredictReply.model_validate_json(body)
    document: dict[str, Any] = json.loads(body)
    return document


def test_a_reply_contains_the_rows_of_its_own_request(
    writer: ReplyWriter, batch: Batch, bundle: Bundle, runner: GraphRunner
) -> None:
    outputs = dict(zip(runner.outputs, batch.outputs, strict=True))
    rule = Decider(bundle.manifest).rule(DEFAULT_OPERATING_POINT)
    verdicts = decide(rule, outputs)
    reply = write(writer, Answer(batch, 2, 3, 0.0))
    assert reply["model"] == {"name": "tiny", "version": "1.2", "digest": bundle.digest}
    assert reply["request_id"] == "r1"
    assert len(reply["results"]) == 3
    assert rule.trust is not None
    assert verdicts.accepts is not None
    for row, result in enumerate(reply["results"], start=2):

        def value(name: str, row: int = row) -> float:
            return float(np.format_float_positional(outputs[name][row], unique=True))

        index = int(outputs["prediction"][row])
        assert result == {
            "prediction": {
                "index": index,
                "label": bundle.manifest.classes[index],
                "probability": pytest.approx(outputs["base_probabilities"][row, index], rel=1e-6),
            },
            "dirichlet": {
                "alpha": pytest.approx(outputs["alpha"][row].tolist(), rel=1e-6),
                "precision": value("precision"),
            },
            "uncertainty": {
                "total": {"entropy": value("entropy"), "max_probability": value("max_probability")},
                "epistemic": {
                    "mutual_information": value("mutual_information"),
                    "differential_entropy": value("differential_entropy"),
                    "precision": value("precision"),
                },
                "aleatoric": value("expected_entropy"),
            },
            "ood": {
                "flag": bool(verdicts.flags[row]),
                "score": "fused",
                "value": value("fused"),
                "threshold": rule.flag.threshold,
                "p_value": verdicts.p_values[row],
                "target_fpr": 0.01,
                "guarantee": "confident",
                "guarantee_text": "at most 1 % of in-distribution images are flagged, for 95 % of calibration sets, "
                "for images like the calibration images",
            },
            "trust": {
                "accept": bool(verdicts.accepts[row]),
                "score": "predicted_error",
                "value": value("predicted_error"),
                "threshold": rule.trust.threshold,
                "target_risk": 0.01,
            },
        }


def test_float32_values_are_read_back_unchanged(writer: ReplyWriter, batch: Batch, runner: GraphRunner) -> None:
    outputs = dict(zip(runner.outputs, batch.outputs, strict=True))
    for row, result in enumerate(write(writer, Answer(batch, 0, ROWS, 0.0))["results"]):
        assert np.array_equal(np.array(result["dirichlet"]["alpha"], np.float32), outputs["alpha"][row])
        assert np.float32(result["ood"]["value"]) == outputs["fused"][row]


def test_verdicts_and_rows_are_computed_once_per_batch_and_query(
    writer: ReplyWriter, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores: list[str] = []

    def recorded(rule: Any, outputs: Any) -> Any:
        scores.append(rule.flag.score)
        return decide(rule, outputs)

    monkeypatch.setattr("qualms.web.reply.decide", recorded)
    for row in range(ROWS):
        write(writer, Answer(batch, row, 1, 0.0))
        for explain in (False, True, False):
            write(writer, Answer(batch, row, 1, 0.0), Query(OperatingPoint(score="entropy"), explain))
    assert scores == ["fused", "entropy", "entropy"]


def test_requests_with_and_without_explanation_can_share_a_batch(
    writer: ReplyWriter, batch: Batch, manifest: Manifest, runner: GraphRunner
) -> None:
    outputs = dict(zip(runner.outputs, batch.outputs, strict=True))
    replies = [
        write(writer, Answer(batch, row, 2, 0.0), Query(explain=explain))["results"]
        for row, explain in ((0, False), (2, True), (4, False))
    ]
    assert [["explanation" in result for result in results] for results in replies] == [
        2 * [False],
        2 * [True],
        2 * [False],
    ]
    for row, result in enumerate(replies[1], start=2):
        explanation = result.pop("explanation")
        assert result.keys() == replies[0][0].keys()
        terms = dict(zip(manifest.flag_terms, outputs["fused_terms"][row].tolist(), strict=True))
        assert explanation["flag_terms"] == pytest.approx(terms, rel=1e-6)
        assert explanation["meta"] == {
            "alpha": pytest.approx(outputs["meta_alpha"][row].tolist(), rel=1e-6),
            "mutual_information": pytest.approx(outputs["meta_mutual_information"][row], rel=1e-6),
        }


def test_requests_with_different_details_of_alpha_can_share_a_batch(writer: ReplyWriter, batch: Batch) -> None:
    queries = (DEFAULT_QUERY, Query(alpha="top10"), Query(alpha="none"), Query(alpha="all"))
    replies = [
        write(writer, Answer(batch, row, 1, 0.0), query)["results"][0] for row in range(ROWS) for query in queries
    ]
    for default, top, none, all_ in zip(*(replies[first::4] for first in range(4)), strict=True):
        assert all_ == default
        alpha = default["dirichlet"].pop("alpha")
        entries = top["dirichlet"].pop("top")
        assert [entry["alpha"] for entry in entries] == sorted(alpha, reverse=True)
        assert [alpha[entry["index"]] for entry in entries] == [entry["alpha"] for entry in entries]
        assert default == top == none
        assert list(default["dirichlet"]) == ["precision"]


def test_a_reply_reports_the_requested_operating_point(writer: ReplyWriter, batch: Batch) -> None:
    point = OperatingPoint("precision", 0.2, "marginal", 0.1)
    (result,) = write(writer, Answer(batch, 1, 1, 0.0), Query(point))["results"]
    assert (result["ood"]["score"], result["ood"]["target_fpr"]) == ("precision", 0.2)
    assert result["ood"]["guarantee"] == "marginal"
    assert result["ood"]["flag"] == (result["ood"]["value"] < result["ood"]["threshold"])
    assert result["trust"]["target_risk"] == 0.1


def test_a_trust_refusal_is_in_the_reply(bundle: Bundle, manifest: Manifest, batch: Batch, runner: GraphRunner) -> None:
    operating = manifest.operating.model_copy(update={"target_risk": 1e-6})
    strict = manifest.model_copy(update={"operating": operating})
    writer = ReplyWriter(bundle, Decider(strict), runner.outputs)
    (result,) = write(writer, Answer(batch, 0, 1, 0.0))["results"]
    trust = result["trust"]
    assert (trust["accept"], trust["threshold"], trust["target_risk"]) == (None, None, 1e-6)
    assert trust["refusal"].startswith("A target risk of 1e-06 needs")
