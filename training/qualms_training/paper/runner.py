"""Run a benchmark: every method, seed and protocol once, each result a file of its own, so that runs resume."""

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError
from rich.markup import escape

from qualms_training.console import Display
from qualms_training.data import load
from qualms_training.data.prepare import CORRUPTED, itself, itself_half, ood_sets
from qualms_training.errors import DataError, RecipeError
from qualms_training.files import fingerprint, save_json
from qualms_training.paper.definition import Benchmark
from qualms_training.paper.measure import Detections, Measured, measure, measure_noise
from qualms_training.paper.method import Chains, Method, NotApplicableError, PostHoc, Verdict
from qualms_training.paper.protocol import Protocol
from qualms_training.paper.registry import METHODS, Entry, methods_for
from qualms_training.paper.subject import Subject
from qualms_training.recipe import Recipe, load_recipe
from qualms_training.stages import base
from qualms_training.stages.context import RunContext


class Result(BaseModel):
    """The file of one method, seed and protocol."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mark: str
    """fingerprint of all that decides the result"""
    reason: str | None = None
    """why there is none"""
    measured: Measured | None = None
    fit_seconds: float = 0.0
    score_seconds: float = 0.0
    images: int = 0
    """scored in that time"""
    kept: int = 0
    """numbers kept beside the frozen base, or weights of a network of its own"""


@dataclass(frozen=True)
class Job:
    """One method with one seed under one protocol."""

    key: str
    seed: int
    protocol: Protocol

    @property
    def entry(self) -> Entry:
        """The method's."""
        return METHODS[self.key]

    def file(self, out: Path) -> Path:
        """Where its result goes."""
        return out / "results" / self.protocol / self.key / f"seed-{self.seed}.json"


@dataclass
class Run:
    """One benchmark in one folder."""

    benchmark: Benchmark
    out: Path
    cache: Path
    data_dir: Path | None
    device: torch.device
    display: Display

    @cached_property
    def recipes(self) -> list[Recipe]:
        """The benchmark's, each with those OOD sets that there are data for; they must share a base."""
        found = [load_recipe(name) for name in self.benchmark.recipes]
        for other in found[1:]:
            if _decides_base(other) != _decides_base(found[0]):
                raise RecipeError(
                    f"Benchmark {self.benchmark.name!r} joins the recipes {found[0].name!r} and {other.name!r}, "
                    "which must agree in prediction, data, input and base (but for its taps)."
                )
        ood = [name for name in self.columns if name != CORRUPTED]
        update = {"ood": ood, "corrupted": CORRUPTED in self.benchmark.columns}
        return [recipe.model_copy(update={"data": recipe.data.model_copy(update=update)}) for recipe in found]

    @property
    def transfer(self) -> bool:
        """Whether the base's classes are not the data's, so that methods predict and the base does not."""
        return self.recipes[0].prediction == "meta"

    @cached_property
    def columns(self) -> dict[str, str]:
        """Every column that there are data for, with the data's digest."""
        found = {}
        for name in self.benchmark.columns:
            try:
                found[name] = "made" if name == CORRUPTED else load(name, "test", self.data_dir).digest()
            except DataError as error:
                self.display.note(f"  column {name}: not available ({escape(str(error))})")
        return found

    @cached_property
    def _data(self) -> list[object]:
        known = load_recipe(self.benchmark.recipes[0]).data.id
        return [[load(known, split, self.data_dir).digest() for split in ("train", "test")], self.columns]

    def jobs(self, only: Sequence[str], seeds: int) -> list[Job]:
        """Everything there is to do, by seed, then protocol, then method."""
        known = methods_for(transfer=self.transfer)
        keys = [key for key, entry in known.items() if entry.make and key not in self.benchmark.not_run]
        return [
            Job(key, seed, protocol)
            for seed in range(seeds)
            for protocol in self.benchmark.protocols
            for key in keys
            if (not only or key in only)
            and (not METHODS[key].whole_network or seed < self.benchmark.whole_network_seeds)
        ]

    def mark(self, job: Job) -> str:
        """Fingerprint of all that decides a job's result."""
        recipe = self.recipe_of(job.entry)
        settings = asdict(self.method(job.key))
        # Where the base predicts, the key is left out: results that are older than it stay valid.
        needless = {"prediction"} if recipe and recipe.prediction == "base" else None
        decided = None if recipe is None else recipe.model_dump(mode="json", exclude=needless)
        return fingerprint(decided, self._data, self.benchmark.one_base, job.key, settings, job.seed, job.protocol)

    def recipe_of(self, entry: Entry) -> Recipe | None:
        """The benchmark's recipe of the form that a method needs, or None if there is none."""
        if entry.form is None:
            return self.recipes[0]
        return next((recipe for recipe in self.recipes if recipe.meta.form == entry.form), None)

    def method(self, key: str) -> Method:
        """A method with the benchmark's settings, not yet fitted."""
        return METHODS[key].build(key, self.benchmark.methods.get(key, {}), self.benchmark.name)

    def seen_noise(self, key: str, score: str) -> Chains:
        """The noisy copies that a method's score is learned from or stopped by with the recipe of its form."""
        recipe = self.recipe_of(METHODS[key])
        return [] if recipe is None else self.method(key).seen_noise(recipe, score)

    def found(self, job: Job) -> Result | None:
        """A job's result, if it is there and made from the present inputs."""
        try:
            result = Result.model_validate_json(job.file(self.out).read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            return None
        return result if result.mark == self.mark(job) else None

    def run(self, jobs: Sequence[Job]) -> None:
        """Do what has not been done."""
        missing = [job for job in jobs if self.found(job) is None]
        self.display.note(f"  {len(jobs) - len(missing)} of {len(jobs)} results are there")
        for index, (job, subject) in enumerate(self._subjects(missing), start=1):
            result = self._result(job, subject)
            save_json(job.file(self.out), result.model_dump(mode="json"))
            shutil.rmtree(self._scratch(job), ignore_errors=True)
            said = (
                escape(result.reason or "")
                or f"fitted in {result.fit_seconds:.1f} s, scored in {result.score_seconds:.1f} s"
            )
            self.display.note(f"  {index}/{len(missing)} seed {job.seed}, {job.protocol}, {job.key}: {said}")

    def _subjects(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, Subject | None]]:
        """Each job with its base and data; those of one seed, and then of one protocol, are kept while they last."""
        contexts: dict[str, RunContext] = {}
        seed, others = -1, {}
        for job in jobs:
            recipe = self.recipe_of(job.entry)
            base_seed = 0 if self.benchmark.one_base else job.seed
            if base_seed != seed:
                seed, first = base_seed, self._context(base_seed)
                test = first.data.parts["test"]
                others = ood_sets(first.recipe, test, self.data_dir, self.display)
                contexts = {first.recipe.name: first}
                contexts |= {other.name: first.around(base.frozen_base(first), other) for other in self.recipes[1:]}
            subject = None if recipe is None else Subject(contexts[recipe.name], job.protocol, job.seed, others)
            yield job, subject

    def _scratch(self, job: Job) -> Path:
        """For checkpoints of a post-hoc method, until its result is there."""
        return self.out / "unfinished" / f"{job.key}-{job.protocol}-{job.seed}"

    def _context(self, seed: int) -> RunContext:
        context = RunContext(self.recipes[0], seed, self.out, self.cache, self.data_dir, self.device, self.display)
        base.run(context)
        return context

    def _result(self, job: Job, subject: Subject | None) -> Result:
        mark = self.mark(job)
        if subject is None:
            return Result(mark=mark, reason=f"the benchmark has no recipe with a meta-model of {job.entry.form} form")
        method, begin = self.method(job.key), time.perf_counter()
        try:
            if isinstance(method, PostHoc):
                material = subject.frozen(self._scratch(job))
                begin = time.perf_counter()
                kept = method.fit(material)
            else:
                kept = method.fit(subject.pictures(self.out / "networks" / job.key / f"seed-{job.seed}"))
        except NotApplicableError as error:
            return Result(mark=mark, reason=str(error))
        fitted = time.perf_counter() - begin
        verdicts, seconds = _verdicts(method, subject)
        predictions = None if self.transfer else subject.views()["test"].predictions
        measured = measure(verdicts, subject.test_labels, predictions, _apart(subject))
        if isinstance(method, PostHoc) and job.protocol is Protocol.fair and not self.transfer:
            measured = measured.model_copy(update={"noise": _on_noise(method, subject)})
        return Result(
            mark=mark,
            measured=measured,
            fit_seconds=fitted,
            score_seconds=seconds,
            images=sum(len(verdict.predictions) for verdict in verdicts.values()),
            kept=kept,
        )


def _decides_base(recipe: Recipe) -> list[object]:
    return [recipe.prediction, recipe.data, recipe.input, recipe.base.model_dump(exclude={"taps"})]


def _verdicts(method: Method, subject: Subject) -> tuple[dict[str, Verdict], float]:
    """On the test set and every column, and the seconds that took beside the base's pass."""
    if isinstance(method, PostHoc):
        views = subject.views()
        begin = time.perf_counter()
        verdicts = {name: method.score(view) for name, view in views.items()}
    else:
        begin = time.perf_counter()
        verdicts = {name: method.score(shown) for name, shown in subject.shown().items()}
    return verdicts, time.perf_counter() - begin


def _on_noise(method: PostHoc, subject: Subject) -> dict[str, Detections]:
    known = subject.validation()
    noisy = {kind: method.score(view) for kind, view in subject.noise("validation").items()}
    return measure_noise(method.score(known.view), known.view.predictions != known.labels, noisy)


def _apart(subject: Subject) -> dict[str, NDArray[np.bool_]]:
    """The half of the test set that the other half is compared with, where both are of one order."""
    recipe = subject.context.recipe
    if recipe.data.held_out != "train":
        return {}
    count = len(subject.test_labels)
    return {itself(recipe.data.id): ~np.isin(np.arange(count), itself_half(count))}
