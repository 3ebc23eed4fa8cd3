"""The OpenAPI document agrees with the real replies."""

import base64
import re
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
def openapi(client: httpx.Client) -> dict[str, Any]:
    parsed: dict[str, Any] = client.get("/openapi.json").json()
    return parsed


def check(openapi: dict[str, Any], response: httpx.Response, path: str, method: str) -> None:
    """Status, media type, headers and body of a reply agree with the document."""
    documented = openapi["paths"][path][method]["responses"][str(response.status_code)]
    media_type = response.headers["content-type"].partition(";")[0]
    schema = documented["content"][media_type]["schema"]
    body = response.json() if media_type.endswith("json") else response.text
    jsonschema_rs.Draft202012Validator({**schema, "components": openapi["components"]}).validate(body)
    for name in documented.get("headers", {}):
        assert name in response.headers


@pytest.mark.parametrize(
    "path",
    [
        "/livez",
        "/readyz",
        "/models",
        "/models/tiny",
        "/models/other",
        "/metrics",
        "/status",
        "/models/tiny/calibration",
    ],
)
def test_replies_of_get_routes_agree_with_the_document(
    client: httpx.Client, openapi: dict[str, Any], path: str
) -> None:
    template = re.sub("(?<=^/models/)[^/]+", "{name}", path)
    check(openapi, client.get(path), template, "get")


def test_openmetrics_agrees_with_the_document(client: httpx.Client, openapi: dict[str, Any]) -> None:
    response = client.get("/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"})
    check(openapi, response, "/metrics", "get")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ({}, 200),
        ({"params": "score=precision&target_fpr=0.3&guarantee=marginal&target_risk=0.2"}, 200),
        ({"params": "explain=true"}, 200),
        ({"params": "alpha=top10"}, 200),
        ({"params": "alpha=all"}, 200),
        ({"params": "alpha=none"}, 200),
        ({"params": "alpha=top10&explain=true"}, 200),
        ({"params": "alpha=none&explain=true"}, 200),
        ({"params": "alpha=top5"}, 422),
        ({"params": "coverage=0.9"}, 200),
        ({"params": "coverage=0.01"}, 200),
        ({"params": "guarantee=by-class&target_fpr=0.05"}, 200),
        ({"params": "guarantee=by-class&target_fpr=0.05&coverage=0.5&explain=true"}, 200),
        ({"params": "coverage=0.9999"}, 422),
        ({"content": b""}, 400),
        ({"content": bytes(5001)}, 413),
        ({"content": b"?"}, 415),
        ({"params": "target_fpr=1"}, 422),
        ({"headers": {"content-type": "image/png", "x-request-timeout": "1e-9"}}, 422),
        ({"tasks": 10**9}, 429),
    ],
)
def test_replies_to_predictions_agree_with_the_document(
    start_service: Callable[..., httpx.Client],
    openapi: dict[str, Any],
    encode: Callable[..., bytes],
    draw_images: Draw,
    request_: dict[str, Any],
    status: int,
) -> None:
    state = ServiceState(in_progress=lambda: request_.get("tasks", 0))
    client = start_service(state=state, max_body_bytes=5000)
    good = {"content": encode(draw_images(41, 1)[0]), "headers": {"content-type": "image/png"}}
    response = client.post(
        "/predict", **{**good, **{name: value for name, value in request_.items() if name != "tasks"}}
    )
    assert response.status_code == status
    check(openapi, response, "/predict", "post")


@pytest.mark.parametrize("alpha", [None, "top10", "all", "none"])
@pytest.mark.parametrize("explain", ["false", "true"])
def test_replies_of_a_model_with_many_classes_agree_with_the_document(
    start_service: Callable[..., httpx.Client],
    openapi: dict[str, Any],
    many_classes_bundle: Bundle,
    alpha: str | None,
    explain: str,
) -> None:
    client = start_service(many_classes_bundle.path)
    params = {"explain": explain, **({} if alpha is None else {"alpha": alpha})}
    response = client.post("/predict", json={"images": [[[1, 2], [3, 4]], [[200]]]}, params=params)
    assert response.status_code == 200
    check(openapi, response, "/predict", "post")
    for result in response.json()["results"]:
        parts = [result["dirichlet"], *([result["explanation"]["meta"]] if explain == "true" else ())]
        for part in parts:
            assert len(part.get("alpha", [])) == (150 if alpha == "all" else 0)
            assert len(part.get("top", [])) == (10 if alpha in (None, "top10") else 0)
            assert part.get("precision", 0) > 0 or "alpha" in part


def test_a_trust_refusal_agrees_with_the_document(
    start_service: Callable[..., httpx.Client],
    openapi: dict[str, Any],
    tmp_path: Any,
    graph: bytes,
    manifest: Manifest,
) -> None:
    operating = manifest.operating.model_copy(update={"target_risk": 1e-6})
    strict = write_bundle(tmp_path / "strict.onnx", graph, manifest.model_copy(update={"operating": operating}))
    client = start_service(strict.path)
    response = client.post("/predict", json={"images": [[[1, 2], [3, 4]]]})
    assert response.json()["results"][0]["trust"]["accept"] is None
    check(openapi, response, "/predict", "post")
    check(openapi, client.get("/models/tiny"), "/models/{name}", "get")


@pytest.mark.parametrize("which", ["worst_manifest", "unlabelled_manifest", "kept_manifest"])
def test_replies_of_other_calibrations_agree_with_the_document(
    start_service: Callable[..., httpx.Client],
    openapi: dict[str, Any],
    tmp_path: Any,
    graph: bytes,
    request: pytest.FixtureRequest,
    which: str,
) -> None:
    client = start_service(write_bundle(tmp_path / "tiny.onnx", graph, request.getfixturevalue(which)).path)
    response = client.post("/predict", json={"images": [[[1, 2], [3, 4]]]})
    assert response.status_code == 200
    check(openapi, response, "/predict", "post")
    for path in ("/models", "/models/tiny"):
        check(openapi, client.get(path), path.replace("tiny", "{name}"), "get")


def test_the_document_describes_the_values_of_coverage_guarantee_and_alpha(openapi: dict[str, Any]) -> None:
    parameters = {one["name"]: one["schema"] for one in openapi["paths"]["/predict"]["post"]["parameters"]}
    assert parameters["guarantee"] == {"type": "string", "enum": ["confident", "marginal", "by-class"]}
    assert parameters["alpha"] == {"type": "string", "enum": ["top10", "all", "none"]}
    assert parameters["coverage"] == {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}


def test_replies_while_draining_agree_with_the_document(
    start_service: Callable[..., httpx.Client], openapi: dict[str, Any]
) -> None:
    state = ServiceState()
    client = start_service(state=state)
    state.draining = True
    check(openapi, client.get("/readyz"), "/readyz", "get")


def test_the_document_lists_all_parameters_bodies_and_statuses(openapi: dict[str, Any]) -> None:
    operation = openapi["paths"]["/predict"]["post"]
    queries = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "query"}
    headers = {parameter["name"] for parameter in operation["parameters"] if parameter["in"] == "header"}
    assert queries == {"explain", "alpha", *(field.name for field in fields(OperatingPoint))}
    assert headers == {"X-Request-ID", "X-Request-Timeout"}
    assert set(operation["requestBody"]["content"]) == {
        "image/*",
        "application/octet-stream",
        "multipart/form-data",
        "application/json",
    }
    assert set(operation["responses"]) == {"200", "400", "401", "403", "408", "413", "415", "422", "429", "503", "504"}


def test_the_document_lists_all_routes_and_no_unused_error(openapi: dict[str, Any]) -> None:
    assert set(openapi["paths"]) == {
        "/livez",
        "/readyz",
        "/models",
        "/models/{name}",
        "/models/{name}/calibration",
        "/metrics",
        "/status",
        "/predict",
        "/models/{name}/predict",
    }
    assert set(openapi["paths"]["/models/{name}"]["get"]["responses"]) == {"200", "401", "403", "404", "429"}
    assert "HTTPValidationError" not in openapi["components"]["schemas"]


def test_a_request_that_agrees_with_the_document_is_accepted(
    client: httpx.Client, openapi: dict[str, Any], bundle: Bundle, encode: Callable[..., bytes], draw_images: Draw
) -> None:
    image = draw_images(42, 1)[0]
    body = {"images": [base64.b64encode(encode(image)).decode(), image.tolist()]}
    schema = {"$ref": "#/components/schemas/PredictRequest", "components": openapi["components"]}
    jsonschema_rs.Draft202012Validator(schema).validate(body)
    reply = client.post("/predict", json=body).json()
    assert reply["model"]["digest"] == bundle.digest
    assert len(reply["results"]) == 2
