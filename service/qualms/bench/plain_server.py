"""The server that the benchmark compares with: a plain FastAPI route with a response model, one model run per request.

Its replies equal those of the service, but it has no batching, deadlines, metrics or limits. Run it with
`python -m qualms.bench.plain_server MODEL PORT`.
"""

import sys
from uuid import uuid4

import numpy as np
import uvicorn
from fastapi import FastAPI, Request

from qualms.bundle.embedded import resolve
from qualms.bundle.file import Bundle, open_bundle
from qualms.bundle.runtime import Outputs
from qualms.decisions.verdicts import Decider, Rule, decide
from qualms.images.preprocess import preprocess
from qualms.inference.cpu import available_cores
from qualms.inference.engine import Engine
from qualms.settings import Device, load_settings
from qualms.web.schemas import (
    Dirichlet,
    Epistemic,
    ModelId,
    Ood,
    Prediction,
    PredictReply,
    Result,
    Status,
    Total,
    Trust,
    Uncertainty,
)


def create_app(bundle: Bundle, device: Device = "cpu") -> FastAPI:
    """A server for one bundle; the model is loaded when this returns."""
    manifest = bundle.manifest
    engine = Engine(bundle, device, available_cores(), max_batch=1)
    rule = Decider(manifest).rule()
    model = ModelId(name=manifest.name, version=manifest.version, digest=bundle.digest)
    source = "base_probabilities" if manifest.prediction == "base" else "probabilities"
    app = FastAPI()

    @app.get("/readyz")
    async def readyz() -> Status:
        return Status(status="ready", provider=engine.provider)

    @app.post("/predict")
    async def predict(request: Request) -> PredictReply:
        image = preprocess(await request.body(), manifest.input)
        outputs = engine.run_all(image[np.newaxis])
        result = _result(outputs, source, manifest.classes, rule)
        return PredictReply(model=model, request_id=uuid4().hex, results=[result])

    return app


def _result(outputs: Outputs, source: str, classes: list[str], rule: Rule) -> Result:
    """The result for the only image of a run."""
    index = int(outputs["prediction"][0])
    value = {name: float(outputs[name][0]) for name in outputs if outputs[name].ndim == 1}
    verdicts = decide(rule, outputs)
    return Result(
        prediction=Prediction(index=index, label=classes[index], probability=float(outputs[source][0, index])),
        dirichlet=Dirichlet(alpha=outputs["alpha"][0].tolist(), precision=value["precision"]),
        uncertainty=Uncertainty(
            total=Total(entropy=value["entropy"], max_probability=value["max_probability"]),
            epistemic=Epistemic(
                mutual_information=value["mutual_information"],
                differential_entropy=value["differential_entropy"],
                precision=value["precision"],
            ),
            aleatoric=value["expected_entropy"],
        ),
        ood=Ood(
            flag=bool(verdicts.flags[0]),
            score=rule.flag.score,
            value=float(verdicts.values[0]),
            threshold=rule.flag.threshold,
            p_value=float(verdicts.p_values[0]),
            target_fpr=rule.flag.target_fpr,
            guarantee=rule.flag.guarantee,
        ),
        trust=Trust(
            accept=None if verdicts.accepts is None else bool(verdicts.accepts[0]),
            score=rule.trust_score,
            value=float(verdicts.trust_values[0]),
            threshold=None if rule.trust is None else rule.trust.threshold,
            target_risk=rule.target_risk,
            refusal=rule.refusal,
        ),
    )


def main(model: str, port: str) -> None:
    """Serve on the loopback interface until a signal arrives."""
    bundle = open_bundle(resolve(model))
    app = create_app(bundle, load_settings().device)
    uvicorn.run(app, host="127.0.0.1", port=int(port), access_log=False, log_level="warning")


if __name__ == "__main__":
    main(*sys.argv[1:])
