"""A benchmark gives the same figures as a training run, and saved results are not computed again."""

import csv
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from qualms_training import cli
from qualms_training.console import Display
from qualms_training.errors import RecipeError
from qualms_training.paper.command import make_tables
from qualms_training.paper.definition import Benchmark, load_benchmark
from qualms_training.paper.document import Document
from qualms_training.paper.evaluation_protocol import Protocol
from qualms_training.paper.inputs import InputBuilder
from qualms_training.paper.registry import METHODS as REGISTRY
from qualms_training.paper.runner import JobResult, MethodRun, Run

pytestmark = pytest.mark.slow

METHODS = ("base", "ours", "ours-pooled", "fused", "energy", "vim", "pixels")
CPU = torch.device("cpu")


def tables(
    out: Path, *only: str, benchmark: Benchmark | None = None, seeds: int = 1, keep: Path | None = None
) -> tuple[Document, str]:
    printed = io.StringIO()
    document = make_tables(
        benchmark or load_benchmark("tiny"),
        out=out,
        cache=out / "cache",
        data_dir=None,
        device=CPU,
        seeds=seeds,
        only=only or METHODS,
        keep=keep,
        display=Display(Console(file=printed, width=250)),
    )
    return document, printed.getvalue()


def result(out: Path, key: str, protocol: Protocol = Protocol.fair) -> JobResult:
    return JobResult.model_validate_json(MethodRun(key, 0, protocol).file(out).read_text())


def times(out: Path) -> dict[str, int]:
    return {str(file.relative_to(out)): file.stat().st_mtime_ns for file in (out / "results").rglob("*.json")}


@pytest.fixture(scope="module")
def done(tiny_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished benchmark on the base of the tiny run; tests must not write to it."""
    out = tmp_path_factory.mktemp("benchmark")
    shutil.copytree(tiny_run / "cache" / "bases", out / "cache" / "bases")
    tables(out)
    return out


@pytest.fixture
def copy_of_done(done: Path, tmp_path: Path) -> Path:
    """A copy of the finished benchmark that a test may change."""
    return Path(shutil.copytree(done, tmp_path / "copy"))


def test_figures_of_flag_score_alpha_meta_model_and_base_agree_with_the_training_run(
    done: Path, tiny_run: Path
) -> None:
    """Compares figures from PyTorch with those of the exported bundle in ONNX Runtime."""
    meta, fused = (result(done, key).measured for key in ("ours-pooled", "fused"))
    assert meta
    assert fused
    rows = {score: (fused, score) for score in ("entropy", "mutual_information", "precision", "fused")}
    rows["meta_mutual_information"] = (meta, "mutual_information")
    evaluation = json.loads((tiny_run / "seed-0" / "evaluation.json").read_text())
    compared = 0
    for row in evaluation["ood"]:
        if row["score"] in rows and "itself" not in row["data"]:
            measured, score = rows[row["score"]]
            assert measured.ood[row["data"]][score].auroc == pytest.approx(row["auroc"], abs=0.05)
            compared += 1
    assert compared == 15
    base = result(done, "base").measured
    assert base
    assert base.error_rate == pytest.approx(100 - evaluation["base_accuracy"])
    for row in evaluation["ood"]:
        if row["score"] == "base_entropy" and "itself" not in row["data"]:
            assert base.ood[row["data"]]["entropy"].auroc == pytest.approx(row["auroc"], abs=0.05)


def test_auroc_of_the_set_against_itself_is_fifty_under_the_fair_protocol(done: Path) -> None:
    for key in ("base", "ours-pooled", "fused", "energy", "vim", "pixels"):
        measured = result(done, key).measured
        assert measured
        for score, detection in measured.ood["shapes (itself)"].items():
            assert detection.auroc == pytest.approx(50, abs=4), (key, score)


def test_the_published_protocol_changes_only_sets_that_it_normalises_differently(done: Path) -> None:
    """The tiny recipe normalises with 0.5, as the published protocol does for OOD images, so only noise differs."""
    fair, published = (result(done, "base", protocol).measured for protocol in Protocol)
    assert fair
    assert published
    assert fair.ood["textures"] == published.ood["textures"]
    assert fair.ood["corrupted"] != published.ood["corrupted"]


def test_documents_are_written_with_command_and_reasons(done: Path) -> None:
    text = (done / "tiny.md").read_text()
    assert "Made by `qualms tables tiny --seeds 1 --out DIR --cache DIR`." in text
    assert "Column nothing: not available" in text
    assert "Ours, published form: not run: the benchmark has no recipe with a meta-model of published form." in text
    assert "LULA: not run: left out of this run by --only." in text
    assert (done / "tiny.csv").read_text().count("\n") > 500
    assert "</html>" in (done / "tiny.html").read_text()


def test_seen_noise_is_marked_and_explained_in_every_file(done: Path) -> None:
    text, page = (
        (done / "tiny.md").read_text(),
        (done / "tiny.html").read_text().replace("<code>", "`").replace("</code>", "`"),
    )
    for document in (text, page):
        assert "† marks figures on noise that the row has seen" in document
        assert "permutation + blur + contrast by `ours-pooled`, `fused`." in document
    rows = list(csv.DictReader((done / "tiny.csv").read_text().splitlines()))
    seen = {(row["method"], row["column"]) for row in rows if row["seen_noise"] == "1" and row["table"] == "ood"}
    assert seen == {("Ours, pooled form", "corrupted"), ("Flag score and joined α", "corrupted")}
    (line,) = [line for line in text.partition("protocol as-published")[0].splitlines() if "pooled form · MI" in line][
        :1
    ]
    assert line.count("†") == 1


def test_a_second_run_uses_all_saved_results(copy_of_done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError

    before = times(copy_of_done)
    monkeypatch.setattr(InputBuilder, "post_hoc_inputs", fail)
    monkeypatch.setattr(InputBuilder, "image_inputs", fail)
    _, printed = tables(copy_of_done)
    assert f"{len(before)} of {len(before)} results exist" in printed
    assert times(copy_of_done) == before
    assert len(before) == 2 * len(METHODS)


def test_rows_of_earlier_tables_are_kept_for_methods_without_results(done: Path, tmp_path: Path) -> None:
    shutil.copytree(done / "cache", tmp_path / "cache")
    earlier = tmp_path / "earlier.csv"
    earlier.write_text((done / "tiny.csv").read_text().replace("Pixels alone", "Gone"))
    document, _ = tables(tmp_path, "energy", keep=earlier)
    (sentence,) = [paragraph for paragraph in document.head if "earlier.csv`, an" in paragraph]
    assert "for them: Base Model; Ours, pooled form; Flag score and joined α; ViM; they are not compared" in sentence
    assert str(tmp_path) not in document.markdown()
    assert "permutation + blur + contrast by `ours-pooled`, `fused`." in " ".join(document.head)
    assert "Rows of Gone in `earlier.csv`: not kept: there is no such method any more." in document.notes
    assert any(paragraph.endswith("over 1 seed(s).") for paragraph in document.head)  # both have the same base
    fields = ("protocol", "table", "method", "score", "column", "metric", "mean", "seeds", "missing", "seen_noise")
    old, new = (
        [tuple(row[name] for name in fields) for row in csv.DictReader(text.splitlines())]
        for text in ((done / "tiny.csv").read_text(), document.csv())
    )
    for method in ("Base Model", "Ours, pooled form", "ViM", "Energy"):
        rows = [row for row in old if row[2] == method and row[1] != "cost" and "detected" not in row[4] + row[5]]
        assert rows == [row for row in new if row in rows]


def test_only_jobs_with_a_damaged_result_or_changed_settings_are_run_again(copy_of_done: Path) -> None:
    before = times(copy_of_done)
    damaged = MethodRun("base", 0, Protocol.fair).file(copy_of_done)
    damaged.write_text("{")
    tables(copy_of_done, "base", "energy")
    changed = {name for name, time in times(copy_of_done).items() if time != before[name]}
    assert changed == {"results/fair/base/seed-0.json"}
    document = load_benchmark("tiny").model_dump()
    document["methods"]["ours-pooled"] = {"share": 0.5}
    tables(copy_of_done, benchmark=Benchmark.model_validate(document))
    changed = {name for name, time in times(copy_of_done).items() if time != before[name]} - changed
    assert changed == {f"results/{protocol}/ours-pooled/seed-0.json" for protocol in Protocol}


def test_with_one_base_all_seeds_use_the_same_base(copy_of_done: Path) -> None:
    benchmark = load_benchmark("tiny").model_copy(update={"one_base": True})
    document, _ = tables(copy_of_done, "base", "ours-pooled", benchmark=benchmark, seeds=2)
    assert any("best for this base only" in paragraph for paragraph in document.head)
    bases = list((copy_of_done / "cache" / "bases").glob("*.pt"))
    assert len(bases) == 1
    base, ours = (
        [
            JobResult.model_validate_json(MethodRun(key, seed, Protocol.fair).file(copy_of_done).read_text()).measured
            for seed in (0, 1)
        ]
        for key in ("base", "ours-pooled")
    )
    assert base[0] == base[1]
    assert ours[0] != ours[1]


def test_whole_networks_are_trained_once_unless_protocols_have_different_outliers(copy_of_done: Path) -> None:
    keys = [key for key, entry in REGISTRY.items() if entry.whole_network]
    document, _ = tables(copy_of_done, *keys)
    assert not any(note.startswith(("MC Dropout", "Be-Bayesian", "PostNet", "ALOE")) for note in document.notes)
    for key in keys:
        files = list((copy_of_done / "networks" / key / "seed-0").iterdir())
        assert len(files) == (2 if key == "aloe" else 1)
        assert all(result(copy_of_done, key, protocol).measured for protocol in Protocol)


def test_an_unknown_method_is_reported_by_name(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no method 'magic' to run; accepted are base,"):
        tables(tmp_path, "magic")


def test_recipes_of_one_benchmark_must_share_a_base(tmp_path: Path, display: Display) -> None:
    benchmark = load_benchmark("tiny").model_copy(update={"recipes": ["tiny", "mnist-lenet"]})
    with pytest.raises(RecipeError, match="'tiny' and 'mnist-lenet', which must have the same"):
        _ = Run(benchmark, tmp_path, tmp_path, None, CPU, display).recipes


def test_the_command_line_runs_a_benchmark(copy_of_done: Path) -> None:
    app = typer.Typer()
    cli.register(app)
    result = CliRunner().invoke(app, ["tables", "tiny", "--out", str(copy_of_done), "--seeds", "1", "--only", "base"])
    assert result.exit_code == 0, result.output
    assert "2 of 2 results exist" in result.output
    assert "Base Model" in result.output
