"""The stages of a run, in order; each module makes one product, or finds it made."""

from qualms_training.stages import base, calibrate, combine, evaluate, export, features, fit
from qualms_training.stages.context import RunContext

STAGES = {
    "base": base.run,
    "features": features.run,
    "fit": fit.run,
    "combine": combine.run,
    "export": export.run,
    "calibrate": calibrate.run,
    "evaluate": evaluate.run,
}


def run_stages(context: RunContext) -> None:
    """Run all stages, or the one that `context.only` names."""
    for name, run in STAGES.items():
        if context.only in (None, name):
            context.display.note(f"[bold]{name}[/bold]")
            run(context)
