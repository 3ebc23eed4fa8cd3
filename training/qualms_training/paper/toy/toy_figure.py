"""`qualms toy-figure`: the paper's toy example, Dirichlet densities of an in-distribution and an OOD image.

The paper trains three meta-models on a LeNet for MNIST, on both taps and on each tap alone, and draws their densities for
a digit and a FashionMNIST image on the simplex of three leading classes. Here the α that a bundle serves is drawn beside
them. The drawing is exact: if π has the distribution Dir(α), then (π_i, π_j, π_k) / (π_i + π_j + π_k) has the distribution
Dir(α_i, α_j, α_k), which does not depend on the other classes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from numpy.typing import NDArray
from rich.markup import escape
from sklearn.metrics import roc_auc_score
from torch import Tensor

from qualms.files import atomic_path
from qualms_training.console import Display
from qualms_training.data import load
from qualms_training.errors import QualmsError
from qualms_training.files import save_json, save_text
from qualms_training.meta.dirichlet import dirichlet_scores
from qualms_training.meta.graph import BundleGraph
from qualms_training.paper.toy.simplex_plot import add_colour_bar, draw_density
from qualms_training.recipe import Recipe
from qualms_training.reporting.report import Grid, to_markdown, to_rich
from qualms_training.stages import base, check, combine, fit
from qualms_training.stages.context import RunContext
from qualms_training.stages.features import extractor
from qualms_training.stages.provenance import versions

ROWS = 500
"""images per forward pass"""
Outputs = Mapping[str, NDArray[np.float32]]
"""outputs of a model for N images by name, among them alpha (N, K) and mutual_information (N,)"""


@dataclass(frozen=True)
class Example:
    """An image of the figure."""

    data: str
    """name of its data set"""
    index: int
    """position in the test split"""
    label: str
    """its class in that data set"""
    pixels: NDArray[np.uint8]
    """(H, W, C)"""

    @property
    def title(self) -> str:
        """The image in words."""
        return f"{self.data} test image {self.index} (class {self.label})"


@dataclass(frozen=True)
class Column:
    """One α in the figure."""

    title: str
    outputs: Mapping[str, Outputs]
    """outputs for all test images, by data set"""

    def alpha(self, example: Example) -> NDArray[np.float64]:
        """α of an image, (K,)."""
        return np.asarray(self.outputs[example.data]["alpha"][example.index], dtype=np.float64)

    def totals(self, data: str) -> NDArray[np.float64]:
        """α_0 of all test images of a data set, (N,)."""
        return np.asarray(self.outputs[data]["alpha"].sum(axis=1, dtype=np.float64))

    def information(self, example: Example) -> float:
        """The mutual information of an image."""
        return float(self.outputs[example.data]["mutual_information"][example.index])


def make_toy_figure(
    published: Recipe,
    served: Recipe,
    ood: str,
    *,
    out: Path,
    cache: Path,
    data_dir: Path | None,
    device: torch.device,
    seed: int = 0,
    with_images: bool = False,
    display: Display | None = None,
) -> None:
    """Train the meta-models that `out` does not have yet, and write toy-figure.png, .md and .json.

    Both recipes must have the same data and the same base. The meta-models on all taps and on each tap alone are those of
    `published`; `served` gives the joined α, and the flag score by which the images are chosen.
    """
    display = display or Display()
    recipe = published.model_copy(update={"data": published.data.model_copy(update={"ood": [ood]})})
    first = RunContext(recipe, seed, out / "all-taps", cache, data_dir, device, display)
    check.run(first)
    settings = {"recipes": [recipe.name, served.name], "ood": ood, "seed": seed, "versions": versions()}
    try:
        save_json(out / "run.json", settings)
    except OSError as error:
        raise QualmsError(f"Folder {out} cannot be written to: {error.strerror}.") from None

    test, other = load(recipe.data.id, "test", data_dir), load(ood, "test", data_dir)
    images = {source.name: source.conformed(recipe.input.spec) for source in (test, other)}
    columns = _columns(first, served, images)
    examples = [
        Example(source.name, index, source.classes[source.labels[index]], images[source.name][index])
        for source in (test, other)
        for index in [median_index(columns[-1].outputs[source.name]["fused"])]
    ]
    grids = [_image_grid(columns, example, first.data.classes) for example in examples]
    grids.append(_set_grid(columns, test.name, other.name))
    with atomic_path(out / "toy-figure.png") as file:
        figure = _figure(columns, examples, first.data.classes, with_images)
        figure.savefig(file, dpi=110, pil_kwargs={"optimize": True})
    save_text(out / "toy-figure.md", _document(recipe, served, seed, examples, grids))
    save_json(out / "toy-figure.json", _record(columns, examples))
    for grid in grids:
        display.console.print(to_rich(grid))
    for suffix in ("png", "md", "json"):
        display.note(f"wrote {escape(str(out / f'toy-figure.{suffix}'))}")


def median_index(scores: NDArray[np.float32]) -> int:
    """The index of the median score (N,); of the two middle ones of an even number, the smaller."""
    return int(np.argsort(scores, kind="stable")[(len(scores) - 1) // 2])


def leading(alpha: NDArray[np.float64]) -> NDArray[np.int64]:
    """The three classes with the largest α (K,), largest first."""
    return np.argsort(-alpha, kind="stable")[:3]


def _columns(first: RunContext, served: Recipe, images: Mapping[str, NDArray[np.uint8]]) -> list[Column]:
    """The meta-models on all taps and on each tap, and the served α, all on one frozen base."""
    frozen, recipe = base.frozen_base(first), first.recipe
    taps = extractor(first).tapped.names
    contexts = {"taps " + " and ".join(taps): first}
    for index, tap in enumerate(taps):
        contexts[f"tap {tap} only"] = first.with_base(frozen, _one_tap(recipe, tap, index))
        contexts[f"tap {tap} only"].folder = first.folder.with_name(tap)
    columns = [Column(title, _run(_meta_model(context), images)) for title, context in contexts.items()]
    last = first.with_base(frozen, served)
    last.folder = first.folder.with_name("served")
    graph = BundleGraph(extractor(last).cpu(), fit.fitted_meta(last), *combine.fitted(last), served.prediction).eval()
    return [*columns, Column("served, α = 1 + n·p", _run(graph.named, images))]


def _one_tap(recipe: Recipe, tap: str, index: int) -> Recipe:
    """The recipe with one of its taps."""
    meta = recipe.meta.model_copy(update={"branches": recipe.meta.branches[index : index + 1]})
    return recipe.model_copy(update={"base": recipe.base.model_copy(update={"taps": [tap]}), "meta": meta})


def _meta_model(context: RunContext) -> Callable[[Tensor], Mapping[str, Tensor]]:
    """Pixels to α of the trained meta-model and its scores."""
    features, meta = extractor(context).cpu(), fit.fitted_meta(context)
    return lambda batch: dirichlet_scores(meta(features(batch)[1]))._asdict()


@torch.inference_mode()
def _run(
    model: Callable[[Tensor], Mapping[str, Tensor]], images: Mapping[str, NDArray[np.uint8]]
) -> dict[str, Outputs]:
    results: dict[str, Outputs] = {}
    for name, pixels in images.items():
        parts = [model(torch.from_numpy(pixels[start : start + ROWS])) for start in range(0, len(pixels), ROWS)]
        results[name] = {key: torch.cat([part[key] for part in parts]).numpy() for key in parts[0]}
    return results


def _figure(
    columns: Sequence[Column], examples: Sequence[Example], classes: Sequence[str], with_images: bool
) -> Figure:
    """One row per image and one column per α, after a column of the images themselves if `with_images`."""
    count = len(columns) + with_images
    figure = Figure(figsize=(2.15 * count + 1.0, 4.9), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(examples), count, squeeze=False)
    for row, example in zip(all_axes, examples, strict=True):
        if with_images:
            row[0].imshow(example.pixels)
            row[0].set_axis_off()
        panels = row[with_images:]
        name = f"{example.data}\ntest image {example.index}"
        panels[0].text(-0.22, 0.43, name, rotation=90, ha="center", va="center")
        for axes, column in zip(panels, columns, strict=True):
            alpha = column.alpha(example)
            chosen = leading(alpha)
            draw_density(axes, alpha[chosen], [classes[index] for index in chosen])
            values = ", ".join(map(_number, alpha[chosen]))
            text = f"α = {values}\nα₀ = {_number(alpha.sum())}   MI = {_information(column.information(example))}"
            axes.text(0.5, -0.1, text, ha="center", va="top", fontsize=9)
            if example is examples[0]:
                axes.set_title(column.title, fontsize=10)
    add_colour_bar(figure, all_axes.ravel().tolist())
    return figure


def _number(value: float) -> str:
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _information(value: float) -> str:
    return f"{value:.3f}" if value > 0.01 else f"{value:.1e}"


def _image_grid(columns: Sequence[Column], example: Example, classes: Sequence[str]) -> Grid:
    """The numbers of one row of the figure."""
    alphas = [column.alpha(example) for column in columns]
    three = [leading(alpha) for alpha in alphas]
    pairs = list(zip(alphas, three, strict=True))
    named = [", ".join(f"{classes[index]}: {_number(alpha[index])}" for index in chosen) for alpha, chosen in pairs]
    rows = [
        ("leading classes: α", named),
        ("their share of α_0, %", [f"{100 * alpha[chosen].sum() / alpha.sum():.0f}" for alpha, chosen in pairs]),
        ("α_0", [_number(alpha.sum()) for alpha in alphas]),
        ("mutual information", [_information(column.information(example)) for column in columns]),
    ]
    return Grid(example.title, [column.title for column in columns], rows)


def _set_grid(columns: Sequence[Column], test: str, ood: str) -> Grid:
    """The same scores over all test images of both sets."""
    first, *single_taps, _ = columns
    rows = []
    for name in (test, ood):
        totals = [np.median(column.totals(name)) for column in columns]
        information = [np.median(column.outputs[name]["mutual_information"]) for column in columns]
        larger = [100 * np.mean(column.totals(name) > first.totals(name)) for column in single_taps]
        rows += [
            (f"median α_0, {name}", [_number(float(value)) for value in totals]),
            (f"median mutual information, {name}", [_information(float(value)) for value in information]),
            (f"{name}: α_0 larger than with all taps, % of images", ["–", *(f"{share:.0f}" for share in larger), "–"]),
        ]
    rows.append((f"AUROC of mutual information against {ood}, %", [f"{_auroc(c, test, ood):.2f}" for c in columns]))
    return Grid("All test images", [column.title for column in columns], rows)


def _auroc(column: Column, test: str, ood: str) -> float:
    scores = [column.outputs[name]["mutual_information"] for name in (test, ood)]
    return 100 * float(roc_auc_score(np.repeat([0, 1], [len(part) for part in scores]), np.concatenate(scores)))


def _document(recipe: Recipe, served: Recipe, seed: int, examples: Sequence[Example], grids: Sequence[Grid]) -> str:
    """The caption of the figure and the tables, as Markdown."""
    command = "qualms toy-figure --out DIR" + (f" --seed {seed}" if seed else "")
    caption = (
        f"Made by `{command}`. Rows: {' and '.join(example.title for example in examples)}; each is the test image of its "
        f"set with the median flag score. Columns: meta-models of the recipe `{recipe.name}` on all of its taps and on each "
        f"tap alone, and the α that a bundle of the recipe `{served.name}` serves, all on one frozen base. Each panel shows "
        "the density of the three classes with the largest α, renormalised to sum to one: it is the Dirichlet density with "
        "these three α, which are given below (top, left, right), with the sum α₀ and the mutual information (MI) of all "
        "classes. Colours show the density relative to the uniform distribution, lines its factors of ten, and the dot the "
        "mean. A small triangle is a magnified part of a narrow density."
    )
    return "\n".join(["# Toy figure\n", "![](toy-figure.png)\n", caption + "\n", *map(to_markdown, grids)])


def _record(columns: Sequence[Column], examples: Sequence[Example]) -> list[dict[str, object]]:
    """All α of the figure with their images."""
    return [
        {
            "data": example.data,
            "index": example.index,
            "class": example.label,
            "column": column.title,
            "alpha": column.alpha(example).tolist(),
            "mutual_information": column.information(example),
        }
        for example in examples
        for column in columns
    ]
