"""The outputs of the whole graph: their names and order, and how they depend on each other."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from qualms.bundle.manifest import Predictor
from qualms.bundle.scores import SCORES
from qualms_training.meta.dirichlet import dirichlet_scores
from qualms_training.meta.graph import BundleGraph
from qualms_training.meta.joined_alpha import MIN_EVIDENCE

MakeGraph = Callable[[Predictor], BundleGraph]
DIRICHLET = (
    *("probabilities", "alpha", "entropy", "max_probability", "mutual_information", "differential_entropy"),
    *("precision", "log_precision", "expected_entropy", "error_probability"),
)


class Run(NamedTuple):
    graph: BundleGraph
    images: Tensor
    outputs: dict[str, Tensor]
    logits: Tensor
    log_alpha: Tensor
    classes: int

    @property
    def source(self) -> Tensor:
        """Logits of the network that predicts, (N, K)."""
        return self.logits if self.graph.predicts_by == "base" else self.log_alpha


@pytest.fixture(scope="module", params=["pooled-base", "pooled-meta", "published-base", "published-meta"])
def run(request: pytest.FixtureRequest) -> Run:
    form, prediction = request.param.split("-")
    make: MakeGraph = request.getfixturevalue(f"{form}_graph")
    graph = make(prediction)
    shape, classes = ((16, 16, 3), 4) if form == "pooled" else ((32, 32, 1), 10)
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (60, *shape), dtype=np.uint8))
    with torch.inference_mode():
        logits, taps = graph.extractor(images)
        log_alpha = graph.meta_model(taps)
        return Run(graph, images, graph.named(images), logits.double(), log_alpha.double(), classes)


def test_outputs_have_the_names_and_the_order_of_the_bundle(run: Run) -> None:
    pooled = run.graph.flag_score.density is not None
    distance = ("distance",) if pooled else ()
    assert run.graph.outputs == (
        *("prediction", "base_probabilities", *DIRICHLET, "predicted_error", "meta_mutual_information", *distance),
        *("fused", "fused_terms", "meta_alpha"),
    )
    scores = [name for name in SCORES if pooled or name != "distance"]
    assert [name for name in run.graph.outputs if name in SCORES] == scores


def test_outputs_have_one_row_per_image_and_the_documented_types(run: Run) -> None:
    n, terms = len(run.images), len(run.graph.flag_score.names)
    widths = {
        "base_probabilities": run.logits.shape[1],
        **dict.fromkeys(("probabilities", "alpha", "meta_alpha"), run.classes),
        "fused_terms": terms,
    }
    for name, values in run.outputs.items():
        assert values.dtype == (torch.int64 if name == "prediction" else torch.float32), name
        assert values.shape == ((n, widths[name]) if name in widths else (n,)), name
        assert torch.isfinite(values).all(), name


def test_prediction_and_predicted_error_are_those_of_the_network_that_predicts(run: Run) -> None:
    assert torch.equal(run.outputs["prediction"], run.source.argmax(dim=1))
    probabilities = run.source.softmax(dim=1)
    error = probabilities.sum(dim=1) - probabilities.amax(dim=1)
    np.testing.assert_allclose(run.outputs["predicted_error"], error, rtol=1e-5)
    np.testing.assert_allclose(run.outputs["base_probabilities"], run.logits.softmax(dim=1), rtol=1e-5, atol=1e-7)


def test_the_largest_alpha_belongs_to_the_served_class(run: Run) -> None:
    for name in ("alpha", "probabilities"):
        assert torch.equal(run.outputs[name].argmax(dim=1), run.outputs["prediction"])


def test_alpha_joins_the_tempered_softmax_with_evidence_from_the_flag_score(run: Run) -> None:
    outputs, joined = run.outputs, run.graph.joined_alpha
    p = (run.source * joined.inverse_temperature).softmax(dim=1)
    evidence = outputs["precision"].double() - run.classes
    np.testing.assert_allclose(outputs["alpha"], 1 + evidence.unsqueeze(1) * p, rtol=1e-4)
    assert (evidence >= 0.99 * MIN_EVIDENCE).all()
    order = outputs["fused"].argsort()
    assert (outputs["precision"][order].diff() <= 0).all()


def test_scores_are_those_of_the_joined_alpha(run: Run) -> None:
    expected = dirichlet_scores(run.outputs["alpha"].double().log())
    for name in DIRICHLET:
        np.testing.assert_allclose(run.outputs[name], getattr(expected, name), rtol=1e-4, atol=1e-5, err_msg=name)


def test_the_papers_alpha_and_its_mutual_information_are_those_of_the_meta_model(run: Run) -> None:
    np.testing.assert_allclose(run.outputs["meta_alpha"], run.log_alpha.exp(), rtol=1e-5)
    expected = dirichlet_scores(run.log_alpha).mutual_information
    np.testing.assert_allclose(run.outputs["meta_mutual_information"], expected, rtol=1e-5, atol=1e-7)


def test_the_flag_score_is_the_sum_of_its_terms(run: Run) -> None:
    np.testing.assert_allclose(run.outputs["fused"], run.outputs["fused_terms"].sum(dim=1), rtol=1e-5, atol=1e-5)
