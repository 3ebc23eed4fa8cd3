"""Every row of the tables: the method that makes it, and its name in the paper's."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from training.benchmark.method import Method
from training.benchmark.methods.aloe import ALOE
from training.benchmark.methods.base import Base
from training.benchmark.methods.be_bayesian import BeBayesian
from training.benchmark.methods.cross_ent import CrossEnt
from training.benchmark.methods.energy import Energy
from training.benchmark.methods.fdbd import FDBD
from training.benchmark.methods.fine_tune import FineTune
from training.benchmark.methods.fused import Fused
from training.benchmark.methods.gen import GEN
from training.benchmark.methods.knn import KNN
from training.benchmark.methods.last_layer import LastLayer
from training.benchmark.methods.linear_meta import LinearMeta
from training.benchmark.methods.lula import LULA
from training.benchmark.methods.mahalanobis import MahalanobisPlusPlus
from training.benchmark.methods.mc_dropout import MCDropout
from training.benchmark.methods.ours import Ours
from training.benchmark.methods.pixels import Pixels
from training.benchmark.methods.postnet import PostNet
from training.benchmark.methods.rmds import RMDS
from training.benchmark.methods.vim import ViM
from training.benchmark.methods.whitebox import Whitebox
from training.errors import RecipeError

Group = Literal["transfer", "paper", "ablation", "past", "today", "control"]
Form = Literal["published", "pooled"]

SHORT = {
    "entropy": "Ent",
    "max_probability": "MaxP",
    "mutual_information": "MI",
    "differential_entropy": "Dent",
    "precision": "Prec",
}
"""the paper's names of scores"""

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Entry:
    """One method."""

    title: str
    group: Group
    """of the paper's tables, of transfer alone, its ablations, past the paper, used today, or what must not work"""
    make: Callable[..., Method] | None
    """None where there is no code yet; then `reason` says why"""
    whole_network: bool = False
    form: Form | None = None
    """the form of meta-model it needs; None takes the benchmark's first recipe"""
    paper: dict[str, str] = field(default_factory=dict)
    """its name in the paper's tables, by task: ood, misclassification, ablation, transfer"""
    single: str | None = None
    """the score behind the one figure that the paper gives for the method without naming a score"""
    settings: dict[str, Any] = field(default_factory=dict)
    """hyper-parameters that make this row out of a class that makes several"""
    reason: str = ""

    def build(self, key: str, settings: dict[str, Any], benchmark: str) -> Method:
        """The method with a benchmark's hyper-parameters; a name or a value that it does not take is an error."""
        assert self.make is not None
        known: dict[str, Any] = {}
        if isinstance(self.make, type):
            known = {item.name: item.type for item in fields(self.make)}
        for name, value in settings.items():
            if name not in known:
                raise RecipeError(
                    f"Benchmark {benchmark!r}: method {key!r} has no setting {name!r}; "
                    f"accepted are {', '.join(known) or 'none'}."
                )
            try:
                TypeAdapter(known[name], config=_STRICT).validate_python(value)
            except ValidationError as error:
                wanted = error.errors()[0]["msg"].removeprefix("Input should be ")
                raise RecipeError(
                    f"Benchmark {benchmark!r}: setting {name!r} of method {key!r} is {value!r}; it should be {wanted}."
                ) from None
        # The values as they were given, not as they were read: results are known by them.
        return self.make(**{**self.settings, **settings})


_OOD_TASKS = ("ood", "misclassification")


def _named(name: str, *tasks: str) -> dict[str, str]:
    return dict.fromkeys(tasks or _OOD_TASKS, name)


METHODS: dict[str, Entry] = {
    "base": Entry("Base Model", "paper", Base, paper=_named("Base Model", *_OOD_TASKS, "ablation")),
    "fine-tune": Entry("FineTune", "transfer", FineTune, paper=_named("FineTune", "transfer")),
    "fine-tune-meta": Entry(
        "CrossEnt",
        "transfer",
        FineTune,
        paper=_named("CrossEnt Loss", "transfer"),
        settings={"structure": "meta"},
    ),
    "mc-dropout": Entry(
        "MC Dropout", "paper", MCDropout, whole_network=True, paper=_named("MCDropout"), single="entropy"
    ),
    "be-bayesian": Entry(
        "Be-Bayesian", "paper", BeBayesian, whole_network=True, paper=_named("BeBayesian"), single="entropy"
    ),
    "postnet": Entry("PostNet", "paper", PostNet, whole_network=True, paper=_named("PostNet"), single="precision"),
    "aloe": Entry("ALOE", "paper", ALOE, whole_network=True, paper=_named("ALOE", "ood"), single="max_probability"),
    "whitebox": Entry("Whitebox", "paper", Whitebox, paper=_named("Whitebox"), single="wrong_probability"),
    "lula": Entry("LULA", "paper", LULA, paper=_named("LULA"), single="max_probability"),
    "ours": Entry("Ours, published form", "paper", Ours, form="published", paper=_named("Ours", "ood", "ablation")),
    "ours-pooled": Entry(
        "Ours, pooled form", "paper", Ours, form="pooled", paper=_named("Ours", "ood", "ablation", "transfer")
    ),
    "ours-errors": Entry(
        "Ours, stopped by errors",
        "paper",
        Ours,
        paper=_named("Ours", "misclassification"),
        settings={"stop": "misclassification"},
    ),
    "linear-meta": Entry("Linear-Meta", "ablation", LinearMeta, paper=_named("Single-layer Meta", "ablation")),
    "cross-ent": Entry("Cross-Ent", "ablation", CrossEnt, paper=_named("Cross-Ent Meta", "ablation")),
    "last-layer": Entry("LastLayer", "ablation", LastLayer, paper=_named("Base-Model+LastLayer", "ablation")),
    "ten-percent": Entry("10 % data", "ablation", Ours, paper=_named("10%data", "ablation"), settings={"share": 0.1}),
    "fused": Entry("Fused", "past", Fused, form="pooled"),
    "density-evidence": Entry("Evidence by density", "past", Fused, form="pooled", settings={"evidence": "density"}),
    "knn": Entry("KNN", "today", KNN),
    "mahalanobis": Entry("Mahalanobis++", "today", MahalanobisPlusPlus),
    "mahalanobis-taps": Entry(
        "Mahalanobis++, pooled taps", "today", MahalanobisPlusPlus, form="pooled", settings={"where": "taps"}
    ),
    "rmds": Entry("RMDS", "today", RMDS),
    "vim": Entry("ViM", "today", ViM),
    "fdbd": Entry("fDBD", "today", FDBD),
    "gen": Entry("GEN", "today", GEN),
    "energy": Entry("Energy", "today", Energy),
    "pixels": Entry("Pixels alone", "control", Pixels),
}
"""by the name that commands, files and folders use"""


def methods_for(*, transfer: bool) -> dict[str, Entry]:
    """The methods of a benchmark; where the base's classes are not the data's, those that learn to predict by it."""
    return {
        key: entry
        for key, entry in METHODS.items()
        if (entry.group == "control" or "transfer" in entry.paper if transfer else entry.group != "transfer")
    }
