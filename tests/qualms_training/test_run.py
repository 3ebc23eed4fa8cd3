"""A run of a recipe makes one calibrated bundle; a second run repeats only stages whose product is missing or outdated."""

import importlib
import io
import json
import os
import random
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

from qualms.bundle.calibration_data import AsSent, CalibrationForm
from qualms.bundle.evaluation_results import Evaluation
from qualms.bundle.file import Bundle, open_bundle
from qualms.bundle.manifest import SetMethod
from qualms.bundle.runtime import GraphRunner, check_golden
from qualms.bundle.scores import SCORES
from qualms.decisions.calibration_set import CalibrationSet
from qualms.errors import OperatingPointError
from qualms.images.encodings import all_settings, parse_encodings
from qualms.images.fingerprints import fingerprints
from qualms.machine.cpu import available_cores
from qualms_training.calibration_run import STORED
from qualms_training.console import Display
from qualms_training.data import load
from qualms_training.errors import ModelError, QualmsError, RecipeError
from qualms_training.fitting.loop import Hooks, Progress
from qualms_training.meta.joined_alpha import EVIDENCE_PER_CLASS, temperature
from qualms_training.models import build, count_parameters
from qualms_training.recipe import REPORTED_ENCODINGS, Recipe, load_recipe
from qualms_training.run import train_recipe
from qualms_training.stages import Stage, base, calibrate, check, combine, evaluate, export, fit
from qualms_training.stages.context import RunContext
from qualms_training.stages.provenance import versions

pytestmark = pytest.mark.slow

Alter = Callable[[Mapping[str, Any]], Recipe]
CPU = torch.device("cpu")
MADE_BY_FIT = {f"seed-0/{name}" for name in ("meta.pt", "fit.json", "probe.npz", "stages.json")}


def run(recipe: Recipe, out: Path, only: str | None = None, *, allow_chance: bool = False) -> str:
    """Run a recipe in `out`, and return its console output."""
    output = io.StringIO()
    train_recipe(
        recipe,
        out=out,
        cache=out / "cache",
        data_dir=None,
        seeds=[0],
        device=CPU,
        only=only,
        display=Display(Console(file=output, width=200)),
        allow_chance=allow_chance,
    )
    return output.getvalue()


def context_of(recipe: Recipe, out: Path, display: Display, only: str | None = None) -> RunContext:
    return RunContext(recipe, 0, out / "seed-0", out / "cache", None, CPU, display, only)


def products(out: Path) -> dict[str, tuple[int, bytes]]:
    """Every file in the seed's folder and the cache, with its modification time and content."""
    files = [path for folder in ("seed-0", "cache") for path in (out / folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(out)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def changed(before: dict[str, tuple[int, bytes]], after: dict[str, tuple[int, bytes]]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.fixture
def copy(tiny_run: Path, tmp_path: Path) -> Path:
    """A copy of a finished run, which a test may change."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """A function that makes the test fail if a stage does its work, except the stages named and `features`."""

    def forbid(*allowed: str) -> None:
        parts: dict[str, tuple[Any, str]] = {
            "base": (base, "train_base"),
            "fit": (fit, "train_meta"),
            "combine": (combine, "save_torch"),
            "export": (export, "export_graph"),
            "calibrate": (calibrate, "write_bundle"),
            "evaluate": (evaluate, "save_plots"),
        }
        for stage, (module, name) in parts.items():
            if stage not in allowed:
                monkeypatch.setattr(
                    module, name, lambda *_, stage=stage, **__: pytest.fail(f"stage {stage} did its work")
                )

    return forbid


@pytest.fixture(scope="module")
def bundle(tiny_run: Path) -> Bundle:
    return open_bundle(tiny_run / "seed-0" / "model.onnx")


@pytest.fixture(scope="module")
def evaluation(bundle: Bundle) -> Evaluation:
    assert bundle.manifest.evaluation is not None
    return bundle.manifest.evaluation


def test_the_bundle_reproduces_its_golden_vectors(bundle: Bundle) -> None:
    check_golden(GraphRunner(bundle.graph), bundle.manifest)
    manifest = bundle.manifest
    assert (manifest.name, manifest.classes) == ("tiny", ["disc", "square", "cross", "stripes"])
    assert (manifest.input.height, manifest.input.width, manifest.input.colour) == (16, 16, "RGB")
    assert list(manifest.scores) == list(SCORES)
    assert manifest.operating == load_recipe("tiny").operating


def test_calibration_uses_the_calibration_split_and_the_exported_graph(bundle: Bundle, display: Display) -> None:
    context = context_of(load_recipe("tiny"), bundle.path.parent.parent, display)
    held_out = context.data.parts["calibration"]
    outputs = GraphRunner(bundle.graph)(held_out.images)
    calibration = bundle.manifest.calibration
    assert (calibration.n, calibration.split, calibration.data) == (1000, "calibration", "shapes")
    assert calibration.data_sha256 == load("shapes", "train").digest()
    for name, values in calibration.scores.items():
        np.testing.assert_allclose(values, outputs[name], rtol=1e-5, atol=1e-6)
    assert calibration.wrong == np.flatnonzero(outputs["prediction"] != held_out.labels).tolist()
    point = CalibrationSet(bundle.manifest).flag_point()
    # Fewer flags would mean that several images share the largest value, and no score can exceed that one.
    assert point.flags(outputs[point.score]).sum() == point.k - 1
    np.testing.assert_allclose(
        bundle.manifest.reference.class_shares, np.bincount(outputs["prediction"], minlength=4) / 1000
    )


def test_provenance_records_recipe_seed_versions_base_and_splits(bundle: Bundle) -> None:
    origin = bundle.manifest.provenance
    assert Recipe.model_validate(origin.recipe) == load_recipe("tiny")
    assert (origin.recipe_name, origin.seed) == ("tiny", 0)
    assert origin.versions == versions()
    assert origin.base["parameters"] == count_parameters(build("small", 4, 3, 16, 16))
    assert origin.base["taps"] == ["pool1", "pool2"]
    assert len(origin.base["sha256"]) == 64
    assert origin.meta["form"] == "pooled"
    assert 1 <= origin.meta["best_epoch"] <= 5
    assert origin.data["splits"][0]["sizes"] == {"train": 2000, "validation": 400, "fit": 400, "calibration": 1000}


def test_the_bundle_predicts_the_same_classes_as_the_base(evaluation: Evaluation) -> None:
    assert evaluation.identical_predictions
    assert evaluation.base_accuracy == evaluation.accuracy > 80
    assert (evaluation.test_data, evaluation.n, evaluation.protocol) == ("shapes", 2000, "fair")


def test_every_score_is_evaluated_on_every_ood_set_and_on_the_test_set_itself(evaluation: Evaluation) -> None:
    sets = ["textures", "strokes", "corrupted", "shapes (itself)"]
    assert list(dict.fromkeys(row.data for row in evaluation.ood)) == sets
    assert len(evaluation.ood) == len(sets) * (len(SCORES) + 2)
    for row in evaluation.ood:
        if row.data == "shapes (itself)":
            assert row.auroc == pytest.approx(50, abs=2), row.score


def test_the_false_alarm_rate_on_the_test_set_is_below_the_target(evaluation: Evaluation) -> None:
    rows = {(row.promise, row.target): row for row in evaluation.realised}
    assert {target for _, target in rows} == {0.05, 0.01}
    alarms = rows["false_alarm_rate", 0.05].realised
    assert alarms is not None
    assert 0 < alarms < 0.065  # three standard deviations of 2,000 images above 0.05


def test_a_run_folder_has_settings_report_evaluation_and_plots(tiny_run: Path, evaluation: Evaluation) -> None:
    settings = json.loads((tiny_run / "run.json").read_text())
    assert settings["versions"] == versions()
    assert Recipe.model_validate(settings["recipe"]) == load_recipe("tiny")
    saved = json.loads((tiny_run / "seed-0" / "evaluation.json").read_text())
    assert Evaluation.model_validate(saved) == evaluation
    report = (tiny_run / "report.md").read_text()
    assert report.startswith("# tiny 1\n")
    titles = [line.removeprefix("### ") for line in report.splitlines() if line.startswith("### ")]
    assert [title.partition(",")[0] for title in titles] == [
        *("Test set shapes", "OOD sets"),
        *["OOD detection"] * 3,
        "Misclassification detection",
        "Class probabilities on the test set",
        "Guarantees as measured on the test set",
        "By encoding",
        "False alarms by predicted class",
        "False alarms by true class",
        "Prediction sets on the test set",
    ]
    assert "identical predictions" in report
    mutual_information = next(row for row in evaluation.ood if row.score == "mutual_information")
    assert f"| mutual_information | {mutual_information.auroc:.1f} |" in report
    plots = tiny_run / "seed-0" / "plots"
    assert {path.name for path in plots.iterdir()} == {f"{score}.png" for score in SCORES}
    with Image.open(plots / "entropy.png") as image:
        image.load()


def test_a_finished_run_leaves_no_temporary_files_or_checkpoints(tiny_run: Path) -> None:
    names = {path.name for path in tiny_run.rglob("*")}
    assert not {name for name in names if name.startswith(".") or "checkpoint" in name}


def test_a_second_run_does_nothing_but_the_report(copy: Path, no_work: Callable[..., None]) -> None:
    before = products(copy)
    (copy / "report.md").unlink()
    no_work()
    output = run(load_recipe("tiny"), copy)
    assert not changed(before, products(copy))
    assert (copy / "report.md").exists()
    assert "Test accuracy" in output


def test_only_a_deleted_product_is_made_again(copy: Path, no_work: Callable[..., None]) -> None:
    before = products(copy)
    weights = torch.load(copy / "seed-0" / "meta.pt", weights_only=True)
    (copy / "seed-0" / "meta.pt").unlink()
    no_work("fit")
    run(load_recipe("tiny"), copy)
    assert changed(before, products(copy)) <= MADE_BY_FIT
    again = torch.load(copy / "seed-0" / "meta.pt", weights_only=True)
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    assert (copy / "seed-0" / "fit.json").read_bytes() == before["seed-0/fit.json"][1]


class Interrupted(BaseException):
    """Raised in place of the end of the process."""


def interrupted_at_random(train: Callable[..., Progress], steps: int, seed: int) -> Callable[..., Progress]:
    """The same training, interrupted at a random step."""
    last = random.Random(seed).randint(steps // 2, steps)

    def on_step(step: int, _: float) -> None:
        if step == last:
            raise Interrupted

    def interrupted(*arguments: Any, **options: Any) -> Progress:
        return train(*arguments, **{**options, "hooks": Hooks(on_step=on_step)})

    return interrupted


@pytest.mark.parametrize(
    ("stage", "module", "name", "steps"), [("base", base, "train_base", 128), ("fit", fit, "train_meta", 160)]
)
def test_an_interrupted_training_resumes_to_the_same_weights(
    stage: str, module: Any, name: str, steps: int, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = next((copy / "cache" / "bases").glob("*.pt")) if stage == "base" else copy / "seed-0" / "meta.pt"
    whole = torch.load(product, weights_only=True)
    product.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(module, name, interrupted_at_random(getattr(module, name), steps, seed=3))
        with pytest.raises(Interrupted):
            run(load_recipe("tiny"), copy, only=stage)
    assert not product.exists()
    run(load_recipe("tiny"), copy, only=stage)
    resumed = torch.load(product, weights_only=True)
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())
    assert not list(copy.rglob("*checkpoint*"))


@pytest.mark.parametrize("stage", [stage.value for stage in Stage if stage != "base"])
def test_a_single_stage_needs_the_products_of_earlier_stages(stage: str, tmp_path: Path) -> None:
    with pytest.raises(QualmsError, match=f"Stage '{stage}' needs the product of stage 'base'.*run --stage base"):
        run(load_recipe("tiny"), tmp_path, only=stage)
    assert {path.name for path in tmp_path.rglob("*")} == {"run.json", "cache"}


SMALL = {
    "data.limit": 50,
    "data.splits": {"train": 200, "validation": 60, "fit": 60, "calibration": 200},
    "base.epochs": 1,
    "meta.epochs": 1,
}


def test_running_the_stages_one_by_one_makes_the_same_bundle(tiny: Alter, tmp_path: Path) -> None:
    recipe = tiny(SMALL)
    assert recipe.uses_distance
    for stage in Stage:
        run(recipe, tmp_path / "stages", only=stage.value)
    run(recipe, tmp_path / "whole")
    stages, whole = (open_bundle(tmp_path / name / "seed-0" / "model.onnx").manifest for name in ("stages", "whole"))
    assert stages.graph_sha256 == whole.graph_sha256
    assert stages.evaluation == whole.evaluation is not None


def test_combine_without_cached_features_names_the_stage_features(copy: Path) -> None:
    shutil.rmtree(copy / "cache" / "features")
    (copy / "seed-0" / "flag_score.pt").unlink()
    with pytest.raises(QualmsError, match="run --stage features first"):
        run(load_recipe("tiny"), copy, only="combine")
    run(load_recipe("tiny"), copy, only="features")
    run(load_recipe("tiny"), copy, only="combine")


def test_weights_trained_with_another_seed_are_an_error_before_any_stage_runs(
    tiny: Alter, tmp_path: Path, display: Display, no_work: Callable[..., None]
) -> None:
    no_work()
    given = {"base.weights": str(tmp_path / "w.pt"), "base.weights_saw": "train-split", "base.weights_seed": 0}
    options: dict[str, Any] = {"cache": tmp_path / "cache", "data_dir": None, "device": CPU, "display": display}
    with pytest.raises(RecipeError, match="seed 1 would calibrate on some of its images"):
        train_recipe(tiny(given), out=tmp_path / "out", seeds=range(2), **options)
    assert not (tmp_path / "out").exists()


def test_a_changed_kl_weight_retrains_the_meta_model_but_not_the_base(copy: Path, tiny: Alter) -> None:
    recipe = tiny({"meta.kl_weight": 0.5})
    before = products(copy)
    run(recipe, copy, only="fit")
    assert changed(before, products(copy)) == MADE_BY_FIT
    # The files of later stages were made with the old meta-model and must not be used with the new one.
    for stage in ("export", "calibrate", "evaluate"):
        with pytest.raises(QualmsError, match="needs the product of stage 'combine'"):
            run(recipe, copy, only=stage)
    run(recipe, copy, only="combine")
    for stage in ("calibrate", "evaluate"):
        with pytest.raises(QualmsError, match="needs the product of stage 'export'"):
            run(recipe, copy, only=stage)
    run(recipe, copy, only="export")
    run(recipe, copy, only="calibrate")
    manifest = open_bundle(copy / "seed-0" / "model.onnx").manifest
    assert manifest.provenance.recipe["meta"]["kl_weight"] == 0.5
    assert manifest.evaluation is None
    untouched = {name for name in before if name.startswith("cache/")}
    assert not changed(before, products(copy)) & untouched


def test_flag_score_and_joined_alpha_are_fitted_to_the_fit_split(
    tiny_run: Path, bundle: Bundle, display: Display
) -> None:
    context = context_of(load_recipe("tiny"), tiny_run, display)
    part = context.data.parts["fit"]
    outputs = GraphRunner(bundle.graph)(part.images)
    results = json.loads((tiny_run / "seed-0" / "combine.json").read_text())
    assert results["terms"] == ["softmax", "evidence", "distance"]
    assert results["temperature"] == pytest.approx(temperature(base.logits(context, "fit"), part.labels), rel=1e-3)
    # The softmax term has mean 0 on the images that it is fitted to, and ordinary evidence or distance adds nothing.
    assert outputs["fused_terms"][:, 0].mean() == pytest.approx(0, abs=1e-3)
    assert (np.median(outputs["fused_terms"][:, 1:], axis=0) == 0).all()
    evidence = outputs["precision"] - len(bundle.manifest.classes)
    assert np.median(evidence) == pytest.approx(EVIDENCE_PER_CLASS * len(bundle.manifest.classes) / 2, rel=0.02)


def test_the_manifest_names_the_kind_of_alpha_and_the_terms_of_the_flag_score(bundle: Bundle) -> None:
    manifest = bundle.manifest
    assert manifest.alpha == "joined"
    assert manifest.flag_terms == ["softmax", "evidence", "distance"]
    assert (manifest.operating.score, manifest.operating.trust_score) == ("fused", "predicted_error")


def test_the_joined_alpha_is_calibrated_and_tells_the_same_story_as_the_flag_score(
    bundle: Bundle, evaluation: Evaluation
) -> None:
    test = load("shapes", "test")
    for images in (np.asarray(test.images), np.asarray(load("textures", "test").images)):
        outputs = GraphRunner(bundle.graph)(images)
        np.testing.assert_array_equal(outputs["alpha"].argmax(axis=1), outputs["prediction"])
        assert (np.diff(outputs["precision"][outputs["fused"].argsort()]) <= 0).all()
    quality = {row.distribution: row for row in evaluation.probabilities}
    assert quality["alpha"].ece <= quality["base"].ece + 0.5
    assert quality["alpha"].nll <= quality["base"].nll + 0.005
    assert quality["alpha"].nll < quality["meta_alpha"].nll
    aurocs = {(row.data, row.score): row.auroc for row in evaluation.ood}
    for name in ("textures", "strokes", "corrupted"):
        assert aurocs[name, "mutual_information"] >= aurocs[name, "fused"] - 0.5


def test_a_recipe_without_distance_has_a_flag_score_of_two_terms(copy: Path, tiny: Alter) -> None:
    run(tiny({"distance": False}), copy)
    bundle = open_bundle(copy / "seed-0" / "model.onnx")
    assert list(bundle.manifest.scores) == [name for name in SCORES if name != "distance"]
    assert bundle.manifest.flag_terms == ["softmax", "evidence"]
    assert "distance" not in GraphRunner(bundle.graph).outputs


def test_a_recipe_of_the_published_form_has_a_joined_alpha(tiny: Alter, tmp_path: Path) -> None:
    recipe = tiny({**SMALL, "meta.form": "published", "meta.branches": ["32-4", "16-4"], "meta.kl_weight": None})
    output = run(recipe, tmp_path)
    bundle = open_bundle(tmp_path / "seed-0" / "model.onnx")
    assert (bundle.manifest.alpha, bundle.manifest.operating.score) == ("joined", "fused")
    assert "distance" not in bundle.manifest.scores
    assert "flag score: softmax + evidence; α = 1 + n·p with temperature" in output


def test_a_changed_target_repeats_only_the_calibration(copy: Path, tiny: Alter, no_work: Callable[..., None]) -> None:
    before = products(copy)
    no_work("calibrate")
    run(tiny({"operating.target_fpr": 0.1}), copy, only="calibrate")
    assert changed(before, products(copy)) == {"seed-0/model.onnx", "seed-0/stages.json"}
    assert CalibrationSet(open_bundle(copy / "seed-0" / "model.onnx").manifest).flag_point().target_fpr == 0.1


def test_changed_encodings_and_sets_repeat_calibration_and_evaluation_but_not_the_export(
    copy: Path, tiny: Alter, no_work: Callable[..., None]
) -> None:
    before, listed = products(copy), ["png", "jpeg:40"]
    no_work("calibrate", "evaluate")
    recipe = tiny(
        {
            "calibration.as_sent": listed,
            "calibration.sets": {"method": "raps"},
            "report_encodings": ["bmp", "jpeg:40", "jpeg:30"],
            "report_limit": 50,
        }
    )
    output = run(recipe, copy)
    after = products(copy)
    made = {"model.onnx", "stages.json", "evaluation.json"}
    assert {name for name in changed(before, after) if "/plots/" not in name} == {f"seed-0/{name}" for name in made}
    assert "1,000 held-out images, sent as png, jpeg:40 (worst); wrote " in output
    manifest = open_bundle(copy / "seed-0" / "model.onnx").manifest
    assert manifest.sets == SetMethod(method="raps")
    assert manifest.evaluation is not None
    rows = [(row.encoding, row.calibrated, row.n) for row in manifest.evaluation.encodings]
    assert rows == [("bmp", True, 50), ("jpeg:40", True, 50), ("jpeg:30", False, 50)]
    for row in manifest.evaluation.sets:
        assert row.empty == 0  # a set by raps holds the most probable class
        assert row.realised is not None
        assert row.realised > row.coverage - 0.03
    report = (copy / "report.md").read_text()
    assert "| jpeg:40 | " in report
    assert "| jpeg:30 * | " in report
    no_work()
    run(recipe, copy)
    assert not changed(after, products(copy))


@pytest.mark.parametrize("form", ["worst", "by-size", "mixture"])
def test_a_run_calibrates_on_the_calibration_split_as_sent(
    form: CalibrationForm, copy: Path, tiny: Alter, display: Display
) -> None:
    listed = ["png", "jpeg:20-30"]
    recipe = tiny({"calibration.as_sent": listed, "calibration.form": form})
    run(recipe, copy, only="calibrate")
    bundle = open_bundle(copy / "seed-0" / "model.onnx")
    calibration, runner = bundle.manifest.calibration, GraphRunner(bundle.graph)
    held_out = context_of(recipe, copy, display).data.parts["calibration"]
    encodings = parse_encodings(listed)
    settings = {STORED: encodings} if form == "mixture" else {one.text: [one] for one in all_settings(encodings)}
    outputs = {
        name: runner(held_out.stored.received(bundle.manifest.input, one, 0).images) for name, one in settings.items()
    }
    assert calibration.as_sent == AsSent(encodings=listed, form=form, seed=0)
    assert [one.encoding for one in calibration.settings] == ([] if form == "mixture" else list(settings))
    assert calibration.sizes == (["same"] if form == "by-size" else [])
    envelope = np.max([np.sort(one["fused"]) for one in outputs.values()], axis=0)
    np.testing.assert_allclose(np.sort(calibration.scores["fused"]), envelope, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(calibration.fingerprints, fingerprints(held_out.images))
    assert sum(calibration.observed.values()) == 1000 * len(settings)
    assert bundle.manifest.provenance.recipe["calibration"]["as_sent"] == listed
    assert bundle.manifest.evaluation is None


def test_the_evaluation_of_a_run_has_encodings_classes_and_sets(evaluation: Evaluation, bundle: Bundle) -> None:
    assert [row.encoding for row in evaluation.encodings] == list(REPORTED_ENCODINGS)
    assert {row.n for row in evaluation.encodings} == {200}
    assert [row.encoding for row in evaluation.encodings if row.calibrated] == ["png"]
    assert [row.sets for row in evaluation.encodings[0].detected] == [3, 3]  # textures, strokes and corrupted
    for by in ("predicted", "true"):
        rows = [row for row in evaluation.classes if row.by == by]
        assert [row.label for row in rows] == bundle.manifest.classes
        assert sum(row.n for row in rows) == 2000
        alarms = next(row for row in evaluation.realised if row.promise == "false_alarm_rate" and row.target == 0.05)
        assert sum(row.flagged for row in rows) / 2000 == pytest.approx(alarms.realised)
    assert [row.coverage for row in evaluation.sets] == [0.9, 0.95, 0.99]
    assert evaluation.calibrated_on == 0
    assert bundle.manifest.calibration.observed == {"lossless, same size": 1000}


def test_a_stage_with_a_missing_product_or_a_damaged_stage_record_is_outdated(copy: Path, display: Display) -> None:
    context = context_of(load_recipe("tiny"), copy, display)
    assert export.is_up_to_date(context)
    (copy / "seed-0" / "export.json").unlink()
    assert not export.is_up_to_date(context)
    (copy / "seed-0" / "stages.json").write_text("{")
    assert not context.is_up_to_date("fit", fit.inputs_fingerprint(context), copy / "seed-0" / "meta.pt")
    context.record_stage("fit", fit.inputs_fingerprint(context))
    assert context.is_up_to_date("fit", fit.inputs_fingerprint(context), copy / "seed-0" / "meta.pt")


def test_a_damaged_base_in_the_cache_is_named_in_one_sentence(copy: Path) -> None:
    (file,) = (copy / "cache" / "bases").glob("*.pt")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=f"{file.name}.* cannot be read") as caught:
        run(load_recipe("tiny"), copy)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_of_given_weights_depends_on_their_values(
    tiny: Alter, tmp_path: Path, display: Display
) -> None:
    file = tmp_path / "weights.pt"
    recipe = tiny({"base.weights": str(file), "base.weights_saw": "train-split", "base.weights_seed": 0})
    fingerprints = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        torch.save(build("small", 4, 3, 16, 16).state_dict(), file)
        fingerprints.append(fit.inputs_fingerprint(context_of(recipe, tmp_path, display)))
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]


OWN = """
import torch
from torch import nn


class Net(nn.Sequential):
    def forward(self, x):
        return SIGN * super().forward(x)


def net(classes):
    torch.manual_seed(5)
    return Net(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, classes))
"""


@pytest.mark.parametrize("given", [{}, {"base.weights": "included", "base.weights_saw": "other-data"}])
def test_edited_code_of_the_users_model_makes_a_new_base(
    given: dict[str, str], tiny: Alter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = tiny({**SMALL, **given, "base.model": "edited:net", "base.taps": ["0", "3"]})
    images = load("shapes", "test").conformed(recipe.input.spec, range(20))
    probabilities = []
    for sign in ("1", "-1", "-1"):
        (tmp_path / "edited.py").write_text(OWN.replace("SIGN", sign))
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        importlib.invalidate_caches()
        shutil.rmtree(
            tmp_path / "__pycache__", ignore_errors=True
        )  # byte code is matched by file size and time in seconds
        run(recipe, tmp_path / "out", allow_chance=True)
        bundle = open_bundle(tmp_path / "out" / "seed-0" / "model.onnx")
        probabilities.append(GraphRunner(bundle.graph)(images)["base_probabilities"])
    assert np.abs(probabilities[0] - probabilities[1]).max() > 1e-3
    np.testing.assert_array_equal(probabilities[1], probabilities[2])
    trained = list((tmp_path / "out" / "cache").glob("bases/*.pt"))
    assert len(trained) == (0 if given else 2)


def test_a_small_change_of_the_code_of_a_given_model_is_exported(
    tiny: Alter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    given = {"base.weights": "included", "base.weights_saw": "other-data", "base.taps": ["0", "3"]}
    recipe = tiny({**SMALL, **given, "base.model": "scaled:net"})
    images = load("shapes", "test").conformed(recipe.input.spec, range(20))
    probabilities = []
    for scale in ("10", "10.06", "10.06"):  # less than features in half precision could show
        (tmp_path / "scaled.py").write_text(OWN.replace("SIGN", scale))
        monkeypatch.delitem(sys.modules, "scaled", raising=False)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
        run(recipe, tmp_path / "out", allow_chance=True)
        bundle = open_bundle(tmp_path / "out" / "seed-0" / "model.onnx")
        probabilities.append(GraphRunner(bundle.graph)(images)["base_probabilities"])
    assert np.abs(probabilities[0] - probabilities[1]).max() > 1e-4
    np.testing.assert_array_equal(probabilities[1], probabilities[2])


def test_a_failed_command_does_not_change_the_stage_record(tiny: Alter, tmp_path: Path) -> None:
    recipe = tiny({**SMALL, "distance": False})
    run(recipe, tmp_path / "out")
    record = tmp_path / "out" / "seed-0" / "stages.json"
    before = record.read_bytes()
    with pytest.raises(QualmsError, match="needs the product of stage 'fit'"):
        run(tiny({**SMALL, "distance": False, "meta.grid": 1}), tmp_path / "out", "evaluate")
    assert record.read_bytes() == before
    run(recipe, tmp_path / "out", "evaluate")


def test_given_weights_are_used_unchanged_without_training(
    tiny: Alter, tmp_path: Path, display: Display, no_work: Callable[..., None]
) -> None:
    no_work()
    given = build("small", 4, 3, 16, 16)
    torch.save(given.state_dict(), tmp_path / "weights.pt")
    recipe = tiny(
        {"base.weights": str(tmp_path / "weights.pt"), "base.weights_saw": "train-split", "base.weights_seed": 0}
    )
    model = base.frozen_base(context_of(recipe, tmp_path, display))
    assert all(torch.equal(value, given.state_dict()[name]) for name, value in model.state_dict().items())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"operating.target_fpr": 1e-4}, OperatingPointError, "needs at least 29,956 calibration images"),
        ({"base.taps": ["pool1", "poool2"]}, ModelError, "'poool2' is not a module.*did you mean.*'pool2'"),
        ({"base.model": "smal"}, ModelError, "did you mean 'small'"),
        (
            {"meta.form": "published", "meta.branches": ["8-4"]},
            QualmsError,
            "1 branches for 2 taps",
        ),
        ({"data.ood": ["textures", "absent"]}, QualmsError, "'absent'"),
        ({"data.splits.fit": 31}, QualmsError, "fit split has 31 images; to combine scores it needs 32"),
    ],
    ids=["target", "tap", "base", "branches", "ood set", "fit split"],
)
def test_an_impossible_recipe_fails_before_anything_is_trained_or_written(
    changes: dict[str, Any],
    error: type[QualmsError],
    message: str,
    tiny: Alter,
    tmp_path: Path,
    no_work: Callable[..., None],
) -> None:
    no_work()
    with pytest.raises(error, match=message):
        run(tiny(changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


MODELS = """
from torch import nn


def too_deep(classes):
    return nn.Sequential(nn.MaxPool2d(32), nn.Flatten(), nn.Linear(3, classes))


def too_many():
    return nn.Sequential(nn.MaxPool2d(8), nn.Flatten(), nn.Linear(12, 10))


def normalised(classes):
    return nn.Sequential(nn.MaxPool2d(8), nn.Flatten(), nn.BatchNorm1d(12), nn.Linear(12, classes))


class WithAuxiliary(nn.Sequential):
    def forward(self, x):
        logits = super().forward(x)
        return (logits, logits) if self.training else logits


def auxiliary(classes):
    return WithAuxiliary(nn.MaxPool2d(8), nn.Flatten(), nn.Linear(12, classes))
"""


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("too_deep", "'mine:too_deep' cannot be run on images of 16 × 16 × 3"),
        ("too_many", "has 10 logits.*4 classes"),
        ("auxiliary", r"returns tuple in training mode; it must return logits \(N, 4\)"),
        ("normalised", "cannot be trained on one image, and 65 images in batches of 64 leave a last batch of one"),
    ],
)
def test_a_base_that_does_not_fit_the_data_or_cannot_be_trained_is_an_error(
    function: str, message: str, tiny: Alter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {"base.model": f"mine:{function}", "base.taps": ["0", "1"], "data.splits.train": 65}
    with pytest.raises(ModelError, match=message) as caught:
        run(tiny(changes), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("model", "train"), [("normalised", 66), ("small", 65)])
def test_a_last_batch_that_the_base_can_be_trained_on_is_accepted(
    model: str, train: int, tiny: Alter, tmp_path: Path, display: Display, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"base.model": "mine:normalised", "base.taps": ["0", "1"]} if model == "normalised" else {}
    check.run(context_of(tiny({**own, "data.splits.train": train}), tmp_path, display))


def test_an_out_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(QualmsError, match=r"out cannot be made: .*out is a file\."):
        run(load_recipe("tiny"), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_folder_without_write_permission_is_named_before_the_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, _: Path(path) != tmp_path)  # root may write everywhere
    monkeypatch.setattr(check, "run", lambda _: pytest.fail("the checks ran first"))
    with pytest.raises(QualmsError, match=r"out cannot be written to: .* is read-only for this user\."):
        run(load_recipe("tiny"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_pytorch_has_no_more_threads_than_available_cores_during_a_run(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, threads = torch.get_num_threads(), list[int]()
    monkeypatch.setattr(check, "run", lambda _: threads.append(torch.get_num_threads()))
    torch.set_num_threads(available_cores() + 1)
    try:
        run(load_recipe("tiny"), copy, only="fit")
        assert threads == [available_cores()]
        assert torch.get_num_threads() == available_cores() + 1
    finally:
        torch.set_num_threads(before)


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, display: Display) -> None:
    (tmp_path / "file").write_text("mine")
    options: dict[str, Any] = {"data_dir": None, "seeds": [0], "device": CPU, "display": display}
    with pytest.raises(QualmsError, match=r"file/cache cannot be made: .*file is a file\."):
        train_recipe(load_recipe("tiny"), out=tmp_path / "out", cache=tmp_path / "file" / "cache", **options)


def test_an_error_in_the_recipe_does_not_change_a_finished_run(copy: Path, tiny: Alter) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    with pytest.raises(ModelError):
        run(tiny({"base.taps": ["pol1"]}), copy)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_the_checks_do_not_leave_an_untrained_base_in_the_context(copy: Path, display: Display) -> None:
    context = context_of(load_recipe("tiny"), copy, display)
    check.run(context)
    (file,) = (copy / "cache" / "bases").glob("*.pt")
    trained = torch.load(file, weights_only=True)
    state = base.frozen_base(context).state_dict()
    assert all(torch.equal(value, state[name]) for name, value in trained.items())


def test_a_description_may_hold_brackets(copy: Path, tiny: Alter) -> None:
    recipe = tiny({"description": "Shapes [/not] markup."})
    assert "Shapes [/not] markup." in run(recipe, copy, only="fit")


def test_the_order_of_the_stages() -> None:
    assert list(Stage) == ["base", "features", "fit", "combine", "export", "calibrate", "evaluate"]


def test_a_stage_is_up_to_date_if_its_inputs_are_recorded_and_its_products_exist(
    tmp_path: Path, display: Display
) -> None:
    context = context_of(load_recipe("tiny"), tmp_path, display)
    file = tmp_path / "product"
    assert not context.is_up_to_date("fit", "a", file)
    context.record_stage("fit", "a")
    assert not context.is_up_to_date("fit", "a", file)  # the product is missing
    file.touch()
    assert context.is_up_to_date("fit", "a", file)
    assert not context.is_up_to_date("fit", "b", file)
    assert not context.is_up_to_date("export", "a", file)
    context.record_stage("export", "b")
    assert context.is_up_to_date("fit", "a", file)


def test_a_context_makes_each_object_once(tmp_path: Path, display: Display) -> None:
    context = context_of(load_recipe("tiny"), tmp_path, display)
    made: list[int] = []

    def make() -> nn.Module:
        made.append(1)
        return nn.Identity()

    assert context.get_or_make("thing", make) is context.get_or_make("thing", make)
    assert len(made) == 1
    other = context.with_base(nn.Linear(1, 1))
    assert other.data is context.data
    assert isinstance(other.get_or_make("base", make), nn.Linear)
    assert other.get_or_make("thing", make) is not context.get_or_make("thing", make)


def test_versions_are_those_of_the_installed_packages() -> None:
    installed = versions()
    assert installed["torch"] == metadata.version("torch")
    assert {"python", "numpy", "onnx", "onnxruntime", "scikit-learn"} <= set(installed)
    assert None not in installed.values()
