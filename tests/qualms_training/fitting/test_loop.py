"""The loop ends at the same weights however often it was cut off, keeps the first best epoch, and refuses NaN."""

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
from qualms_training.fitting.loop import Hooks, Progress, Schedule, run
from qualms_training.fitting.schedules import rate

EXAMPLES, BATCH, EPOCHS = 50, 8, 5  # seven steps an epoch, the last one of two examples
STEPS = 7 * EPOCHS

INPUTS = torch.randn(EXAMPLES, 6, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS[:, 0] > INPUTS[:, 1]).long()

OptimizerName = Literal["sgd", "adam"]


class Cut(BaseException):
    """Stands in for whatever ends a process."""


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
        """Accuracy: coarse, so that epochs tie and the best one is rarely the last."""
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
            EXAMPLES, BATCH, EPOCHS, rate("cosine", 0.05, epochs=EPOCHS, steps_per_epoch=7), seed=4, clip_norm=1.0
        )
        hooks = Hooks(select=self.select, on_step=on_step)
        return run(self.model, self.optimizer, self.loss, schedule, checkpoint, fingerprint, hooks, checkpoint_steps)


def assert_same_weights(left: nn.Module, right: nn.Module) -> None:
    for (name, ours), theirs in zip(left.state_dict().items(), right.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs), name


def cut_after(step: int) -> Callable[[int, float], None]:
    def on_step(done: int, _: float) -> None:
        if done == step:
            raise Cut

    return on_step


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
@pytest.mark.parametrize("seed", range(3))
def test_a_run_cut_off_anywhere_ends_at_the_same_weights(optimizer: OptimizerName, seed: int, tmp_path: Path) -> None:
    whole = Task(optimizer)
    expected = whole.train(tmp_path / "whole.pt")
    for step in sorted(random.Random(seed).sample(range(1, STEPS + 1), 3)):
        with pytest.raises(Cut):
            Task(optimizer).train(tmp_path / "cut.pt", cut_after(step))
    torch.manual_seed(1000 + seed)  # whatever the process drew before must not matter
    resumed = Task(optimizer)
    found = resumed.train(tmp_path / "cut.pt")
    assert_same_weights(resumed.model, whole.model)
    assert found.history == expected.history
    assert (found.best_epoch, found.best_value) == (expected.best_epoch, expected.best_value)


def test_a_resumed_run_does_not_repeat_what_its_checkpoint_holds(tmp_path: Path) -> None:
    with pytest.raises(Cut):
        Task().train(tmp_path / "cut.pt", cut_after(11))
    task = Task()
    task.train(tmp_path / "cut.pt")
    assert len(task.drawn) == STEPS - 9  # the last multiple of three before the cut


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    first, second = Task(), Task()
    first.train(tmp_path / "done.pt")
    second.train(tmp_path / "done.pt")
    assert not second.drawn
    assert_same_weights(second.model, first.model)


def test_another_run_s_checkpoint_is_ignored(tmp_path: Path) -> None:
    whole = Task()
    whole.train(tmp_path / "whole.pt")
    with pytest.raises(Cut):
        Task().train(tmp_path / "cut.pt", cut_after(20), fingerprint="another")
    task = Task()
    task.train(tmp_path / "cut.pt")
    assert len(task.drawn) == STEPS
    assert_same_weights(task.model, whole.model)


@pytest.mark.parametrize("damage", ["cut short", "empty", "not a checkpoint", "another pickle"])
def test_a_damaged_checkpoint_means_a_fresh_start(damage: str, tmp_path: Path) -> None:
    whole = Task()
    whole.train(tmp_path / "whole.pt")
    file = tmp_path / "cut.pt"
    with pytest.raises(Cut):
        Task().train(file, cut_after(20))
    data = file.read_bytes()
    if damage == "another pickle":
        torch.save([1, 2, 3], file)
    else:
        file.write_bytes({"cut short": data[: len(data) // 2], "empty": b""}.get(damage, b"qualms" * 100))
    task = Task()
    task.train(file)
    assert len(task.drawn) == STEPS
    assert_same_weights(task.model, whole.model)


def test_no_checkpoint_is_ever_half_there(tmp_path: Path) -> None:
    def look(step: int, _: float) -> None:
        if step > 3:
            torch.load(tmp_path / "c.pt", weights_only=True)
        assert {path.name for path in tmp_path.iterdir()} <= {"c.pt"}

    Task().train(tmp_path / "c.pt", look)


def test_every_epoch_shows_every_example_once_in_another_order() -> None:
    schedule = Schedule(EXAMPLES, BATCH, EPOCHS, lambda _: 0.1, seed=4)
    assert (schedule.steps_per_epoch, schedule.steps) == (7, STEPS)
    epochs = [np.concatenate([schedule.indices(7 * epoch + step) for step in range(7)]) for epoch in range(2)]
    for order in epochs:
        assert sorted(order.tolist()) == list(range(EXAMPLES))
    assert epochs[0].tolist() != epochs[1].tolist()
    other = Schedule(EXAMPLES, BATCH, EPOCHS, lambda _: 0.1, seed=5)
    assert other.indices(0).tolist() != schedule.indices(0).tolist()


def test_every_step_draws_anew(tmp_path: Path) -> None:
    task = Task()
    task.train(tmp_path / "c.pt")
    assert len(set(task.drawn)) == STEPS


def _selecting(values: list[float], tmp_path: Path) -> tuple[Progress, list[dict[str, Tensor]], nn.Module]:
    """Train with these values as each epoch's; the weights after each epoch."""
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
def test_a_loss_that_is_not_finite_is_one_sentence(value: str, tmp_path: Path) -> None:
    task = Task()
    calls: list[int] = []

    def loss(indices: NDArray[np.int64], generator: torch.Generator) -> Tensor:
        calls.append(1)
        return task.loss(indices, generator) * (float(value) if len(calls) == 4 else 1)

    schedule = Schedule(EXAMPLES, BATCH, EPOCHS, lambda _: 0.05, seed=4)
    with pytest.raises(ModelError, match=f"became {value} at step 3; lower the learning rate"):
        run(task.model, task.optimizer, loss, schedule, tmp_path / "c.pt", "mine")


def test_weights_broken_by_the_last_step_are_refused_before_anyone_judges_them(tmp_path: Path) -> None:
    task = Task()
    schedule = Schedule(EXAMPLES, BATCH, 1, lambda step: 1e38 if step == 6 else 0.05, seed=4)
    with pytest.raises(ModelError, match="no longer finite after epoch 1; lower the learning rate"):
        run(
            task.model,
            torch.optim.SGD(task.model.parameters(), lr=1.0, momentum=0.9, weight_decay=1e3),
            task.loss,
            schedule,
            tmp_path / "c.pt",
            "mine",
            Hooks(select=lambda _: pytest.fail("was asked about broken weights")),
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
from qualms_training.data.synthetic import draw_shapes
from qualms_training.fitting.loop import Hooks
from qualms_training.models import build
from qualms_training.meta.normalise import Normalise
from qualms_training.recipe import BaseSection


def main(folder: Path, led: bool = False) -> None:
    def report(step: int, loss: float) -> None:
        print(step, flush=True)
        if led:
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
    main(Path(sys.argv[1]), led=True)
"""


def _kill_after(script: Path, folder: Path, steps: int) -> None:
    """Run the script, lead it through so many steps and kill it for real in the middle of the next one."""
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


def test_a_killed_process_goes_on_to_the_same_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT, encoding="utf-8")
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    whole.mkdir()
    cut.mkdir()
    main = runpy.run_path(str(script))["main"]
    main(whole)
    _kill_after(script, cut, random.Random(11).randint(8, 40))
    assert not (cut / "weights.pt").exists()
    assert torch.load(cut / "checkpoint.pt", weights_only=True)["progress"]["step"] > 0
    capsys.readouterr()
    main(cut)
    steps = capsys.readouterr().out.split()
    assert steps[-1] == "42"
    assert len(steps) < 42
    expected, found = (torch.load(folder / "weights.pt", weights_only=True) for folder in (whole, cut))
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_patience_ends_a_run_and_a_resumed_one_at_the_same_epoch(tmp_path: Path) -> None:
    values = [1.0, 3.0, 2.0, 3.0, 9.0]  # an equal value is not a better one
    schedule = Schedule(EXAMPLES, BATCH, EPOCHS, lambda _: 0.01, seed=4)

    def train(patience: int) -> tuple[Task, Progress]:
        task, given = Task(), iter(values)
        hooks = Hooks(select=lambda _: next(given), patience=patience)
        return task, run(task.model, task.optimizer, task.loss, schedule, tmp_path / "file.pt", "mine", hooks)

    task, found = train(patience=2)
    assert (len(found.history), found.best_epoch, len(task.drawn)) == (4, 2, 28)
    again, found = train(patience=2)
    assert (len(found.history), found.best_epoch, len(again.drawn)) == (4, 2, 0)
    assert_same_weights(again.model, task.model)
