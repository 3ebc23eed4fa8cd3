"""The comparison of flag scores agrees with the evaluation of a bundle, trains once per seed, and continues."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from qualms_training import cli
from qualms_training.console import Display
from qualms_training.errors import DataError, QualmsError, RecipeError
from qualms_training.paper.definition import Benchmark, load_benchmark
from qualms_training.paper.flags import comparison
from qualms_training.paper.flags.comparison import FIELDS, compare_flags
from qualms_training.paper.flags.seed_scores import NEW_DEFAULT, OLD_DEFAULT, AlphaQuality, ComparedScore, SeedScores
from qualms_training.paper.methods.trained_heads.dirichlet_meta import DirichletMeta

pytestmark = pytest.mark.slow

SEEN = "† marks figures on noise"
NETWORK = """
import torch

from qualms_training.models import build


def seven():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build("small", 7, 3, 16, 16)
"""


def compare(out: Path, *, benchmark: Benchmark | None = None, **options: Any) -> str:
    """Run one seed; return the console output."""
    printed = io.StringIO()
    compare_flags(
        benchmark or load_benchmark("tiny"),
        out=out,
        cache=out / "cache",
        data_dir=None,
        device=torch.device("cpu"),
        display=Display(Console(file=printed, width=250)),
        **{"seeds": 1, "resamples": 100, **options},
    )
    return printed.getvalue()


def lines(out: Path, name: str = "tiny") -> dict[tuple[str, str, str], dict[str, str]]:
    """The lines of the CSV file by table, row and column."""
    with (out / f"compare-{name}.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == FIELDS
    return {(row["table"], row["row"], row["column"]): row for row in rows}


@pytest.fixture(scope="module")
def done(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished comparison on the base of the tiny run, with the test set itself as a further OOD set."""
    out = tmp_path_factory.mktemp("comparison")
    shutil.copytree(tiny_run / "cache" / "bases", out / "cache" / "bases")
    with patch.object(DirichletMeta, "fit", autospec=True, side_effect=DirichletMeta.fit) as fit:
        compare(out, ood=["shapes"])
    assert fit.call_count == 1  # all methods of a seed share one meta-model
    return out


@pytest.fixture
def copy_of_done(done: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(done, tmp_path / "copy"))


def test_aurocs_agree_with_the_evaluation_of_the_bundle(done: Path, tiny_run: Path) -> None:
    rows = {
        "fused": NEW_DEFAULT,
        "distance": ComparedScore("fused", "distance"),
        "mutual_information": ComparedScore("fused", "mutual_information"),
        "expected_entropy": ComparedScore("fused", "expected_entropy"),
        "precision": ComparedScore("fused", "precision"),
        "meta_mutual_information": ComparedScore("ours-pooled", "mutual_information"),
        "base_entropy": ComparedScore("base", "entropy"),
    }
    made, compared = lines(done), 0
    for row in json.loads((tiny_run / "seed-0" / "evaluation.json").read_text())["ood"]:
        if row["score"] in rows and "itself" not in row["data"]:
            line = made["AUROC in %", rows[row["score"]].title, row["data"]]
            assert float(line["mean"]) == pytest.approx(row["auroc"], abs=0.05), row["score"]
            compared += 1
    assert compared == 3 * len(rows)


def test_quality_of_alpha_agrees_with_the_evaluation_of_the_bundle(done: Path, tiny_run: Path) -> None:
    evaluation = json.loads((tiny_run / "seed-0" / "evaluation.json").read_text())
    names = {"alpha": "joined α", "base": "softmax of the base", "meta_alpha": "α of the meta-model"}
    made = lines(done)
    assert len(evaluation["probabilities"]) == len(names)
    for row in evaluation["probabilities"]:
        for column, figure in (("ECE in %", row["ece"]), ("NLL in nats", row["nll"])):
            line = made["Class probabilities on the test set", names[row["distribution"]], column]
            assert float(line["mean"]) == pytest.approx(figure, rel=0.01, abs=1e-3)
    accuracy = made["The joined α", "test accuracy of the served classes in %", "value"]
    assert float(accuracy["mean"]) == pytest.approx(evaluation["accuracy"])


def test_mean_and_worst_are_over_the_sets_of_the_benchmark_and_over_all(done: Path) -> None:
    made = lines(done)
    for title, worst in (("AUROC in %", min), ("FPR95 in %", max), ("detected at 1 % false alarms in %", min)):
        values = {
            name: float(made[title, NEW_DEFAULT.title, name]["mean"])
            for name in ("textures", "strokes", "corrupted", "shapes", "mean", "worst", "mean of all", "worst of all")
        }
        own = [values[name] for name in ("textures", "strokes", "corrupted")]
        for end, sets in (("", own), (" of all", [*own, values["shapes"]])):
            assert values[f"mean{end}"] == pytest.approx(np.mean(sets), abs=1e-3)
            assert values[f"worst{end}"] == worst(sets)
    assert float(made["AUROC in %", NEW_DEFAULT.title, "shapes"]["mean"]) == pytest.approx(50, abs=2)
    assert float(made["detected at 1 % false alarms in %", NEW_DEFAULT.title, "shapes"]["mean"]) < 2


def test_differences_are_those_of_the_aurocs_and_inside_their_intervals(done: Path) -> None:
    made = lines(done)
    title = f"AUROC of {NEW_DEFAULT.title} minus that of the row, in points"
    rows = {row for table, row, _ in made if table == title}
    assert rows == {row for table, row, _ in made if table == "AUROC in %"} - {NEW_DEFAULT.title}
    for row in rows:
        for column in ("mean", "worst", "mean of all", "worst of all"):
            line = made[title, row, column]
            new, other = (float(made["AUROC in %", name, column]["mean"]) for name in (NEW_DEFAULT.title, row))
            assert float(line["mean"]) == pytest.approx(new - other, abs=1e-3)
            assert float(line["lower"]) <= float(line["upper"])
    for row in (OLD_DEFAULT.title, "Base Model · Ent"):
        line = made[title, row, "mean"]
        assert float(line["lower"]) < float(line["mean"]) < float(line["upper"])
    precision = made[title, "Flag score and joined α · Prec", "mean"]  # a decreasing function of the flag score
    assert abs(float(precision["lower"])) < 0.05
    assert abs(float(precision["upper"])) < 0.05


def test_the_largest_alpha_is_that_of_the_served_class_on_every_set(done: Path) -> None:
    title = "Images whose largest α, in float32, is that of the served class, in %"
    for name in ("test", "textures", "strokes", "corrupted", "shapes"):
        assert float(lines(done)[title, "joined α", name]["mean"]) == 100


def test_the_document_names_its_command_sets_and_marks_and_no_path(done: Path) -> None:
    text = (done / "compare-tiny.md").read_text()
    assert "Made by `qualms compare-flags tiny --seeds 1 --ood shapes --out DIR --cache DIR --resamples 100`." in text
    assert "`of all` includes shapes, too" in text
    assert "There are no data for nothing." in text
    assert SEEN in text
    assert str(done) not in text
    titles = {line.split(" | ")[0] for line in text.splitlines() if "†" in line and line.startswith("|")}
    assert f"| {OLD_DEFAULT.title}" in titles
    assert not any("distance" in title or "Base Model" in title for title in titles)


def test_a_second_run_uses_the_files_of_seeds(copy_of_done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(comparison, "compute_scores", fail)
    before = {name: (copy_of_done / f"compare-tiny.{name}").read_bytes() for name in ("md", "csv")}
    assert "1 of 1 seeds exist" in compare(copy_of_done, ood=["shapes"])
    assert {name: (copy_of_done / f"compare-tiny.{name}").read_bytes() for name in before} == before
    with pytest.raises(AssertionError):  # other sets: the file of the seed does not fit
        compare(copy_of_done)


def test_a_damaged_file_is_made_again_with_the_same_scores(copy_of_done: Path) -> None:
    file = copy_of_done / "compare-tiny" / "seed-0.npz"
    with np.load(file) as content:
        before = dict(content)
    file.write_bytes(file.read_bytes()[:1000])
    assert "0 of 1 seeds exist" in compare(copy_of_done, ood=["shapes"])
    with np.load(file) as content:
        for name, values in before.items():
            np.testing.assert_array_equal(content[name], values)
    assert not (copy_of_done / "unfinished" / "fused-fair-0").exists()


def test_if_the_meta_model_predicts_the_rows_of_the_base_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "network_of_seven.py").write_text(NETWORK)
    monkeypatch.syspath_prepend(str(tmp_path))
    tiny = (Path(cli.__file__).parent / "recipes" / "tiny.toml").read_text()
    base = 'model = "network_of_seven:seven"\nweights = "included"\nweights_saw = "other-data"'
    text = 'prediction = "meta"\n' + tiny.replace('model = "small"', base)
    (tmp_path / "transfer.toml").write_text(text)
    benchmark = load_benchmark("tiny").model_copy(update={"recipes": [str(tmp_path / "transfer.toml")]})
    compare(tmp_path / "out", benchmark=benchmark)
    made = lines(tmp_path / "out")
    rows = {row for table, row, _ in made if table == "AUROC in %"}
    assert not any(row.startswith("Base Model") for row in rows)
    assert {NEW_DEFAULT.title, OLD_DEFAULT.title, "GEN · generalised entropy", "Ours, pooled form · Ent"} <= rows
    assert not any(row == "softmax of the base" for _, row, _ in made)
    served = {column: line for (table, _, column), line in made.items() if "served class, in" in table}
    assert [float(line["mean"]) for line in served.values()] == [100.0] * 4
    assert float(made["The joined α", "test accuracy of the served classes in %", "value"]["mean"]) > 30  # 25 by chance
    assert (
        "the meta-model predicts, and rows of the base are left out" in (tmp_path / "out/compare-tiny.md").read_text()
    )


def test_an_unknown_set_is_reported_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'nowhere'"):
        compare(tmp_path / "out", ood=["nowhere"])
    assert not (tmp_path / "out").exists()


def test_a_benchmark_without_available_sets_is_reported(tmp_path: Path) -> None:
    benchmark = load_benchmark("tiny").model_copy(update={"columns": ["nothing"]})
    with pytest.raises(DataError, match="'tiny' has no OOD set with data; give one with --ood"):
        compare(tmp_path / "out", benchmark=benchmark)
    assert not (tmp_path / "out").exists()


def test_a_benchmark_without_a_pooled_meta_model_is_reported(tmp_path: Path) -> None:
    tiny = (Path(cli.__file__).parent / "recipes" / "tiny.toml").read_text()
    (tmp_path / "published.toml").write_text(tiny.replace('form = "pooled"', 'form = "published"'))
    benchmark = load_benchmark("tiny").model_copy(update={"recipes": [str(tmp_path / "published.toml")]})
    with pytest.raises(RecipeError, match="'tiny' has no recipe with a meta-model of pooled form"):
        compare(tmp_path / "out", benchmark=benchmark)
    assert not (tmp_path / "out").exists()


def test_an_output_path_that_cannot_be_a_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(QualmsError, match=r"Folder .*file/x cannot be written to: Not a directory\."):
        compare(tmp_path / "file" / "x")


def test_the_command_line_runs_a_comparison(copy_of_done: Path) -> None:
    app = typer.Typer()
    cli.register(app)
    options = ["--out", str(copy_of_done), "--seeds", "1", "--ood", "shapes", "--resamples", "100"]
    result = CliRunner().invoke(app, ["compare-flags", "tiny", *options])
    assert result.exit_code == 0, result.output
    assert "1 of 1 seeds exist" in result.output


def test_files_of_seeds_are_read_only_with_their_fingerprint(tmp_path: Path) -> None:
    alpha = AlphaQuality(temperature=1.0, accuracy=90.0, ece={}, nll={}, served_class={"test": 100.0}, ties=0)
    scores = {"folder:a/b": {NEW_DEFAULT: np.array([1.0, 2.0])}}
    SeedScores(scores, alpha).save(tmp_path / "seed.npz", "mark")
    read = SeedScores.load(tmp_path / "seed.npz", "mark")
    assert read
    assert read.alpha == alpha
    np.testing.assert_array_equal(read.scores["folder:a/b"][NEW_DEFAULT], [1.0, 2.0])
    assert SeedScores.load(tmp_path / "seed.npz", "other") is None
    assert SeedScores.load(tmp_path / "none.npz", "mark") is None
