"""The calibration of a manifest: how its images were sent, and which of its fields belong together."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from qualms.bundle.calibration_data import AsSent, Calibration, PairedScores, TrustGrid
from qualms.bundle.manifest import first_problem

N = 4


def floats(*values: float) -> Any:
    return np.array(values, np.float32)


def grid(**counts: Any) -> TrustGrid:
    return TrustGrid(levels=floats(0.5, 1), thresholds=floats(1, 2), **counts)


UNLABELLED: dict[str, Any] = {"wrong": None, "label_scores": None}


def fields(**changes: Any) -> dict[str, Any]:
    """Fields of a valid calibration on 4 images with labels."""
    valid = {
        "n": N,
        "split": "calibration",
        "data": "drawn",
        "data_sha256": "0" * 64,
        "scores": {"entropy": floats(3, 1, 2, 0)},
        "wrong": [0],
        "trust": grid(),
        "predictions": np.array([0, 1, 2, 0]),
        "label_scores": floats(-0.5, -0.1, -0.9, -0.2),
    }
    return {**valid, **changes}


def setting(encoding: str = "png", **changes: Any) -> dict[str, Any]:
    valid = {
        "encoding": encoding,
        "scores": {"entropy": floats(0, 1, 2, 3)},
        "predictions": np.zeros(N, int),
        "wrong": [1, 3],
        "label_scores": floats(0, 0, 0, 0),
    }
    return {**valid, **changes}


def worst(*settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """Fields of a calibration in the form `worst`."""
    as_sent = AsSent(encodings=["png", "jpeg:75"], form="worst", seed=0)
    alone = fields(wrong=None, predictions=None, label_scores=None)
    return {**alone, "as_sent": as_sent, "settings": list(settings), **changes}


def problem(document: dict[str, Any]) -> str:
    with pytest.raises(ValidationError) as caught:
        Calibration.model_validate(document)
    return first_problem(caught.value)


# As sent


def test_the_text_names_the_encodings_and_their_shares() -> None:
    def text(*encodings: str, form: Any = "worst") -> str:
        return AsSent(encodings=list(encodings), form=form, seed=0).text

    assert text("png") == "images sent as png, in any shares"
    assert text("png", "jpeg:75-95") == "images sent as png or jpeg:75-95, in any shares"
    assert text("png", "jpeg:75-95", "resize:2") == "images sent as png, jpeg:75-95 or resize:2, in any shares"
    assert (
        text("png", "png", "webp:80", form="mixture")
        == "images sent as png (2 of 3) or webp:80 (1 of 3), in the listed shares"
    )


@pytest.mark.parametrize(
    ("encodings", "message"),
    [
        ([], "encodings: List should have at least 1 item"),
        (["heif"], "the document: The encoding 'heif' is unknown: 'heif' is not one of png,"),
        (
            ["jpeg:101"],
            "the document: The encoding 'jpeg:101' is not accepted: jpeg takes a whole number from 1 to 100",
        ),
        (["resize:0.1-8", "resize:0.1-8+png", "resize:0.1-8+bmp"], "the document: The encodings resize:0.1-8, "),
    ],
)
def test_encodings_that_are_not_accepted_are_refused(encodings: list[str], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        AsSent(encodings=encodings, form="worst", seed=0)
    assert first_problem(caught.value).startswith(message)


def test_only_mixture_worst_and_by_size_are_forms() -> None:
    with pytest.raises(ValidationError, match="Input should be 'mixture', 'worst' or 'by-size'"):
        AsSent.model_validate({"encodings": ["png"], "form": "best", "seed": 0})


# Labels


@pytest.mark.parametrize(
    ("document", "labels"),
    [
        (fields(), True),
        (fields(wrong=[]), True),
        (fields(wrong=None, label_scores=None), False),
        (worst(setting(), setting("jpeg:75")), True),
        (worst(setting(wrong=[]), setting("jpeg:75", wrong=[])), True),
        (worst(setting(wrong=None, label_scores=None), setting("jpeg:75", wrong=None, label_scores=None)), False),
        (
            fields(
                wrong=None,
                predictions=None,
                label_scores=None,
                scores={"entropy": floats(0, 1, 2, 3)},
                trust=grid(accepted=[1, 4], errors=[0, 1]),
            ),
            True,
        ),
    ],
)
def test_a_calibration_has_labels_if_its_errors_are_known(document: dict[str, Any], labels: bool) -> None:
    assert Calibration.model_validate(document).has_labels == labels


def test_a_mixture_has_no_settings() -> None:
    as_sent = AsSent(encodings=["png", "jpeg:75"], form="mixture", seed=3)
    calibration = Calibration.model_validate(fields(as_sent=as_sent, trimmed=0.05))
    assert (calibration.settings, calibration.as_sent, calibration.trimmed) == ([], as_sent, 0.05)


def test_the_json_round_trip_of_all_fields_is_exact() -> None:
    document = worst(
        setting(), setting("jpeg:75"), observed={"lossless, same size": 4}, fingerprints=np.arange(4, dtype=np.uint64)
    )
    calibration = Calibration.model_validate(document)
    again = Calibration.model_validate_json(calibration.model_dump_json())
    assert again.model_dump_json() == calibration.model_dump_json()
    assert [one.encoding for one in again.settings] == ["png", "jpeg:75"]
    assert again.fingerprints is not None
    assert again.fingerprints.tolist() == [0, 1, 2, 3]


def test_fields_without_a_value_are_left_out_of_the_json() -> None:
    document = Calibration.model_validate(fields(wrong=None, label_scores=None)).model_dump(mode="json")
    assert set(document) == {"n", "split", "data", "data_sha256", "scores", "trust", "predictions"}
    part = PairedScores.model_validate(setting(wrong=None, label_scores=None)).model_dump(mode="json")
    assert set(part) == {"encoding", "scores", "predictions"}


# Inconsistent fields


@pytest.mark.parametrize(
    ("document", "message"),
    [
        (fields(scores={"entropy": floats(1, 2)}), "the calibration scores of entropy must be 4 values"),
        (
            fields(trust=grid(accepted=[1, 4], errors=[0, 1]), wrong=None),
            "the calibration scores of entropy must be 4 ascending values",
        ),
        (fields(predictions=np.zeros(3, int)), "predictions must be 4 values"),
        (fields(predictions=np.zeros((4, 1), int)), "predictions must be 4 values"),
        (fields(label_scores=floats(1)), "label_scores must be 4 values"),
        (fields(wrong=[2, 1]), "wrong must be strictly ascending indices from 0 to 3"),
        (fields(wrong=[4]), "wrong must be strictly ascending indices from 0 to 3"),
        (worst(setting(predictions=np.zeros(5, int))), "settings.0.predictions must be 4 values"),
        (worst(setting(), setting("jpeg:75", label_scores=floats(0))), "settings.1.label_scores must be 4 values"),
        (worst(setting(scores={"entropy": floats(0)})), "settings.0.entropy must be 4 values"),
        (
            worst(setting(), setting("jpeg:75", wrong=[-1])),
            "settings.1.wrong must be strictly ascending indices from 0 to 3",
        ),
        (
            fields(
                scores={"entropy": floats(0, 1, 2, 3)},
                trust=grid(accepted=[1, 5], errors=[0, 1]),
                wrong=None,
                label_scores=None,
            ),
            "trust.accepted must be at most n, 4",
        ),
        (
            fields(scores={"entropy": floats(0, 1, 2, 3)}, trust=grid(accepted=[1, 4], errors=[0, 1])),
            "with wrong or settings, trust must not have accepted and errors",
        ),
        (
            worst(setting(), scores={"entropy": floats(0, 1, 2, 3)}, trust=grid(accepted=[1, 4], errors=[0, 1])),
            "with wrong or settings, trust must not have accepted and errors",
        ),
        (
            worst(setting(), as_sent=AsSent(encodings=["png"], form="by-size", seed=0)),
            "in the form 'by-size', every setting must have a size",
        ),
        (worst(), "settings and the form 'worst' or 'by-size' of as_sent belong together"),
        (worst(setting(), as_sent=None), "settings and the form 'worst' or 'by-size' of as_sent belong together"),
        (
            worst(setting(), as_sent=AsSent(encodings=["png"], form="mixture", seed=0)),
            "settings and the form 'worst' or 'by-size' of as_sent belong together",
        ),
        (worst(setting(), wrong=[]), "with settings, wrong, predictions and label_scores belong to each setting"),
        (
            worst(setting(), predictions=np.zeros(4, int)),
            "with settings, wrong, predictions and label_scores belong to each setting",
        ),
        (
            worst(setting(), wrong=[], label_scores=floats(0, 0, 0, 0)),
            "with settings, wrong, predictions and label_scores belong to each setting",
        ),
        (worst(setting(), label_scores=floats(0, 0, 0, 0)), "label_scores need wrong"),
        (
            fields(wrong=None),
            "label_scores need wrong",
        ),
        (
            worst(setting(), setting("jpeg:75", wrong=None, label_scores=None)),
            "either all settings or none have labels",
        ),
    ],
)
def test_inconsistent_fields_are_refused_with_a_sentence(document: dict[str, Any], message: str) -> None:
    assert problem(document) == f"the document: {message}"


@pytest.mark.parametrize("share", [-0.1, 1.0])
def test_the_trimmed_share_is_at_least_0_and_less_than_1(share: float) -> None:
    assert problem(fields(trimmed=share)).startswith("trimmed: Input should be")
