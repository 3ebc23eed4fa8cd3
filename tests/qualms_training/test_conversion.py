"""Runs of earlier versions: they get the joined α without training, or are left as they are if they cannot be converted."""

import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from qualms.bundle.calibration_data import TrustGrid
from qualms.bundle.file import open_bundle, write_bundle
from qualms.bundle.manifest import OperatingDefaults
from qualms.decisions.calibration import trust_grid
from qualms.decisions.trust import count_accepted
from qualms_training import conversion
from qualms_training.console import Display
from qualms_training.conversion import convert_run, recorded_recipe
from qualms_training.errors import ConversionError, ModelError, QualmsError
from qualms_training.recipe import load_recipe
from qualms_training.reporting.evaluation import evaluate_bundle
from qualms_training.run import train_recipe
from qualms_training.stages import Stage, base, combine, evaluate, export, fit

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
EARLIER_BUNDLE = b"the bundle of an earlier version"


def edit_json(file: Path, change: Callable[[Any], Any]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def as_earlier_version(settings: dict[str, Any]) -> dict[str, Any]:
    """run.json as earlier versions wrote it: `fuse`, no `distance`, and the scores that were the defaults."""
    recipe = {key: value for key, value in settings["recipe"].items() if key != "distance"}
    recipe["operating"] = {**recipe["operating"], "score": "fused", "trust_score": "error_probability"}
    return {**settings, "recipe": {**recipe, "fuse": None}}


@pytest.fixture
def earlier(tiny_run: Path, tmp_path: Path) -> Path:
    """A finished run of the tiny recipe in the state in which earlier versions left it."""
    folder = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    edit_json(folder / "run.json", as_earlier_version)
    seed = folder / "seed-0"
    for name in ("flag_score.pt", "joined_alpha.pt"):
        (seed / name).unlink()
    (seed / "ood_scores.pt").write_bytes(b"weights of the former fused score")
    (seed / "combine.json").write_text('{"weights": {}, "auroc": {}}')
    (seed / "graph.onnx").write_bytes(b"the graph of an earlier version")
    (seed / "model.onnx").write_bytes(EARLIER_BUNDLE)
    later = ("combine", "export", "calibrate", "evaluate")
    edit_json(
        seed / "stages.json", lambda record: {**record, **dict.fromkeys(later, "fingerprint of the earlier graph")}
    )
    return folder


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((base, "train_base"), (fit, "train_meta")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("a network was trained"))


def convert(folder: Path, cache: Path | None = None) -> str:
    """Convert a run and return the console output."""
    output = io.StringIO()
    display = Display(Console(file=output, width=200))
    convert_run(folder, cache=cache or folder / "cache", data_dir=None, device=CPU, display=display)
    return output.getvalue()


def files(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file with its modification time and content."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes()) for path in paths}


@pytest.mark.usefixtures("no_training")
def test_a_converted_run_has_the_bundle_that_training_would_make(earlier: Path, tiny_run: Path) -> None:
    before = files(earlier)
    output = convert(earlier)
    bundle, expected = (open_bundle(folder / "seed-0" / "model.onnx") for folder in (earlier, tiny_run))
    assert bundle.manifest.alpha == "joined"
    assert bundle.manifest.flag_terms == ["softmax", "evidence", "distance"]
    assert bundle.manifest.graph_sha256 == expected.manifest.graph_sha256
    assert bundle.manifest.evaluation == expected.manifest.evaluation is not None
    assert bundle.manifest.operating == expected.manifest.operating
    assert bundle.manifest.provenance.recipe == expected.manifest.provenance.recipe
    kept = ("seed-0/meta.pt", "seed-0/fit.json", *(name for name in before if name.startswith("cache/")))
    assert {name: files(earlier)[name] for name in kept} == {name: before[name] for name in kept}
    assert (earlier / "report.md").read_text() == (tiny_run / "report.md").read_text()
    assert "flag score: softmax + evidence + distance; α = 1 + n·p" in output
    assert "Test accuracy" in output


def test_a_converted_run_is_up_to_date_for_train_and_for_another_conversion(
    earlier: Path, display: Display, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(earlier)
    before = files(earlier / "seed-0")
    for module, name in ((combine, "save_torch"), (export, "export_graph"), (evaluate, "save_plots")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("a stage did its work again"))
    convert(earlier)
    train_recipe(
        load_recipe("tiny"), out=earlier, cache=earlier / "cache", data_dir=None, seeds=[0], device=CPU, display=display
    )
    assert files(earlier / "seed-0") == before


@pytest.mark.usefixtures("no_training")
def test_missing_features_are_computed_again(earlier: Path, tiny_run: Path) -> None:
    shutil.rmtree(earlier / "cache" / "features")
    convert(earlier)
    manifests = [open_bundle(folder / "seed-0" / "model.onnx").manifest for folder in (earlier, tiny_run)]
    assert manifests[0].graph_sha256 == manifests[1].graph_sha256


@pytest.mark.parametrize(
    ("recorded", "converted"),
    [
        (("fused", "error_probability"), ("fused", "predicted_error")),
        (("mutual_information", "error_probability"), ("fused", "predicted_error")),
        (("entropy", "max_probability"), ("entropy", "max_probability")),
        (("distance", "error_probability"), ("distance", "predicted_error")),
    ],
)
def test_only_default_scores_of_earlier_versions_are_replaced(
    recorded: tuple[str, str], converted: tuple[str, str], earlier: Path
) -> None:
    def name_scores(settings: dict[str, Any]) -> dict[str, Any]:
        settings["recipe"]["operating"].update(score=recorded[0], trust_score=recorded[1])
        return settings

    edit_json(earlier / "run.json", name_scores)
    operating = recorded_recipe(earlier).operating
    assert (operating.score, operating.trust_score) == converted
    assert operating.target_fpr == load_recipe("tiny").operating.target_fpr


def test_scores_of_a_run_of_this_version_are_kept(tiny_run: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_run / "run.json", tmp_path)

    def name_scores(settings: dict[str, Any]) -> dict[str, Any]:
        settings["recipe"]["operating"].update(score="mutual_information", trust_score="error_probability")
        return settings

    edit_json(tmp_path / "run.json", name_scores)
    operating = recorded_recipe(tmp_path).operating
    assert (operating.score, operating.trust_score) == ("mutual_information", "error_probability")


def remove(*names: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def write(name: str, text: str) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        (folder / name).write_text(text)

    return damage


def change_recipe(section: str, key: str, value: object) -> Callable[[Path], None]:
    def change(settings: dict[str, Any]) -> dict[str, Any]:
        settings["recipe"][section][key] = value
        return settings

    return lambda folder: edit_json(folder / "run.json", change)


def truncate_meta_model(folder: Path) -> None:
    file = folder / "seed-0" / "meta.pt"
    file.write_bytes(file.read_bytes()[:500])


def add_an_unfinished_seed(folder: Path) -> None:
    (folder / "seed-1").mkdir()
    (folder / "seed-1" / "stages.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove("run.json"), r"run cannot be converted: it has no run\.json, so it is not a run folder\.$"),
        (write("run.json", "{"), r"run cannot be converted: its run\.json is damaged\.$"),
        (write("run.json", "[1]"), r"its run\.json is damaged\.$"),
        (write("run.json", "{}"), r"its run\.json is damaged\.$"),
        (write("run.json", '{"recipe": {"name": "tiny"}}'), r"run\.json is not valid: description: Field required\.$"),
        (change_recipe("meta", "layers", 3), r"run\.json is not valid: meta\.layers: this field is unknown"),
        (change_recipe("operating", "score", "energy"), r"operating\.score is 'energy'; accepted are entropy, "),
        (remove("seed-0"), r"it has no folder seed-0 or of another seed\.$"),
        (
            remove("seed-0/meta.pt"),
            r"seed-0 cannot be converted: it has no meta\.pt, so its meta-model was not trained",
        ),
        (remove("seed-0/stages.json"), r"seed-0 cannot be converted: it has no stages\.json, "),
        (remove("seed-0/fit.json"), r"seed-0 cannot be converted: it has no fit\.json, "),
        (
            write("seed-0/stages.json", '{"combine": "x"}'),
            r"its meta-model was not trained with the recipe in run\.json",
        ),
        (write("seed-0/stages.json", "{"), r"its meta-model was not trained with the recipe in run\.json"),
        (change_recipe("meta", "kl_weight", 0.2), r"its meta-model was not trained with the recipe in run\.json"),
        (
            change_recipe("base", "epochs", 3),
            r"cache has no base that was trained with the recipe, data and model code",
        ),
        (remove("cache"), r"cache has no base that was trained with .* --cache names the folder that the run used\.$"),
        (truncate_meta_model, r"meta\.pt' cannot be read as a state dict"),
        (add_an_unfinished_seed, r"seed-1 cannot be converted: it has no meta\.pt, "),
    ],
)
@pytest.mark.usefixtures("no_training")
def test_a_run_that_cannot_be_converted_is_named_with_what_is_missing_and_not_changed(
    damage: Callable[[Path], None], message: str, earlier: Path
) -> None:
    damage(earlier)
    before = files(earlier)
    with pytest.raises(QualmsError, match=message) as caught:
        convert(earlier)
    assert "\n" not in str(caught.value)
    assert files(earlier) == before


def test_an_interrupted_conversion_leaves_the_earlier_bundle_and_can_be_continued(
    earlier: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(conversion, "STAGES", (Stage.combine, Stage.export))
        with pytest.raises(QualmsError):  # there is no new bundle to report
            convert(earlier)
    assert (earlier / "seed-0" / "model.onnx").read_bytes() == EARLIER_BUNDLE
    convert(earlier)
    manifest = open_bundle(earlier / "seed-0" / "model.onnx").manifest
    assert (manifest.alpha, manifest.operating.trust_score) == ("joined", "predicted_error")


def test_all_seeds_are_checked_before_the_first_is_converted(earlier: Path) -> None:
    shutil.copytree(earlier / "seed-0", earlier / "seed-3")  # the base of seed 3 is not in the cache
    before = files(earlier)
    with pytest.raises(ConversionError, match="seed-3 cannot be converted: .* has no base"):
        convert(earlier)
    assert files(earlier) == before


def test_a_damaged_base_is_named(earlier: Path) -> None:
    (file,) = (earlier / "cache" / "bases").glob("*.pt")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=f"{file.name}.* cannot be read"):
        convert(earlier)


def test_a_bundle_of_an_earlier_version_can_still_be_evaluated(tiny_bundle: Path, display: Display) -> None:
    """Such a bundle has sorted calibration scores, counts for trust, and the recipe as it was recorded then."""
    bundle = open_bundle(tiny_bundle)
    manifest = bundle.manifest
    calibration, origin = manifest.calibration, manifest.provenance
    later = ("predicted_error", "meta_mutual_information", "fused_terms", "meta_alpha")
    names = [name for name in manifest.scores if name not in later]
    errors = calibration.scores["error_probability"]
    wrong = np.isin(np.arange(calibration.n), calibration.wrong or [])[errors.argsort()]
    levels, thresholds = trust_grid(errors)
    accepted, failed = count_accepted(np.sort(errors), wrong, thresholds)
    trust = TrustGrid(levels=levels, thresholds=thresholds, accepted=accepted.tolist(), errors=failed.tolist())
    scores = {name: np.sort(calibration.scores[name]) for name in names}
    outputs = {name: values for name, values in manifest.golden.outputs.items() if name not in later}
    recipe = as_earlier_version({"recipe": origin.recipe})["recipe"]
    changes = {
        "schema_version": 1,
        "alpha": "meta",
        "flag_terms": [],
        "scores": {name: manifest.scores[name] for name in names},
        "operating": OperatingDefaults.model_validate(recipe["operating"]),
        "calibration": calibration.model_copy(
            update={
                **dict.fromkeys(("wrong", "predictions", "label_scores", "fingerprints")),
                "observed": {},
                "scores": scores,
                "trust": trust,
            }
        ),
        "golden": manifest.golden.model_copy(update={"outputs": outputs}),
        "provenance": origin.model_copy(update={"recipe": recipe}),
        "evaluation": None,
    }
    write_bundle(tiny_bundle, bundle.graph, manifest.model_copy(update=changes))
    evaluation = evaluate_bundle(tiny_bundle, None, display=display)
    assert manifest.evaluation is not None
    assert evaluation.accuracy == manifest.evaluation.accuracy
    assert {row.score for row in evaluation.ood} == {*names, "base_entropy", "base_max_probability"}
    assert {row.distribution for row in evaluation.probabilities} == {"alpha", "base"}
    assert len(evaluation.realised) == 4


def test_the_command_prints_one_sentence_for_a_folder_that_is_not_a_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from qualms.cli import main; main()", "convert", str(tmp_path), "--device", "cpu"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr == f"qualms: {tmp_path} cannot be converted: it has no run.json, so it is not a run folder.\n"
    assert not list(tmp_path.iterdir())
