"""The ordinary routes: models, health, metrics and documentation."""

from typing import Any, TypeAlias

import orjson
from fastapi import FastAPI, Request, Response
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse

from qualms.bundle.manifest import Manifest
from qualms.replies import RequestLimits
from qualms.telemetry.metrics import OPEN_METRICS, LimitedExposition
from qualms.web.openapi import problem_response
from qualms.web.predict import PATH as PREDICT_PATH
from qualms.web.problems import MEDIA_TYPE, Kind, Problem, from_error, quoted
from qualms.web.reply import ModelList, ModelReply, ModelSummary, Status
from qualms.web.served_model import ServedModel
from qualms.web.state import ServiceState

_ROUTES = {
    PREDICT_PATH: "predict",
    "/metrics": "metrics",
    "/docs": "docs",
    "/openapi.json": "docs",
    "/": "page",
    "/status": "status",
}
Responses: TypeAlias = dict[int | str, dict[str, Any]]
_ARRAYS = {"scores", "wrong", "trust", "predictions", "label_scores", "settings", "fingerprints"}
"""parts of a calibration that are too large for a reply"""
METRICS_PATH = "/metrics"
HEALTH = ("/livez", "/readyz", "/healthz")


def route_name(path: str) -> str:
    """The route label of a path in metrics and logs."""
    if path in HEALTH:
        return "health"
    if path == "/models" or path.startswith("/models/"):
        return "models"
    if path.startswith(("/docs/", "/page/")):
        return path.split("/")[1]
    return _ROUTES.get(path, "other")


def add_routes(app: FastAPI, state: ServiceState, registry: CollectorRegistry, limits: RequestLimits) -> None:
    """Add all routes except `POST /predict`."""

    not_ready: Responses = {503: problem_response("Loading or stopping.")}
    unknown: Responses = {404: problem_response("No such model.")}
    exposition: Responses = {200: {"content": {OPEN_METRICS: {"schema": {"type": "string"}}}}}

    limited = LimitedExposition(registry)

    @app.get("/livez", tags=["health"], summary="Is the process alive?", response_model=Status)
    @app.get("/healthz", tags=["health"], include_in_schema=False)
    async def livez() -> Response:
        return _json({"status": "alive"})

    @app.get(
        "/readyz",
        tags=["health"],
        summary="Is the service ready for requests?",
        response_model=Status,
        responses=not_ready,
    )
    async def readyz() -> Response:
        if state.model is not None and state.model.why_failing:
            state.model.probe()
        if state.model is None or state.why_not_ready:
            raise Problem(Kind.UNAVAILABLE, state.why_not_ready or "The model is still loading.")
        return _json({"status": "ready", "provider": state.model.engine.provider})

    @app.get("/models", tags=["models"], summary="The models being served.", response_model=ModelList)
    async def models() -> Response:
        summaries = [] if state.model is None else [_summary(state.model).model_dump()]
        return _json({"models": summaries, "limits": limits.model_dump()})

    @app.get("/models/{name}", tags=["models"], summary="One model.", response_model=ModelReply, responses=unknown)
    async def model(name: str) -> Response:
        if state.model is None or state.model.bundle.manifest.name != name:
            raise Problem(Kind.NOT_FOUND, f"There is no model {quoted(name)} here.")
        manifest = state.model.bundle.manifest
        document = manifest.model_dump(
            mode="json", exclude={"golden": True, "calibration": _ARRAYS, "labelled_calibration": _ARRAYS}
        )
        return _json({**_summary(state.model).model_dump(), "manifest": document})

    @app.get(METRICS_PATH, tags=["health"], response_class=PlainTextResponse, responses=exposition)
    async def metrics(request: Request) -> Response:
        body, content_type = limited(request.headers.get("accept", ""))
        return Response(body, media_type=None, headers={"content-type": content_type})

    @app.exception_handler(HTTPException)
    @app.exception_handler(Exception)
    @app.exception_handler(Problem)
    async def failed(request: Request, error: Exception) -> Response:
        problem = _framework_problem(request, error) if isinstance(error, HTTPException) else from_error(error)
        return Response(problem.body(request.state.request_id), problem.status, problem.headers, MEDIA_TYPE)


def _summary(model: ServedModel) -> ModelSummary:
    """The facts about a model that an application needs."""
    manifest = model.bundle.manifest
    rule = model.decider.rule()
    operating: dict[str, Any] = {
        "ood": {
            "score": rule.flag.score,
            "threshold": rule.flag.threshold,
            "target_fpr": rule.flag.target_fpr,
            "guarantee": rule.flag.guarantee,
            "guarantee_text": rule.guarantee_text,
            "rate_bound": rule.flag.rate_bound,
            "thresholds_by_size": {
                size: model.decider.rule(size=size).flag.threshold for size in manifest.calibration.sizes
            },
        },
        "trust": {
            "score": rule.trust_score,
            "threshold": None if rule.trust is None else rule.trust.threshold,
            "target_risk": rule.target_risk,
            "accepted_if": None if rule.trust is None else rule.trust.condition,
            "refusal": rule.refusal,
        },
    }
    return ModelSummary(
        name=manifest.name,
        version=manifest.version,
        digest=model.bundle.digest,
        classes=manifest.classes,
        input=manifest.input.model_dump(),
        prediction=manifest.prediction,
        alpha=manifest.alpha,
        flag_terms=manifest.flag_terms,
        operating=operating,
        calibration=_calibration_summary(manifest),
        provider=model.engine.provider,
        max_batch=model.engine.max_batch,
        cost_seconds=dict(zip(map(str, model.engine.cost.sizes), model.engine.cost.seconds, strict=True)),
    )


def _calibration_summary(manifest: Manifest) -> dict[str, Any]:
    calibration, kept = manifest.calibration, manifest.labelled_calibration
    as_sent = calibration.as_sent
    return {
        "n": calibration.n,
        "data": calibration.data,
        "labels": calibration.has_labels,
        "kept_labels": None if kept is None else {"n": kept.n, "data": kept.data},
        "as_sent": None if as_sent is None else as_sent.model_dump(),
        "observed": calibration.observed,
        "trimmed": calibration.trimmed,
    }


def nothing_at(path: str) -> Problem:
    """404."""
    return Problem(Kind.NOT_FOUND, f"There is nothing at {quoted(path)}.")


def _framework_problem(request: Request, error: HTTPException) -> Problem:
    """A sentence in place of Starlette's "Not Found"."""
    if error.status_code == 404:
        return nothing_at(request.url.path)
    if error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "GET")
        return Problem.wrong_method(request.method, allowed.replace("GET", "GET, HEAD"))
    return Problem.from_status(error.status_code, str(error.detail))


def _json(value: Any) -> Response:
    return Response(orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
