"""The result of an image depends neither on the size of its batch nor on the other images in it."""

import base64
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from qualms.bundle.embedded import DEFAULT as DEFAULT_MODEL
from qualms.bundle.embedded import available, resolve_model
from qualms.bundle.file import open_bundle
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT
from qualms.decisions.verdicts import Decider, decide
from qualms.images.preprocess import preprocess_batch
from qualms.inference.engine import Engine

pytestmark = pytest.mark.slow

TOLERANCE = 1e-5
"""relative tolerance of α"""


def assert_equal(results: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for result, other in zip(results, expected, strict=True):
        np.testing.assert_allclose(result["dirichlet"]["alpha"], other["dirichlet"]["alpha"], rtol=TOLERANCE)
        assert result["prediction"]["index"] == other["prediction"]["index"]
        assert result["ood"]["flag"] == other["ood"]["flag"]
        assert result["trust"]["accept"] == other["trust"]["accept"]


def test_the_result_of_an_image_is_the_same_alone_and_in_any_batch(
    client: httpx.Client, encode: Callable[..., bytes], draw_images: Callable[[int, int], NDArray[np.uint8]]
) -> None:
    files = [encode(image) for image in draw_images(51, 96)]
    png = {"content-type": "image/png"}

    def alone(data: bytes) -> dict[str, Any]:
        result: dict[str, Any] = client.post("/predict", content=data, headers=png).json()["results"][0]
        return result

    expected = [alone(data) for data in files]
    for size in (2, 3, 7, 32, 64):
        order = np.random.default_rng(size).permutation(len(files))
        results: dict[int, dict[str, Any]] = {}
        for start in range(0, len(files), size):
            indices = order[start : start + size].tolist()
            images = [base64.b64encode(files[index]).decode() for index in indices]
            reply = client.post("/predict", json={"images": images}).json()
            results.update(zip(indices, reply["results"], strict=True))
        assert_equal([results[index] for index in range(len(files))], expected)
    with ThreadPoolExecutor(8) as threads:
        assert_equal(list(threads.map(alone, files)), expected)


def test_results_of_ten_thousand_digits_are_the_same_alone_and_in_any_batch() -> None:
    path = Path(os.environ.get("QUALMS_DATA") or "nowhere") / "mnist-test.npz"
    if DEFAULT_MODEL not in available() or not path.is_file():
        pytest.skip("needs the embedded model, and QUALMS_DATA with mnist-test.npz")
    bundle = open_bundle(resolve_model(None))
    with np.load(path) as data:
        images = preprocess_batch(data["images"], bundle.manifest.input)
    assert len(images) == 10_000
    engine, rule = Engine(bundle, "cpu", threads=1), Decider(bundle.manifest).rule(DEFAULT_OPERATING_POINT)
    alone = [engine.run_all(images[index : index + 1]) for index in range(len(images))]
    expected = {name: np.concatenate([outputs[name] for outputs in alone]) for name in engine.outputs}
    flags = decide(rule, expected).flags
    rng = np.random.default_rng(0)
    for max_batch in (2, 64):
        order, start = rng.permutation(len(images)), 0
        outputs = {name: np.empty_like(values) for name, values in expected.items()}
        while start < len(order):
            indices = order[start : start + rng.integers(1, max_batch + 1)]
            for name, values in engine.run_all(images[indices]).items():
                outputs[name][indices] = values
            start += len(indices)
        np.testing.assert_allclose(outputs["alpha"], expected["alpha"], rtol=TOLERANCE)
        np.testing.assert_array_equal(outputs["prediction"], expected["prediction"])
        np.testing.assert_array_equal(decide(rule, outputs).flags, flags)
