"""An image's answer is its own: neither the size of its batch nor its neighbours change it."""

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
from qualms.bundle.embedded import available, resolve
from qualms.bundle.file import open_bundle
from qualms.decisions.operating_point import DEFAULT_OPERATING_POINT
from qualms.decisions.verdicts import Decider, decide
from qualms.images.preprocess import preprocess_batch
from qualms.inference.engine import Engine

TOLERANCE = 1e-5
"""relative, of α"""


def same(found: list[dict[str, Any]], want: list[dict[str, Any]]) -> None:
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one["dirichlet"]["alpha"], other["dirichlet"]["alpha"], rtol=TOLERANCE)
        assert one["prediction"]["index"] == other["prediction"]["index"]
        assert one["ood"]["flag"] == other["ood"]["flag"]
        assert one["trust"]["accept"] == other["trust"]["accept"]


def test_an_image_is_answered_alike_alone_and_in_any_company(
    client: httpx.Client, encode: Callable[..., bytes], draw_images: Callable[[int, int], NDArray[np.uint8]]
) -> None:
    files = [encode(image) for image in draw_images(51, 96)]
    png = {"content-type": "image/png"}

    def alone(data: bytes) -> dict[str, Any]:
        found: dict[str, Any] = client.post("/predict", content=data, headers=png).json()["results"][0]
        return found

    want = [alone(data) for data in files]
    for size in (2, 3, 7, 32, 64):
        order = np.random.default_rng(size).permutation(len(files))
        found: dict[int, dict[str, Any]] = {}
        for start in range(0, len(files), size):
            places = order[start : start + size].tolist()
            images = [base64.b64encode(files[place]).decode() for place in places]
            results = client.post("/predict", json={"images": images}).json()["results"]
            found.update(zip(places, results, strict=True))
        same([found[place] for place in range(len(files))], want)
    with ThreadPoolExecutor(8) as threads:
        same(list(threads.map(alone, files)), want)


def test_ten_thousand_digits_are_answered_alike_alone_and_in_any_company() -> None:
    path = Path(os.environ.get("QUALMS_DATA") or "nowhere") / "mnist-test.npz"
    if DEFAULT_MODEL not in available() or not path.is_file():
        pytest.skip("it needs the embedded model, and QUALMS_DATA with mnist-test.npz")
    bundle = open_bundle(resolve(None))
    with np.load(path) as data:
        images = preprocess_batch(data["images"], bundle.manifest.input)
    assert len(images) == 10_000
    engine, rule = Engine(bundle, "cpu", threads=1), Decider(bundle.manifest).rule(DEFAULT_OPERATING_POINT)
    alone = [engine.run_all(images[place : place + 1]) for place in range(len(images))]
    want = {name: np.concatenate([outputs[name] for outputs in alone]) for name in engine.outputs}
    flags = decide(rule, want).flags
    rng = np.random.default_rng(0)
    for cap in (2, 64):
        order, start = rng.permutation(len(images)), 0
        found = {name: np.empty_like(values) for name, values in want.items()}
        while start < len(order):
            places = order[start : start + rng.integers(1, cap + 1)]
            for name, values in engine.run_all(images[places]).items():
                found[name][places] = values
            start += len(places)
        np.testing.assert_allclose(found["alpha"], want["alpha"], rtol=TOLERANCE)
        np.testing.assert_array_equal(found["prediction"], want["prediction"])
        np.testing.assert_array_equal(decide(rule, found).flags, flags)
