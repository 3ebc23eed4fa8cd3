import base64
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import httpx
import jsonschema_rs
import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.file import Bundle, write_bundle
from qualms.bundle.manifest import Manifest
from qualms.decisions.operating_point import OperatingPoint
from qualms.web.state import ServiceState

Draw = Callable[[int, int], NDArray[np.uint8]]


@pytest.fixture(scope="session")
def described(client: httpx.Client) -> dict[str, Any]:
    found: dict[str, Any] = client.get("/openapi.json").json()
    return found


def check(described: dict[str, Any], response: httpx.Response, path: str, method: str) -> None:
    """The reply's status, type and body are as the document says."""
    documented = described["paths"][path][method]["responses"][str(response.status_code)]
    media_type = response.headers["content-type"].partition(";")[0]
    schema = documented["content"][media_type]["schema"]
    body = response.json() if media_type.endswith("json") else response.text
    jsonschema_rs.Draft202012Validator({**schema, "components": described["components"]}).validate(body)
    for name in documented.get("headers", {}):
        assert name in response.headers


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/models", "/models/tiny", "/models/other", "/metrics"])
def test_ordinary_replies_are_as_described(client: httpx.Client, described: dict[str, Any], path: str) -> None:
    template = "/models/{name}" if path.startswith("/models/") else path
    check(described, client.get(path), template, "get")


def test_metrics_in_their_other_format_are_as_described(client: httpx.Client, described: dict[str, Any]) -> None:
    response = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    check(described, response, "/metrics", "get")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({}, 200),
        ({"params": "score=precision&target_fpr=0.3&guarantee=marginal&target_risk=0.2"}, 200),
        ({"content": b""}, 400),
        ({"content": bytes(5001)}, 413),
        ({"content": b"?"}, 415),
        ({"params": "target_fpr=1"}, 422),
        ({"headers": {"content-type": "image/png", "x-request-timeout": "1e-9"}}, 422),
        ({"crowd": 10**9}, 429),
    ],
)
def test_replies_to_predictions_are_as_described(
    start_service: Callable[..., httpx.Client],
    described: dict[str, Any],
    encode: Callable[..., bytes],
    draw_images: Draw,
    request_: dict[str, Any],
    status: int,
) -> None:
    state = ServiceState()
    client = start_service(state=state, max_body_bytes=5000)
    state.tasks = lambda: request_.get("crowd", 0)
    good = {"content": encode(draw_images(41, 1)[0]), "headers": {"content-type": "image/png"}}
    response = client.post("/predict", **{**good, **{name: v for name, v in request_.items() if name != "crowd"}})
    assert response.status_code == status
    check(described, response, "/predict", "post")


def test_a_stated_refusal_of_trust_is_as_described(
    start_service: Callable[..., httpx.Client],
    described: dict[str, Any],
    tmp_path: Any,
    graph: bytes,
    manifest: Manifest,
) -> None:
    operating = manifest.operating.model_copy(update={"target_risk": 1e-6})
    strict = write_bundle(tmp_path / "strict.onnx", graph, manifest.model_copy(update={"operating": operating}))
    client = start_service(strict.path)
    response = client.post("/predict", json={"images": [[[1, 2], [3, 4]]]})
    assert response.json()["results"][0]["trust"]["accept"] is None
    check(described, response, "/predict", "post")
    check(described, client.get("/models/tiny"), "/models/{name}", "get")


def test_replies_while_stopping_are_as_described(
    start_service: Callable[..., httpx.Client], described: dict[str, Any]
) -> None:
    state = ServiceState()
    client = start_service(state=state)
    state.draining = True
    check(described, client.get("/readyz"), "/readyz", "get")


def test_the_document_describes_every_way_to_ask(described: dict[str, Any]) -> None:
    operation = described["paths"]["/predict"]["post"]
    queries = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "query"}
    headers = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "header"}
    assert queries == {field.name for field in fields(OperatingPoint)}
    assert headers == {"X-Request-ID", "X-Request-Timeout"}
    assert set(operation["requestBody"]["content"]) == {
        "image/*",
        "application/octet-stream",
        "multipart/form-data",
        "application/json",
    }
    assert set(operation["responses"]) == {"200", "400", "408", "413", "415", "422", "429", "503", "504"}


def test_the_document_lists_the_routes_and_no_errors_that_cannot_happen(described: dict[str, Any]) -> None:
    assert set(described["paths"]) == {
        "/livez",
        "/readyz",
        "/models",
        "/models/{name}",
        "/metrics",
        "/predict",
    }
    assert set(described["paths"]["/models/{name}"]["get"]["responses"]) == {"200", "404"}
    assert "HTTPValidationError" not in described["components"]["schemas"]


def test_a_request_as_described_is_taken(
    client: httpx.Client, described: dict[str, Any], bundle: Bundle, encode: Callable[..., bytes], draw_images: Draw
) -> None:
    image = draw_images(42, 1)[0]
    body = {"images": [base64.b64encode(encode(image)).decode(), image.tolist()]}
    schema = {"$ref": "#/components/schemas/PredictRequest", "components": described["components"]}
    jsonschema_rs.Draft202012Validator(schema).validate(body)
    reply = client.post("/predict", json=body).json()
    assert reply["model"]["digest"] == bundle.digest
    assert len(reply["results"]) == 2
