"""Recipes: one TOML file with every setting of a run; an unknown key is an error that names the key."""

import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from qualms.bundle.calibration_data import CalibrationForm
from qualms.bundle.manifest import OperatingDefaults, Predictor, SetMethod, first_problem
from qualms.bundle.parts import Fraction, Name, is_none
from qualms.bundle.scores import DIRICHLET_SCORES, SCORES
from qualms.errors import EncodingError
from qualms.images.encodings import parse_encodings
from qualms.images.input_spec import InputSpec
from qualms_training.data.noise import CORRUPTION, check_noise
from qualms_training.errors import RecipeError, did_you_mean
from qualms_training.files import load_toml, toml_names
from qualms_training.fitting.learning_rate import LearningRate, ScheduleName, learning_rate

Positive = Annotated[float, Field(gt=0)]
NoiseChain = Annotated[list[Annotated[str, AfterValidator(check_noise)]], Field(min_length=1)]
NotNegative = Annotated[float, Field(ge=0)]
Count = Annotated[int, Field(gt=0)]
INCLUDED = "included"
MODEL_SUFFIXES = (".pt", ".pth", ".ts", ".torchscript", ".pt2")
"""of files that hold a whole network"""
FOLDER_PREFIX = "folder:"
TRANSFORMERS_PREFIX = "transformers:"
LIBRARY_WEIGHTS = re.compile(r"[A-Z][A-Z0-9_]*")
"""names of weights that a library has, such as DEFAULT or IMAGENET1K_V2; anything else is a file"""
REPORTED_ENCODINGS = (
    *("png", "jpeg:95", "jpeg:85", "jpeg:75", "jpeg:50", "webp:80", "resize:2:bilinear", "resize:2:bicubic"),
    *("resize:2:lanczos", "resize:2+jpeg:75", "resize:0.5:bicubic", "brightness:0.85", "brightness:1.15"),
)
_FOLDER = resources.files("qualms_training") / "recipes"


def _check_encodings(texts: list[str]) -> list[str]:
    try:
        parse_encodings(texts)
    except EncodingError as error:
        raise ValueError(str(error).rstrip(".")) from None
    return texts


class Section(BaseModel):
    """Base class of all sections: unknown keys and non-finite numbers are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, protected_namespaces=())


class SplitSizes(Section):
    """Number of images in each split; the splits are disjoint and drawn with the run's seed."""

    train: Count
    validation: Count
    fit: Count
    calibration: Count


class DataSection(Section):
    """The in-distribution data set and the OOD sets."""

    id: str
    held_out: Literal["train", "test"] = "train"
    """source of the splits `fit` and `calibration`: `test` if the base has been trained on all training images"""
    ood: list[str] = []
    corrupted: bool = True
    """also evaluate on corrupted test images (permutation, then blur, then contrast)"""
    limit: Count = 10_000
    """largest number of images of an OOD set"""
    classes: list[str] | None = Field(None, exclude_if=is_none)
    """class names in the order of the base's logits; by default the alphabetical order of the class folders"""
    splits: SplitSizes


class InputSection(InputSpec):
    """The bundle's input, and the normalisation that its graph applies to pixels in [0, 1]."""

    model_config = ConfigDict(allow_inf_nan=False)

    mean: list[float]
    std: list[Positive]

    @model_validator(mode="after")
    def _check_channels(self) -> Self:
        if len(self.mean) != self.channels or len(self.std) != self.channels:
            raise ValueError(f"mean and std need {self.channels} value(s) for colour {self.colour!r}")
        return self

    @property
    def spec(self) -> InputSpec:
        """The input as the manifest records it, without the normalisation."""
        return InputSpec.model_validate(self.model_dump(exclude={"mean", "std"}))


class Optimisation(Section):
    """How a network is trained: the settings common to base and meta-model."""

    epochs: Count
    batch: Count = 128
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: Positive
    momentum: NotNegative = 0.9
    """for SGD only"""
    nesterov: bool = False
    weight_decay: NotNegative = 0.0
    schedule: ScheduleName = "constant"
    milestones: list[Count] = []
    """epochs after which the schedule `steps` changes the learning rate"""
    factors: list[Positive] = []
    """the learning rate after each milestone, relative to `lr`"""

    @model_validator(mode="after")
    def _check_milestones(self) -> Self:
        if len(self.milestones) != len(self.factors):
            raise ValueError("milestones and factors must have the same length")
        if self.milestones and self.schedule != "steps":
            raise ValueError(f"milestones need schedule 'steps', not {self.schedule!r}")
        if self.milestones != sorted(set(self.milestones)):
            raise ValueError("milestones must be in ascending order")
        return self

    @model_validator(mode="after")
    def _check_nesterov(self) -> Self:
        if self.nesterov and self.optimizer == "sgd" and self.momentum == 0:
            raise ValueError("nesterov needs a momentum above 0")
        return self

    def rate(self, examples: int) -> LearningRate:
        """The learning rate as a function of the global step."""
        return learning_rate(
            self.schedule,
            self.lr,
            epochs=self.epochs,
            steps_per_epoch=-(-examples // self.batch),
            milestones=self.milestones,
            factors=self.factors,
        )


class BaseSection(Optimisation):
    """The base classifier, which is frozen: trained by this recipe, or read from a file."""

    model: str
    weights: str | None = None
    """a state-dict file, the name of weights that the model's library has (`DEFAULT`), or `included` if the model comes with
    them: a function that loads them, a TorchScript or torch.export file; the base is then not trained"""
    weights_saw: Literal["train-split", "all", "other-data"] | None = None
    """training images that the given weights were trained on: the recipe's train split, all, or none (`other-data`);
    `train-split` means a base trained by `qualms train` with this recipe's data and the seed `weights_seed`;
    thresholds calibrated on images that the base was trained on are invalid"""
    weights_seed: Annotated[int, Field(ge=0)] | None = Field(None, exclude_if=is_none)
    """for `train-split`: the seed of the run that trained the weights, and the only seed they can be used with"""
    logits: str | None = Field(None, exclude_if=is_none)
    """key or index of the logits if the model returns several tensors"""
    taps: list[str] | Literal["auto"] = "auto"
    augment: Literal["none", "crop-flip"] = "none"

    @model_validator(mode="before")
    @classmethod
    def _default_unused_training(cls, document: Any) -> Any:
        """Make `epochs` and `lr` optional where given weights leave nothing to train."""
        given = isinstance(document, dict) and document.get("weights") is not None
        return {"epochs": 1, "lr": 1.0, **document} if given else document

    @model_validator(mode="after")
    def _check_weights(self) -> Self:
        if (self.weights is None) != (self.weights_saw is None):
            raise ValueError(
                "weights and weights_saw belong together: weights_saw names the data that the given weights were trained on"
            )
        if (self.weights_saw == "train-split") != (self.weights_seed is not None):
            raise ValueError(
                "weights_saw = 'train-split' and weights_seed belong together: weights_seed is the seed of the "
                "`qualms train` run that made the weights, because each seed draws another split"
            )
        source, _, name = self.model.partition(":")
        if (
            self.weights == INCLUDED
            and not is_model_file(self.model)
            and (not name or source in ("torchvision", "timm"))
        ):
            raise ValueError(
                f"weights = 'included' needs a model given as package.module:function or as a file, not {self.model!r}"
            )
        return self

    @property
    def weights_file(self) -> Path | None:
        """The file of the given weights; None if the base is trained, or its weights are included or the library's."""
        if self.weights is None or self.weights == INCLUDED or LIBRARY_WEIGHTS.fullmatch(self.weights):
            return None
        return Path(self.weights).expanduser()


class MetaSection(Optimisation):
    """The Dirichlet meta-model and how it is trained and stopped."""

    form: Literal["published", "pooled"]
    branches: list[str] = []
    """published: one string per tap, for example 120-84-10 or 8192-P-512-10"""
    hidden: list[Count] = [64]
    """pooled: widths of the hidden layers of each tap's branch"""
    statistics: list[Literal["mean", "max", "std"]] = ["mean", "max"]
    """pooled: the statistics of a tap over space"""
    grid: Count = 1
    """pooled: each statistic is taken in grid × grid cells"""
    kl_weight: Positive | None = None
    """λ; by default 1 / (100 K) for K classes, which is the paper's 0.001 for ten: the optimum gives the true class
    α = 1 + 1/λ, and with a fixed λ its share of α_0 would shrink with the number of classes"""
    prior: Positive = 1.0
    """β, the same for every class"""
    clip_norm: Positive = 1.0
    stop_task: Literal["ood", "misclassification"] = "ood"
    stop_score: str = "mutual_information"
    stop_noise: list[NoiseChain] = Field([list(CORRUPTION)], min_length=1)
    """noisy copies of the validation images, each made by a chain of noises; the AUROC is averaged over them"""
    noise_draws: Count = 1
    """number of copies per chain; they are made once and cached"""

    def kl_weight_for(self, classes: int) -> float:
        """λ for a number of classes."""
        return 1 / (100 * classes) if self.kl_weight is None else self.kl_weight


class CalibrationSection(Section):
    """How calibration images are sent, and how prediction sets are formed."""

    as_sent: list[str] = []
    """encodings such as png, jpeg:75-95 or resize:1.5-3 (`qualms.images.encodings`); without any, images are used as stored"""
    form: CalibrationForm = "worst"
    """`worst`: the guarantees hold for each of the encodings; `by-size`: the same, with thresholds for images of the model's input
    size, larger and smaller ones; `mixture`: they hold for all encodings in the listed shares"""
    sets: SetMethod = SetMethod()
    """method of prediction sets: lac, or raps with its penalty and free_ranks"""

    @field_validator("as_sent")
    @classmethod
    def _check_as_sent(cls, texts: list[str]) -> list[str]:
        return _check_encodings(texts)


class Recipe(Section):
    """All settings of a run."""

    name: Name
    version: Name = "1"
    description: str
    paper_id: str | None = None
    """the in-distribution set's name in the paper's tables, to print the paper's figures beside ours"""
    prediction: Predictor = "base"
    """the network that predicts the served class: the base, or for transfer (the base's classes are not the data's)
    the meta-model"""
    data: DataSection
    input: InputSection
    base: BaseSection
    meta: MetaSection
    operating: OperatingDefaults = OperatingDefaults()
    distance: bool | None = None
    """whether the distance from the training data is a term of the flag score; by default only if the taps are pooled,
    because flattened taps are too wide"""
    calibration: CalibrationSection = CalibrationSection()
    report_targets: list[Fraction] = [0.05, 0.01]
    report_encodings: list[str] = list(REPORTED_ENCODINGS)
    """encodings in which the test set and the OOD sets are evaluated"""
    report_limit: Count = 10_000
    """largest number of test images per encoding; of each OOD set, a tenth of it is used"""

    @field_validator("report_encodings")
    @classmethod
    def _check_report_encodings(cls, texts: list[str]) -> list[str]:
        return _check_encodings(texts)

    @model_validator(mode="before")
    @classmethod
    def _rename_fuse(cls, document: Any) -> Any:
        """Read `fuse`, the former name of `distance`, in recipes that earlier versions recorded."""
        if not isinstance(document, dict) or "fuse" not in document or "distance" in document:
            return document
        return {"distance": document["fuse"], **{key: value for key, value in document.items() if key != "fuse"}}

    @property
    def uses_distance(self) -> bool:
        """Whether the distance from the training data is a term of the flag score."""
        return self.meta.form == "pooled" if self.distance is None else self.distance

    def check_seed(self, seed: int) -> None:
        """Raise RecipeError if this seed would hold out images that the given weights were trained on."""
        weights_seed = self.base.weights_seed
        if weights_seed not in (None, seed):
            raise RecipeError(
                f"The given weights were trained on the train split of seed {weights_seed}, and seed {seed} would "
                f"calibrate on some of its images: run with --seed {weights_seed} --seeds 1."
            )

    @property
    def scores(self) -> list[str]:
        """Scores of the bundle, each of which can flag."""
        return [name for name in SCORES if name != "distance" or self.uses_distance]

    @model_validator(mode="after")
    def _check_scores(self) -> Self:
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
    def _check_calibration(self) -> Self:
        if self.base.weights_saw == "all" and self.data.held_out == "train":
            raise ValueError(
                "base.weights_saw is 'all', so calibration on training images would be invalid: "
                "set data.held_out to 'test'"
            )
        return self

    @model_validator(mode="after")
    def _check_stop_task(self) -> Self:
        if self.prediction == "meta" and self.meta.stop_task == "misclassification":
            raise ValueError(
                "meta.stop_task = 'misclassification' needs errors of the base, and with prediction = 'meta' the base "
                "does not predict the data's classes: set meta.stop_task to 'ood'"
            )
        return self


def is_model_file(model: str) -> bool:
    """Whether a base is given as a file, TorchScript or torch.export, rather than by name."""
    return model.endswith(MODEL_SUFFIXES)


def available() -> list[str]:
    """Names of the recipes that come with the package."""
    return toml_names(_FOLDER)


def load_recipe(name_or_path: str) -> Recipe:
    """A recipe of the package by name, or any TOML file by path; paths in the file are relative to it."""
    document = load_toml(name_or_path, _FOLDER, "recipe")
    if name_or_path.endswith(".toml"):
        resolve_paths(document, Path(name_or_path).parent)
    return check_recipe(document, name_or_path)


def resolve_paths(document: dict[str, Any], folder: Path) -> None:
    """Make the paths in a recipe relative to the working directory instead of `folder`."""
    map_paths(document, lambda path: str(folder / Path(path).expanduser()))


def map_paths(document: dict[str, Any], change: Callable[[str], str]) -> None:
    """Apply `change` to the paths of data, model and weights in a recipe; values of the wrong type are left to `check_recipe`."""

    def changed(value: Any, is_path: Callable[[str], bool]) -> Any:
        if isinstance(value, list):
            return [changed(one, is_path) for one in value]
        if not isinstance(value, str) or not is_path(value):
            return value
        prefix = next((one for one in (FOLDER_PREFIX, TRANSFORMERS_PREFIX) if value.startswith(one)), "")
        return prefix + change(value.removeprefix(prefix))

    def is_model_path(value: str) -> bool:
        """Whether a base is a file, or the folder of a Hugging Face model rather than its name on the Hub."""
        name = value.removeprefix(TRANSFORMERS_PREFIX)
        return is_model_file(value) or (name != value and (Path(name).is_dir() or Path(change(name)).is_dir()))

    for section, key, is_path in (
        ("data", "id", lambda value: value.startswith(FOLDER_PREFIX)),
        ("data", "ood", lambda value: value.startswith(FOLDER_PREFIX)),
        ("base", "weights", lambda value: value != INCLUDED and not LIBRARY_WEIGHTS.fullmatch(value)),
        ("base", "model", is_model_path),
    ):
        values = document.get(section)
        if isinstance(values, dict) and key in values:
            values[key] = changed(values[key], is_path)


def check_recipe(document: dict[str, Any], source: str) -> Recipe:
    """Validate a recipe's keys and values; RecipeError names the first invalid one. `source` is named in the error.

    Unknown keys come before missing ones, because an unknown key is often a missing one that is misspelt.
    """
    try:
        return Recipe.model_validate(document)
    except ValidationError as error:
        unknown = [".".join(map(str, one["loc"])) for one in error.errors() if one["type"] == "extra_forbidden"]
        problem = f"{unknown[0]}: this field is unknown" if unknown else first_problem(error)
        close = did_you_mean(unknown[0].rpartition(".")[2], _keys(unknown[0])) if unknown else "."
        raise RecipeError(f"Recipe {source} is not valid: {problem}{close}") from None


def _keys(path: str) -> list[str]:
    """The accepted keys of the section of the key at the dotted `path`."""
    section: Any = Recipe
    for part in path.split(".")[:-1]:
        section = section.model_fields[part].annotation if part in section.model_fields else Section
    return list(section.model_fields) if isinstance(section, type) and issubclass(section, BaseModel) else []
