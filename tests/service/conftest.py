"""A complete small bundle: a graph of a few plain operators with every output, and its true manifest."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from service.bundle import golden
from service.bundle.calibration import calibrate, reference, trust_grid
from service.bundle.container import Container, pack
from service.bundle.file import graph_digest, write_bundle
from service.bundle.input_spec import InputSpec
from service.bundle.manifest import (
    ErrorResult,
    Evaluation,
    Golden,
    Manifest,
    OodResult,
    Operating,
    Provenance,
    Realised,
    ScoreSpec,
)
from service.bundle.runtime import GraphRunner
from service.bundle.scores import SCORES, doubt

CLASSES = ["bee", "crab", "dove"]
SPEC = InputSpec(height=6, width=5)
SPECS = {name: ScoreSpec(direction=score.direction, kind=score.kind) for name, score in SCORES.items()}
CALIBRATION = 400
"""enough for the default targets, which need 299"""
MISTAKES = 3
"""how many of the most doubtful calibration images are labelled otherwise than they are predicted"""


@pytest.fixture(scope="session")
def model() -> onnx.ModelProto:
    """Mean colour → logits → α → scores; those that need digamma are stand-ins that move the same way."""
    float32, int64 = TensorProto.FLOAT, TensorProto.INT64
    k = len(CLASSES)
    weights = np.random.default_rng(5).normal(0, 6, (SPEC.channels, k)).astype(np.float32)
    node = helper.make_node
    nodes = [
        node("Cast", ["image"], ["pixels"], to=float32),
        node("Div", ["pixels", "white"], ["scaled"]),
        node("ReduceMean", ["scaled"], ["features"], axes=[1, 2], keepdims=0),
        node("MatMul", ["features", "weights"], ["logits"]),
        node("Softmax", ["logits"], ["base_probabilities"], axis=-1),
        node("ArgMax", ["logits"], ["prediction"], axis=-1, keepdims=0),
        node("Exp", ["logits"], ["alpha"]),
        node("ReduceSum", ["alpha", "last"], ["total"], keepdims=1),
        node("ReduceSum", ["alpha", "last"], ["precision"], keepdims=0),
        node("Div", ["alpha", "total"], ["probabilities"]),
        node("ReduceMax", ["probabilities"], ["max_probability"], axes=[-1], keepdims=0),
        node("Sub", ["one", "max_probability"], ["error_probability"]),
        node("Log", ["precision"], ["log_precision"]),
        node("Neg", ["log_precision"], ["differential_entropy"]),
        node("Log", ["probabilities"], ["log_probabilities"]),
        node("Mul", ["probabilities", "log_probabilities"], ["terms"]),
        node("ReduceSum", ["terms", "last"], ["negative_entropy"], keepdims=0),
        node("Neg", ["negative_entropy"], ["entropy"]),
        node("Add", ["precision", "one"], ["more"]),
        node("Div", ["entropy", "more"], ["mutual_information"]),
        node("Sub", ["entropy", "mutual_information"], ["expected_entropy"]),
    ]
    vectors = ("base_probabilities", "probabilities", "alpha")
    outputs = [
        helper.make_tensor_value_info("prediction", int64, ["N"]),
        *(helper.make_tensor_value_info(name, float32, ["N", k]) for name in vectors),
        *(helper.make_tensor_value_info(name, float32, ["N"]) for name in SCORES),
    ]
    graph = helper.make_graph(
        nodes,
        "tiny",
        [helper.make_tensor_value_info("image", TensorProto.UINT8, ["N", *SPEC.shape])],
        outputs,
        [
            numpy_helper.from_array(weights, "weights"),
            numpy_helper.from_array(np.array(255, np.float32), "white"),
            numpy_helper.from_array(np.array(1, np.float32), "one"),
            numpy_helper.from_array(np.array([-1]), "last"),
        ],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(made, full_check=True)
    return made


@pytest.fixture(scope="session")
def graph(model: onnx.ModelProto) -> bytes:
    """The model as a file's bytes, without a manifest."""
    return bytes(model.SerializeToString())


@pytest.fixture(scope="session")
def runner(graph: bytes) -> GraphRunner:
    return GraphRunner(graph, threads=1)


@pytest.fixture(scope="session")
def draw_images() -> Callable[[int, int], NDArray[np.uint8]]:
    """(seed, count) → images (count, H, W, C) whose mean colours, and so their scores, differ."""

    def draw(seed: int, count: int) -> NDArray[np.uint8]:
        rng = np.random.default_rng(seed)
        colour = rng.integers(20, 236, (count, 1, 1, SPEC.channels))
        return (colour + rng.integers(-20, 20, (count, *SPEC.shape))).astype(np.uint8)

    return draw


@pytest.fixture(scope="session")
def manifest(graph: bytes, runner: GraphRunner, draw_images: Callable[[int, int], NDArray[np.uint8]]) -> Manifest:
    """What training would write for the graph, with an evaluation that shows every part."""
    fitted, outputs = runner(draw_images(1, 300)), runner(draw_images(2, CALIBRATION))
    labels = outputs["prediction"].copy()
    doubtful = np.argsort(outputs["error_probability"])[-MISTAKES:]
    labels[doubtful] = (labels[doubtful] + 1) % len(CLASSES)
    inputs = golden.draw(SPEC)
    operating = Operating()
    return Manifest(
        name="tiny",
        version="1.2",
        classes=CLASSES,
        input=SPEC,
        scores=SPECS,
        operating=operating,
        calibration=calibrate(
            outputs,
            labels,
            SPECS,
            operating.trust_score,
            trust_grid(doubt(fitted[operating.trust_score], SPECS[operating.trust_score].direction)),
            split="calibration",
            data="drawn",
            data_sha256=graph_digest(b"drawn"),
        ),
        reference=reference(outputs, SPECS, len(CLASSES)),
        golden=Golden(count=len(inputs), input_sha256=golden.digest(inputs), outputs=runner(inputs)),
        provenance=Provenance(
            created="2026-01-02T03:04:05+00:00",
            qualms="0.1.0",
            recipe_name="tiny",
            recipe={"name": "tiny", "meta": {"lr": 0.1, "hidden": [64]}},
            seed=7,
            versions={"python": "3.11.1", "numpy": "2.2.0"},
            base={"model": "mean-colour", "parameters": 1234567, "taps": ["features", "logits"]},
            meta={"form": "pooled", "parameters": 9},
            data={"id": "drawn"},
        ),
        evaluation=Evaluation(
            test_data="drawn",
            n=1000,
            base_accuracy=98.75,
            accuracy=98.75,
            identical_predictions=True,
            ood=[
                OodResult(data=data, score=score, auroc=auroc, aupr=90, fpr95=20, n_id=1000, n_ood=500)
                for data, score, auroc in [
                    ("stripes", "mutual_information", 91.25),
                    ("checks", "mutual_information", 87.5),
                    ("stripes", "entropy", 83.25),
                ]
            ],
            misclassification=[ErrorResult(score="entropy", auroc=77.5, aupr=33.5)],
            realised=[
                Realised(promise="false_alarm_rate", target=0.01, realised=0.004, n=1000),
                Realised(promise="selective_risk", target=0.001, realised=None, n=1000),
            ],
        ),
        graph_sha256=graph_digest(graph),
    )


@pytest.fixture
def document(manifest: Manifest) -> dict[str, Any]:
    """The manifest as parsed JSON, for a test to damage."""
    parsed: dict[str, Any] = json.loads(manifest.to_json())
    return parsed


@pytest.fixture
def bundle_file(tmp_path: Path, graph: bytes, manifest: Manifest) -> Path:
    """A good bundle on disk."""
    path = tmp_path / "tiny.onnx"
    write_bundle(path, graph, manifest)
    return path


@pytest.fixture
def write_text_as_manifest(tmp_path: Path, graph: bytes) -> Callable[[str], Path]:
    """Put any text where a manifest goes, beside the good graph."""

    def write(text: str) -> Path:
        path = tmp_path / "odd.onnx"
        path.write_bytes(pack(Container(graph, text)))
        return path

    return write
