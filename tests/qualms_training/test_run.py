"""A recipe becomes one calibrated file; run again, it does what is missing or has changed, and nothing else."""

import importlib
import io
import json
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

from qualms.bundle.file import Bundle, open_bundle
from qualms.bundle.manifest import Evaluation
from qualms.bundle.runtime import GraphRunner, check_golden
from qualms.bundle.scores import DIRICHLET_SCORES, SCORES
from qualms.decisions.operating_point import flag_point
from qualms.errors import OperatingPointError
from qualms_training.cli import Stage
from qualms_training.console import Display
from qualms_training.data import load
from qualms_training.data.noise import NOISES
from qualms_training.errors import ModelError, QualmsError, RecipeError
from qualms_training.fitting.loop import Hooks, Progress
from qualms_training.models import build
from qualms_training.recipe import Recipe, load_recipe
from qualms_training.reporting.provenance import parameters, versions
from qualms_training.run import train_recipe
from qualms_training.stages import STAGES, base, calibrate, check, combine, evaluate, export, features, fit
from qualms_training.stages.context import RunContext

Alter = Callable[[Mapping[str, Any]], Recipe]
CPU = torch.device("cpu")
MADE_BY_FIT = {f"seed-0/{name}" for name in ("meta.pt", "fit.json", "probe.npz", "stages.json")}


def run(recipe: Recipe, out: Path, only: str | None = None) -> str:
    """Run a recipe in `out`, and return what it says."""
    said = io.StringIO()
    train_recipe(
        recipe,
        out=out,
        cache=out / "cache",
        data_dir=None,
        seeds=[0],
        device=CPU,
        only=only,
        display=Display(Console(file=said, width=200)),
    )
    return said.getvalue()


def context_of(recipe: Recipe, out: Path, display: Display, only: str | None = None) -> RunContext:
    return RunContext(recipe, 0, out / "seed-0", out / "cache", None, CPU, display, only)


def products(out: Path) -> dict[str, tuple[int, bytes]]:
    """Every file below the seed's folder and the cache, with its time and content."""
    files = [path for folder in ("seed-0", "cache") for path in (out / folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(out)): (path.stat().st_mtime_ns, path.read_bytes()) for path in files}


def changed(before: dict[str, tuple[int, bytes]], after: dict[str, tuple[int, bytes]]) -> set[str]:
    return {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}


@pytest.fixture
def copy(tiny_run: Path, tmp_path: Path) -> Path:
    """A finished run to do anything to."""
    return Path(shutil.copytree(tiny_run, tmp_path / "run"))


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make the expensive parts of stages fail the test that runs them, all but those named."""

    def forbid(*allowed: str) -> None:
        parts: dict[str, tuple[Any, str]] = {
            "base": (base, "train_base"),
            "features": (features, "cached_features"),
            "fit": (fit, "train_meta"),
            "combine": (combine, "save_torch"),
            "export": (export, "export_graph"),
            "calibrate": (calibrate, "write_bundle"),
            "evaluate": (evaluate, "save_plots"),
        }
        for stage, (module, name) in parts.items():
            if stage not in allowed and stage != "features":
                monkeypatch.setattr(module, name, lambda *_, stage=stage, **__: pytest.fail(f"stage {stage} worked"))

    return forbid


@pytest.fixture(scope="module")
def bundle(tiny_run: Path) -> Bundle:
    return open_bundle(tiny_run / "seed-0" / "model.onnx")


@pytest.fixture(scope="module")
def evaluation(bundle: Bundle) -> Evaluation:
    assert bundle.manifest.evaluation is not None
    return bundle.manifest.evaluation


def test_the_bundle_opens_and_reproduces_its_golden_vectors(bundle: Bundle) -> None:
    check_golden(GraphRunner(bundle.graph), bundle.manifest)
    manifest = bundle.manifest
    assert (manifest.name, manifest.classes) == ("tiny", ["disc", "square", "cross", "stripes"])
    assert (manifest.input.height, manifest.input.width, manifest.input.colour) == (16, 16, "RGB")
    assert list(manifest.scores) == list(SCORES)
    assert manifest.operating == load_recipe("tiny").operating


def test_thresholds_rest_on_the_calibration_split_by_the_exported_graph(bundle: Bundle, display: Display) -> None:
    context = context_of(load_recipe("tiny"), bundle.path.parent.parent, display)
    held_out = context.data.parts["calibration"]
    outputs = GraphRunner(bundle.graph)(held_out.images)
    calibration = bundle.manifest.calibration
    assert (calibration.n, calibration.split, calibration.data) == (1000, "calibration", "shapes")
    assert calibration.data_sha256 == load("shapes", "train").digest()
    for name, values in calibration.scores.items():
        np.testing.assert_allclose(values, np.sort(outputs[name]), rtol=1e-5, atol=1e-6)
    point = flag_point(bundle.manifest)
    # Fewer would mean that images share the most doubtful value, beyond which the flag can never go up.
    assert point.flags(outputs[point.score]).sum() == point.k - 1
    np.testing.assert_allclose(
        bundle.manifest.reference.class_shares, np.bincount(outputs["prediction"], minlength=4) / 1000
    )


def test_provenance_is_enough_to_make_it_again(bundle: Bundle) -> None:
    origin = bundle.manifest.provenance
    assert Recipe.model_validate(origin.recipe) == load_recipe("tiny")
    assert (origin.recipe_name, origin.seed) == ("tiny", 0)
    assert origin.versions == versions()
    assert origin.base["parameters"] == parameters(build("small", 4, 3, 16, 16))
    assert origin.base["taps"] == ["pool1", "pool2"]
    assert len(origin.base["sha256"]) == 64
    assert origin.meta["form"] == "pooled"
    assert 1 <= origin.meta["best_epoch"] <= 5
    assert origin.data["splits"][0]["sizes"] == {"train": 2000, "validation": 400, "fit": 400, "calibration": 1000}


def test_the_frozen_base_predicts_as_it_did_before(evaluation: Evaluation) -> None:
    assert evaluation.identical_predictions
    assert evaluation.base_accuracy == evaluation.accuracy > 80
    assert (evaluation.test_data, evaluation.n, evaluation.protocol) == ("shapes", 2000, "fair")


def test_every_stranger_and_the_known_set_itself_are_evaluated_by_every_score(evaluation: Evaluation) -> None:
    sets = ["textures", "strokes", "corrupted", "shapes (itself)"]
    assert list(dict.fromkeys(row.data for row in evaluation.ood)) == sets
    assert len(evaluation.ood) == len(sets) * (len(SCORES) + 2)
    for row in evaluation.ood:
        if row.data == "shapes (itself)":
            assert row.auroc == pytest.approx(50, abs=2), row.score


def test_promises_are_kept_on_the_test_set(evaluation: Evaluation) -> None:
    rows = {(row.promise, row.target): row for row in evaluation.realised}
    assert {target for _, target in rows} == {0.05, 0.01}
    alarms = rows["false_alarm_rate", 0.05].realised
    assert alarms is not None
    assert 0 < alarms < 0.065  # three standard deviations of 2,000 images above 0.05


def test_a_run_folder_holds_settings_report_results_and_plots(tiny_run: Path, evaluation: Evaluation) -> None:
    settings = json.loads((tiny_run / "run.json").read_text())
    assert settings["versions"] == versions()
    assert Recipe.model_validate(settings["recipe"]) == load_recipe("tiny")
    saved = json.loads((tiny_run / "seed-0" / "evaluation.json").read_text())
    assert Evaluation.model_validate(saved) == evaluation
    report = (tiny_run / "report.md").read_text()
    assert report.startswith("# tiny 1\n")
    assert report.count("\n### ") == 5
    assert "identical predictions" in report
    mutual_information = next(row for row in evaluation.ood if row.score == "mutual_information")
    assert f"| mutual_information | {mutual_information.auroc:.1f} |" in report
    plots = tiny_run / "seed-0" / "plots"
    assert {path.name for path in plots.iterdir()} == {f"{score}.png" for score in SCORES}
    with Image.open(plots / "entropy.png") as picture:
        picture.load()


def test_nothing_half_made_is_left(tiny_run: Path) -> None:
    names = {path.name for path in tiny_run.rglob("*")}
    assert not {name for name in names if name.startswith(".") or "checkpoint" in name}


def test_run_again_it_does_nothing(copy: Path, no_work: Callable[..., None]) -> None:
    before = products(copy)
    (copy / "report.md").unlink()
    no_work()
    said = run(load_recipe("tiny"), copy)
    assert not changed(before, products(copy))
    assert (copy / "report.md").exists()
    assert "Test accuracy" in said


def test_what_a_run_has_lost_is_all_it_makes_again(copy: Path, no_work: Callable[..., None]) -> None:
    before = products(copy)
    weights = torch.load(copy / "seed-0" / "meta.pt", weights_only=True)
    (copy / "seed-0" / "meta.pt").unlink()
    no_work("fit")
    run(load_recipe("tiny"), copy)
    assert changed(before, products(copy)) <= MADE_BY_FIT
    again = torch.load(copy / "seed-0" / "meta.pt", weights_only=True)
    assert all(torch.equal(again[name], value) for name, value in weights.items())
    assert (copy / "seed-0" / "fit.json").read_bytes() == before["seed-0/fit.json"][1]


class Cut(BaseException):
    """Stands in for whatever ends a process."""


def cut_somewhere(train: Callable[..., Progress], steps: int, seed: int) -> Callable[..., Progress]:
    """The same training, ended at a random step."""
    last = random.Random(seed).randint(steps // 2, steps)

    def on_step(step: int, _: float) -> None:
        if step == last:
            raise Cut

    def cut(*arguments: Any, **options: Any) -> Progress:
        return train(*arguments, **{**options, "hooks": Hooks(on_step=on_step)})

    return cut


@pytest.mark.parametrize(
    ("stage", "module", "name", "steps"), [("base", base, "train_base", 128), ("fit", fit, "train_meta", 160)]
)
def test_a_stage_that_was_cut_off_goes_on_to_the_same_weights(
    stage: str, module: Any, name: str, steps: int, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    product = next((copy / "cache" / "bases").glob("*.pt")) if stage == "base" else copy / "seed-0" / "meta.pt"
    whole = torch.load(product, weights_only=True)
    product.unlink()
    with monkeypatch.context() as patched:
        patched.setattr(module, name, cut_somewhere(getattr(module, name), steps, seed=3))
        with pytest.raises(Cut):
            run(load_recipe("tiny"), copy, only=stage)
    assert not product.exists()
    run(load_recipe("tiny"), copy, only=stage)
    resumed = torch.load(product, weights_only=True)
    assert all(torch.equal(resumed[key], value) for key, value in whole.items())
    assert not list(copy.rglob("*checkpoint*"))


@pytest.mark.parametrize(
    ("stage", "first"),
    [
        ("features", "base"),
        ("fit", "base"),
        ("combine", "base"),
        ("export", "base"),
        ("calibrate", "base"),
        ("evaluate", "base"),
    ],
)
def test_a_stage_alone_needs_the_ones_before_it(stage: str, first: str, tmp_path: Path) -> None:
    with pytest.raises(QualmsError, match=f"Stage '{stage}' needs what stage '{first}' makes.*run --stage {first}"):
        run(load_recipe("tiny"), tmp_path, only=stage)
    assert {path.name for path in tmp_path.rglob("*")} == {"run.json", "cache"}


SMALL = {
    "data.limit": 50,
    "data.splits": {"train": 200, "validation": 60, "fit": 60, "calibration": 200},
    "base.epochs": 1,
    "meta.epochs": 1,
}


def test_the_stages_one_by_one_are_the_whole_run(tiny: Alter, tmp_path: Path) -> None:
    recipe = tiny(SMALL)
    assert recipe.fuses
    for stage in Stage:
        run(recipe, tmp_path / "stages", only=stage.value)
    run(recipe, tmp_path / "whole")
    found, whole = (open_bundle(tmp_path / name / "seed-0" / "model.onnx").manifest for name in ("stages", "whole"))
    assert found.graph_sha256 == whole.graph_sha256
    assert found.evaluation == whole.evaluation is not None


def test_a_combination_alone_is_sent_to_the_stage_that_helps_it(copy: Path) -> None:
    shutil.rmtree(copy / "cache" / "features")
    (copy / "seed-0" / "doubter.pt").unlink()
    with pytest.raises(QualmsError, match="run --stage features first"):
        run(load_recipe("tiny"), copy, only="combine")
    run(load_recipe("tiny"), copy, only="features")
    run(load_recipe("tiny"), copy, only="combine")


def test_weights_that_saw_one_seeds_split_are_refused_for_every_other_before_any_is_run(
    tiny: Alter, tmp_path: Path, display: Display, no_work: Callable[..., None]
) -> None:
    no_work()
    given = {"base.weights": str(tmp_path / "w.pt"), "base.weights_saw": "train-split", "base.weights_seed": 0}
    options: dict[str, Any] = {"cache": tmp_path / "cache", "data_dir": None, "device": CPU, "display": display}
    with pytest.raises(RecipeError, match="seed 1 would calibrate on some of its images"):
        train_recipe(tiny(given), out=tmp_path / "out", seeds=range(2), **options)
    assert not (tmp_path / "out").exists()


def test_another_kl_weight_makes_another_meta_model_on_the_same_base(copy: Path, tiny: Alter) -> None:
    recipe = tiny({"meta.kl_weight": 0.5})
    before = products(copy)
    run(recipe, copy, only="fit")
    assert changed(before, products(copy)) == MADE_BY_FIT
    # What is in the folder is that of the old meta-model: what comes after must not take it for the new one's.
    for stage in ("export", "calibrate", "evaluate"):
        with pytest.raises(QualmsError, match="needs what stage 'combine' makes"):
            run(recipe, copy, only=stage)
    run(recipe, copy, only="combine")
    for stage in ("calibrate", "evaluate"):
        with pytest.raises(QualmsError, match="needs what stage 'export' makes"):
            run(recipe, copy, only=stage)
    run(recipe, copy, only="export")
    run(recipe, copy, only="calibrate")
    manifest = open_bundle(copy / "seed-0" / "model.onnx").manifest
    assert manifest.provenance.recipe["meta"]["kl_weight"] == 0.5
    assert manifest.evaluation is None
    untouched = {name for name in before if name.startswith("cache/")}
    assert not changed(before, products(copy)) & untouched


def test_the_flag_score_is_fused_of_doubts_that_the_fit_split_weighed(tiny_run: Path, bundle: Bundle) -> None:
    found = json.loads((tiny_run / "seed-0" / "combine.json").read_text())
    names = ["base_entropy", "mutual_information", "distance", "distance of tap 0", "distance of tap 1"]
    assert list(found["weights"]) == names
    assert sum(found["weights"].values()) == pytest.approx(1)
    assert set(found["auroc"]) == {*NOISES, "errors"}
    assert bundle.manifest.operating.score == "fused"


def test_a_recipe_may_do_without_fusing(copy: Path, tiny: Alter) -> None:
    run(tiny({"fuse": False, "operating.score": "mutual_information"}), copy)
    bundle = open_bundle(copy / "seed-0" / "model.onnx")
    assert list(bundle.manifest.scores) == list(DIRICHLET_SCORES)
    assert not {"distance", "fused"} & set(GraphRunner(bundle.graph).outputs)


def test_another_target_recalibrates_and_no_more(copy: Path, tiny: Alter, no_work: Callable[..., None]) -> None:
    before = products(copy)
    no_work("calibrate")
    run(tiny({"operating.target_fpr": 0.1}), copy, only="calibrate")
    assert changed(before, products(copy)) == {"seed-0/model.onnx", "seed-0/stages.json"}
    assert flag_point(open_bundle(copy / "seed-0" / "model.onnx").manifest).target_fpr == 0.1


def test_a_ledger_or_a_fact_that_was_lost_is_made_again(copy: Path, display: Display) -> None:
    context = context_of(load_recipe("tiny"), copy, display)
    assert export.is_done(context)
    (copy / "seed-0" / "export.json").unlink()
    assert not export.is_done(context)
    (copy / "seed-0" / "stages.json").write_text("{")
    assert not context.done("fit", fit.mark(context), copy / "seed-0" / "meta.pt")
    context.record("fit", fit.mark(context))
    assert context.done("fit", fit.mark(context), copy / "seed-0" / "meta.pt")


def test_a_damaged_base_in_the_cache_is_one_sentence(copy: Path) -> None:
    (file,) = (copy / "cache" / "bases").glob("*.pt")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=f"{file.name}.* cannot be read") as caught:
        run(load_recipe("tiny"), copy)
    assert "\n" not in str(caught.value)


def test_given_weights_are_known_by_their_content_and_not_by_their_name(
    tiny: Alter, tmp_path: Path, display: Display
) -> None:
    file = tmp_path / "weights.pt"
    recipe = tiny({"base.weights": str(file), "base.weights_saw": "train-split", "base.weights_seed": 0})
    marks = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        torch.save(build("small", 4, 3, 16, 16).state_dict(), file)
        marks.append(fit.mark(context_of(recipe, tmp_path, display)))
    assert marks[0] == marks[2] != marks[1]


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
def test_an_edit_of_the_users_model_is_another_base_although_its_weights_fit(
    given: dict[str, str], tiny: Alter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = tiny({**SMALL, **given, "base.model": "edited:net", "base.taps": ["0", "3"]})
    images = load("shapes", "test").conformed(recipe.input.spec, range(20))
    said = []
    for sign in ("1", "-1", "-1"):
        (tmp_path / "edited.py").write_text(OWN.replace("SIGN", sign))
        monkeypatch.delitem(sys.modules, "edited", raising=False)
        importlib.invalidate_caches()
        shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)  # which knows a file by its size and second
        run(recipe, tmp_path / "out")
        bundle = open_bundle(tmp_path / "out" / "seed-0" / "model.onnx")
        said.append(GraphRunner(bundle.graph)(images)["base_probabilities"])
    assert np.abs(said[0] - said[1]).max() > 1e-3
    np.testing.assert_array_equal(said[1], said[2])
    trained = list((tmp_path / "out" / "cache").glob("bases/*.pt"))
    assert len(trained) == (0 if given else 2)


def test_a_command_that_is_refused_leaves_the_ledger_as_it_was(tiny: Alter, tmp_path: Path) -> None:
    """Another grid is another meta-model of the same base: what was done for the first is still done."""
    recipe = tiny({**SMALL, "fuse": False, "operating.score": "entropy"})
    run(recipe, tmp_path / "out")
    ledger = tmp_path / "out" / "seed-0" / "stages.json"
    before = ledger.read_bytes()
    with pytest.raises(QualmsError, match="needs what stage 'fit' makes"):
        run(tiny({**SMALL, "fuse": False, "operating.score": "entropy", "meta.grid": 1}), tmp_path / "out", "evaluate")
    assert ledger.read_bytes() == before
    run(recipe, tmp_path / "out", "evaluate")


def test_given_weights_are_used_as_they_are_and_nothing_is_trained(
    tiny: Alter, tmp_path: Path, display: Display, no_work: Callable[..., None]
) -> None:
    no_work()
    given = build("small", 4, 3, 16, 16)
    torch.save(given.state_dict(), tmp_path / "weights.pt")
    recipe = tiny(
        {"base.weights": str(tmp_path / "weights.pt"), "base.weights_saw": "train-split", "base.weights_seed": 0}
    )
    found = base.frozen_base(context_of(recipe, tmp_path, display))
    assert all(torch.equal(value, given.state_dict()[name]) for name, value in found.state_dict().items())
    assert not any(parameter.requires_grad for parameter in found.parameters())
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"operating.target_fpr": 1e-4}, OperatingPointError, "needs at least 29,956 calibration images"),
        ({"base.taps": ["pool1", "poool2"]}, ModelError, "'poool2' is not a module.*did you mean.*'pool2'"),
        ({"base.model": "smal"}, ModelError, "did you mean 'small'"),
        (
            {"meta.form": "published", "meta.branches": ["8-4"], "operating.score": "entropy"},
            QualmsError,
            "1 branches for 2 taps",
        ),
        ({"data.ood": ["textures", "absent"]}, QualmsError, "'absent'"),
        ({"data.splits.fit": 31}, QualmsError, "fit split has 31 images; to combine scores it needs 32"),
    ],
    ids=["target", "tap", "base", "branches", "stranger", "fit split"],
)
def test_what_cannot_work_is_refused_before_anything_is_trained_or_written(
    changes: dict[str, Any],
    error: type[QualmsError],
    says: str,
    tiny: Alter,
    tmp_path: Path,
    no_work: Callable[..., None],
) -> None:
    no_work()
    with pytest.raises(error, match=says):
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
    ("function", "says"),
    [
        ("too_deep", "'mine:too_deep' cannot be run on images of 16 × 16 × 3"),
        ("too_many", "gives 10 logits.*4 classes"),
        ("auxiliary", r"returns tuple while it is trained; it must return logits \(N, 4\)"),
        ("normalised", "cannot be trained on one image, and 65 in batches of 64 leave a last batch of one"),
    ],
)
def test_a_base_that_does_not_fit_the_data_or_its_training_is_refused(
    function: str, says: str, tiny: Alter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {"base.model": f"mine:{function}", "base.taps": ["0", "1"], "data.splits.train": 65}
    with pytest.raises(ModelError, match=says) as caught:
        run(tiny(changes), tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("model", "train"), [("normalised", 66), ("small", 65)])
def test_a_last_batch_that_the_base_can_be_trained_on_is_let_pass(
    model: str, train: int, tiny: Alter, tmp_path: Path, display: Display, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = {"base.model": "mine:normalised", "base.taps": ["0", "1"]} if model == "normalised" else {}
    check.run(context_of(tiny({**own, "data.splits.train": train}), tmp_path, display))


def test_an_out_folder_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(QualmsError, match="out cannot be written to"):
        run(load_recipe("tiny"), tmp_path / "out")
    assert (tmp_path / "out").read_text() == "mine"


def test_a_cache_folder_that_cannot_be_made_is_named(tmp_path: Path, display: Display) -> None:
    (tmp_path / "file").write_text("mine")
    options: dict[str, Any] = {"data_dir": None, "seeds": [0], "device": CPU, "display": display}
    with pytest.raises(QualmsError, match=r"file/cache cannot be made: Not a directory\."):
        train_recipe(load_recipe("tiny"), out=tmp_path / "out", cache=tmp_path / "file" / "cache", **options)


def test_a_mistake_in_the_recipe_leaves_a_finished_run_alone(copy: Path, tiny: Alter) -> None:
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    with pytest.raises(ModelError):
        run(tiny({"base.taps": ["pol1"]}), copy)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


def test_checking_leaves_no_untrained_base_behind(copy: Path, display: Display) -> None:
    context = context_of(load_recipe("tiny"), copy, display)
    check.run(context)
    (file,) = (copy / "cache" / "bases").glob("*.pt")
    trained = torch.load(file, weights_only=True)
    found = base.frozen_base(context).state_dict()
    assert all(torch.equal(value, found[name]) for name, value in trained.items())


def test_a_description_may_hold_brackets(copy: Path, tiny: Alter) -> None:
    recipe = tiny({"description": "Shapes [/not] markup."})
    assert "Shapes [/not] markup." in run(recipe, copy, only="fit")


def test_stages_run_in_their_order() -> None:
    assert list(STAGES) == ["base", "features", "fit", "combine", "export", "calibrate", "evaluate"]
    assert [stage.value for stage in Stage] == list(STAGES)


def test_the_ledger_knows_a_stage_by_its_inputs_and_its_products(tmp_path: Path, display: Display) -> None:
    context = context_of(load_recipe("tiny"), tmp_path, display)
    file = tmp_path / "product"
    assert not context.done("fit", "a", file)
    context.record("fit", "a")
    assert not context.done("fit", "a", file)  # the product is missing
    file.touch()
    assert context.done("fit", "a", file)
    assert not context.done("fit", "b", file)
    assert not context.done("export", "a", file)
    context.record("export", "b")
    assert context.done("fit", "a", file)


def test_what_a_context_makes_it_makes_once(tmp_path: Path, display: Display) -> None:
    context = context_of(load_recipe("tiny"), tmp_path, display)
    made: list[int] = []

    def make() -> nn.Module:
        made.append(1)
        return nn.Identity()

    assert context.once("thing", make) is context.once("thing", make)
    assert len(made) == 1
    other = context.around(nn.Linear(1, 1))
    assert other.data is context.data
    assert isinstance(other.once("base", make), nn.Linear)
    assert other.once("thing", make) is not context.once("thing", make)


def test_versions_are_those_installed() -> None:
    found = versions()
    assert found["torch"] == metadata.version("torch")
    assert {"python", "numpy", "onnx", "onnxruntime", "scikit-learn"} <= set(found)
    assert None not in found.values()
