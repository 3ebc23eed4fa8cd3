"""The loop ends with the same weights after any interruption, keeps the first best epoch, and refuses NaN."""

import os
import random
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from qualms_training.errors import ModelError
from qualms_training.fitting.learning_rate import learning_rate
from qualms_training.fitting.loop import Hooks, Progress, Schedule, run

EXAMPLES, BATCH, EPOCHS = 50, 8, 5  # seven steps per epoch, the last one with two examples
STEPS = 7 * EPOCHS

INPUTS = torch.randn(EXAMPLES, 6, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, 0] > INPUTS[:, 1]).long()

OptimizerName = Literal["sgd", "adam"]


class Interrupt(BaseException):
    """Ends a run as the end of its process would."""


class Task:
    """A small classifier with dropout and batch normalisation, and noise drawn from the step's generator."""

    def __init__(self, optimizer: OptimizerName = "sgd") -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.model = nn.Sequential(
                nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2)
            )
        parameters = self.model.parameters()
        self.optimizer: torch.optim.Optimizer = (
            torch.optim.Adam(parameters, lr=1.0)
            if optimizer == "adam"
            else torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=1e-3)
        )
        self.drawn: list[float] = []

    def loss(self, indices: NDArray[np.int64], generator: torch.Generator) -> Tensor:
        chosen = torch.from_numpy(indices)
        noise = 0.1 * torch.randn(len(chosen), 6, generator=generator)
        self.drawn.append(float(noise[0, 0]))
        return nn.functional.cross_entropy(self.model(INPUTS[chosen] + noise), TARGETS[chosen])

    def select(self, model: nn.Module) -> float:
        """Accuracy, which is coarse, so that epochs tie and the best one is rarely the last."""
        assert not model.training
        return float((model(INPUTS).argmax(dim=1) == TARGETS).float().mean())

    def train(
        self,
        checkpoint: Path,
        on_step: Callable[[int, float], None] | None = None,
        *,
        fingerprint: str = "mine",
        checkpoint_steps: int = 3,
    ) -> Progress:
        schedule = Schedule(
            EXAMPLES,
            BATCH,
            EPOCHS,
            learning_rate("cosine", 0.05, epochs=EPOCHS, steps_per_epoch=7),
            seed=4,
            clip_norm=1.0,
        )
        hooks = Hooks(select=self.select, on_step=on_step)
        return run(self.model, self.optimizer, self.loss, schedule, checkpoint, fingerprint, hooks, checkpoint_steps)


def assert_same_weights(left: nn.Module, right: nn.Module) -> None:
    for (name, ours), theirs in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def interrupt_after(step: int) -> Callable[[int, float], None]:
    def on_step(done: int, _: float) -> None:
        if done == step:
            raise Interrupt

    return on_step


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("seed", range(3))
def test_an_interrupted_run_resumes_to_the_same_weights(optimizer: OptimizerName, seed: int, tmp_path: Path) -> None:
    whole = Task(optimizer)
    expected = whole.train(tmp_path / "whole.pt")
    for step in sorted(random.Random(seed).sample(range(1, STEPS + 1), 3)):
        with pytest.raises(Interrupt):
            Task(optimizer).train(tmp_path / "interrupted.pt", interrupt_after(step))
    torch.manual_seed(1000 + seed)  # earlier draws of the process must not matter
    resumed = Task(optimizer)
    progress = resumed.train(tmp_path / "interrupted.pt")
    assert_same_weights(resumed.model, whole.model)
    assert progress.history == expected.history
    assert (progress.best_epoch, progress.best_value) == (expected.best_epoch, expected.best_value)


def test_a_resumed_run_does_not_repeat_the_steps_of_its_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Interrupt):
        Task().train(tmp_path / "interrupted.pt", interrupt_after(11))
    task = Task()
    task.train(tmp_path / "interrupted.pt")
    assert len(task.drawn) == STEPS - 9  # nine is the last multiple of three before step 11


def test_a_finished_run_is_not_repeated(tmp_path: Path) -> None:
    first, second = Task(), Task()
    first.train(tmp_path / "done.pt")
    second.train(tmp_path / "done.pt")
    assert not second.drawn
    assert_same_weights(second.model, first.model)


def test_a_checkpoint_with_another_fingerprint_is_ignored(tmp_path: Path) -> None:
    whole = Task()
    whole.train(tmp_path / "whole.pt")
    with pytest.raises(Interrupt):
        Task().train(tmp_path / "interrupted.pt", interrupt_after(20), fingerprint="another")
    task = Task()
    task.train(tmp_path / "interrupted.pt")
    assert len(task.drawn) == STEPS
    assert_same_weights(task.model, whole.model)


@pytest.mark.parametrize("damage", ["cut short", "empty", "not a checkpoint", "another pickle"])
def test_a_damaged_checkpoint_means_a_fresh_start(damage: str, tmp_path: Path) -> None:
    whole = Task()
    whole.train(tmp_path / "whole.pt")
    file = tmp_path / "interrupted.pt"
    with pytest.raises(Interrupt):
        Task().train(file, interrupt_after(20))
    data = file.read_bytes()
    if damage == "another pickle":
        torch.save([1, 2, 3], file)
    else:
        file.write_bytes({"cut short": data[: len(data) // 2], "empty": b""}.get(damage, b"qualms" * 100))
    task = Task()
    task.train(file)
    assert len(task.drawn) == STEPS
    assert_same_weights(task.model, whole.model)


def test_checkpoints_are_written_atomically(tmp_path: Path) -> None:
    def check(step: int, _: float) -> None:
        if step > 3:
            torch.load(tmp_path / "c.pt", weights_only=True)
        assert {path.name for path in tmp_path.iterdir()} <= {"c.pt"}

    Task().train(tmp_path / "c.pt", check)


def test_every_epoch_uses_every_example_once_in_another_order() -> None:
    schedule = Schedule(EXAMPLES, BATCH, EPOCHS, lambda _: 0.1, seed=4)
    assert (schedule.steps_per_epoch, schedule.steps) == (7, STEPS)
    epochs = [np.concatenate([schedule.indices(7 * epoch + step) for step in range(7)]) for epoch in range(2)]
    for order in epochs:
        assert sorted(order.tolist()) == list(range(EXAMPLES))
    assert epochs[0].tolist() != epochs[1].tolist()
    other = Schedule(EXAMPLES, BATCH, EPOCHS, lambda _: 0.1, seed=5)
    assert other.indices(0).tolist() != schedule.indices(0).tolist()


def test_every_step_has_its_own_random_draws(tmp_path: Path) -> None:
    task = Task()
    task.train(tmp_path / "c.pt")
    assert len(set(task.drawn)) == STEPS


def _selecting(values: list[float], tmp_path: Path) -> tuple[Progress, list[dict[str, Tensor]], nn.Module]:
    """Train with these values as those of the epochs; also returns the weights after each epoch."""
    seen: list[dict[str, Tensor]] = []

    def select(model: nn.Module) -> float:
        seen.append({name: value.clone() for name, value in model.state_dict().items()})
        return values[len(seen) - 1]

    task = Task()
    schedule = Schedule(EXAMPLES, BATCH, len(values), lambda _: 0.05, seed=4)
    progress = run(task.model, task.optimizer, task.loss, schedule, tmp_path / "c.pt", "mine", Hooks(select=select))
    return progress, seen, task.model


def test_the_first_of_equally_good_epochs_is_kept(tmp_path: Path) -> None:
    progress, seen, model = _selecting([0.5, 0.9, 0.9, 0.7], tmp_path)
    assert (progress.best_epoch, progress.best_value) == (2, 0.9)
    assert all(torch.equal(value, seen[1][name]) for name, value in model.state_dict().items())
    assert [row["selected_on"] for row in progress.history] == [0.5, 0.9, 0.9, 0.7]


def test_without_selection_the_last_weights_stay(tmp_path: Path) -> None:
    task = Task()
    schedule = Schedule(EXAMPLES, BATCH, 2, lambda _: 0.05, seed=4)
    rows: list[dict[str, float]] = []
    hooks = Hooks(on_epoch=rows.append)
    progress = run(task.model, task.optimizer, task.loss, schedule, tmp_path / "c.pt", "mine", hooks)
    assert progress.best is None
    assert rows == progress.history
    assert not task.model.training
    saved = torch.load(tmp_path / "c.pt", weights_only=True)["model"]
    assert all(torch.equal(value, saved[name]) for name, value in task.model.state_dict().items())


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_non_finite_loss_is_refused(value: str, tmp_path: Path) -> None:
    task = Task()
    calls: list[int] = []

    def loss(indices: NDArray[np.int64], generator: torch.Generator) -> Tensor:
        calls.append(1)
        return task.loss(indices, generator) * (float(value) if len(calls) == 4 else 1)

    schedule = Schedule(EXAMPLES, BATCH, EPOCHS, lambda _: 0.05, seed=4)
    with pytest.raises(ModelError, match=f"The loss is {value} at step 3; lower the learning rate"):
        run(task.model, task.optimizer, loss, schedule, tmp_path / "c.pt", "mine")


def test_weights_made_non_finite_by_the_last_step_are_refused_before_selection(tmp_path: Path) -> None:
    task = Task()
    schedule = Schedule(EXAMPLES, BATCH, 1, lambda step: 1e38 if step == 6 else 0.05, seed=4)
    with pytest.raises(ModelError, match="not finite after epoch 1; lower the learning rate"):
        run(
            task.model,
            torch.optim.SGD(task.model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e3),
            task.loss,
            schedule,
            tmp_path / "c.pt",
            "mine",
            Hooks(select=lambda _: pytest.fail("selected on non-finite weights")),
        )
    assert not (tmp_path / "c.pt").exists()


def test_gradients_are_clipped_to_the_norm(tmp_path: Path) -> None:
    model = nn.Linear(1, 1, bias=False)
    before = model.weight.detach().clone()
    schedule = Schedule(1, 1, 1, lambda _: 1.0, seed=0, clip_norm=0.25)
    run(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        lambda *_: 1000 * model.weight.sum(),
        schedule,
        tmp_path / "c.pt",
        "mine",
    )
    assert float((before - model.weight).detach()) == pytest.approx(0.25, rel=1e-4)


SCRIPT = """
import sys
from pathlib import Path

import torch

from qualms_training.fitting.base_trainer import train_base
from qualms_training.data.sources.synthetic import draw_shapes
from qualms_training.fitting.loop import Hooks
from qualms_training.models import build
from qualms_training.meta.extractor import Normalise
from qualms_training.recipe import BaseSection


def main(folder: Path, paced: bool = False) -> None:
    def report(step: int, loss: float) -> None:
        print(step, flush=True)
        if paced:
            sys.stdin.readline()

    torch.set_num_threads(1)
    drawn = draw_shapes(200, seed=3)
    torch.manual_seed(0)
    model = build("small", 4, 3, 16, 16)
    section = BaseSection(
        model="small", epochs=6, batch=32, lr=0.05, nesterov=True, schedule="one-cycle", augment="crop-flip"
    )
    train_base(
        model,
        Normalise([0.5] * 3, [0.5] * 3),
        drawn.images,
        drawn.labels,
        section,
        seed=7,
        checkpoint=folder / "checkpoint.pt",
        fingerprint="mine",
        device=torch.device("cpu"),
        hooks=Hooks(on_step=report),
    )
    torch.save(model.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]), paced=True)
"""


def _kill_after(script: Path, folder: Path, steps: int) -> None:
    """Run the script for a number of steps and kill its process in the middle of the next step."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(steps):
            assert process.stdout.readline()
            process.stdin.write("\n")
            process.stdin.flush()
        process.kill()
    assert process.returncode != 0


@pytest.mark.slow
def test_a_killed_process_resumes_to_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    whole, interrupted = tmp_path / "whole", tmp_path / "interrupted"
    whole.mkdir()
    interrupted.mkdir()
    main = runpy.run_path(str(script))["main"]
    main(whole)
    _kill_after(script, interrupted, random.Random(11).randint(8, 40))
    assert not (interrupted / "weights.pt").exists()
    assert torch.load(interrupted / "checkpoint.pt", weights_only=True)["progress"]["step"] > 0
    capsys.readouterr()
    main(interrupted)
    steps = capsys.readouterr().out.split()
    assert steps[-1] == "42"
    assert len(steps) < 42
    expected, actual = (torch.load(folder / "weights.pt", weights_only=True) for folder in (whole, interrupted))
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_patience_ends_a_resumed_run_at_the_same_epoch(tmp_path: Path) -> None:
    values = [1.0, 3.0, 2.0, 3.0, 9.0]  # an equal value is no improvement
    schedule = Schedule(EXAMPLES, BATCH, EPOCHS, lambda _: 0.01, seed=4)

    def train(patience: int) -> tuple[Task, Progress]:
        task, given = Task(), iter(values)
        hooks = Hooks(select=lambda _: next(given), patience=patience)
        return task, run(task.model, task.optimizer, task.loss, schedule, tmp_path / "file.pt", "mine", hooks)

    task, progress = train(patience=2)
    assert (len(progress.history), progress.best_epoch, len(task.drawn)) == (4, 2, 28)
    again, progress = train(patience=2)
    assert (len(progress.history), progress.best_epoch, len(again.drawn)) == (4, 2, 0)
    assert_same_weights(again.model, task.model)
