"""The stages of a run: each has a module of its name with a function `run`, which does nothing if its product is up to date."""

from enum import StrEnum


class Stage(StrEnum):
    """The stages in the order in which they run."""

    base = "base"  # train the base classifier, or read its weights, and freeze it
    features = "features"  # run the base over the data once and cache the features at its taps
    fit = "fit"  # train the meta-model on the cached features
    combine = "combine"  # fit the flag score, with the distance from the training data, and the joined α
    export = "export"  # export base, meta-model and scores as one ONNX graph
    calibrate = "calibrate"  # calibrate thresholds with the exported graph, and write the bundle
    evaluate = "evaluate"  # evaluate the bundle on the test set and on OOD sets
