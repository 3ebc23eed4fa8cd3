"""Every row of the tables: the method that makes it, and its name in the paper's."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from qualms_training.errors import RecipeError
from qualms_training.paper.method import Method
from qualms_training.paper.methods.post_hoc.base_softmax import Base
from qualms_training.paper.methods.post_hoc.energy import Energy
from qualms_training.paper.methods.post_hoc.fdbd import FDBD
from qualms_training.paper.methods.post_hoc.gen import GEN
from qualms_training.paper.methods.post_hoc.knn import KNN
from qualms_training.paper.methods.post_hoc.mahalanobis import MahalanobisPlusPlus
from qualms_training.paper.methods.post_hoc.pixels import Pixels
from qualms_training.paper.methods.post_hoc.rmds import RMDS
from qualms_training.paper.methods.post_hoc.vim import ViM
from qualms_training.paper.methods.trained_heads.cross_ent import CrossEnt
from qualms_training.paper.methods.trained_heads.dirichlet_meta import Ours
from qualms_training.paper.methods.trained_heads.fine_tune import FineTune
from qualms_training.paper.methods.trained_heads.fused import Fused
from qualms_training.paper.methods.trained_heads.last_layer import LastLayer
from qualms_training.paper.methods.trained_heads.linear_meta import LinearMeta
from qualms_training.paper.methods.trained_heads.lula import LULA
from qualms_training.paper.methods.trained_heads.whitebox import Whitebox
from qualms_training.paper.methods.whole_network.aloe import ALOE
from qualms_training.paper.methods.whole_network.be_bayesian import BeBayesian
from qualms_training.paper.methods.whole_network.mc_dropout import MCDropout
from qualms_training.paper.methods.whole_network.postnet import PostNet

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
