"""Bundles of large networks for benchmarks of the service: `python -m qualms_training.bench.large_bundles --out DIR`.

The files are complete bundles for RGB images of 224 pixels, made with the same code as a run of `qualms train`. Nothing is
trained: ResNet-50 and both meta-models have random weights, EfficientNet-Lite0 those of its package, and the calibration
images are noise. Only speed and memory can be measured with them.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from qualms.bundle import golden
from qualms.bundle.file import graph_digest, write_bundle
from qualms.bundle.manifest import Golden, Manifest
from qualms.bundle.runtime import GraphRunner, check_golden
from qualms.bundle.scores import SCORES, as_uncertainty
from qualms.decisions.calibration import CalibrationSource, trust_grid
from qualms_training.bench.random_networks import random_graph, random_images
from qualms_training.calibration_run import STORED, CalibrationPlan
from qualms_training.console import Display
from qualms_training.meta.export.onnx_export import export_graph
from qualms_training.recipe import Recipe, check_recipe
from qualms_training.stages.provenance import provenance

CALIBRATION_IMAGES = 100
"""the smallest round number for the default operating point"""

MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "efficientnet-lite0": (
        10,
        {
            "prediction": "meta",
            "base": {
                "model": "qualms_training.models.efficientnet:lite0",
                "weights": "included",
                "weights_saw": "other-data",
                "taps": ["_blocks.0", "_blocks.2", "_blocks.4", "_blocks.10", "_avg_pooling"],
            },
        },
    ),
    "resnet50": (1000, {"base": {"model": "torchvision:resnet50", "epochs": 1, "lr": 0.1}}),
}
"""number of classes, and the sections of the recipe that differ, by the name of the file"""


def large_recipe(name: str, sections: dict[str, Any], side: int = 224) -> Recipe:
    """A recipe for images of `side` × `side` pixels with these sections; its data and training are not used."""
    sizes = {"train": 1, "validation": 1, "fit": CALIBRATION_IMAGES, "calibration": CALIBRATION_IMAGES}
    size = {"height": side, "width": side, "fit": "crop", "shorter_side": side * 8 // 7}
    document = {
        "name": name,
        "description": "Untrained, for benchmarks of speed and memory.",
        "data": {"id": "noise", "splits": sizes},
        "input": {**size, "mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
        "meta": {"form": "pooled", "statistics": ["mean"], "epochs": 1, "lr": 0.1},
        "operating": {"target_fpr": 0.05},
        **sections,
    }
    return check_recipe(document, name)


def write_random_bundle(path: Path, recipe: Recipe, classes: int) -> None:
    """Export the recipe's network untrained, calibrate it on noise, and write the bundle."""
    graph = random_graph(recipe, classes)
    images = random_images(recipe, CALIBRATION_IMAGES)
    drawn = golden.draw(recipe.input.spec)
    data, _ = export_graph(graph, drawn)
    runner = GraphRunner(data)
    outputs = runner(images)
    labels = np.random.default_rng(0).integers(0, classes, len(images))
    specs = {name: SCORES[name] for name in recipe.scores}
    trust = recipe.operating.trust_score
    plan = CalibrationPlan(
        input=recipe.input.spec,
        scores=specs,
        classes=classes,
        operating=recipe.operating,
        sets=recipe.calibration.sets,
        grid=trust_grid(as_uncertainty(outputs[trust], specs[trust].direction)),
    )
    source = CalibrationSource(split="calibration", data="noise", data_sha256=golden.digest(images))
    calibration, reference = plan.calibrate({STORED: outputs}, labels, source)
    extractor = graph.extractor
    manifest = Manifest(
        name=recipe.name,
        version=recipe.version,
        classes=[f"class {index}" for index in range(classes)],
        input=recipe.input.spec,
        prediction=recipe.prediction,
        alpha="joined",
        flag_terms=graph.flag_score.names,
        scores=specs,
        operating=recipe.operating,
        calibration=calibration,
        reference=reference,
        golden=Golden(count=len(drawn), input_sha256=golden.digest(drawn), outputs=runner(drawn)),
        provenance=provenance(
            recipe, 0, extractor.tapped.base, extractor.tapped.names, graph.meta_model, {}, {"id": "noise"}
        ),
        graph_sha256=graph_digest(data),
    )
    check_golden(runner, manifest)
    write_bundle(path, data, manifest)


def main() -> None:
    """Write the bundles of all models."""
    parser = argparse.ArgumentParser(description="Write bundles of large networks for benchmarks of the service.")
    parser.add_argument("--out", type=Path, required=True, help="folder of the bundles; made if it does not exist")
    folder: Path = parser.parse_args().out
    folder.mkdir(parents=True, exist_ok=True)
    display = Display()
    for name, (classes, sections) in MODELS.items():
        path = folder / f"{name}.onnx"
        with display.console.status(f"writing {path}"):
            write_random_bundle(path, large_recipe(name, sections), classes)
        display.note(f"wrote {path}, {path.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
