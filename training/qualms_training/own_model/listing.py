"""List the modules of a network that can be tapped, for `qualms taps`."""

import torch
from rich.markup import escape
from rich.table import Table

from qualms_training.console import Display
from qualms_training.meta.taps.tapped import describe_taps
from qualms_training.models.channels import expected_channels
from qualms_training.models.logits import return_logits
from qualms_training.models.source import load_base, untrained_base
from qualms_training.models.unusable_input import run_errors_explained
from qualms_training.own_model.options import FitOptions

DEFAULT_SIDE = 224


def list_model_taps(options: FitOptions, display: Display, show_all: bool) -> None:
    """Print the modules that are chosen as taps, or all that can be, with their shapes and why."""
    sizes = {"height": options.input.height, "width": options.input.width}
    if options.weights is None:
        base = untrained_base(options.model, {"RGB": 3, "L": 1}.get(options.input.colour or ""), **sizes)
    else:
        base = load_base(options.model, weights=options.weights, **sizes)
    side = (DEFAULT_SIDE, DEFAULT_SIDE) if base.input is None else (base.input.height, base.input.width)
    height, width = options.input.height or side[0], options.input.width or side[1]
    colour = options.input.colour or ("L" if expected_channels(base.module) == 1 else "RGB")
    channels = 1 if colour == "L" else 3
    example = torch.zeros(2, channels, height, width)
    with run_errors_explained(options.model, base.module, channels, height, width):
        described = describe_taps(return_logits(base.module, example, options.logits), example)
    table = Table("tap", "shape", "layout", "chosen", "why", header_style="bold")
    for one in described if show_all else (one for one in described if one.chosen):
        shape = " × ".join(map(str, one.shape))
        table.add_row(escape(one.name), shape, one.layout, "yes" if one.chosen else "", escape(one.reason))
    display.console.print(table)
    chosen = [one.name for one in described if one.chosen]
    display.note(f"Chosen: {escape(','.join(chosen))}")
    if not show_all:
        display.note(f"{len(described) - len(chosen)} other modules can be named with --taps; --all lists them.")
    if base.opaque:
        display.note(escape(base.opaque))
