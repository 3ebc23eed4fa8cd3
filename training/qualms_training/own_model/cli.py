"""The commands for a user's own classifier: `qualms fit`, `qualms init` and `qualms taps`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from qualms.cluster.options import Address, Cpus, Engine, Gpus, cluster_options
from qualms_training.options import AllowChance, Cache, Device, Form, ShowAll

if TYPE_CHECKING:
    from qualms_training.own_model.options import FitOptions

Model = Annotated[
    str,
    typer.Option(
        help="torchvision:NAME, timm:NAME, transformers:FOLDER, package.module:function, a TorchScript or torch.export file, or "
        "one of our own, such as resnet20."
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        help="A state-dict file (.pt, .pth, .safetensors), DEFAULT or another name of the library's weights, or included if the "
        "model comes with them.",
        show_default=False,
    ),
]
Images = Annotated[
    str,
    typer.Option(
        "--data",
        help="Folder of class folders, with or without train, val and test above them; or NAME of NAME-train.npz and "
        "NAME-test.npz in the folder of QUALMS_DATA.",
    ),
]
Name = Annotated[str | None, typer.Option(help="Name of the served model.", show_default="from --model")]
Ood = Annotated[
    list[str] | None, typer.Option(help="Folder of OOD images for the report; repeat for more.", show_default=False)
]
Classes = Annotated[
    Path | None,
    typer.Option(
        help="File with the class names in the order of the logits: one per line, or a JSON list.",
        show_default="the model's own, or alphabetical",
    ),
]
Seen = Annotated[
    str | None,
    typer.Option(
        help="Training images of --data that the weights were trained on: all, or other-data (none of them).",
        show_default="all",
    ),
]
Size = Annotated[
    str | None, typer.Option(help="Input size, such as 224 or 224x320.", show_default="the model's, or the images'")
]
Numbers = Annotated[
    str | None,
    typer.Option(help="One number per channel, separated by commas.", show_default="the model's"),
]
Colour = Annotated[str | None, typer.Option(help="RGB or L (grey).", show_default="the model's")]
Resize = Annotated[str | None, typer.Option(help="nearest, bilinear, bicubic or lanczos.", show_default="the model's")]
Crop = Annotated[
    int | None,
    typer.Option(help="Shorter side before the centre crop; 0 stretches images instead.", show_default="the model's"),
]
Taps = Annotated[
    str | None, typer.Option("--taps", help="Module names, separated by commas (`qualms taps`).", show_default="chosen")
]
NoDistance = Annotated[
    bool, typer.Option("--no-distance", help="Leave the distance from the training data out of the flag score.")
]
Logits = Annotated[
    str | None,
    typer.Option(help="Key or index of the logits, if the model returns several tensors.", show_default="found"),
]
Fpr = Annotated[float, typer.Option(help="Default false-alarm rate.")]
Risk = Annotated[float, typer.Option(help="Default error rate of accepted predictions.")]
AsSent = Annotated[
    str | None,
    typer.Option(help="Encodings in which images will be sent, separated by commas.", show_default="as stored"),
]
Epochs = Annotated[int, typer.Option(min=1, help="Epochs of the meta-model.")]
DataDir = Annotated[Path | None, typer.Option(envvar="QUALMS_DATA", hidden=True)]


def register(app: typer.Typer) -> None:
    """Add the commands of this module to `qualms`."""
    app.command()(fit)
    app.command()(init)
    app.command()(taps)
    app.command("draw-photos")(draw_photos)


def fit(
    model: Model,
    data: Images,
    out: Annotated[Path, typer.Option(help="Folder for the run; the bundle is OUT/seed-0/model.onnx.")],
    weights: Weights = None,
    name: Name = None,
    ood: Ood = None,
    classes: Classes = None,
    weights_saw: Seen = None,
    size: Size = None,
    mean: Numbers = None,
    std: Numbers = None,
    colour: Colour = None,
    resize: Resize = None,
    crop: Crop = None,
    tap: Taps = None,
    no_distance: NoDistance = False,
    logits: Logits = None,
    target_fpr: Fpr = 0.01,
    target_risk: Risk = 0.05,
    as_sent: AsSent = None,
    form: Annotated[Form, typer.Option(help="Form of the guarantee with --as-sent.")] = Form.worst,
    epochs: Epochs = 20,
    seed: Annotated[int, typer.Option(min=0, help="Seed of splits and meta-model.")] = 0,
    allow_chance: AllowChance = False,
    show_all: ShowAll = False,
    cache: Cache = None,
    device: Device = Device.auto,
    data_dir: DataDir = None,
    engine: Engine = "local",
    address: Address = None,
    cpus_per_model: Cpus = 1,
    gpus_per_model: Gpus = 0,
) -> None:
    """Put calibrated uncertainty on your own classifier: checks, features, meta-model, one calibrated ONNX file."""
    from qualms.cluster.connection import connected_if
    from qualms_training.console import Display
    from qualms_training.own_model.planning import plan_recipe, save_recipe
    from qualms_training.run import pick_device, train_recipe

    cluster = cluster_options(engine, address, cpus_per_model, gpus_per_model)
    display, options = Display(), _options(locals())
    with connected_if(cluster):
        recipe = plan_recipe(options, data_dir, display)
        train_recipe(
            recipe,
            out=out,
            cache=cache or out / "cache",
            data_dir=data_dir,
            seeds=[seed],
            device=pick_device(device.value),
            allow_chance=allow_chance,
            show_all=show_all,
            display=display,
            cluster=cluster,
        )
        save_recipe(recipe, out / "recipe.toml")
    display.note(f"Serve it: qualms serve {out / f'seed-{seed}' / 'model.onnx'}")


def init(
    model: Model,
    data: Images,
    out: Annotated[Path, typer.Option(help="The recipe to write, a .toml file.")] = Path("recipe.toml"),
    weights: Weights = None,
    name: Name = None,
    ood: Ood = None,
    classes: Classes = None,
    weights_saw: Seen = None,
    size: Size = None,
    mean: Numbers = None,
    std: Numbers = None,
    colour: Colour = None,
    resize: Resize = None,
    crop: Crop = None,
    tap: Taps = None,
    no_distance: NoDistance = False,
    logits: Logits = None,
    target_fpr: Fpr = 0.01,
    target_risk: Risk = 0.05,
    as_sent: AsSent = None,
    form: Annotated[Form, typer.Option(help="Form of the guarantee with --as-sent.")] = Form.worst,
    epochs: Epochs = 20,
    data_dir: DataDir = None,
) -> None:
    """Write the recipe that `qualms fit` would use with these options, to edit and to run with `qualms train`."""
    from qualms_training.console import Display
    from qualms_training.own_model.planning import plan_recipe, save_recipe

    if out.suffix != ".toml":
        raise typer.BadParameter(f"{out} does not end in .toml, as the file of a recipe must")
    if out.exists():
        raise typer.BadParameter(f"{out} exists already: name another file with --out")
    display = Display()
    save_recipe(plan_recipe(_options(locals()), data_dir, display), out)
    display.note(f"Wrote {out}; edit it, then: qualms train {out} --out runs/{out.stem}")


def taps(
    model: Annotated[str, typer.Argument(help="As --model of `qualms fit`.")],
    weights: Weights = None,
    size: Size = None,
    colour: Colour = None,
    logits: Logits = None,
    show_all: Annotated[bool, typer.Option("--all", help="List every module that can be tapped.")] = False,
) -> None:
    """List the modules of a network that are tapped, chosen automatically, and why; or all that can be."""
    from qualms_training.console import Display
    from qualms_training.own_model.listing import list_model_taps

    given = {"model": model, "weights": weights, "size": size, "colour": colour, "logits": logits}
    list_model_taps(_options(given), Display(), show_all)


def draw_photos(
    out: Annotated[Path, typer.Option(help="Folder to write to, with one folder per class.")],
    count: Annotated[int, typer.Option(min=1, help="Number of images.")] = 5000,
    classes: Annotated[int, typer.Option(min=2, help="Number of classes.")] = 1000,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Draw JPEG files like photographs, 640 × 480 pixels, to try `qualms fit` on many classes."""
    from qualms_training.data.sources.drawn_photos import draw_photos as draw

    draw(out, count, classes, seed=seed)
    typer.echo(f"drew {count} images of {classes} classes in {out}")


def _options(given: dict[str, Any]) -> "FitOptions":
    """The options of a command line."""
    from qualms_training.own_model.options import parse_options

    return parse_options(given)
