"""The subcommands of training; each imports its dependencies when it runs, so that `qualms --help` is fast."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from qualms.cluster.options import Address, Cpus, Engine, Gpus, cluster_options
from qualms_training.options import AllowChance, Cache, Data, Device, Form, Model, ShowAll
from qualms_training.own_model import cli as own_model
from qualms_training.stages import Stage


class ProtocolName(StrEnum):
    """A protocol of the paper's tables, as defined in qualms_training.paper.evaluation_protocol."""

    fair = "fair"
    as_published = "as-published"


def register(app: typer.Typer) -> None:
    """Add the commands of this module and of `qualms_training.own_model.cli` to `qualms`."""
    own_model.register(app)
    app.command()(train)
    app.command()(evaluate)
    app.command()(calibrate)
    app.command()(convert)
    app.command()(compare)
    app.command()(tables)
    app.command("compare-flags")(compare_flags)
    app.command("toy-figure")(toy_figure)
    app.command()(data)
    app.command()(recipes)
    app.command("bench-fit")(bench_fit)
    app.command("bench-graph")(bench_graph)
    app.command("bench-scores")(bench_scores)
    app.command("gpu-table")(gpu_table)


def train(
    recipe: Annotated[str, typer.Argument(help="A recipe's name (see `qualms recipes`) or a .toml file.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the run.")],
    data: Data = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds, counted from --seed.")] = 1,
    seed: Annotated[int, typer.Option(min=0, help="The first seed.")] = 0,
    device: Device = Device.auto,
    stage: Annotated[Stage | None, typer.Option(help="Run this stage only.", show_default=False)] = None,
    cache: Cache = None,
    allow_chance: AllowChance = False,
    show_all: ShowAll = False,
    engine: Engine = "local",
    address: Address = None,
    cpus_per_model: Cpus = 1,
    gpus_per_model: Gpus = 0,
) -> None:
    """Run a recipe, from data to one calibrated ONNX file; an interrupted run continues when it is started again."""
    from qualms.cluster.connection import connected_if
    from qualms_training.recipe import load_recipe
    from qualms_training.run import pick_device, train_recipe

    cluster = cluster_options(engine, address, cpus_per_model, gpus_per_model)
    with connected_if(cluster):
        train_recipe(
            load_recipe(recipe),
            out=out,
            cache=cache or out / "cache",
            data_dir=data,
            seeds=range(seed, seed + seeds),
            device=pick_device(device.value),
            only=stage.value if stage else None,
            allow_chance=allow_chance,
            show_all=show_all,
            cluster=cluster,
        )


def evaluate(
    model: Model,
    data: Data = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="OOD set: a name, or a folder of images; repeat for more.", show_default="the recipe's"),
    ] = None,
    test: Annotated[
        Path | None,
        typer.Option(
            help="Labelled images instead of the recipe's test set: a folder of class folders, or NAME-SPLIT.npz.",
            show_default=False,
        ),
    ] = None,
    encoding: Annotated[
        list[str] | None,
        typer.Option(help="Encoding to evaluate in; repeat for more.", show_default="the recipe's"),
    ] = None,
    coverage: Annotated[
        list[float] | None,
        typer.Option(help="Coverage of prediction sets; repeat for more.", show_default="0.9, 0.95 and 0.99"),
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="Store the evaluation in the bundle.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(help="Files of the tables, OUT.md and OUT.json.", show_default="MODEL.evaluation"),
    ] = None,
    show_all: ShowAll = False,
) -> None:
    """Evaluate a bundle on its test set and on OOD sets, in several encodings; print the rows that decide, and save all."""
    from qualms.bundle.embedded import available, resolve_model
    from qualms_training.reporting.evaluation import evaluate_bundle
    from qualms_training.reporting.saved import default_out

    if write and model in available():
        raise typer.BadParameter(f"the embedded model {model} cannot be overwritten: copy its file")
    path = resolve_model(model)
    evaluate_bundle(
        path,
        data,
        ood,
        test=test,
        encodings=encoding,
        coverages=coverage,
        write=write,
        out=out or default_out(path),
        show_all=show_all,
    )


def calibrate(
    model: Model,
    images: Annotated[
        str | None,
        typer.Argument(
            metavar="[DATA]",
            help="Folder of images without labels, folder of class folders, or NAME-SPLIT.npz; without DATA, the bundle's own "
            "calibration images, drawn again from --data.",
        ),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="MODEL")] = None,
    name: Annotated[str | None, typer.Option(help="New name of the model.", show_default="unchanged")] = None,
    as_sent: Annotated[
        list[str] | None,
        typer.Option(
            help="Send the images in this encoding: png, jpeg:75-95, webp:80, resize:1.5-3, brightness:0.85-1.15, or a chain "
            "such as resize:2+jpeg:85. Repeat for more, or separate them by commas.",
            show_default="as stored",
        ),
    ] = None,
    form: Annotated[
        Form | None,
        typer.Option(
            help="worst: the guarantee holds for each encoding; by-size: the same, with thresholds for images of the model's input "
            "size, larger and smaller ones; mixture: it holds for all encodings in the listed shares.",
            show_default="worst",
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of drawn encodings.", show_default="0")] = None,
    unlabelled: Annotated[
        bool, typer.Option("--unlabelled", help="Ignore labels, and use all images in and below the folder.")
    ] = False,
    keep_trust: Annotated[
        bool, typer.Option("--keep-trust", help="Without labels: keep the present guarantee on errors.")
    ] = False,
    from_log: Annotated[
        Path | None,
        typer.Option(
            help="Calibrate on the scores of served images in this file (QUALMS_SCORE_LOG).", show_default=False
        ),
    ] = None,
    trim: Annotated[
        float | None,
        typer.Option(help="Without labels: leave out this share with the highest flag scores.", show_default="0"),
    ] = None,
    target_fpr: Annotated[
        float | None, typer.Option(help="Default false-alarm rate.", show_default="unchanged")
    ] = None,
    target_risk: Annotated[
        float | None, typer.Option(help="Default error rate of trusted predictions.", show_default="unchanged")
    ] = None,
    data: Data = None,
) -> None:
    """Recalibrate a bundle on in-distribution images, with or without labels, as they will be sent; torch is not needed."""
    from qualms.bundle.embedded import available, resolve_model
    from qualms_training.reporting.recalibration import recalibrate

    if out is None and model in available():
        raise typer.BadParameter(f"the embedded model {model} cannot be overwritten: give --out")
    path = resolve_model(model)
    recalibrate(
        path,
        images,
        out or path,
        from_log=from_log,
        data_dir=data,
        as_sent=[part.strip() for text in as_sent or [] for part in text.split(",")],
        form=None if form is None else form.value,
        seed=seed,
        unlabelled=unlabelled,
        keep_trust=keep_trust,
        trim=trim,
        name=name,
        target_fpr=target_fpr,
        target_risk=target_risk,
    )


def convert(
    run: Annotated[Path, typer.Argument(help="Folder of a run that an earlier version made.")],
    data: Data = None,
    cache: Annotated[
        Path | None, typer.Option(help="Cache folder of the run, with its trained base.", show_default="RUN/cache")
    ] = None,
    device: Device = Device.auto,
) -> None:
    """Give a run of an earlier version the joined α and the present flag score; nothing is trained again."""
    from qualms_training.conversion import convert_run
    from qualms_training.run import pick_device

    convert_run(run, cache=cache or run / "cache", data_dir=data, device=pick_device(device.value))


def compare(
    first: Annotated[Path, typer.Argument(metavar="A", help="A bundle or a run folder.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another bundle or run folder.")],
) -> None:
    """Compare the evaluations of two bundles, or of two runs seed by seed."""
    from qualms_training.reporting.compare import compare_runs

    compare_runs(first, second)


def tables(
    benchmark: Annotated[str, typer.Argument(help="mnist, cifar10, cifar100, transfer, tiny, or a .toml file.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for results and tables.")],
    data: Data = None,
    cache: Cache = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds, counted from 0.", show_default="the benchmark's")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Run this method only; repeat for more.", show_default="all")
    ] = None,
    protocol: Annotated[
        ProtocolName | None, typer.Option(help="Use this protocol only.", show_default="the benchmark's")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="CSV file of earlier tables; its rows are used for methods without results.", show_default=False
        ),
    ] = None,
    device: Device = Device.auto,
) -> None:
    """Reproduce the paper's tables: every method, two protocols; an interrupted run continues when it is started again."""
    from qualms_training.paper.command import make_tables
    from qualms_training.paper.definition import load_benchmark
    from qualms_training.run import pick_device

    loaded = load_benchmark(benchmark)
    if protocol is not None:
        loaded = loaded.under(protocol.value)
    make_tables(
        loaded,
        out=out,
        cache=cache or out / "cache",
        data_dir=data,
        device=pick_device(device.value),
        seeds=seeds,
        only=only or [],
        keep=keep,
    )


def compare_flags(
    benchmark: Annotated[str, typer.Argument(help="mnist, cifar10, cifar100, transfer, tiny, or a .toml file.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for scores and tables.")],
    data: Data = None,
    cache: Cache = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Number of seeds, counted from 0.", show_default="the benchmark's")
    ] = None,
    ood: Annotated[
        list[str] | None,
        typer.Option(help="OOD set beside the benchmark's; repeat for more.", show_default=False),
    ] = None,
    resamples: Annotated[int, typer.Option(min=100, help="Resamples of the paired bootstrap.")] = 1000,
    device: Device = Device.auto,
) -> None:
    """Compare the flag score with its predecessor and every single score; an interrupted run continues when started again."""
    from qualms_training.paper.definition import load_benchmark
    from qualms_training.paper.flags.comparison import compare_flags as compare
    from qualms_training.run import pick_device

    compare(
        load_benchmark(benchmark),
        out=out,
        cache=cache or out / "cache",
        data_dir=data,
        device=pick_device(device.value),
        seeds=seeds,
        ood=ood or [],
        resamples=resamples,
    )


def toy_figure(
    out: Annotated[Path, typer.Option("--out", help="Folder for the figure, its numbers and the meta-models.")],
    data: Data = None,
    cache: Cache = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of splits, base and meta-models.")] = 0,
    with_images: Annotated[
        bool, typer.Option("--with-images", help="Draw the two images beside their densities.")
    ] = False,
    device: Device = Device.auto,
) -> None:
    """Draw the paper's toy figure: Dirichlet densities of a digit and a FashionMNIST image, by the taps that are used."""
    from qualms_training.paper.toy.toy_figure import make_toy_figure
    from qualms_training.recipe import load_recipe
    from qualms_training.run import pick_device

    make_toy_figure(
        load_recipe("mnist-lenet"),
        load_recipe("mnist-lenet-pooled"),
        "fashion_mnist",
        out=out,
        cache=cache or out / "cache",
        data_dir=data,
        device=pick_device(device.value),
        seed=seed,
        with_images=with_images,
    )


def data(
    name: Annotated[str, typer.Argument(help="mnist, fashion_mnist, kmnist, omniglot, cifar10, cifar100 or svhn.")],
    out: Annotated[Path, typer.Option("--out", help="The data folder to write to.")],
    mirror: Annotated[
        str | None,
        typer.Option(
            envvar="QUALMS_MIRROR", help="Base URL to download from instead of the publishers.", show_default=False
        ),
    ] = None,
) -> None:
    """Download a data set and write it as NAME-SPLIT.npz files."""
    from qualms_training.data.sources.download import download

    for path in download(name, out, mirror):
        typer.echo(f"wrote {path}")


def recipes() -> None:
    """List the recipes that come with Qualms."""
    from rich.console import Console
    from rich.table import Table

    from qualms_training.recipe import available, load_recipe

    table = Table("recipe", "description", header_style="bold")
    for name in available():
        table.add_row(name, load_recipe(name).description)
    Console().print(table)


def bench_fit(
    images: Annotated[int, typer.Option(min=128, help="Training images.")] = 1024,
    epochs: Annotated[int, typer.Option(min=1)] = 20,
    recipe: Annotated[str, typer.Option(help="Recipe whose base and meta-model are used.")] = "cifar10-vgg16-pooled",
) -> None:
    """Compare training on cached features with running the base in every epoch."""
    from qualms_training.bench.fit_speed import bench_fit as bench

    bench(recipe, images, epochs)


def bench_graph(
    recipe: Annotated[str, typer.Option(help="Recipe whose base and meta-model are used.")] = "cifar10-vgg16-pooled",
    model: Annotated[
        str | None,
        typer.Option(help="A model with random weights instead, such as torchvision:resnet50.", show_default=False),
    ] = None,
    classes: Annotated[int, typer.Option(min=2, help="Number of classes of --model.")] = 1000,
    size: Annotated[int, typer.Option(min=1, help="Side of the images of --model.")] = 224,
    repeats: Annotated[int, typer.Option(min=5)] = 60,
) -> None:
    """Compare size and run time of the full graph with those of the base, and measure the time of the scores."""
    from qualms_training.bench import graph_cost

    if model is None:
        graph_cost.bench_graph(recipe, repeats)
    else:
        graph_cost.bench_model(model, classes, size, repeats)


def bench_scores() -> None:
    """Compare the exported scores with high-precision arithmetic, and print the errors."""
    from qualms_training.bench.score_accuracy import bench_scores as bench

    bench()


def gpu_table(
    out: Annotated[Path | None, typer.Option(help="File to write.", show_default="none")] = None,
    graph: Annotated[
        list[Path] | None,
        typer.Option(help="ONNX file to include; repeat for more.", exists=True, dir_okay=False, show_default="none"),
    ] = None,
    wheels: Annotated[
        Path | None,
        typer.Option(
            help="Folder of onnxruntime-gpu wheels that open the graphs; needs Linux and gcc.",
            exists=True,
            file_okay=False,
            show_default="none",
        ),
    ] = None,
) -> None:
    """Tabulate which nodes of the exported graphs each release of onnxruntime-gpu runs on a GPU; none is needed."""
    from qualms_training.bench.gpu_table import gpu_table as make

    make(out, graph or [], wheels)
