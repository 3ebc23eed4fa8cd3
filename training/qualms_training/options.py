"""Options that several commands of training share."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[
    Path | None,
    typer.Option("--data", help="Folder of NAME-SPLIT.npz files.", envvar="QUALMS_DATA", show_default=False),
]
Cache = Annotated[
    Path | None,
    typer.Option(help="Folder for trained bases and features; recipes may share it.", show_default="OUT/cache"),
]
Model = Annotated[str, typer.Argument(help="A bundle's path, or an embedded model's name.")]


class Device(StrEnum):
    """The device to compute on."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Form(StrEnum):
    """A form of calibration, as defined in qualms.bundle.calibration_data."""

    worst = "worst"
    by_size = "by-size"
    mixture = "mixture"


AllowChance = Annotated[
    bool,
    typer.Option("--allow-chance", help="Go on if the accuracy of the given base on held-out images is near chance."),
]
ShowAll = Annotated[bool, typer.Option("--all", help="Print all tables, not only the rows that decide.")]
