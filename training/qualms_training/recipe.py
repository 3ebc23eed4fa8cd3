"""Recipes: every number of a run in one TOML file, where an unknown key is an error that names it."""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from qualms.bundle.manifest import Fraction, Name, Operating, first_problem
from qualms.bundle.scores import DIRICHLET_SCORES, SCORES
from qualms.images.input_spec import InputSpec
from qualms_training.errors import RecipeError
from qualms_training.fitting.schedules import Rate, ScheduleName, rate

Positive = Annotated[float, Field(gt=0)]
NoiseName = Literal["permutation", "blur", "contrast", "shuffle", "mosaic", "blend"]
NoiseChain = Annotated[list[NoiseName], Field(min_length=1)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(gt=0)]
INCLUDED = "included"


class Section(BaseModel):
    """What all sections share."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class SplitSizes(Section):
    """How many images each part gets; disjoint and drawn by the run's seed."""

    train: Count
    validation: Count
    fit: Count
    calibration: Count


class DataSection(Section):
    """Which sets are in-distribution and which are shown as strangers."""

    id: str
    held_out: Literal["train", "test"] = "train"
    """where `fit` and `calibration` come from: `test` when the base has seen all training images"""
    ood: list[str] = []
    corrupted: bool = True
    """also evaluate on test images that were permuted, blurred and given another contrast"""
    limit: Count = 10_000
    """images of each OOD set"""
    splits: SplitSizes


class InputSection(InputSpec):
    """The bundle's input, and the normalisation its graph applies to pixels in [0, 1]."""

    model_config = ConfigDict(allow_inf_nan=False)

    mean: list[float]
    std: list[Positive]

    @model_validator(mode="after")
    def _one_value_a_channel(self) -> Self:
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(f"mean and std need {self.channels} value(s) for colour {self.colour!r}")
        return self

    @property
    def spec(self) -> InputSpec:
        """The part that goes into the manifest."""
        return InputSpec.model_validate(self.model_dump(exclude={"mean", "std"}))


class Optimisation(Section):
    """How a network is trained: what base and meta-model have in common."""

    epochs: Count
    batch: Count = 128
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Positive
    momentum: NotNegative = 0.9
    """of SGD"""
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    schedule: ScheduleName = "constant"
    milestones: list[Count] = []
    """epochs after which `steps` changes the rate"""
    factors: list[Positive] = []
    """what the initial rate is multiplied by after each milestone"""

    @model_validator(mode="after")
    def _one_factor_a_milestone(self) -> Self:
        if len(self.milestones) != len(self.factors):
            raise ValueError("milestones and factors must have one length")
        if self.milestones and self.schedule != "steps":
            raise ValueError(f"milestones are for schedule 'steps', not {self.schedule!r}")
        if self.milestones != sorted(set(self.milestones)):
            raise ValueError("milestones must ascend")
        return self

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and self.optimizer == "sgd" and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    def rate(self, examples: int) -> Rate:
        """The learning rate of a global step."""
        return rate(
            self.schedule,
            self.lr,
            epochs=self.epochs,
            steps_per_epoch=-(-examples // self.batch),
            milestones=self.milestones,
            factors=self.factors,
        )


class BaseSection(Optimisation):
    """The classifier that is frozen: trained here, or read from a file."""

    model: str
    weights: str | None = None
    """a state-dict file, or `included` where the function that `model` names brings them; then nothing is trained"""
    weights_saw: Literal["train-split", "all", "other-data"] | None = None
    """which of the recipe's training images those weights were made from, `other-data` being none of them;
    `train-split` is a base that `qualms train` made with this recipe's data and the seed `weights_seed`, for
    every seed draws another split; thresholds calibrated on seen images are void"""
    weights_seed: Annotated[int, Field(ge=0)] | None = Field(None, exclude_if=lambda seed: seed is None)
    """the seed of the run that made weights which saw its `train-split`; the only seed they can be used with"""
    taps: list[str] | Literal["auto"] = "auto"
    augment: Literal["none", "crop-flip"] = "none"

    @model_validator(mode="before")
    @classmethod
    def _given_weights_need_no_training(cls, document: Any) -> Any:
        """Nobody has to say for how long, and how fast, a base that is not trained would be trained."""
        given = isinstance(document, dict) and document.get("weights") is not None
        return {"epochs": 1, "lr": 1.0, **document} if given else document

    @model_validator(mode="after")
    def _weights_are_explained(self) -> Self:
        if (self.weights is None) != (self.weights_saw is None):
            raise ValueError("weights and weights_saw belong together: say what the given weights were trained on")
        if (self.weights_saw == "train-split") != (self.weights_seed is not None):
            raise ValueError(
                "weights_saw = 'train-split' and weights_seed belong together: say which seed the run of "
                "`qualms train` had that made the weights, for it drew the split"
            )
        source, _, name = self.model.partition(":")
        if self.weights == INCLUDED and (not name or source in ("torchvision", "timm")):
            raise ValueError(
                f"weights are 'included' in a model that a package.module:function returns, not in {self.model!r}"
            )
        return self

    @property
    def weights_file(self) -> Path | None:
        """Where given weights are read from, unless the model brings them."""
        return None if self.weights in (None, INCLUDED) else Path(str(self.weights)).expanduser()


class MetaSection(Optimisation):
    """The Dirichlet meta-model and how it is trained and stopped."""

    form: Literal["published", "pooled"]
    branches: list[str] = []
    """published: one string a tap, such as 120-84-10 or 8192-P-512-10"""
    hidden: list[Count] = [64]
    """pooled: widths of the hidden layers of each tap's branch"""
    statistics: list[Literal["mean", "max", "std"]] = ["mean", "max"]
    """pooled: what is kept of a tap over space"""
    grid: Count = 1
    """pooled: over grid × grid cells instead of the whole plane"""
    kl_weight: Positive
    """λ"""
    prior: Positive = 1.0
    """β of every class"""
    clip_norm: Positive = 1.0
    stop_task: Literal["ood", "misclassification"] = "ood"
    stop_score: str = "mutual_information"
    stop_noise: list[NoiseChain] = Field([["permutation", "blur", "contrast"]], min_length=1)
    """kinds of noisy copies of the validation images, each a chain of noises; their AUROC is averaged"""
    noise_draws: Count = 1
    """how many copies of each kind are made (once, and cached)"""


class Recipe(Section):
    """A whole run."""

    name: Name
    version: Name = "1"
    description: str
    paper_id: str | None = None
    """the in-distribution set's name in the paper's tables, to print its figures beside ours"""
    prediction: Literal["base", "meta"] = "base"
    """whose class is served: the base's own, or for transfer, where the base's classes are not the data's, the
    meta-model's"""
    data: DataSection
    input: InputSection
    base: BaseSection
    meta: MetaSection
    operating: Operating = Operating()
    fuse: bool | None = None
    """whether distance and fused score join the others; by default where taps are pooled, for only then are they narrow"""
    report_targets: list[Fraction] = [0.05, 0.01]

    @model_validator(mode="before")
    @classmethod
    def _flags_by_the_fused_score(cls, document: Any) -> Any:
        """What fuses its doubts flags by them unless it says otherwise."""
        if not isinstance(document, dict) or not _fuses(document):
            return document
        operating = document.get("operating", {})
        if not isinstance(operating, dict):
            return document
        return {**document, "operating": {"score": "fused", **operating}}

    @property
    def fuses(self) -> bool:
        """Whether distance and fused score join the others."""
        return self.meta.form == "pooled" if self.fuse is None else self.fuse

    def check_seed(self, seed: int) -> None:
        """Refuse a seed that would hold out images which the given weights have seen."""
        made_by = self.base.weights_seed
        if made_by not in (None, seed):
            raise RecipeError(
                f"The given weights saw the train split that seed {made_by} draws, and seed {seed} would calibrate on "
                f"some of its images: run with --seed {made_by} --seeds 1."
            )

    @property
    def scores(self) -> list[str]:
        """What its bundles can flag by."""
        return list(SCORES if self.fuses else DIRICHLET_SCORES)

    @model_validator(mode="after")
    def _scores_exist(self) -> Self:
        named = {
            "meta.stop_score": self.meta.stop_score,
            "operating.score": self.operating.score,
            "operating.trust_score": self.operating.trust_score,
        }
        for key, score in named.items():
            accepted = list(DIRICHLET_SCORES) if key == "meta.stop_score" else self.scores
            if score not in accepted:
                raise ValueError(f"{key} is {score!r}; accepted are {', '.join(accepted)}")
        return self

    @model_validator(mode="after")
    def _calibration_is_unseen(self) -> Self:
        if self.base.weights_saw == "all" and self.data.held_out == "train":
            raise ValueError(
                "base.weights_saw is all, so calibration on training images would be void: "
                "set data.held_out to test, or calibrate on images of your own"
            )
        return self

    @model_validator(mode="after")
    def _errors_are_the_bases(self) -> Self:
        if self.prediction == "meta" and self.meta.stop_task == "misclassification":
            raise ValueError(
                "meta.stop_task is misclassification, which is by errors of the base, and prediction is meta, for a "
                "base that does not predict the data's classes: stop by ood"
            )
        return self


def _fuses(document: dict[str, Any]) -> bool:
    meta = document.get("meta")
    pooled = isinstance(meta, dict) and meta.get("form") == "pooled"
    return pooled if document.get("fuse") is None else document["fuse"] is True


def available() -> list[str]:
    """Names of the recipes that come with the package."""
    folder = resources.files("qualms_training") / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name_or_path: str) -> Recipe:
    """A recipe of the package by name, or any TOML file by path."""
    path = Path(name_or_path)
    if path.suffix == ".toml":
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RecipeError(f"Recipe {name_or_path} cannot be read: {error}.") from None
    elif name_or_path in available():
        text = (resources.files("qualms_training") / "recipes" / f"{name_or_path}.toml").read_text(encoding="utf-8")
    else:
        raise RecipeError(
            f"There is no recipe {name_or_path!r}; give one of {', '.join(available())}, or a path to a .toml file."
        )
    return parse_recipe(text, name_or_path)


def parse_recipe(text: str, source: str) -> Recipe:
    """Check a recipe's text; RecipeError names the key."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError(f"Recipe {source} is not valid TOML: {error}.") from None
    return check_recipe(document, source)


def check_recipe(document: dict[str, Any], source: str) -> Recipe:
    """Check a recipe's keys and values; RecipeError names the first that is wrong."""
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        raise RecipeError(f"Recipe {source} is not usable: {first_problem(error)}.") from None
