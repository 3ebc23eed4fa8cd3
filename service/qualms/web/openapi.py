"""The OpenAPI document, including `POST /predict`, which is not a FastAPI route, and the page that displays it.

The page's assets are served from an installed package, so that it works without internet access.
"""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from qualms.replies import PredictReply, ProblemReply
from qualms.web.bodies.parsing import JSON, MULTIPART, RAW_IMAGE_TYPES
from qualms.web.parameters import HEADERS, QUERY_PARAMETERS
from qualms.web.predict import PATH as PREDICT_PATH
from qualms.web.problems import MEDIA_TYPE, PREDICT_KINDS, Kind
from qualms.web.reply import PredictRequest

_BINARY = {"schema": {"type": "string", "format": "binary"}}


def describe(app: FastAPI, needs_key: Callable[[str], bool]) -> None:
    """Add the document and its page to `app`; `needs_key`: whether a path needs an API key if the service has keys."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
            _add_keys(app.openapi_schema, needs_key)
        return app.openapi_schema

    app.openapi = document  # type: ignore[method-assign]
    app.mount("/docs/assets", StaticFiles(packages=[("fastapi_offline", "static")]), name="docs-assets")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="Qualms",
            swagger_js_url="/docs/assets/swagger-ui-bundle.js",
            swagger_css_url="/docs/assets/swagger-ui.css",
            swagger_favicon_url="/docs/assets/favicon.png",
        )


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title="Qualms",
        version="1",
        description="Tells when an image classifier does not know: class, Dirichlet α, uncertainties, OOD flag, trust.",
        routes=app.routes,
    )
    _, definitions = models_json_schema(
        [(PredictReply, "serialization"), (PredictRequest, "serialization"), (ProblemReply, "serialization")],
        ref_template="#/components/schemas/{model}",
    )
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    # FastAPI documents a 422 for every path parameter; ours are strings, which cannot be invalid.
    for operations in document["paths"].values():
        operations["get"]["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas.update(definitions["$defs"])
    document["paths"][PREDICT_PATH] = {"post": _predict()}
    document["paths"][f"/models/{{name}}{PREDICT_PATH}"] = {"post": _predict_by_name()}
    return document


def _add_keys(document: dict[str, Any], needs_key: Callable[[str], bool]) -> None:
    """Add how keys are sent, and the replies to requests without a valid one. Whether keys are needed is a setting."""
    document["components"]["securitySchemes"] = {
        "bearer": {"type": "http", "scheme": "bearer", "description": "An API key, if the service needs one."},
        "api_key": {"type": "apiKey", "in": "header", "name": "X-API-Key"},
    }
    for path, operations in document["paths"].items():
        if not needs_key(path):
            continue
        for operation in operations.values():
            operation["security"] = [{}, {"bearer": []}, {"api_key": []}]
            for kind in (Kind.UNAUTHORIZED, Kind.FORBIDDEN, Kind.RATE_LIMITED):
                operation["responses"].setdefault(str(kind.status), problem_response(f"{kind.title}."))


def _predict() -> dict[str, Any]:
    parameters = [
        *(_parameter("query", name, one.description, one.schema) for name, one in QUERY_PARAMETERS.items()),
        *(_parameter("header", name, description, schema) for name, (description, schema) in HEADERS.items()),
    ]
    form = {
        "type": "object",
        "properties": {"images": {"type": "array", "items": _BINARY["schema"], "minItems": 1}},
        "required": ["images"],
    }
    body = {
        "required": True,
        "content": {
            **dict.fromkeys(RAW_IMAGE_TYPES, _BINARY),
            MULTIPART: {"schema": form},
            JSON: {"schema": {"$ref": "#/components/schemas/PredictRequest"}},
        },
    }
    good = {
        "description": "One result per image.",
        "content": {JSON: {"schema": {"$ref": "#/components/schemas/PredictReply"}}},
        "headers": {
            "X-Request-ID": {"schema": {"type": "string"}},
            "Server-Timing": {"schema": {"type": "string"}, "description": "Milliseconds of queue, decode, inference."},
        },
    }
    titles: dict[int, list[str]] = {}
    for kind in PREDICT_KINDS:
        if kind is not Kind.INTERNAL:
            titles.setdefault(kind.status, []).append(f"{kind.title}.")
    problems = {str(status): problem_response(" ".join(sentences)) for status, sentences in titles.items()}
    problems["429"]["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    return {
        "tags": ["predict"],
        "summary": "Predict the class of one or several images, with its uncertainty.",
        "operationId": "predict",
        "parameters": parameters,
        "requestBody": body,
        "responses": {"200": good, **problems},
    }


def _predict_by_name() -> dict[str, Any]:
    """`POST /predict` with the name of the model in the path."""
    predict = _predict()
    name = {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}, "description": "The model."}
    return {
        **predict,
        "summary": "The same for the model of this name.",
        "operationId": "predict_by_name",
        "parameters": [name, *predict["parameters"]],
        "responses": {**predict["responses"], "404": problem_response("No such model.")},
    }


def problem_response(description: str) -> dict[str, Any]:
    """An error reply of the document."""
    schema = {"$ref": "#/components/schemas/ProblemReply"}
    return {"description": description, "content": {MEDIA_TYPE: {"schema": schema}}}


def _parameter(location: str, name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": location, "required": False, "schema": schema, "description": description}
