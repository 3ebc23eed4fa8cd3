"""The JSON of a reply to /predict, built from a batch that was judged as a whole."""

from typing import Any

import orjson
from numpy.typing import NDArray

from qualms.bundle.file import Bundle
from qualms.decisions.operating_point import OperatingPoint
from qualms.decisions.verdicts import Decider, Rule, Verdicts, decide
from qualms.inference.jobs import Answer, Batch

_OPTIONS = orjson.OPT_SERIALIZE_NUMPY


class ReplyWriter:
    """Writes replies of one model."""

    def __init__(self, bundle: Bundle, decider: Decider, output_names: list[str]) -> None:
        manifest = bundle.manifest
        self._classes = manifest.classes
        self._source = "base_probabilities" if manifest.prediction == "base" else "probabilities"
        self._model = {"name": manifest.name, "version": manifest.version, "digest": bundle.digest}
        self._decider = decider
        self._names = output_names

    def outputs(self, batch: Batch) -> dict[str, NDArray[Any]]:
        """A batch's outputs by name."""
        found: dict[str, NDArray[Any]] | None = batch.notes.get("outputs")
        if found is None:
            found = batch.notes["outputs"] = dict(zip(self._names, batch.outputs, strict=True))
        return found

    def verdicts(self, batch: Batch, asked: OperatingPoint) -> tuple[Rule, Verdicts]:
        """A batch judged by what was asked, once for all requests that asked it."""
        found: tuple[Rule, Verdicts] | None = batch.notes.get(asked)
        if found is None:
            rule = self._decider.rule(asked)
            found = batch.notes[asked] = (rule, decide(rule, self.outputs(batch)))
        return found

    def write(self, answer: Answer, asked: OperatingPoint, request_id: str) -> bytes:
        """The whole body for one request."""
        outputs = self.outputs(answer.batch)
        rule, verdicts = self.verdicts(answer.batch, asked)
        rows = range(answer.start, answer.start + answer.count)
        results = [self._result(row, outputs, rule, verdicts) for row in rows]
        return orjson.dumps({"model": self._model, "request_id": request_id, "results": results}, option=_OPTIONS)

    def _result(self, row: int, outputs: dict[str, NDArray[Any]], rule: Rule, verdicts: Verdicts) -> dict[str, Any]:
        index = int(outputs["prediction"][row])
        return {
            "prediction": {
                "index": index,
                "label": self._classes[index],
                "probability": outputs[self._source][row, index],
            },
            "dirichlet": {"alpha": outputs["alpha"][row], "precision": outputs["precision"][row]},
            "uncertainty": {
                "total": {"entropy": outputs["entropy"][row], "max_probability": outputs["max_probability"][row]},
                "epistemic": {
                    "mutual_information": outputs["mutual_information"][row],
                    "differential_entropy": outputs["differential_entropy"][row],
                    "precision": outputs["precision"][row],
                },
                "aleatoric": outputs["expected_entropy"][row],
            },
            "ood": {
                "flag": bool(verdicts.flags[row]),
                "score": rule.flag.score,
                "value": verdicts.values[row],
                "threshold": rule.flag.threshold,
                "p_value": verdicts.p_values[row],
                "target_fpr": rule.flag.target_fpr,
                "guarantee": rule.flag.guarantee,
            },
            "trust": self._trust(row, rule, verdicts),
        }

    def _trust(self, row: int, rule: Rule, verdicts: Verdicts) -> dict[str, Any]:
        found = {
            "accept": None if verdicts.accepts is None else bool(verdicts.accepts[row]),
            "score": rule.trust_score,
            "value": verdicts.trust_values[row],
            "threshold": None if rule.trust is None else rule.trust.threshold,
            "target_risk": rule.target_risk,
        }
        return found if rule.refusal is None else {**found, "refusal": rule.refusal}
