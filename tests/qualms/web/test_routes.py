"""Routes other than /predict: health, models, documentation, and errors of the framework."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from qualms.bundle.file import Bundle, write_bundle
from qualms.bundle.manifest import Manifest
from qualms.web.problems import MEDIA_TYPE
from qualms.web.routes import route_name
from qualms.web.state import ServiceState

Start = Callable[..., httpx.Client]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/predict", "predict"),
        ("/livez", "health"),
        ("/readyz", "health"),
        ("/healthz", "health"),
        ("/models", "models"),
        ("/models/tiny", "models"),
        ("/metrics", "metrics"),
        ("/docs", "docs"),
        ("/docs/assets/swagger-ui.css", "docs"),
        ("/openapi.json", "docs"),
        ("/", "page"),
        ("/page/app.js", "page"),
        ("/status", "status"),
        ("/modelsandmore", "other"),
        ("/predict/", "other"),
    ],
)
def test_every_path_has_a_route_label(path: str, name: str) -> None:
    assert route_name(path) == name


# Health


def test_readiness_reports_the_execution_provider(client: httpx.Client) -> None:
    assert client.get("/readyz").json() == {"status": "ready", "provider": "CPUExecutionProvider"}
    assert client.get("/livez").json() == client.get("/healthz").json() == {"status": "alive"}


def test_while_draining_readiness_is_503_and_other_routes_answer(
    start_service: Start, encode: Callable[..., bytes], draw_images: Callable[[int, int], Any]
) -> None:
    state = ServiceState()
    client = start_service(state=state)
    state.draining = True
    image = encode(draw_images(1, 1)[0])
    replies = {
        "/readyz": (client.get("/readyz"), 503),
        "/livez": (client.get("/livez"), 200),
        "/models": (client.get("/models"), 200),
        "/nowhere": (client.get("/nowhere"), 404),
        "GET /predict": (client.get("/predict"), 405),
        "POST /predict": (client.post("/predict", content=image, headers={"content-type": "image/png"}), 200),
        "POST an empty body": (client.post("/predict", content=b"", headers={"content-type": "image/png"}), 400),
    }
    for name, (reply, status) in replies.items():
        assert reply.status_code == status, name
    assert replies["/readyz"][0].json()["detail"] == "The service is stopping."


# Models


def test_models_lists_input_operating_point_calibration_and_cost(
    client: httpx.Client, bundle: Bundle, manifest: Manifest
) -> None:
    (model,) = client.get("/models").json()["models"]
    assert (model["name"], model["version"], model["digest"]) == ("tiny", "1.2", bundle.digest)
    assert model["classes"] == manifest.classes
    assert model["input"] == {"height": 6, "width": 5, "colour": "RGB", "resize": "bilinear", "fit": "stretch"}
    assert model["provider"] == "CPUExecutionProvider"
    assert (model["alpha"], model["flag_terms"]) == ("joined", ["entropy", "meta_mutual_information"])
    assert model["operating"]["ood"]["score"] == "fused"
    assert model["operating"]["ood"]["guarantee_text"] == (
        "at most 1 % of in-distribution images are flagged, for 95 % of calibration sets, for images like the "
        "calibration images"
    )
    assert 0.003 < model["operating"]["ood"]["rate_bound"] < 0.05
    trust = model["operating"]["trust"]
    assert trust["accepted_if"] == f"not flagged and predicted_error ≤ {trust['threshold']:.6g}"
    assert trust["refusal"] is None
    assert model["calibration"] == {
        "n": 400,
        "data": "drawn",
        "labels": True,
        "kept_labels": None,
        "as_sent": None,
        "observed": {"lossless, same size": 400},
        "trimmed": None,
    }
    assert "1" in model["cost_seconds"]
    assert model["max_batch"] >= 1


def test_a_model_of_an_earlier_version_is_listed_with_its_kind_of_alpha(
    start_service: Start, earlier_bundle: Bundle
) -> None:
    (model,) = start_service(earlier_bundle.path).get("/models").json()["models"]
    assert (model["alpha"], model["flag_terms"]) == ("meta", [])
    trust = model["operating"]["trust"]
    assert trust["accepted_if"] == f"not flagged and error_probability ≤ {trust['threshold']:.6g}"


def test_models_show_how_the_calibration_images_were_sent(
    start_service: Start, graph: bytes, worst_manifest: Manifest, tmp_path: Path
) -> None:
    client = start_service(write_bundle(tmp_path / "tiny.onnx", graph, worst_manifest).path)
    (model,) = client.get("/models").json()["models"]
    encodings = ["png", "jpeg:75", "brightness:0.9"]
    assert model["calibration"]["as_sent"] == {"encodings": encodings, "form": "worst", "seed": 0}
    assert model["calibration"]["observed"] == {"lossless, same size": 800, "jpeg 70-79, same size": 400}
    assert model["operating"]["ood"]["guarantee_text"].endswith(
        ", for images sent as png, jpeg:75 or brightness:0.9, in any shares"
    )
    shown = client.get("/models/tiny").json()["manifest"]["calibration"]
    assert set(shown) == {"n", "split", "data", "data_sha256", "as_sent", "observed"}


def test_the_arrays_of_a_kept_calibration_are_left_out(
    start_service: Start, graph: bytes, kept_manifest: Manifest, tmp_path: Path
) -> None:
    client = start_service(write_bundle(tmp_path / "tiny.onnx", graph, kept_manifest).path)
    shown = client.get("/models/tiny").json()
    assert set(shown["manifest"]["labelled_calibration"]) == {"n", "split", "data", "data_sha256", "observed"}
    assert shown["calibration"]["labels"] is False
    assert shown["calibration"]["kept_labels"] == {"n": 400, "data": "drawn"}
    assert shown["operating"]["trust"]["refusal"] is None


def test_one_model_is_returned_with_its_manifest_without_large_arrays(client: httpx.Client, manifest: Manifest) -> None:
    model = client.get("/models/tiny").json()
    expected = json.loads(manifest.to_json())
    for omitted in ("scores", "wrong", "trust", "predictions", "label_scores", "fingerprints"):
        del expected["calibration"][omitted]
    del expected["golden"]
    assert model.pop("manifest") == expected
    (listed,) = client.get("/models").json()["models"]
    assert model == listed


def test_an_unknown_model_is_404(client: httpx.Client) -> None:
    response = client.get("/models/other")
    assert response.status_code == 404
    assert response.json()["detail"] == "There is no model 'other' here."


# Errors of the framework


@pytest.mark.parametrize(
    ("method", "path", "status", "detail"),
    [
        ("GET", "/nowhere", 404, "There is nothing at '/nowhere'."),
        ("GET", "/docs/assets/nothing.js", 404, "There is nothing at '/docs/assets/nothing.js'."),
        ("GET", "/docs/assets/../../engine.py", 404, "There is nothing at"),
        ("POST", "/models", 405, "The method 'POST' is not allowed here; accepted: GET, HEAD."),
        ("DELETE", "/readyz", 405, "The method 'DELETE' is not allowed here; accepted: GET, HEAD."),
        ("PUT", "/predict", 405, "The method 'PUT' is not allowed here; accepted: POST."),
        ("GET", "/" + "x" * 300, 404, "There is nothing at '/" + "x" * 60 + "...'."),
    ],
)
def test_errors_of_the_framework_are_problems(
    client: httpx.Client, method: str, path: str, status: int, detail: str
) -> None:
    response = client.request(method, path, headers={"x-request-id": "r1"})
    assert response.status_code == status
    assert response.headers["content-type"] == MEDIA_TYPE
    assert response.json()["request_id"] == response.headers["x-request-id"] == "r1"
    assert response.json()["detail"].startswith(detail)
    assert (status == 405) == ("allow" in response.headers)


def test_every_reply_has_a_request_id(client: httpx.Client) -> None:
    for path in ("/livez", "/models", "/metrics", "/docs", "/openapi.json", "/nowhere"):
        assert re.fullmatch("[0-9a-f]{32}", client.get(path).headers["x-request-id"]), path


def test_an_internal_error_of_a_route_is_500_without_details_and_counted(
    start_service: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("address 0xdeadbeef")

    state = ServiceState()
    client = start_service(state=state)
    assert state.model is not None
    with monkeypatch.context() as patch:
        patch.setattr(state.model.decider, "rule", fail)
        response = client.get("/models")
    assert response.status_code == 500
    assert response.headers["content-type"] == MEDIA_TYPE
    assert response.json()["request_id"] == response.headers["x-request-id"]
    assert "deadbeef" not in response.text
    assert 'qualms_requests_total{code="500",route="models"} 1.0' in client.get("/metrics").text


# Documentation


def test_the_documentation_page_loads_nothing_from_other_hosts(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    links = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert len(links) == 3
    for link in links:
        assert link.startswith("/docs/assets/")
        assert client.get(link).status_code == 200, link
    assert "http://" not in page.text.replace("http://www.w3.org", "")
    assert "https://" not in page.text


def test_the_limits_on_requests_are_published_while_the_model_is_loading(
    start_service: Callable[..., httpx.Client],
) -> None:
    client = start_service(
        ready=False, max_images=5, max_body_bytes=1000, max_pixels=900, max_request_timeout_seconds=20
    )
    expected = {"max_images": 5, "max_body_bytes": 1000, "max_pixels": 900, "max_request_timeout_seconds": 20}
    assert client.get("/models").json()["limits"] == expected
