"""Two complete small bundles, and the service with one: in the test process or as a separate process.

The graphs have all outputs and few operators. The manifests are computed from the graphs as in training. The fixtures `graph`,
`manifest` and `bundle` have a joined α and paired calibration scores; those named `earlier_…` are as earlier versions wrote
them, with the meta-model's α, sorted calibration scores and counts of the trust score. `worst_manifest`, `unlabelled_manifest` and
`kept_manifest` differ from `manifest` in their calibration, `many_classes_bundle` from `bundle` in its classes.
"""

import io
import json
import os
import socket
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import onnx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal
from fastapi import FastAPI
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper
from PIL import Image
from prometheus_client import CollectorRegistry

from qualms.bundle import golden
from qualms.bundle.calibration_data import AsSent, Calibration, TrustGrid
from qualms.bundle.container import Container, pack
from qualms.bundle.evaluation_results import ErrorResult, Evaluation, GuaranteeResult, OodResult, ProbabilityResult
from qualms.bundle.file import Bundle, graph_digest, write_bundle
from qualms.bundle.manifest import Golden, Manifest, OperatingDefaults, Provenance
from qualms.bundle.runtime import GraphRunner
from qualms.bundle.scores import DIRICHLET_SCORES, FEATURE_SCORES, SCORES
from qualms.decisions.calibration import CalibrationSource, calibrate, calibrate_worst, reference, trust_grid
from qualms.images.encodings import parse_encoding
from qualms.images.fingerprints import fingerprints
from qualms.images.input_spec import InputSpec
from qualms.images.preprocess import preprocess
from qualms.settings import Settings
from qualms.web.app import create_app
from qualms.web.state import ServiceState

Draw = Callable[[int, int], NDArray[np.uint8]]
CLASSES = ["bee", "crab", "dove"]
MANY_CLASSES = [f"species {number}" for number in range(150)]
SPEC = InputSpec(height=6, width=5)
SPECS = {name: spec for name, spec in SCORES.items() if name not in FEATURE_SCORES}
EARLIER_SPECS = {name: SCORES[name] for name in DIRICHLET_SCORES}
FLAG_TERMS = ["entropy", "meta_mutual_information"]
CALIBRATION = 400
"""number of calibration images; the default targets need 299"""
MISTAKES = 3
"""number of wrong predictions, among the most uncertain calibration images"""
TIMEOUT = 30.0
"""seconds after which a test that waits for a condition fails, long enough for a busy machine"""


def _model(*, joined: bool, classes: Sequence[str] = CLASSES) -> onnx.ModelProto:
    """Mean colour → logits → α → scores; scores that need digamma are replaced by monotone approximations."""
    float32, int64 = TensorProto.FLOAT, TensorProto.INT64
    k = len(classes)
    weights = np.random.default_rng(5).normal(0, 6, (SPEC.channels, k)).astype(np.float32)
    node = helper.make_node
    nodes = [
        node("Cast", ["image"], ["pixels"], to=float32),
        node("Div", ["pixels", "white"], ["scaled"]),
        node("ReduceMean", ["scaled"], ["features"], axes=[1, 2], keepdims=0),
        node("MatMul", ["features", "weights"], ["logits"]),
        node("Softmax", ["logits"], ["base_probabilities"], axis=-1),
        node("ArgMax", ["logits"], ["prediction"], axis=-1, keepdims=0),
        node("Exp", ["logits"], ["meta_alpha"]),
        node("Add" if joined else "Max", ["meta_alpha", "one" if joined else "meta_alpha"], ["alpha"]),
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
        node("ReduceMax", ["base_probabilities"], ["largest"], axes=[-1], keepdims=0),
        node("Sub", ["one", "largest"], ["predicted_error"]),
        node("Sqrt", ["mutual_information"], ["meta_mutual_information"]),
        node("Unsqueeze", ["entropy", "last"], ["first_term"]),
        node("Unsqueeze", ["meta_mutual_information", "last"], ["second_term"]),
        node("Concat", ["first_term", "second_term"], ["fused_terms"], axis=-1),
        node("ReduceSum", ["fused_terms", "last"], ["fused"], keepdims=0),
    ]
    by_class = ("base_probabilities", "probabilities", "alpha", *(("meta_alpha",) if joined else ()))
    outputs = [
        helper.make_tensor_value_info("prediction", int64, ["N"]),
        *(helper.make_tensor_value_info(name, float32, ["N", k]) for name in by_class),
        *(helper.make_tensor_value_info(name, float32, ["N"]) for name in (SPECS if joined else EARLIER_SPECS)),
        *([helper.make_tensor_value_info("fused_terms", float32, ["N", len(FLAG_TERMS)])] if joined else ()),
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
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.checker.check_model(model, full_check=True)
    return model


@pytest.fixture(scope="session")
def model() -> onnx.ModelProto:
    """The graph with a joined α."""
    return _model(joined=True)


@pytest.fixture(scope="session")
def graph(model: onnx.ModelProto) -> bytes:
    """The bytes of the model's file without a manifest."""
    return bytes(model.SerializeToString())


@pytest.fixture(scope="session")
def earlier_graph() -> bytes:
    """The bytes of a file without a manifest, with the outputs of earlier versions."""
    return bytes(_model(joined=False).SerializeToString())


@pytest.fixture(scope="session")
def runner(graph: bytes) -> GraphRunner:
    return GraphRunner(graph, threads=1)


@pytest.fixture(scope="session")
def draw_images() -> Draw:
    """(seed, count) → images (count, H, W, C) with different mean colours and therefore different scores."""

    def draw(seed: int, count: int) -> NDArray[np.uint8]:
        rng = np.random.default_rng(seed)
        colour = rng.integers(20, 236, (count, 1, 1, SPEC.channels))
        return (colour + rng.integers(-20, 20, (count, *SPEC.shape))).astype(np.uint8)

    return draw


@pytest.fixture(scope="session")
def manifest(graph: bytes, runner: GraphRunner, draw_images: Draw) -> Manifest:
    """The manifest of the graph as training would write it, with an evaluation that uses every field."""
    images = draw_images(2, CALIBRATION)
    fit_outputs, outputs = runner(draw_images(1, 300)), runner(images)
    labels = outputs["prediction"].copy()
    uncertain = np.argsort(outputs["predicted_error"])[-MISTAKES:]
    labels[uncertain] = (labels[uncertain] + 1) % len(CLASSES)
    inputs = golden.draw(SPEC)
    return Manifest(
        name="tiny",
        version="1.2",
        classes=CLASSES,
        input=SPEC,
        alpha="joined",
        flag_terms=FLAG_TERMS,
        scores=SPECS,
        operating=OperatingDefaults(),
        calibration=calibrate(
            outputs,
            labels,
            SPECS,
            trust_grid(fit_outputs["predicted_error"]),
            source=CalibrationSource(
                split="calibration",
                data="drawn",
                data_sha256=graph_digest(b"drawn"),
                observed={"lossless, same size": CALIBRATION},
                fingerprints=fingerprints(images),
            ),
        ),
        reference=reference([outputs], SPECS, len(CLASSES)),
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
                GuaranteeResult(promise="false_alarm_rate", target=0.01, realised=0.004, n=1000),
                GuaranteeResult(promise="selective_risk", target=0.001, realised=None, n=1000),
            ],
            probabilities=[
                ProbabilityResult(distribution="alpha", ece=1.25, nll=0.125),
                ProbabilityResult(distribution="base", ece=2.5, nll=0.25),
            ],
        ),
        graph_sha256=graph_digest(graph),
    )


@pytest.fixture(scope="session")
def earlier_manifest(manifest: Manifest, earlier_graph: bytes, draw_images: Draw) -> Manifest:
    """A manifest as earlier versions wrote it."""
    runner, inputs = GraphRunner(earlier_graph, threads=1), golden.draw(SPEC)
    outputs, evaluation = runner(draw_images(2, CALIBRATION)), manifest.evaluation
    assert evaluation is not None
    uncertainty = np.sort(outputs["error_probability"])
    thresholds = trust_grid(runner(draw_images(1, 300))["error_probability"])[1]
    accepted = uncertainty.searchsorted(thresholds, side="right")
    counts = {"accepted": accepted.tolist(), "errors": np.maximum(0, accepted - CALIBRATION + MISTAKES).tolist()}
    calibration = {
        **dict(manifest.calibration),
        "scores": {name: np.sort(outputs[name]) for name in EARLIER_SPECS},
        **dict.fromkeys(("wrong", "predictions", "label_scores", "fingerprints")),
        "observed": {},
        "trust": TrustGrid(levels=manifest.calibration.trust.levels, thresholds=thresholds, **counts),
    }
    return Manifest.model_validate(
        {
            **dict(manifest),
            "schema_version": 1,
            "alpha": "meta",
            "flag_terms": [],
            "scores": EARLIER_SPECS,
            "operating": OperatingDefaults(score="mutual_information", trust_score="error_probability"),
            "calibration": calibration,
            "reference": reference([outputs], EARLIER_SPECS, len(CLASSES)),
            "golden": Golden(count=len(inputs), input_sha256=golden.digest(inputs), outputs=runner(inputs)),
            "evaluation": evaluation.model_copy(update={"probabilities": []}),
            "graph_sha256": graph_digest(earlier_graph),
        }
    )


AS_SENT = ["png", "jpeg:75", "brightness:0.9"]
"""settings of the fixture `worst_manifest`"""


@pytest.fixture(scope="session")
def outputs_as_sent(runner: GraphRunner, draw_images: Draw) -> dict[str, dict[str, NDArray[Any]]]:
    """By setting of AS_SENT: the graph's outputs on the calibration images."""
    rng = np.random.default_rng(0)
    images = [Image.fromarray(image) for image in draw_images(2, CALIBRATION)]
    return {
        text: runner(np.array([preprocess(parse_encoding(text).encode(image, rng), SPEC) for image in images]))
        for text in AS_SENT
    }


@pytest.fixture(scope="session")
def worst_manifest(manifest: Manifest, outputs_as_sent: dict[str, dict[str, NDArray[Any]]]) -> Manifest:
    """The manifest of a bundle that was calibrated in the form `worst`."""
    labels, wrong = outputs_as_sent["png"]["prediction"].copy(), manifest.calibration.wrong
    labels[wrong] = (labels[wrong] + 1) % len(CLASSES)
    calibration = manifest.calibration
    return Manifest.model_validate(
        {
            **dict(manifest),
            "calibration": calibrate_worst(
                outputs_as_sent,
                labels,
                SPECS,
                (calibration.trust.levels, calibration.trust.thresholds),
                paired=("fused", "predicted_error"),
                source=CalibrationSource(
                    split="calibration",
                    data="drawn",
                    data_sha256=calibration.data_sha256,
                    as_sent=AsSent(encodings=AS_SENT, form="worst", seed=0),
                    observed={"lossless, same size": 2 * CALIBRATION, "jpeg 70-79, same size": CALIBRATION},
                    fingerprints=calibration.fingerprints,
                ),
            ),
            "reference": reference(outputs_as_sent.values(), SPECS, len(CLASSES)),
        }
    )


@pytest.fixture(scope="session")
def sized_manifest(worst_manifest: Manifest) -> Manifest:
    """The manifest of a bundle that was calibrated in the form `by-size`, as if the darker images had been enlarged, too."""
    calibration = worst_manifest.calibration
    settings = [
        one.model_copy(update={"size": "larger" if one.encoding.startswith("brightness") else "same"})
        for one in calibration.settings
    ]
    as_sent = AsSent(encodings=AS_SENT, form="by-size", seed=0)
    update = {"settings": settings, "as_sent": as_sent}
    return Manifest.model_validate(
        {**dict(worst_manifest), "calibration": Calibration.model_validate({**dict(calibration), **update})}
    )


@pytest.fixture(scope="session")
def unlabelled_manifest(manifest: Manifest) -> Manifest:
    """The manifest of a bundle that was calibrated on images without labels."""
    calibration = manifest.calibration.model_copy(update={"wrong": None, "label_scores": None})
    return Manifest.model_validate({**dict(manifest), "calibration": calibration})


@pytest.fixture(scope="session")
def kept_manifest(manifest: Manifest, unlabelled_manifest: Manifest) -> Manifest:
    """As `unlabelled_manifest`, but with the earlier calibration that has labels."""
    return Manifest.model_validate({**dict(unlabelled_manifest), "labelled_calibration": manifest.calibration})


@pytest.fixture
def document(manifest: Manifest) -> dict[str, Any]:
    """The manifest as parsed JSON, which a test may change."""
    parsed: dict[str, Any] = json.loads(manifest.to_json())
    return parsed


@pytest.fixture
def bundle_file(tmp_path: Path, graph: bytes, manifest: Manifest) -> Path:
    """The path of a valid bundle."""
    path = tmp_path / "tiny.onnx"
    write_bundle(path, graph, manifest)
    return path


@pytest.fixture
def write_text_as_manifest(tmp_path: Path, graph: bytes) -> Callable[[str], Path]:
    """text → path of a file with the valid graph and this text as manifest."""

    def write(text: str) -> Path:
        path = tmp_path / "text.onnx"
        path.write_bytes(pack(Container(graph, text)))
        return path

    return write


# The service


@pytest.fixture(scope="session")
def until() -> Callable[[Callable[[], bool]], None]:
    """condition → wait until the condition holds; fail after a timeout."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT
        while not condition():
            assert time.monotonic() < deadline, "timeout"
            time.sleep(0.002)

    return wait


@pytest.fixture(scope="session")
def encode() -> Callable[..., bytes]:
    """(pixels, format, options of Pillow's save) → bytes of an image file."""

    def write(pixels: NDArray[Any], kind: str = "PNG", **options: Any) -> bytes:
        stream = io.BytesIO()
        Image.fromarray(pixels).save(stream, kind, **options)
        return stream.getvalue()

    return write


@pytest.fixture(scope="session")
def bundle(tmp_path_factory: pytest.TempPathFactory, graph: bytes, manifest: Manifest) -> Bundle:
    """A valid bundle on disk and in memory."""
    return write_bundle(tmp_path_factory.mktemp("bundle") / "tiny.onnx", graph, manifest)


@pytest.fixture(scope="session")
def earlier_bundle(
    tmp_path_factory: pytest.TempPathFactory, earlier_graph: bytes, earlier_manifest: Manifest
) -> Bundle:
    """A valid bundle of an earlier version."""
    return write_bundle(tmp_path_factory.mktemp("earlier") / "tiny.onnx", earlier_graph, earlier_manifest)


@pytest.fixture(scope="session")
def many_classes_bundle(tmp_path_factory: pytest.TempPathFactory, manifest: Manifest, draw_images: Draw) -> Bundle:
    """A valid bundle with more classes than a reply has entries of α by default."""
    graph = bytes(_model(joined=True, classes=MANY_CLASSES).SerializeToString())
    runner, inputs, images = GraphRunner(graph, threads=1), golden.draw(SPEC), draw_images(2, CALIBRATION)
    outputs = runner(images)
    changed = {
        "classes": MANY_CLASSES,
        "calibration": calibrate(
            outputs,
            outputs["prediction"],
            SPECS,
            trust_grid(runner(draw_images(1, 300))["predicted_error"]),
            source=CalibrationSource(
                split="calibration",
                data="drawn",
                data_sha256=graph_digest(b"drawn"),
                observed={"lossless, same size": CALIBRATION},
                fingerprints=fingerprints(images),
            ),
        ),
        "reference": reference([outputs], SPECS, len(MANY_CLASSES)),
        "golden": Golden(count=len(inputs), input_sha256=golden.digest(inputs), outputs=runner(inputs)),
        "graph_sha256": graph_digest(graph),
    }
    path = tmp_path_factory.mktemp("many") / "many.onnx"
    return write_bundle(path, graph, Manifest.model_validate({**dict(manifest), **changed}))


class _PortalTransport(httpx.BaseTransport):
    """Connects a synchronous client to an application on the event loop of another thread."""

    def __init__(self, portal: BlockingPortal, app: FastAPI) -> None:
        self._portal = portal
        self._transport = httpx.ASGITransport(app)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        request.read()
        return self._portal.call(self._handle, request)

    async def _handle(self, request: httpx.Request) -> httpx.Response:
        response = await self._transport.handle_async_request(
            httpx.Request(request.method, request.url, headers=request.headers, content=request.content)
        )
        content = httpx.ByteStream(await response.aread())
        return httpx.Response(response.status_code, headers=response.headers, stream=content)


def _start(
    stack: ExitStack,
    model: Path,
    *,
    registry: CollectorRegistry | None = None,
    state: ServiceState | None = None,
    ready: bool = True,
    **settings: Any,
) -> httpx.Client:
    values: dict[str, Any] = {"model": str(model), "device": "cpu", "threads": 1, "decode_threads": 2, **settings}
    app = create_app(Settings(**values), registry=registry, state=state)
    portal = stack.enter_context(start_blocking_portal())
    stack.enter_context(portal.wrap_async_context_manager(app.router.lifespan_context(app)))
    client = stack.enter_context(httpx.Client(transport=_PortalTransport(portal, app), base_url="http://service"))
    deadline = time.monotonic() + TIMEOUT
    while ready and client.get("/readyz").status_code != 200:
        assert time.monotonic() < deadline, client.get("/readyz").text
        time.sleep(0.002)
    return client


@pytest.fixture
def start_service(bundle: Bundle) -> Iterator[Callable[..., httpx.Client]]:
    """(registry, state, ready, any setting) → client of an application that runs in the test process."""
    with ExitStack() as stack:

        def start(model: Path = bundle.path, **options: Any) -> httpx.Client:
            return _start(stack, model, **options)

        yield start


@pytest.fixture(scope="session")
def client(bundle: Bundle) -> Iterator[httpx.Client]:
    """Client of one application, shared by all tests that do not change its state."""
    with ExitStack() as stack:
        yield _start(stack, bundle.path)


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """An unused port of the loopback interface."""

    def find() -> int:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port: int = listener.getsockname()[1]
            return port

    return find


@pytest.fixture
def service_process(
    bundle: Bundle, free_port: Callable[[], int], tmp_path: Path
) -> Iterator[Callable[..., tuple[subprocess.Popen[str], str]]]:
    """(model, ready, any setting) → process of `qualms serve` and its URL; its log is `stdout` in `tmp_path`."""
    with ExitStack() as stack:

        def start(
            model: Path = bundle.path, *, ready: bool = True, **settings: object
        ) -> tuple[subprocess.Popen[str], str]:
            values = {"port": free_port(), "device": "cpu", "threads": 1, "decode_threads": 1, **settings}
            variables = {name: value for name, value in os.environ.items() if not name.startswith("QUALMS_")}
            variables |= {f"QUALMS_{name.upper()}": str(value) for name, value in values.items()}
            script = Path(sysconfig.get_path("scripts")) / "qualms"
            log = stack.enter_context((tmp_path / "stdout").open("w"))
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, script, "serve", model],
                    env=variables,
                    stdout=log,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            url = f"http://127.0.0.1:{values['port']}"
            deadline = time.monotonic() + TIMEOUT
            while ready and not _is_ready(url):
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() < deadline, "the service is not ready"
                time.sleep(0.02)
            return process, url

        yield start


def _is_ready(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(f"{url}/readyz", trust_env=False).status_code == 200
    return False
