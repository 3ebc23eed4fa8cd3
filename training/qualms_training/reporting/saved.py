"""Files of an evaluation, and folders of images as OOD sets."""

import os
from pathlib import Path

from qualms.bundle.embedded import available, resolve_model
from qualms.bundle.evaluation_results import Evaluation
from qualms_training.data.sources import synthetic
from qualms_training.errors import DataError
from qualms_training.files import save_json, save_text
from qualms_training.reporting.report import accuracy_line, all_grids, to_markdown
from qualms_training.reporting.summary import summary_grids

SUFFIXES = (".md", ".json")


def default_out(model: Path) -> Path:
    """Where the evaluation of a bundle is written by default, without suffix: beside it, or here if it is embedded."""
    name = f"{model.stem}.evaluation"
    embedded = {resolve_model(one).resolve() for one in available()}
    return Path(name) if model.resolve() in embedded else model.with_name(name)


def evaluation_files(out: Path) -> list[Path]:
    """The files that `out` stands for: out.md and out.json; a suffix .md or .json of `out` is ignored."""
    name = out.name.removesuffix(out.suffix) if out.suffix in SUFFIXES else out.name
    return [out.with_name(name + suffix) for suffix in SUFFIXES]


def check_out(out: Path | None) -> None:
    """DataError if the files of an evaluation cannot be written, before the long part."""
    if out is None:
        return
    if not out.name or out.is_dir():
        raise DataError(f"{out} is a folder; --out names the files to write, for example {out / 'evaluation'}.")
    folder = next(parent for parent in out.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise DataError(f"The evaluation cannot be written to {folder}; name another place with --out FILE.")


def save_evaluation(out: Path, title: str, evaluation: Evaluation, paper_id: str | None = None) -> list[Path]:
    """Write the summary and all tables to out.md and the results to out.json, each atomically; returns the files."""
    text, results = evaluation_files(out)
    grids = [*summary_grids([evaluation]), *all_grids([evaluation], paper_id)]
    try:
        save_json(results, evaluation.model_dump(mode="json"))
        save_text(
            text,
            "\n".join([f"# {title}\n", accuracy_line([evaluation]) + "\n", *(to_markdown(grid) for grid in grids)]),
        )
    except OSError as error:
        raise DataError(f"The evaluation cannot be written to {out}: {error.strerror}.") from error
    return [text, results]


def ood_name(name: str, data_dir: Path | None) -> str:
    """The name of an OOD set as `qualms_training.data.load` takes it: the path of a folder becomes folder:PATH.

    A data set of the data folder, or a drawn one, has precedence over a folder of the same name.
    """
    folder = data_dir or os.environ.get("QUALMS_DATA")
    known = name in synthetic.SETS or (folder and (Path(folder) / f"{name}-test.npz").exists())
    return f"folder:{name}" if not known and Path(name).expanduser().is_dir() else name
