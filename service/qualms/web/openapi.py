"""The OpenAPI document, with the raw endpoints that FastAPI does not know of, and the page that shows it.

Assets are served from an installed package, so that the page works without the internet.
"""

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic.json_schema import models_json_schema
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from qualms.web.schemas import PredictReply, PredictRequest, ProblemReply

_PROBLEMS = {
    400: "The request cannot be read.",
    408: "The body did not arrive before the deadline.",
    413: "The body, an image or their number is too large.",
    415: "Not an image or a content type that is taken.",
    422: "A value, a shape or an operating point is not accepted.",
    429: "The queue cannot meet the deadline; see Retry-After.",
    503: "Loading or stopping.",
    504: "Admitted, but the deadline passed first.",
}
_BINARY = {"schema": {"type": "string", "format": "binary"}}


def describe(app: FastAPI) -> None:
    """Give `app` its document and its page."""

    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
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
    # FastAPI announces its own 422 wherever a path has a parameter; none of ours can fail to be a string.
    for operations in document["paths"].values():
        operations["get"]["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas.update(definitions["$defs"])
    document["paths"]["/predict"] = {"post": _predict()}
    return document


def _predict() -> dict[str, Any]:
    parameters = [
        _query("score", {"type": "string"}, "Another of the model's scores to flag by."),
        _query("target_fpr", _open_unit(), "Another false-alarm rate."),
        _query("guarantee", {"type": "string", "enum": ["confident", "marginal"]}, "Another guarantee."),
        _query("target_risk", _open_unit(), "Another error rate of trusted predictions."),
        _header("X-Request-ID", {"type": "string"}, "Comes back in the reply and stands in the log."),
        _header("X-Request-Timeout", {"type": "number", "exclusiveMinimum": 0}, "Seconds this request may take."),
    ]
    body = {
        "required": True,
        "content": {
            "image/*": _BINARY,
            "application/octet-stream": _BINARY,
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"images": {"type": "array", "items": _BINARY["schema"], "minItems": 1}},
                    "required": ["images"],
                }
            },
            "application/json": {"schema": {"$ref": "#/components/schemas/PredictRequest"}},
        },
    }
    good = {
        "description": "One result an image.",
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/PredictReply"}}},
        "headers": {
            "X-Request-ID": {"schema": {"type": "string"}},
            "Server-Timing": {"schema": {"type": "string"}, "description": "Milliseconds of queue, decode, inference."},
        },
    }
    problems = {str(status): problem(text) for status, text in _PROBLEMS.items()}
    problems["429"]["headers"] = {"Retry-After": {"schema": {"type": "integer", "minimum": 1}}}
    return {
        "tags": ["predict"],
        "summary": "Predict the class of one or several images, and how far to believe it.",
        "operationId": "predict",
        "parameters": parameters,
        "requestBody": body,
        "responses": {"200": good, **problems},
    }


def problem(text: str) -> dict[str, Any]:
    """An error reply of the document."""
    schema = {"$ref": "#/components/schemas/ProblemReply"}
    return {"description": text, "content": {"application/problem+json": {"schema": schema}}}


def _query(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": text}


def _header(name: str, schema: dict[str, Any], text: str) -> dict[str, Any]:
    return {**_query(name, schema, text), "in": "header"}


def _open_unit() -> dict[str, Any]:
    return {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
