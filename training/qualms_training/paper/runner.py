"""Run a benchmark: every method with every seed under every protocol. Each result is saved, so that runs resume."""

import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.markup import escape

from qualms_training.console import Display
from qualms_training.data import load
from qualms_training.data.prepare import CORRUPTED, itself, itself_half, ood_sets
from qualms_training.errors import DataError, RecipeError
from qualms_training.files import fingerprint, save_json
from qualms_training.paper.definition import Benchmark
from qualms_training.paper.detection import Detections, Measurements, measure, measure_noise
from qualms_training.paper.evaluation_protocol import Protocol
from qualms_training.paper.inputs import InputBuilder
from qualms_training.paper.method import Method, MethodOutput, NoiseChains, NotApplicableError, PostHocMethod
from qualms_training.paper.registry import METHODS, Entry, methods_for
from qualms_training.recipe import Recipe, load_recipe
from qualms_training.stages import base
from qualms_training.stages.context import RunContext


class JobResult(BaseModel):
    """The result of one method with one seed under one protocol. The aliases are the keys in the saved file."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_by_name=True, serialize_by_alias=True)

    fingerprint: str = Field(alias="mark")
    """digest of everything that determines the result"""
    reason: str | None = None
    """reason why there are no measurements"""
    measured: Measurements | None = None
    fit_seconds: float = 0.0
    score_seconds: float = 0.0
    images: int = 0
    """number of images scored in `score_seconds`"""
    stored_numbers: int = Field(0, alias="kept")
    """how many numbers the method stores in addition to the base, or the weights of its own network"""


@dataclass(frozen=True)
class MethodRun:
    """One method with one seed under one protocol."""

    key: str
    seed: int
    protocol: Protocol

    @property
    def entry(self) -> Entry:
        """The method's entry in the registry."""
        return METHODS[self.key]

    def file(self, out: Path) -> Path:
        """Path of the result."""
        return out / "results" / self.protocol / self.key / f"seed-{self.seed}.json"


@dataclass
class Run:
    """One benchmark in one output folder."""

    benchmark: Benchmark
    out: Path
    cache: Path
    data_dir: Path | None
    device: torch.device
    display: Display

    @cached_property
    def recipes(self) -> list[Recipe]:
        """The benchmark's recipes, which must share a base, each with the OOD sets for which data are available."""
        recipes = [load_recipe(name) for name in self.benchmark.recipes]
        for other in recipes[1:]:
            if _base_settings(other) != _base_settings(recipes[0]):
                raise RecipeError(
                    f"Benchmark {self.benchmark.name!r} combines the recipes {recipes[0].name!r} and {other.name!r}, "
                    "which must have the same prediction, data, input and base (except for its taps)."
                )
        ood = [name for name in self.columns if name != CORRUPTED]
        update = {"ood": ood, "corrupted": CORRUPTED in self.benchmark.columns}
        return [recipe.model_copy(update={"data": recipe.data.model_copy(update=update)}) for recipe in recipes]

    @property
    def transfer(self) -> bool:
        """Whether the base's classes are not the data's, so that only the methods predict classes of the data."""
        return self.recipes[0].prediction == "meta"

    @cached_property
    def columns(self) -> dict[str, str]:
        """The columns for which data are available, with the digest of the data."""
        digests = {}
        for name in self.benchmark.columns:
            try:
                digests[name] = "made" if name == CORRUPTED else load(name, "test", self.data_dir).digest()
            except DataError as error:
                self.display.note(f"  column {name}: not available ({escape(str(error))})")
        return digests

    @cached_property
    def _data_digests(self) -> list[object]:
        name = load_recipe(self.benchmark.recipes[0]).data.id
        return [[load(name, split, self.data_dir).digest() for split in ("train", "test")], self.columns]

    def jobs(self, only: Sequence[str], seeds: int) -> list[MethodRun]:
        """All jobs, ordered by seed, then protocol, then method; `only` limits the methods if it is not empty."""
        keys = [key for key in methods_for(transfer=self.transfer) if key not in self.benchmark.not_run]
        return [
            MethodRun(key, seed, protocol)
            for seed in range(seeds)
            for protocol in self.benchmark.protocols
            for key in keys
            if (not only or key in only)
            and (not METHODS[key].whole_network or seed < self.benchmark.whole_network_seeds)
        ]

    def fingerprint(self, job: MethodRun) -> str:
        """Digest of everything that determines a job's result."""
        recipe = self.recipe_of(job.entry)
        settings = asdict(self.method(job.key))
        # The recipe's key `prediction` is excluded if it has its default, so that results from before it existed stay valid.
        exclude = {"prediction"} if recipe and recipe.prediction == "base" else None
        dumped = None if recipe is None else recipe.model_dump(mode="json", exclude=exclude)
        return fingerprint(
            dumped, self._data_digests, self.benchmark.one_base, job.key, settings, job.seed, job.protocol
        )

    def recipe_of(self, entry: Entry) -> Recipe | None:
        """The benchmark's recipe with the form of meta-model that a method needs, or None if there is none."""
        if entry.form is None:
            return self.recipes[0]
        return next((recipe for recipe in self.recipes if recipe.meta.form == entry.form), None)

    def method(self, key: str) -> Method:
        """A method with the benchmark's settings, not yet fitted."""
        return METHODS[key].build(key, self.benchmark.methods.get(key, {}), self.benchmark.name)

    def seen_noise(self, key: str, score: str) -> NoiseChains:
        """The noisy copies that a method's score is learned from, or that early stopping uses."""
        recipe = self.recipe_of(METHODS[key])
        return [] if recipe is None else self.method(key).seen_noise(recipe, score)

    def saved_result(self, job: MethodRun) -> JobResult | None:
        """A job's result, or None if there is none or it was made from other inputs."""
        try:
            result = JobResult.model_validate_json(job.file(self.out).read_text(encoding="utf-8"))
        except (OSError, ValidationError):
            return None
        return result if result.fingerprint == self.fingerprint(job) else None

    def run(self, jobs: Sequence[MethodRun]) -> None:
        """Run the jobs that have no saved result."""
        missing = [job for job in jobs if self.saved_result(job) is None]
        self.display.note(f"  {len(jobs) - len(missing)} of {len(jobs)} results exist")
        for index, (job, builder) in enumerate(self.with_inputs(missing), start=1):
            result = self._result(job, builder)
            save_json(job.file(self.out), result.model_dump(mode="json"))
            shutil.rmtree(self.scratch(job), ignore_errors=True)
            summary = (
                escape(result.reason or "")
                or f"fitted in {result.fit_seconds:.1f} s, scored in {result.score_seconds:.1f} s"
            )
            self.display.note(f"  {index}/{len(missing)} seed {job.seed}, {job.protocol}, {job.key}: {summary}")

    def with_inputs(self, jobs: Sequence[MethodRun]) -> Iterator[tuple[MethodRun, InputBuilder | None]]:
        """Each job with its base and data, or None if there is no recipe for it; jobs with the same base share them."""
        contexts: dict[str, RunContext] = {}
        seed, ood_images = -1, {}
        for job in jobs:
            recipe = self.recipe_of(job.entry)
            base_seed = 0 if self.benchmark.one_base else job.seed
            if base_seed != seed:
                seed, first = base_seed, self._context(base_seed)
                test = first.data.parts["test"]
                ood_images = ood_sets(first.recipe, test, self.data_dir, self.display)
                contexts = {first.recipe.name: first}
                contexts |= {other.name: first.with_base(base.frozen_base(first), other) for other in self.recipes[1:]}
            if recipe is None:
                yield job, None
            else:
                yield job, InputBuilder(contexts[recipe.name], job.protocol, job.seed, ood_images)

    def scratch(self, job: MethodRun) -> Path:
        """Folder for the checkpoints of a post-hoc method; deleted after its result is saved."""
        return self.out / "unfinished" / f"{job.key}-{job.protocol}-{job.seed}"

    def _context(self, seed: int) -> RunContext:
        context = RunContext(self.recipes[0], seed, self.out, self.cache, self.data_dir, self.device, self.display)
        base.run(context)
        return context

    def _result(self, job: MethodRun, builder: InputBuilder | None) -> JobResult:
        digest = self.fingerprint(job)
        if builder is None:
            reason = f"the benchmark has no recipe with a meta-model of {job.entry.form} form"
            return JobResult(fingerprint=digest, reason=reason)
        method, begin = self.method(job.key), time.perf_counter()
        try:
            if isinstance(method, PostHocMethod):
                inputs = builder.post_hoc_inputs(self.scratch(job))
                begin = time.perf_counter()  # the forward pass of the base is not part of the method's cost
                stored_numbers = method.fit(inputs)
            else:
                folder = self.out / "networks" / job.key / f"seed-{job.seed}"
                stored_numbers = method.fit(builder.image_inputs(folder))
        except NotApplicableError as error:
            return JobResult(fingerprint=digest, reason=str(error))
        fit_seconds = time.perf_counter() - begin
        verdicts, score_seconds = _verdicts(method, builder)
        base_predictions = None if self.transfer else builder.scored_outputs()["test"].predictions
        measured = measure(verdicts, builder.test_labels, base_predictions, _negatives(builder))
        if isinstance(method, PostHocMethod) and job.protocol is Protocol.fair and not self.transfer:
            measured = measured.model_copy(update={"noise": _measure_noise(method, builder)})
        return JobResult(
            fingerprint=digest,
            measured=measured,
            fit_seconds=fit_seconds,
            score_seconds=score_seconds,
            images=sum(len(verdict.predictions) for verdict in verdicts.values()),
            stored_numbers=stored_numbers,
        )


def _base_settings(recipe: Recipe) -> list[object]:
    return [recipe.prediction, recipe.data, recipe.input, recipe.base.model_dump(exclude={"taps"})]


def _verdicts(method: Method, builder: InputBuilder) -> tuple[dict[str, MethodOutput], float]:
    """Verdicts on the test set and every column, and the seconds for them without the forward pass of the base."""
    if isinstance(method, PostHocMethod):
        outputs = builder.scored_outputs()
        begin = time.perf_counter()
        verdicts = {name: method.score(values) for name, values in outputs.items()}
    else:
        begin = time.perf_counter()
        verdicts = {name: method.score(images) for name, images in builder.scored_images().items()}
    return verdicts, time.perf_counter() - begin


def _measure_noise(method: PostHocMethod, builder: InputBuilder) -> dict[str, Detections]:
    clean = builder.labelled_outputs("validation")
    noisy = {kind: method.score(outputs) for kind, outputs in builder.outputs_by_noise("validation").items()}
    return measure_noise(method.score(clean.outputs), clean.outputs.predictions != clean.labels, noisy)


def _negatives(builder: InputBuilder) -> dict[str, NDArray[np.bool_]]:
    """The half of the test set that its other half, the column "itself", is compared with."""
    recipe = builder.context.recipe
    if recipe.data.held_out != "train":
        return {}
    count = len(builder.test_labels)
    return {itself(recipe.data.id): ~np.isin(np.arange(count), itself_half(count))}
