"""Transfer, from the recipe to the service: the base's classes are not the data's, so the meta-model predicts."""

import io
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from anyio.from_thread import start_blocking_portal
from PIL import Image
from rich.console import Console
from scipy.special import softmax

from qualms.bundle.file import Bundle, open_bundle
from qualms.bundle.runtime import GraphRunner
from qualms.bundle.scores import SCORES
from qualms.settings import Settings
from qualms.web.app import create_app
from qualms_training.console import Display
from qualms_training.data import load
from qualms_training.errors import ModelError, RecipeError
from qualms_training.meta.joined_alpha import temperature
from qualms_training.paper.command import make_tables
from qualms_training.paper.definition import load_benchmark
from qualms_training.paper.evaluation_protocol import Protocol
from qualms_training.paper.runner import JobResult, MethodRun
from qualms_training.recipe import Recipe, check_recipe, load_recipe
from qualms_training.reporting.evaluation import evaluate_bundle
from qualms_training.run import train_recipe
from qualms_training.stages import combine
from qualms_training.stages.context import RunContext

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
SOURCE = """
import torch

from qualms_training.models import build


def seven():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build("small", 7, 3, 16, 16)
"""
TIMEOUT = 30.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder on the import path with a module that has a network of seven classes and random weights."""
    path = tmp_path_factory.mktemp("transfer")
    (path / "source_network.py").write_text(SOURCE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(path))
        yield path


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """The tiny recipe with that network as its base."""
    tiny = load_recipe("tiny").model_dump(mode="json")
    base = {"model": "source_network:seven", "weights": "included", "weights_saw": "other-data"}
    return {**tiny, "prediction": "meta", "base": {**tiny["base"], **base}}


@pytest.fixture(scope="module")
def recipe(document: Mapping[str, Any]) -> Recipe:
    return check_recipe(dict(document), "of a test")


@pytest.fixture(scope="module")
def output(folder: Path, recipe: Recipe) -> str:
    """The console output of a whole run, which writes to the folder `run`."""
    text = io.StringIO()
    train_recipe(
        recipe,
        out=folder / "run",
        cache=folder / "cache",
        data_dir=None,
        seeds=[0],
        device=CPU,
        display=Display(Console(file=text, width=250)),
    )
    return text.getvalue()


@pytest.fixture(scope="module")
def bundle(output: str, folder: Path) -> Bundle:
    return open_bundle(folder / "run" / "seed-0" / "model.onnx")


def test_the_meta_model_predicts_and_the_base_probabilities_are_the_bases_own(bundle: Bundle) -> None:
    assert bundle.manifest.prediction == "meta"
    assert len(bundle.manifest.classes) == 4
    outputs = GraphRunner(bundle.graph)(np.asarray(load("shapes", "test").images)[:50])
    assert outputs["base_probabilities"].shape == (50, 7)
    assert outputs["alpha"].shape == outputs["probabilities"].shape == (50, 4)
    for name in ("alpha", "meta_alpha"):
        np.testing.assert_array_equal(outputs["prediction"], outputs[name].argmax(axis=1))


def test_there_is_no_accuracy_and_no_score_of_a_base_that_does_not_predict(bundle: Bundle, output: str) -> None:
    evaluation = bundle.manifest.evaluation
    assert evaluation
    assert (evaluation.base_accuracy, evaluation.identical_predictions) == (None, None)
    assert evaluation.accuracy > 30  # chance level is 25 %
    assert {row.score for row in evaluation.ood} == {row.score for row in evaluation.misclassification} == set(SCORES)
    assert "source_network:seven: " in output
    assert "its classes are not the data's" in output
    assert f"Test accuracy: meta-model {evaluation.accuracy:.2f} %" in output


def test_provenance_records_the_source_of_the_weights(bundle: Bundle, recipe: Recipe) -> None:
    origin = bundle.manifest.provenance
    assert Recipe.model_validate(origin.recipe) == recipe
    assert (origin.base["model"], origin.base["weights"]) == ("source_network:seven", "included")
    assert origin.recipe["base"]["weights_saw"] == "other-data"


def test_trust_is_calibrated_on_the_meta_models_predictions(bundle: Bundle) -> None:
    evaluation, calibration = bundle.manifest.evaluation, bundle.manifest.calibration
    assert evaluation
    assert calibration.wrong is not None
    assert 100 * len(calibration.wrong) / calibration.n == pytest.approx(100 - evaluation.accuracy, abs=5)
    for row in evaluation.realised:
        assert row.realised is None or row.realised <= 2 * row.target


def test_the_joined_alpha_has_the_meta_models_probabilities(
    bundle: Bundle, folder: Path, recipe: Recipe, display: Display
) -> None:
    context = RunContext(recipe, 0, folder / "run" / "seed-0", folder / "cache", None, CPU, display)
    part = context.data.parts["fit"]
    outputs = GraphRunner(bundle.graph)(part.images)
    logits = np.log(outputs["meta_alpha"])
    fitted = combine.results(context)["temperature"]
    assert fitted == pytest.approx(temperature(logits, part.labels), rel=1e-3)
    evidence = outputs["precision"] - len(bundle.manifest.classes)
    expected = 1 + evidence[:, None] * softmax(logits.astype(np.float64) / fitted, axis=1)
    np.testing.assert_allclose(outputs["alpha"], expected, rtol=1e-3)
    error = 1 - softmax(logits.astype(np.float64), axis=1).max(axis=1)
    np.testing.assert_allclose(outputs["predicted_error"], error, rtol=1e-3, atol=1e-6)


def test_a_finished_bundle_can_be_evaluated_again(bundle: Bundle, display: Display) -> None:
    assert evaluate_bundle(bundle.path, None, display=display) == bundle.manifest.evaluation


@contextmanager
def serving(model: Path) -> Iterator[Callable[..., httpx.Response]]:
    """Run the application in this process; yields a function (method, path, options of httpx) → response."""
    app = create_app(Settings(model=str(model), device="cpu", threads=1, decode_threads=1))

    async def answer(method: str, path: str, options: dict[str, Any]) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://service") as client:
            return await client.request(method, path, **options)

    with start_blocking_portal() as portal, portal.wrap_async_context_manager(app.router.lifespan_context(app)):

        def request(method: str, path: str, **options: Any) -> httpx.Response:
            reply: httpx.Response = portal.call(answer, method, path, options)
            return reply

        deadline = time.monotonic() + TIMEOUT
        while request("GET", "/readyz").status_code != 200:
            assert time.monotonic() < deadline
        yield request


def test_the_service_returns_the_meta_models_prediction(bundle: Bundle) -> None:
    pixels = np.asarray(load("shapes", "test").images[0])
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    expected = GraphRunner(bundle.graph)(pixels[None])
    with serving(bundle.path) as request:
        assert request("GET", "/models").json()["models"][0]["prediction"] == "meta"
        reply = request("POST", "/predict", content=file.getvalue(), headers={"content-type": "image/png"})
    assert reply.status_code == 200
    (result,) = reply.json()["results"]
    index = int(expected["prediction"][0])
    assert result["prediction"]["label"] == bundle.manifest.classes[index]
    assert result["prediction"]["probability"] == pytest.approx(expected["probabilities"][0, index], rel=1e-4)
    assert len(result["dirichlet"]["alpha"]) == 4


def test_a_base_with_other_classes_is_an_error_that_names_prediction_meta(
    folder: Path, tiny: Callable[[Mapping[str, Any]], Recipe], tmp_path: Path, display: Display
) -> None:
    given = {"base.model": "source_network:seven", "base.weights": "included", "base.weights_saw": "other-data"}
    with pytest.raises(ModelError, match="has 7 logits, and the data have 4 classes; with prediction = 'meta'"):
        train_recipe(
            tiny(given), out=tmp_path / "run", cache=tmp_path, data_dir=None, seeds=[0], device=CPU, display=display
        )


# The table

BENCHMARK = """
name = "mine"
description = "Transfer."
paper_id = "CIFAR10"
recipes = ["RECIPE"]
protocols = ["fair"]
columns = ["textures", "nothing"]
other_ids = ["STL10"]
one_base = true

[methods.fine-tune]
epochs = 2

[methods.fine-tune-meta]
epochs = 2
"""


@pytest.fixture
def file(recipe: Recipe, tmp_path: Path) -> Path:
    """The recipe as a file."""
    text = (resources.files("qualms_training") / "recipes" / "tiny.toml").read_text()
    text = text.replace(
        'model = "small"', 'model = "source_network:seven"\nweights = "included"\nweights_saw = "other-data"'
    )
    path = tmp_path / "mine.toml"
    path.write_text('prediction = "meta"\n' + text)
    assert load_recipe(str(path)) == recipe
    return path


def test_the_table_has_the_methods_that_predict_and_no_row_for_the_base(folder: Path, file: Path) -> None:
    out, text = file.parent / "out", io.StringIO()
    display = Display(Console(file=text, width=400))
    definition = file.parent / "benchmark.toml"
    definition.write_text(BENCHMARK.replace("RECIPE", str(file)))
    benchmark = load_benchmark(str(definition))

    def tables(*only: str) -> str:
        make_tables(
            benchmark, out=out, cache=folder / "cache", data_dir=None, device=CPU, seeds=2, only=only, display=display
        )
        return (out / "mine.md").read_text()

    written = tables()
    assert {path.name for path in (out / "results").iterdir()} == {"fair"}
    keys = {path.name for path in (out / "results" / "fair").iterdir()}
    assert keys == {"fine-tune", "fine-tune-meta", "ours-pooled", "pixels"}
    measured = JobResult.model_validate_json(MethodRun("ours-pooled", 1, Protocol.fair).file(out).read_text()).measured
    assert measured
    assert (measured.base_error_rate, measured.base_errors) == (None, {})
    assert measured.error_rate < 60
    assert "The base's classes are not those of the data" in written
    assert "as-published" not in written
    assert "Misclassification" not in written
    assert "Base Model" not in written
    assert "Columns of STL10: not available: there are no data for it." in written
    with pytest.raises(
        RecipeError, match="no method 'knn' to run; accepted are fine-tune, fine-tune-meta, ours-pooled"
    ):
        tables("knn")
