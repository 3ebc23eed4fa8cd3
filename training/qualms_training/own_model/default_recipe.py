"""The recipe for a user's classifier: every setting that the user did not give follows from the model and the data."""

from collections.abc import Mapping
from typing import Any

from qualms.bundle.manifest import Predictor
from qualms_training.own_model.options import FitOptions
from qualms_training.recipe import INCLUDED, Recipe, check_recipe, is_model_file

OBJECT_PREFIX = "object:"
"""of the name of a base that is a Python object"""
LIBRARY_DEFAULT = "DEFAULT"
SMALL_SIDE = 64
"""pixels; images up to this size are cheap, so that more statistics of each tap and more test images can be used"""
POSITIONS = 4
"""cells per side of each tap if the meta-model predicts from small images: it needs positions to recognise classes"""
LARGE_LIMIT, LARGE_REPORT_LIMIT = 1_000, 500
"""images per OOD set, and test images per encoding, for larger images"""
LARGE_ENCODINGS = ("jpeg:85", "jpeg:50")
"""encodings in which a model of larger images is evaluated"""


def default_recipe(
    options: FitOptions,
    *,
    spec: Mapping[str, Any],
    data: Mapping[str, Any],
    prediction: Predictor,
    seen: str,
    classes: int,
) -> Recipe:
    """The whole recipe.

    spec: the section `input`; data: the keys id, held_out, splits and, optionally, classes; seen: training images that the
    weights were trained on; classes: number of classes of the data.
    """
    small = max(spec["height"], spec["width"]) <= SMALL_SIDE
    weights = options.weights or (INCLUDED if has_weights(options.model) else LIBRARY_DEFAULT)
    base: dict[str, Any] = {"model": options.model, "weights": weights, "weights_saw": seen}
    if options.logits is not None:
        base["logits"] = options.logits
    if options.taps is not None:
        base["taps"] = list(options.taps)
    document: dict[str, Any] = {
        "name": options.name,
        "description": f"{options.model}, frozen.",
        "prediction": prediction,
        **({} if options.distance else {"distance": False}),
        **({} if small else {"report_limit": LARGE_REPORT_LIMIT, "report_encodings": list(LARGE_ENCODINGS)}),
        "data": {**data, "ood": list(options.ood), **({} if small else {"limit": LARGE_LIMIT})},
        "input": dict(spec),
        "base": base,
        "meta": meta_settings(prediction, small=small, classes=classes, epochs=options.epochs),
        "operating": {"target_fpr": options.target_fpr, "target_risk": options.target_risk},
    }
    if options.as_sent:
        document["calibration"] = {"as_sent": list(options.as_sent), "form": options.form}
    return check_recipe(document, "of these options")


def has_weights(model: str) -> bool:
    """Whether a base is an object or a file that holds its weights, rather than a name whose library has them."""
    return model.startswith(OBJECT_PREFIX) or is_model_file(model)


def meta_settings(prediction: Predictor, *, small: bool, classes: int, epochs: int) -> dict[str, Any]:
    """The section `meta`: Adam with a falling learning rate, and statistics that the size of the images allows."""
    settings: dict[str, Any] = {
        "form": "pooled",
        "statistics": ["mean", "max", "std"] if small else ["mean", "max"],
        "optimizer": "adam",
        "lr": 1e-3,
        "schedule": "cosine",
        "epochs": epochs,
    }
    if prediction == "meta":
        settings["hidden"] = [min(256, max(64, classes))]
        if small:
            settings |= {"statistics": ["mean"], "grid": POSITIONS}
    return settings
