"""POST /predict: body formats, headers, operating points, limits, problems and loading."""

import base64
import json
import re
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from qualms.bundle.file import Bundle, write_bundle
from qualms.bundle.manifest import Manifest
from qualms.decisions.calibration_set import CalibrationSet
from qualms.errors import BundleError
from qualms.images.pillow_decoder import decode
from qualms.inference.decoding import INLINE_BYTES, Decoder
from qualms.inference.engine import Engine
from qualms.model import Model, open_model
from qualms.replies import PredictReply, ProblemReply
from qualms.web.state import ServiceState

TIMEOUT = 30.0
JSON = {"content-type": "application/json"}
PNG = {"content-type": "image/png"}

Draw = Callable[[int, int], NDArray[np.uint8]]
Encode = Callable[..., bytes]
Until = Callable[[Callable[[], bool]], None]
Start = Callable[..., httpx.Client]


def results(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    PredictReply.model_validate_json(response.content)
    values: list[dict[str, Any]] = response.json()["results"]
    return values


def assert_close(values: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    """Equal classes and equal α up to float32 rounding, which depends on the size of the batch."""
    for value, other in zip(values, expected, strict=True):
        assert value["prediction"]["label"] == other["prediction"]["label"]
        np.testing.assert_allclose(value["dirichlet"]["alpha"], other["dirichlet"]["alpha"], rtol=1e-5)


def problem(response: httpx.Response) -> ProblemReply:
    assert response.headers["content-type"] == "application/problem+json"
    reply = ProblemReply.model_validate_json(response.content)
    assert reply.status == response.status_code
    assert reply.request_id == response.headers["x-request-id"]
    return reply


def send(client: httpx.Client, image: bytes, **options: Any) -> httpx.Response:
    return client.post("/predict", content=image, headers={**PNG, **options.pop("headers", {})}, **options)


def send_json(client: httpx.Client, *images: Any) -> httpx.Response:
    return client.post("/predict", json={"images": images})


def send_form(client: httpx.Client, *images: bytes) -> httpx.Response:
    return client.post("/predict", files=[("images", (f"{index}.bin", data)) for index, data in enumerate(images)])


# Body formats


@pytest.fixture
def pixels(draw_images: Draw) -> NDArray[np.uint8]:
    """Grey pixels, (6, 5), which every format can store without loss."""
    return np.ascontiguousarray(draw_images(21, 1)[0, ..., 0])


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("PNG", {}),
        ("WEBP", {"lossless": True}),
        ("BMP", {}),
        ("GIF", {}),
        ("TIFF", {"compression": "tiff_lzw"}),
    ],
)
def test_every_lossless_format_and_every_kind_of_body_give_equal_results(
    client: httpx.Client, encode: Encode, pixels: NDArray[np.uint8], kind: str, options: dict[str, Any]
) -> None:
    data = encode(pixels, kind, **options)
    text = base64.b64encode(data).decode()
    expected = results(send_json(client, pixels.tolist()))
    replies = [
        client.post("/predict", content=data, headers={"content-type": f"image/{kind.lower()}"}),
        client.post("/predict", content=data, headers={"content-type": "application/octet-stream"}),
        send_form(client, data),
        send_json(client, text),
        send_json(client, f"data:image/{kind.lower()};base64,{text}"),
    ]
    assert [results(reply) for reply in replies] == [expected] * len(replies)


def test_pixel_arrays_with_one_three_or_four_channels_give_equal_results(
    client: httpx.Client, pixels: NDArray[np.uint8]
) -> None:
    colour = np.stack([pixels] * 3, axis=-1)
    opaque = np.concatenate((colour, np.full((*pixels.shape, 1), 255, np.uint8)), axis=-1)
    shapes = (pixels, pixels[..., np.newaxis], colour, opaque)
    values = results(send_json(client, *(pixels.tolist() for pixels in shapes)))
    assert values == [values[0]] * 4


def test_a_jpeg_gives_the_result_of_its_decoded_pixels(client: httpx.Client, encode: Encode, draw_images: Draw) -> None:
    data = encode(draw_images(22, 1)[0], "JPEG", quality=60)
    pixels = np.asarray(decode(data))
    jpeg = client.post("/predict", content=data, headers={"content-type": "image/jpeg"})
    assert results(jpeg) == results(send_json(client, pixels.tolist()))


def test_images_are_rotated_according_to_exif(client: httpx.Client, encode: Encode, pixels: NDArray[np.uint8]) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # display it rotated by 90° clockwise
    rotated = np.ascontiguousarray(np.rot90(pixels))
    upright, turned, ignored = (
        results(send(client, data)) for data in (encode(pixels), encode(rotated, exif=exif), encode(rotated))
    )
    assert turned == upright
    assert turned != ignored


def test_the_first_frame_of_an_animation_is_used(client: httpx.Client, encode: Encode) -> None:
    dark, light = np.full((6, 5), 40, np.uint8), np.full((6, 5), 200, np.uint8)
    animated = encode(dark, "GIF", save_all=True, append_images=[Image.fromarray(light)])
    assert results(send(client, animated)) == results(send(client, encode(dark)))


def test_several_images_are_answered_in_order_as_if_sent_alone(
    client: httpx.Client, encode: Encode, draw_images: Draw
) -> None:
    files = [encode(image) for image in draw_images(23, 6)]
    alone = [results(send(client, data))[0] for data in files]
    texts = [base64.b64encode(data).decode() for data in files]
    for together in (send_form(client, *files), send_json(client, *texts)):
        assert_close(results(together), alone)


# Where images are decoded


@pytest.fixture
def decode_threads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The name of the thread that decoded the images of each request."""
    names: list[str] = []

    def recorded(decode: Callable[..., Any]) -> Callable[..., Any]:
        def decode_and_record(*arguments: Any, **options: Any) -> Any:
            names.append(threading.current_thread().name)
            return decode(*arguments, **options)

        return decode_and_record

    for name in ("decode_inline", "_decode_one"):
        monkeypatch.setattr(Decoder, name, recorded(getattr(Decoder, name)))
    return names


def test_more_bytes_than_the_event_loop_decodes_are_decoded_in_the_pool_with_equal_results(
    client: httpx.Client, encode: Encode, decode_threads: list[str]
) -> None:
    noise = np.random.default_rng(24).integers(0, 256, (5, 50, 50, 3), np.uint8)
    files = [encode(image) for image in noise]
    assert max(map(len, files)) < INLINE_BYTES < sum(map(len, files))
    alone = [results(send(client, data))[0] for data in files]
    together = results(send_form(client, *files))
    assert_close(together, alone)
    assert [name.startswith("qualms-decode") for name in decode_threads] == 5 * [False] + 5 * [True]


@pytest.mark.parametrize(("shape", "in_pool"), [((96, 96), False), ((97, 96), True), ((96, 96, 4), True)])
def test_large_pixel_arrays_are_converted_in_the_pool(
    client: httpx.Client, decode_threads: list[str], shape: tuple[int, ...], in_pool: bool
) -> None:
    results(send_json(client, np.zeros(shape, np.uint8).tolist()))
    assert [name.startswith("qualms-decode") for name in decode_threads] == [in_pool]


def test_an_image_with_more_pixels_than_the_event_loop_decodes_is_decoded_in_the_pool(
    client: httpx.Client, encode: Encode, decode_threads: list[str]
) -> None:
    results(send(client, encode(np.zeros((97, 96), np.uint8))))
    assert [name.startswith("qualms-decode") for name in decode_threads] == [True]


# Headers


@pytest.mark.parametrize("given", ["abc-123", "a.b:c_d-e", "x" * 128])
def test_the_request_id_is_returned(
    client: httpx.Client, encode: Encode, pixels: NDArray[np.uint8], given: str
) -> None:
    response = send(client, encode(pixels), headers={"x-request-id": given})
    assert response.headers["x-request-id"] == response.json()["request_id"] == given
    assert problem(send(client, b"", headers={"x-request-id": given})).request_id == given


@pytest.mark.parametrize("given", [None, "", "with space", "x" * 129, "é"])
def test_a_request_without_a_valid_id_gets_a_new_one(
    client: httpx.Client, encode: Encode, pixels: NDArray[np.uint8], given: str | None
) -> None:
    headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
    response = send(client, encode(pixels), headers=headers)
    assert re.fullmatch(r"[0-9a-f]{32}", response.headers["x-request-id"])
    assert response.json()["request_id"] == response.headers["x-request-id"]


def test_server_timing_reports_queue_decode_and_inference(
    client: httpx.Client, encode: Encode, pixels: NDArray[np.uint8]
) -> None:
    timing = send(client, encode(pixels)).headers["server-timing"]
    assert re.fullmatch(r"queue;dur=\d+\.\d{3}, decode;dur=\d+\.\d{3}, inference;dur=\d+\.\d{3}", timing)


# Operating points


def test_the_query_selects_another_operating_point(
    client: httpx.Client, encode: Encode, pixels: NDArray[np.uint8]
) -> None:
    query = {"score": "entropy", "target_fpr": "0.2", "guarantee": "marginal", "target_risk": "0.1"}
    (result,) = results(send(client, encode(pixels), params=query))
    assert result["ood"]["score"] == "entropy"
    assert (result["ood"]["target_fpr"], result["ood"]["guarantee"]) == (0.2, "marginal")
    assert result["trust"]["target_risk"] == 0.1
    (default,) = results(send(client, encode(pixels)))
    assert (default["ood"]["score"], default["ood"]["target_fpr"]) == ("fused", 0.01)
    assert default["dirichlet"] == result["dirichlet"]


def test_results_are_explained_on_request(
    client: httpx.Client, bundle: Bundle, encode: Encode, pixels: NDArray[np.uint8]
) -> None:
    (plain,) = results(send(client, encode(pixels), params={"explain": "false"}))
    (explained,) = results(send(client, encode(pixels), params={"explain": "true"}))
    assert "explanation" not in plain
    explanation = explained.pop("explanation")
    assert explained == plain
    assert list(explanation["flag_terms"]) == bundle.manifest.flag_terms
    assert sum(explanation["flag_terms"].values()) == pytest.approx(plain["ood"]["value"], rel=1e-6)
    assert len(explanation["meta"]["alpha"]) == len(bundle.manifest.classes)
    assert explanation["meta"]["mutual_information"] > 0


def test_an_explanation_of_an_earlier_model_is_422_and_costs_no_inference(
    start_service: Start, earlier_bundle: Bundle, encode: Encode, pixels: NDArray[np.uint8]
) -> None:
    client = start_service(earlier_bundle.path)
    response = send(client, encode(pixels), params={"explain": "true"})
    assert (response.status_code, response.json()["field"]) == (422, "explain")
    assert response.json()["detail"] == (
        "The model tiny cannot explain its flags: it was made with an earlier version of qualms and has no flag terms; "
        "`qualms convert` makes one that has them."
    )
    assert 'qualms_batch_size_count{model="tiny",version="1.2"} 0.0' in client.get("/metrics").text
    (result,) = results(send(client, encode(pixels), params={"explain": "false"}))
    assert result["ood"]["score"] == "mutual_information"


def test_flagged_images_are_answered_with_200(client: httpx.Client, encode: Encode, draw_images: Draw) -> None:
    files = [encode(image) for image in draw_images(25, 40)]
    values = results(client.post("/predict?target_fpr=0.5", files=[("images", ("a", data)) for data in files]))
    assert {result["ood"]["flag"] for result in values} == {True, False}
    assert not any(result["trust"]["accept"] for result in values if result["ood"]["flag"])


@pytest.mark.parametrize("coverage", [0.3, 0.9, 0.99])
def test_a_coverage_adds_a_prediction_set_and_changes_nothing_else(
    client: httpx.Client, encode: Encode, draw_images: Draw, bundle: Bundle, coverage: float
) -> None:
    files = [encode(image) for image in draw_images(26, 20)]
    point = CalibrationSet(bundle.manifest).set_point(coverage)
    plain = results(send_form(client, *files))
    forms = [("images", (f"{index}.bin", data)) for index, data in enumerate(files)]
    for result, before in zip(results(client.post(f"/predict?coverage={coverage}", files=forms)), plain, strict=True):
        found = result.pop("prediction_set")
        assert result == before
        alpha = np.array(result["dirichlet"]["alpha"])
        expected = [
            bundle.manifest.classes[i] for i in np.argsort(-alpha) if -alpha[i] / alpha.sum() <= point.threshold
        ]
        assert found["labels"] == expected
        assert (found["coverage"], found["method"]) == (coverage, "lac")
        assert (found["note"] is None) == bool(expected)
    assert "prediction_set" not in plain[0]


def test_an_empty_prediction_set_is_returned_and_explained(client: httpx.Client) -> None:
    """The classes of a black image are equally probable."""
    (result,) = results(client.post("/predict?coverage=0.01", json={"images": [np.zeros((6, 5, 3), int).tolist()]}))
    assert result["prediction_set"] == {
        "labels": [],
        "coverage": 0.01,
        "method": "lac",
        "note": "The set is empty: no class is as probable as the threshold, so the image is more ambiguous than the share of "
        "images that this coverage leaves out.",
    }


def test_by_class_a_result_names_the_classes_that_share_its_threshold(
    client: httpx.Client, manifest: Manifest, encode: Encode, draw_images: Draw
) -> None:
    """No calibration image is predicted as the first class, so it is pooled with the smaller of the others."""
    predictions = manifest.calibration.predictions
    assert predictions is not None
    counts = np.bincount(predictions, minlength=3)
    assert (counts[0], counts[1] >= 14) == (0, True)  # the confident rule needs 14 images for 20 %
    files = [("images", ("a", encode(image))) for image in draw_images(27, 60)]
    values = results(client.post("/predict?guarantee=by-class&target_fpr=0.2", files=files))
    groups = {result["prediction"]["label"]: result["ood"]["group"] for result in values}
    assert groups["dove"] == {"classes": ["dove"], "n": counts[2]}
    assert groups["crab"] == {"classes": ["bee", "crab"], "n": counts[1]}
    for result in values:
        ood = result["ood"]
        assert ood["flag"] == (ood["value"] > ood["threshold"])
        assert ood["guarantee"] == "by-class"
        assert ood["guarantee_text"].startswith(
            "at most 20 % of images predicted as one class (or sharing a threshold) are flagged, "
        )
    assert len({result["ood"]["threshold"] for result in values}) == 2
    assert "group" not in results(client.post("/predict", files=files))[0]["ood"]


def test_without_labels_a_requested_risk_or_coverage_is_422_and_the_default_has_a_refusal(
    start_service: Start,
    graph: bytes,
    unlabelled_manifest: Manifest,
    encode: Encode,
    pixels: NDArray[np.uint8],
    tmp_path: Path,
) -> None:
    client = start_service(write_bundle(tmp_path / "tiny.onnx", graph, unlabelled_manifest).path)
    for name in ("target_risk", "coverage"):
        reply = problem(send(client, encode(pixels), params={name: "0.1"}))
        assert (reply.status, reply.field) == (422, name)
        assert reply.detail.startswith("The calibration images have no labels, so no ")
    (result,) = results(send(client, encode(pixels)))
    assert (result["trust"]["accept"], result["trust"]["threshold"]) == (None, None)
    assert result["trust"]["refusal"].startswith("The calibration images have no labels, so no error rate can be")
    (model,) = client.get("/models").json()["models"]
    assert model["calibration"]["labels"] is False
    assert model["operating"]["trust"]["refusal"] == result["trust"]["refusal"]


# Encodings


def counted(client: httpx.Client) -> dict[tuple[str, str, str, str], int]:
    """The number of images by format, quality, size and whether it is calibrated, where it is not zero."""
    pattern = re.compile(
        r'qualms_images_total\{calibrated="(.*?)",format="(.*?)",model.*?quality="(.*?)",size="(.*?)".*\} (.*)'
    )
    found = {}
    for calibrated, name, quality, size, value in pattern.findall(client.get("/metrics").text):
        if float(value):
            found[name, quality, size, calibrated] = int(float(value))
    return found


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        ("PNG", {}, ("png", "lossless", "same", "true")),
        ("JPEG", {"quality": 75}, ("jpeg", "70-79", "same", "false")),
        ("JPEG", {"quality": 95, "progressive": True}, ("jpeg", "90-100", "same", "false")),
        ("WEBP", {"lossless": True}, ("webp", "lossless", "same", "true")),
        ("WEBP", {"quality": 80}, ("webp", "lossy", "same", "false")),
        ("BMP", {}, ("bmp", "lossless", "same", "true")),
        ("GIF", {}, ("gif", "palette", "same", "false")),
        ("TIFF", {}, ("tiff", "lossless", "same", "true")),
    ],
)
def test_images_of_every_kind_of_body_are_counted_by_their_encoding(
    start_service: Start,
    encode: Encode,
    draw_images: Draw,
    kind: str,
    options: dict[str, Any],
    expected: tuple[str, str, str, str],
) -> None:
    """Some formats are decoded on the event loop and others in the pool."""
    client = start_service()
    data = encode(draw_images(28, 1)[0], kind, **options)
    results(send(client, data))
    assert counted(client) == {expected: 1}
    results(send_form(client, data, data))
    results(send_json(client, base64.b64encode(data).decode()))
    assert counted(client) == {expected: 4}


def test_pixels_and_sizes_are_counted_whether_they_are_decoded_in_the_pool_or_not(
    start_service: Start, encode: Encode, decode_threads: list[str]
) -> None:
    client = start_service()
    results(send_json(client, np.zeros((6, 5), int).tolist(), np.zeros((3, 4), int).tolist()))
    results(send_json(client, np.zeros((120, 100), int).tolist()))
    results(send(client, encode(np.zeros((97, 96), np.uint8))))
    results(send(client, encode(np.zeros((400, 300, 3), np.uint8), "JPEG", quality=30)))
    assert [name.startswith("qualms-decode") for name in decode_threads] == [False, True, True, True]
    assert counted(client) == {
        ("pixels", "lossless", "same", "true"): 1,
        ("pixels", "lossless", "smaller", "false"): 1,
        ("pixels", "lossless", "larger", "false"): 1,
        ("png", "lossless", "larger", "false"): 1,
        ("jpeg", "1-49", "larger", "false"): 1,
    }


def test_images_of_refused_requests_are_not_counted(
    start_service: Start, encode: Encode, pixels: NDArray[np.uint8]
) -> None:
    client = start_service()
    good = encode(pixels)
    assert send(client, good[:40]).status_code == 400
    assert send_form(client, good, b"nonsense").status_code == 415
    assert send(client, good, params="coverage=0.9999").status_code == 422
    assert counted(client) == {}


# The score log


def test_the_scores_of_all_served_images_are_logged_whatever_the_operating_point(
    start_service: Start, encode: Encode, draw_images: Draw, until: Until, tmp_path: Path
) -> None:
    path = tmp_path / "scores.jsonl"
    client = start_service(score_log=str(path), max_batch=2)
    files = [encode(image) for image in draw_images(29, 5)]
    values = results(send_form(client, *files))
    values += results(send(client, files[0], params="score=entropy&target_fpr=0.3"))
    assert send(client, b"?").status_code == 415
    until(lambda: path.read_bytes().count(b"\n") == 6)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["prediction"] for line in lines] == [result["prediction"]["index"] for result in values]
    assert [line["scores"]["fused"] for line in lines[:5]] == [result["ood"]["value"] for result in values[:5]]
    assert lines[5]["scores"]["entropy"] == values[5]["ood"]["value"]
    assert lines[5]["image"] == lines[0]["image"]
    assert 'qualms_score_log_dropped_images{model="tiny",version="1.2"} 0.0' in client.get("/metrics").text


def test_thresholds_by_size_are_used_in_replies_metrics_and_python(
    start_service: Start, graph: bytes, sized_manifest: Manifest, encode: Encode, draw_images: Draw, tmp_path: Path
) -> None:
    bundle = write_bundle(tmp_path / "tiny.onnx", graph, sized_manifest)
    client, model = start_service(bundle.path), open_model(bundle.path)
    thresholds = {size: CalibrationSet(sized_manifest, size).flag_point().threshold for size in ("same", "larger")}
    assert thresholds["same"] != thresholds["larger"]
    small = [encode(image) for image in draw_images(31, 20)]
    large = [encode(np.repeat(np.repeat(image, 2, axis=0), 2, axis=1)) for image in draw_images(31, 20)]
    files = [("images", (f"{index}.png", data)) for index, data in enumerate([*small, *large])]
    results = client.post("/predict", files=files).json()["results"]
    assert [result["ood"]["threshold"] for result in results] == [
        *[pytest.approx(thresholds["same"])] * 20,
        *[pytest.approx(thresholds["larger"])] * 20,
    ]
    assert results[0]["ood"]["guarantee_text"] != results[-1]["ood"]["guarantee_text"]
    flags = [result["ood"]["flag"] for result in results]
    assert [result["ood"]["flag"] for result in model_results(model, [*small, *large])] == flags
    assert f'qualms_ood_total{{model="tiny",version="1.2"}} {float(sum(flags))}' in client.get("/metrics").text
    by_size = client.get("/models").json()["models"][0]["operating"]["ood"]["thresholds_by_size"]
    assert by_size == {size: pytest.approx(threshold) for size, threshold in thresholds.items()}


def model_results(model: Model, images: list[bytes]) -> list[dict[str, Any]]:
    return [result.model_dump() for result in model.predict([*images])]


def test_without_a_score_log_there_is_no_metric_of_it(client: httpx.Client) -> None:
    assert "qualms_score_log" not in client.get("/metrics").text


# Invalid operating points


@pytest.mark.parametrize(
    ("query", "field", "accepted"),
    [
        ("coverage=1", "coverage", "between 0 and 1"),
        ("coverage=0.999", "coverage", "needs at least 999 labelled calibration images; there are 400"),
        ("guarantee=by-class&target_fpr=0.001", "target_fpr", "needs at least 2,995 calibration images; there are 400"),
        ("target_fpr=2", "target_fpr", "between 0 and 1"),
        ("target_fpr=nan", "target_fpr", "between 0 and 1"),
        ("target_fpr=1e-9", "target_fpr", "needs at least"),
        ("target_risk=1e-9", "target_risk", "needs at least"),
        ("score=surprisal", "score", "accepted are entropy"),
        ("guarantee=certain", "guarantee", "confident, marginal, by-class"),
        ("target_frp=0.1", "target_frp", "score, target_fpr, guarantee, target_risk, coverage"),
        ("target_fpr=0.1&target_fpr=0.2", "target_fpr", "one value"),
    ],
)
def test_an_invalid_or_unsupported_operating_point_is_422(
    client: httpx.Client, encode: Encode, pixels: NDArray[np.uint8], query: str, field: str, accepted: str
) -> None:
    reply = problem(send(client, encode(pixels), params=query))
    assert (reply.status, reply.field) == (422, field)
    assert accepted in reply.detail


# Refusals


@pytest.mark.parametrize(
    ("headers", "content", "status", "field", "detail"),
    [
        (PNG, b"", 400, None, "The body is empty"),
        (JSON, b"{", 400, None, "not JSON"),
        (JSON, b"[" * 20, 400, None, "at most 16 levels"),
        (PNG, b"\x89PNG\r\n\x1a\n and no more", 400, "images[0]", "send a complete PNG, JPEG"),
        (JSON, json.dumps({"images": ["####"]}).encode(), 400, "images[0]", "not base64"),
        (PNG, b"GIF or PNG?", 415, "images[0]", "send a PNG, JPEG, WebP, BMP, GIF or TIFF file"),
        ({"content-type": "text/plain"}, b"x", 415, "Content-Type", "accepted: image/*"),
        ({}, b"x", 415, "Content-Type", "accepted: image/*"),
        (JSON, b"{}", 422, "images", "missing"),
        (JSON, b'{"images": [[[1, 2], [3]]]}', 422, "images[0]", "different lengths"),
        (JSON, b'{"images": [[[1]], [[256]]]}', 422, "images[1]", "0 to 255"),
        (JSON, b'{"images": [[[1]]], "score": "entropy"}', 422, "score", "unknown"),
        ({**PNG, "x-request-timeout": "soon"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
        ({**PNG, "x-request-timeout": "0"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
        ({**PNG, "x-request-timeout": "-1"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
        ({**PNG, "x-request-timeout": "inf"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
        ({**PNG, "x-request-timeout": "60.1"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
        ({**PNG, "x-request-timeout": "nan"}, b"x", 422, "X-Request-Timeout", "more than 0 and at most 60"),
    ],
)
def test_a_problem_names_the_field_and_the_error(
    client: httpx.Client, headers: dict[str, str], content: bytes, status: int, field: str | None, detail: str
) -> None:
    reply = problem(client.post("/predict", content=content, headers=headers))
    assert (reply.status, reply.field) == (status, field)
    assert detail in reply.detail


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_the_problem_names_the_index_of_the_damaged_image(
    client: httpx.Client, encode: Encode, pixels: NDArray[np.uint8], kind: str
) -> None:
    """PNG files are decoded on the event loop, TIFF files in the pool."""
    good = encode(pixels, kind)
    assert problem(send_form(client, good, good, good[:50], good)).field == "images[2]"
    assert problem(send_form(client, good, b"nonsense")).field == "images[1]"


def test_an_image_whose_pixels_cannot_be_converted_is_400(client: httpx.Client, encode: Encode) -> None:
    data = encode(np.zeros((6, 5), np.uint8))
    header = data[12:29].replace(bytes([8, 0, 0, 0, 0]), bytes([8, 3, 0, 0, 0]))  # palette colours without a palette
    broken = data[:12] + header + zlib.crc32(header).to_bytes(4, "big") + data[33:]
    reply = problem(send(client, broken))
    assert (reply.status, reply.field) == (400, "images[0]")
    assert "its P pixels cannot be converted to RGB" in reply.detail


def test_exceeded_limits_are_413_and_named(start_service: Start, encode: Encode, pixels: NDArray[np.uint8]) -> None:
    limited = start_service(max_body_bytes=2000, max_images=2, max_pixels=500)
    good = encode(pixels)
    assert len(results(send_form(limited, good, good))) == 2
    body = problem(send(limited, bytes(2001)))
    count = problem(send_form(limited, good, good, good))
    refused = [body, count]
    for side in (20, 21):
        image = np.zeros((25, side), np.uint8)
        for response in (send(limited, encode(image)), send_json(limited, image.tolist())):
            if side == 20:
                results(response)
            else:
                refused.append(problem(response))
    assert [reply.status for reply in refused] == [413] * 4
    assert [reply.field for reply in refused] == [None, "images", "images[0]", "images[0]"]
    limits = ("at most 2,000 bytes", "at most 2", "21 × 25 pixels; at most 500", "21 × 25 pixels; at most 500")
    assert all(limit in reply.detail for limit, reply in zip(limits, refused, strict=True))


def test_only_post_is_allowed(client: httpx.Client) -> None:
    response = client.get("/predict")
    assert problem(response).status == 405
    assert response.headers["allow"] == "POST"


# Deadlines


def test_a_deadline_too_short_for_an_idle_service_is_422_without_retry_after(
    client: httpx.Client, encode: Encode, pixels: NDArray[np.uint8]
) -> None:
    response = send(client, encode(pixels), headers={"x-request-timeout": "1e-9"})
    reply = problem(response)
    assert (reply.status, reply.field) == (422, "X-Request-Timeout")
    assert "has 1e-09 s, and its images alone take longer; accepted: X-Request-Timeout of at least 0.0" in reply.detail
    assert "retry-after" not in response.headers


# Loading


def test_predictions_are_503_while_the_model_is_loading(
    start_service: Start, encode: Encode, pixels: NDArray[np.uint8], monkeypatch: pytest.MonkeyPatch, until: Until
) -> None:
    loading = threading.Event()

    def wait(*arguments: Any, **options: Any) -> Any:
        assert loading.wait(TIMEOUT)
        return Engine(*arguments, **options)

    monkeypatch.setattr("qualms.web.app.Engine", wait)
    client = start_service(ready=False)
    for response in (send(client, encode(pixels)), client.get("/readyz")):
        reply = problem(response)
        assert (reply.status, reply.detail) == (503, "The model is still loading.")
    assert client.get("/livez").json() == {"status": "alive"}
    assert client.get("/models").json()["models"] == []
    loading.set()
    until(lambda: client.get("/readyz").status_code == 200)
    results(send(client, encode(pixels)))


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (BundleError("The golden vectors are not reproduced."), "The golden vectors are not reproduced."),
        (KeyError("secret"), "The model could not be loaded; the log has the reason."),
    ],
)
def test_a_model_that_cannot_be_loaded_is_never_ready_and_reports_the_reason(
    start_service: Start, monkeypatch: pytest.MonkeyPatch, until: Until, error: Exception, detail: str
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    state = ServiceState()
    monkeypatch.setattr("qualms.web.app.Engine", fail)
    client = start_service(ready=False, state=state)
    until(lambda: state.failure is not None)
    for response in (send(client, b"x"), client.get("/readyz")):
        assert (response.status_code, problem(response).detail) == (503, detail)
