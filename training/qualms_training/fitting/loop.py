"""The training loop of base and meta-models, which resumes exactly from a checkpoint.

No random state is carried from step to step: the order of the data is a function of (seed, epoch), and every other
draw is a function of (seed, step). So a checkpoint needs only weights, optimiser state and counters, and a run that was
interrupted anywhere ends with the same weights as one that was not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn, optim

from qualms_training.errors import ModelError
from qualms_training.files import save_torch
from qualms_training.recipe import Optimisation

CHECKPOINT_STEPS = 500


@dataclass(frozen=True)
class Schedule:
    """The steps of a run: their number, examples and learning rates."""

    examples: int
    batch: int
    epochs: int
    rate: Callable[[int], float]
    """learning rate of a global step"""
    seed: int
    clip_norm: float | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch; the last batch may be smaller."""
        return -(-self.examples // self.batch)

    @property
    def steps(self) -> int:
        """Steps of the whole run."""
        return self.steps_per_epoch * self.epochs

    def indices(self, step: int) -> NDArray[np.int64]:
        """Indices of the examples in the batch of a global step."""
        epoch, within = divmod(step, self.steps_per_epoch)
        order = _order(self.seed, epoch, self.examples)
        return order[within * self.batch : (within + 1) * self.batch]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, examples: int) -> NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(examples)


@dataclass
class Progress:
    """Counters and results of a run; `best` is the model state with the highest value so far."""

    step: int = 0
    losses: list[float] = field(default_factory=list)
    """losses of the steps of the current epoch"""
    history: list[dict[str, float]] = field(default_factory=list)
    best_value: float = float("-inf")
    best_epoch: int | None = None
    best: dict[str, Tensor] | None = None


@dataclass(frozen=True)
class Hooks:
    """Optional callbacks of a run, and early stopping."""

    select: Callable[[nn.Module], float] | None = None
    """value of the model after an epoch; training ends with the weights of the best epoch, the first of equal ones"""
    patience: int | None = None
    """number of epochs without a better value after which training ends"""
    on_step: Callable[[int, float], None] | None = None
    on_epoch: Callable[[dict[str, float]], None] | None = None


def make_optimizer(model: nn.Module, section: Optimisation) -> optim.Optimizer:
    """The recipe's optimiser for all weights of `model`; `run` sets the learning rate of every step."""
    if section.optimizer == "adam":
        return optim.Adam(model.parameters(), lr=section.lr, weight_decay=section.weight_decay)
    return optim.SGD(
        model.parameters(),
        lr=section.lr,
        momentum=section.momentum,
        nesterov=section.nesterov,
        weight_decay=section.weight_decay,
    )


def run(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loss: Callable[[NDArray[np.int64], torch.Generator], Tensor],
    schedule: Schedule,
    checkpoint: Path,
    fingerprint: str,
    hooks: Hooks | None = None,
    checkpoint_steps: int = CHECKPOINT_STEPS,
) -> Progress:
    """Train `model` in place, from `checkpoint` if its fingerprint matches, and end with the best weights.

    `loss(indices, generator)` computes the mean loss of the examples at `indices`.
    """
    hooks = hooks or Hooks()
    progress = _resume(model, optimizer, checkpoint, fingerprint)
    while progress.step < schedule.steps and not _out_of_patience(hooks, progress):
        value = _step(model, optimizer, loss, schedule, progress.step)
        progress.losses.append(value)
        progress.step += 1
        if hooks.on_step:
            hooks.on_step(progress.step, value)
        end_of_epoch = progress.step % schedule.steps_per_epoch == 0
        if end_of_epoch:
            _finish_epoch(model, hooks, schedule, progress)
        if end_of_epoch or progress.step % checkpoint_steps == 0:
            save_torch(checkpoint, _state(model, optimizer, progress, fingerprint))
    if progress.best is not None:
        model.load_state_dict(progress.best)
    model.eval()
    return progress


def _step(
    model: nn.Module,
    optimizer: optim.Optimizer,
    loss: Callable[[NDArray[np.int64], torch.Generator], Tensor],
    schedule: Schedule,
    step: int,
) -> float:
    model.train()
    for group in optimizer.param_groups:
        group["lr"] = schedule.rate(step)
    # Dropout uses the global generator, augmentation its own; both are seeded by the step.
    torch.manual_seed(_step_seed(schedule.seed, step))
    generator = torch.Generator().manual_seed(_step_seed(schedule.seed + 1, step))
    value = loss(schedule.indices(step), generator)
    if not torch.isfinite(value):
        raise ModelError(f"The loss is {float(value.detach())} at step {step}; lower the learning rate.")
    optimizer.zero_grad(set_to_none=True)
    value.backward()  # type: ignore[no-untyped-call]
    if schedule.clip_norm is not None:
        nn.utils.clip_grad_norm_(model.parameters(), schedule.clip_norm)
    optimizer.step()
    return float(value.detach())


def _finish_epoch(model: nn.Module, hooks: Hooks, schedule: Schedule, progress: Progress) -> None:
    epoch = progress.step // schedule.steps_per_epoch
    # Weights that the last step of an epoch made non-finite have not been used in a loss yet.
    if not all(bool(torch.isfinite(value).all()) for value in model.state_dict().values()):
        raise ModelError(f"The weights are not finite after epoch {epoch}; lower the learning rate.")
    row = {"epoch": float(epoch), "loss": float(np.mean(progress.losses))}
    progress.losses = []
    if hooks.select:
        model.eval()
        with torch.inference_mode():
            row["selected_on"] = hooks.select(model)
        if row["selected_on"] > progress.best_value:
            progress.best_value, progress.best_epoch = row["selected_on"], epoch
            progress.best = {name: value.detach().clone() for name, value in model.state_dict().items()}
    progress.history.append(row)
    if hooks.on_epoch:
        hooks.on_epoch(row)


def _out_of_patience(hooks: Hooks, progress: Progress) -> bool:
    """Computed from the contents of a checkpoint, so that a resumed run ends at the same epoch."""
    if hooks.patience is None or progress.best_epoch is None:
        return False
    return len(progress.history) - progress.best_epoch >= hooks.patience


def _state(model: nn.Module, optimizer: optim.Optimizer, progress: Progress, fingerprint: str) -> dict[str, Any]:
    return {
        "fingerprint": fingerprint,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": vars(progress),
    }


def _resume(model: nn.Module, optimizer: optim.Optimizer, checkpoint: Path, fingerprint: str) -> Progress:
    state = _read(checkpoint)
    if state.get("fingerprint") != fingerprint:
        return Progress()
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return Progress(**state["progress"])


def _read(checkpoint: Path) -> dict[str, Any]:
    """The contents of a checkpoint; empty if it is missing or damaged, since a new start ends with the same weights."""
    if not checkpoint.exists():
        return {}
    try:
        state = torch.load(checkpoint, weights_only=True, map_location="cpu")
    except Exception:  # damaged files raise exceptions of many types
        return {}
    return state if isinstance(state, dict) else {}


def _step_seed(seed: int, step: int) -> int:
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> np.uint64(1))
