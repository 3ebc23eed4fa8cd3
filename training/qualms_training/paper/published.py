"""The paper's published figures, printed beside ours.

Source: M. Shen, Y. Bu, P. Sattigeri, S. Ghosh, S. Das, G. Wornell, "Post-hoc Uncertainty Learning using a
Dirichlet Meta-Model", AAAI 2023, its tables of OOD detection, misclassification detection, ablations and transfer.
"""

import csv
from functools import lru_cache
from importlib import resources
from typing import NamedTuple

_SCORES = {
    "entropy": ("Ours", "Ent"),
    "max_probability": ("Ours", "MaxP"),
    "mutual_information": ("Ours", "MI"),
    "differential_entropy": ("Ours", "Dent"),
    "precision": ("Ours", "Prec"),
    "base_entropy": ("Base Model", "Ent"),
    "base_max_probability": ("Base Model", "MaxP"),
}
_SETS = {
    "omniglot": "Omniglot",
    "fashion_mnist": "FMNIST",
    "kmnist": "KMNIST",
    "cifar10": "CIFAR10",
    "corrupted": "Corrupted",
    "svhn": "SVHN",
    "tiny_imagenet": "TinyImageNet",
    "lsun": "LSUN",
}
_SETS_OF_ABLATIONS = {"tiny_imagenet": "TIM"}


class Figure(NamedTuple):
    """A published mean and its standard deviation, in percent."""

    mean: float
    std: float | None


def ood_figure(paper_id: str | None, score: str, data: str, metric: str) -> Figure | None:
    """The figure of the paper's OOD table for our names of score and set, or None if the paper gives none."""
    method, short = _SCORES.get(score, (None, None))
    return figure("ood", paper_id, method, short, data, metric)


def error_figure(paper_id: str | None, score: str, metric: str) -> Figure | None:
    """The figure of the paper's misclassification table for our name of a score, or None if the paper gives none."""
    method, short = _SCORES.get(score, (None, None))
    return figure("misclassification", paper_id, method, short, None, metric)


def figure(
    task: str, paper_id: str | None, method: str | None, score: str | None, data: str | None, metric: str
) -> Figure | None:
    """A figure by the paper's names of method and score and our name of the OOD set, or None if the paper gives none."""
    if data is not None and data not in _SETS:
        return None
    names = [None] if data is None else [_SETS[data], _SETS_OF_ABLATIONS.get(data)]
    matches = (_figures().get((task, paper_id, method, score, name, metric)) for name in names)
    return next((match for match in matches if match), None)


@lru_cache(maxsize=1)
def _figures() -> dict[tuple[str | None, ...], Figure]:
    text = (resources.files("qualms_training.paper") / "published.csv").read_text(encoding="utf-8")
    figures = {}
    for row in csv.DictReader(text.splitlines()):
        key = tuple(row[name] or None for name in ("task", "id", "method", "score", "ood", "metric"))
        figures[key] = Figure(float(row["mean"]), float(row["std"]) if row["std"] else None)
    return figures
