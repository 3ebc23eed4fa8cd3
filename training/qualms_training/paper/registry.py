"""Registry of the methods: an entry in `METHODS` adds a method to the tables. `method.py` describes the interface."""

from dataclasses import dataclass, field, fields
from typing import Any, Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from qualms_training.errors import RecipeError
from qualms_training.paper.method import Method
from qualms_training.paper.methods.pixels import Pixels
from qualms_training.paper.methods.post_hoc.base_softmax import BaseSoftmax
from qualms_training.paper.methods.post_hoc.energy import Energy
from qualms_training.paper.methods.post_hoc.fdbd import FDBD
from qualms_training.paper.methods.post_hoc.gen import GEN
from qualms_training.paper.methods.post_hoc.knn import KNN
from qualms_training.paper.methods.post_hoc.mahalanobis import MahalanobisPlusPlus
from qualms_training.paper.methods.post_hoc.rmds import RMDS
from qualms_training.paper.methods.post_hoc.vim import ViM
from qualms_training.paper.methods.trained_heads.ablations import CrossEnt, LastLayer, LinearMeta
from qualms_training.paper.methods.trained_heads.density_evidence import DensityEvidence
from qualms_training.paper.methods.trained_heads.dirichlet_meta import DirichletMeta
from qualms_training.paper.methods.trained_heads.fine_tune import FineTune
from qualms_training.paper.methods.trained_heads.fused import Fused
from qualms_training.paper.methods.trained_heads.lula import LULA
from qualms_training.paper.methods.trained_heads.selected_weights import SelectedWeights
from qualms_training.paper.methods.trained_heads.whitebox import Whitebox
from qualms_training.paper.methods.whole_network.aloe import ALOE
from qualms_training.paper.methods.whole_network.be_bayesian import BeBayesian
from qualms_training.paper.methods.whole_network.mc_dropout import MCDropout
from qualms_training.paper.methods.whole_network.postnet import PostNet

Group = Literal["transfer", "paper", "ablation", "extension", "recent", "control"]
"""`transfer`: only in the paper's table of transfer; `paper`: in its other tables; `ablation`: its ablations;
`extension`: our additions to the paper's method; `recent`: OOD scores in use today; `control`: should not separate the sets"""
Form = Literal["published", "pooled"]

PAPER_SCORE_NAMES = {
    "entropy": "Ent",
    "max_probability": "MaxP",
    "mutual_information": "MI",
    "differential_entropy": "Dent",
    "precision": "Prec",
}
"""by our names"""

_STRICT = ConfigDict(strict=True, allow_inf_nan=False)


@dataclass(frozen=True)
class Entry:
    """One method of the tables."""

    title: str
    """name in our tables"""
    group: Group
    make: type[Method]
    """class of the method"""
    whole_network: bool = False
    """whether it trains a network of its own"""
    form: Form | None = None
    """form of the meta-model that it needs; None uses the benchmark's first recipe"""
    paper: dict[str, str] = field(default_factory=dict)
    """name in the paper's tables, by task: ood, misclassification, ablation, transfer"""
    paper_score: str | None = None
    """the score that the paper's figures belong to, if the paper gives one figure per method and names no score"""
    settings: dict[str, Any] = field(default_factory=dict)
    """hyper-parameters of this entry, if several entries use the same class"""

    def build(self, key: str, settings: dict[str, Any], benchmark: str) -> Method:
        """Make the method with the hyper-parameters of a benchmark. RecipeError names an unknown or invalid setting."""
        types: dict[str, Any] = {item.name: item.type for item in fields(self.make)}
        for name, value in settings.items():
            if name not in types:
                raise RecipeError(
                    f"Benchmark {benchmark!r}: method {key!r} has no setting {name!r}; "
                    f"accepted are {', '.join(types) or 'none'}."
                )
            try:
                TypeAdapter(types[name], config=_STRICT).validate_python(value)
            except ValidationError as error:
                accepted = error.errors()[0]["msg"].removeprefix("Input should be ")
                raise RecipeError(
                    f"Benchmark {benchmark!r}: setting {name!r} of method {key!r} is {value!r}; "
                    f"it should be {accepted}."
                ) from None
        # Pass the values as given and not as validated: the fingerprint of a saved result depends on them (1 is not 1.0).
        return self.make(**{**self.settings, **settings})


_OOD_TASKS = ("ood", "misclassification")


def _named(name: str, *tasks: str) -> dict[str, str]:
    return dict.fromkeys(tasks or _OOD_TASKS, name)


METHODS: dict[str, Entry] = {
    "base": Entry("Base Model", "paper", BaseSoftmax, paper=_named("Base Model", *_OOD_TASKS, "ablation")),
    "fine-tune": Entry("FineTune", "transfer", FineTune, paper=_named("FineTune", "transfer")),
    "fine-tune-meta": Entry(
        "CrossEnt",
        "transfer",
        FineTune,
        paper=_named("CrossEnt Loss", "transfer"),
        settings={"structure": "meta"},
    ),
    "mc-dropout": Entry(
        "MC Dropout", "paper", MCDropout, whole_network=True, paper=_named("MCDropout"), paper_score="entropy"
    ),
    "be-bayesian": Entry(
        "Be-Bayesian", "paper", BeBayesian, whole_network=True, paper=_named("BeBayesian"), paper_score="entropy"
    ),
    "postnet": Entry("PostNet", "paper", PostNet, whole_network=True, paper=_named("PostNet"), paper_score="precision"),
    "aloe": Entry(
        "ALOE", "paper", ALOE, whole_network=True, paper=_named("ALOE", "ood"), paper_score="max_probability"
    ),
    "whitebox": Entry("Whitebox", "paper", Whitebox, paper=_named("Whitebox"), paper_score="wrong_probability"),
    "lula": Entry("LULA", "paper", LULA, paper=_named("LULA"), paper_score="max_probability"),
    "ours": Entry(
        "Ours, published form", "paper", DirichletMeta, form="published", paper=_named("Ours", "ood", "ablation")
    ),
    "ours-pooled": Entry(
        "Ours, pooled form", "paper", DirichletMeta, form="pooled", paper=_named("Ours", "ood", "ablation", "transfer")
    ),
    "ours-errors": Entry(
        "Ours, stopped by errors",
        "paper",
        DirichletMeta,
        paper=_named("Ours", "misclassification"),
        settings={"stop": "misclassification"},
    ),
    "linear-meta": Entry("Linear-Meta", "ablation", LinearMeta, paper=_named("Single-layer Meta", "ablation")),
    "cross-ent": Entry("Cross-Ent", "ablation", CrossEnt, paper=_named("Cross-Ent Meta", "ablation")),
    "last-layer": Entry("LastLayer", "ablation", LastLayer, paper=_named("Base-Model+LastLayer", "ablation")),
    "ten-percent": Entry(
        "10 % data", "ablation", DirichletMeta, paper=_named("10%data", "ablation"), settings={"share": 0.1}
    ),
    "fused": Entry("Flag score and joined α", "extension", Fused, form="pooled"),
    "fused-selected": Entry("Fused, selected weights", "extension", SelectedWeights, form="pooled"),
    "density-evidence": Entry("Evidence by density", "extension", DensityEvidence, form="pooled"),
    "knn": Entry("KNN", "recent", KNN),
    "mahalanobis": Entry("Mahalanobis++", "recent", MahalanobisPlusPlus),
    "mahalanobis-taps": Entry(
        "Mahalanobis++, pooled taps", "recent", MahalanobisPlusPlus, form="pooled", settings={"where": "taps"}
    ),
    "rmds": Entry("RMDS", "recent", RMDS),
    "vim": Entry("ViM", "recent", ViM),
    "fdbd": Entry("fDBD", "recent", FDBD),
    "gen": Entry("GEN", "recent", GEN),
    "energy": Entry("Energy", "recent", Energy),
    "pixels": Entry("Pixels alone", "control", Pixels),
}
"""by the key that commands, files and folders use"""


def methods_for(*, transfer: bool) -> dict[str, Entry]:
    """The methods of a benchmark. A transfer benchmark has only methods that learn the data's classes, and the control."""
    return {
        key: entry
        for key, entry in METHODS.items()
        if (entry.group == "control" or "transfer" in entry.paper if transfer else entry.group != "transfer")
    }
