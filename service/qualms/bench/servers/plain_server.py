"""The server that the benchmark compares with: a plain FastAPI route with a response model, one model run per request.

Its replies equal those of the service, but it decodes with Pillow, and has no batching, deadlines, metrics or limits of
its own. Run it with `python -m qualms.bench.servers.plain_server MODEL PORT`.
"""

import sys
from uuid import uuid4

import numpy as np
import uvicorn
from fastapi import FastAPI, Request

from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import Bundle, open_bundle
from qualms.decisions.results import ResultBuilder
from qualms.decisions.verdicts import Decider, decide
from qualms.images.preprocess import preprocess_with_pillow
from qualms.inference.engine import Engine
from qualms.machine.cpu import available_cores
from qualms.replies import ModelId, PredictReply, Result
from qualms.settings import Device, load_settings
from qualms.web.reply import Status


def create_app(bundle: Bundle, device: Device = "cpu") -> FastAPI:
    """A server for one bundle; the model is loaded when this returns."""
    manifest = bundle.manifest
    engine = Engine(bundle, device, available_cores(), max_batch=1)
    rule = Decider(manifest).rule()
    model = ModelId(name=manifest.name, version=manifest.version, digest=bundle.digest)
    builder = ResultBuilder(manifest, engine.outputs)
    app = FastAPI()

    @app.get("/readyz")
    async def readyz() -> Status:
        return Status(status="ready", provider=engine.provider)

    @app.post("/predict")
    async def predict(request: Request) -> PredictReply:
        image = preprocess_with_pillow(await request.body(), manifest.input)
        outputs = engine.run_all(image[np.newaxis])
        (row,) = builder.rows(outputs, rule, decide(rule, outputs))
        result = Result.model_validate(builder.nested(rule)(row))
        return PredictReply(model=model, request_id=uuid4().hex, results=[result])

    return app


def main(model: str, port: str) -> None:
    """Serve on the loopback interface until a signal arrives."""
    bundle = open_bundle(resolve_model(model))
    app = create_app(bundle, load_settings().device)
    uvicorn.run(app, host="127.0.0.1", port=int(port), access_log=False, log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
