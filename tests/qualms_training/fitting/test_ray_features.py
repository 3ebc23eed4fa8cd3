"""Features extracted on a real cluster of two nodes equal the local ones bit for bit, and so does the bundle fitted from them."""

import json
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.qualms.cluster.ray_nodes import nodes

from qualms.bundle.file import open_bundle
from qualms.cluster.connection import ClusterOptions
from qualms_training.data.lazy_images import LazyImages
from qualms_training.fitting.ray_features import _OpenExtractor
from qualms_training.meta.extractor import Extractor, Normalise, Reduce
from qualms_training.meta.taps.tapped import Tapped
from qualms_training.models.libraries.torchvision_compat import import_torchvision

LOCAL_AND_RAY = ("local", "ray")


def read(index: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    return np.full((2, 2, 1), index, np.uint8)


def test_lazy_images_can_be_sent_to_another_process() -> None:
    images = LazyImages(read, np.arange(5), (2, 2, 1), str, progress=lambda _: None)
    assert images[:3].shape == (3, 2, 2, 1)
    copy = pickle.loads(pickle.dumps(images))
    assert np.array_equal(copy[1:4], images[1:4])
    assert copy.shape == images.shape


class Store:
    """In place of Ray's object store; a reference is the pickled object, and has its number as `hex()`."""

    def get(self, references: list[bytes]) -> list[object]:
        return [pickle.loads(one) for one in references]


def opener(base: torch.nn.Module, tap: str, images: object) -> _OpenExtractor:
    extractor = Extractor(Normalise([0.5], [0.5]), Tapped(base, [tap]), Reduce("pool")).eval()
    return _OpenExtractor(Store(), pickle.dumps(extractor), pickle.dumps(images), ClusterOptions(), {}, ".")


_decoded: list[int] = []


def record(index: int) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]":
    _decoded.append(index)
    return read(index)


def test_a_node_decodes_only_the_images_of_its_batches_because_others_have_the_next_ones() -> None:
    base = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.Flatten())
    run = opener(base, "0", LazyImages(record, np.arange(9), (2, 2, 1), str)).open()
    threads = torch.get_num_threads()
    try:
        logits, taps = run(slice(3, 6))
        assert logits.shape == (3, 8)
        assert np.array_equal(run(slice(3, 6))[1], taps)
    finally:
        torch.set_num_threads(threads)
    assert sorted(_decoded) == [3, 3, 4, 4, 5, 5]


def test_a_node_opens_a_network_of_torchvision_also_with_a_wheel_for_another_torch() -> None:
    network = import_torchvision().models.resnet18(num_classes=3)
    data = pickle.dumps(opener(network, "layer4", np.zeros((2, 32, 32, 3), np.uint8)))
    program = "import pickle, sys; print(*(len(one) for one in pickle.load(sys.stdin.buffer).open()(slice(0, 2))))"
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-c", program], input=data, capture_output=True, check=False, timeout=120, cwd=root
    )
    assert (done.returncode, done.stdout) == (0, b"2 2\n"), done.stderr.decode()


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'qualms[ray]'")
@pytest.mark.slow
def test_features_and_bundle_from_two_nodes_equal_the_local_ones(tmp_path: Path) -> None:
    program = "import torch; torch.set_num_threads(1); from qualms.entry import main; main()"
    with nodes(2) as cluster:
        for engine in LOCAL_AND_RAY:
            options = ["--engine", "ray", "--address", cluster.address] if engine == "ray" else []
            arguments = ["train", "tiny", "--out", str(tmp_path / engine), "--device", "cpu", *options]
            done = subprocess.run(
                [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, timeout=600
            )
            assert done.returncode == 0, done.stderr
    local, ray = (
        {
            f"{file.parent.name}/{file.name}": file.read_bytes()
            for file in sorted((tmp_path / engine / "cache" / "features").rglob("*.npy"))
        }
        for engine in LOCAL_AND_RAY
    )
    assert len(local) > 3
    assert ray == local
    bundles = [open_bundle(tmp_path / engine / "seed-0" / "model.onnx") for engine in LOCAL_AND_RAY]
    assert bundles[0].graph == bundles[1].graph
    first, second = (json.loads(bundle.manifest.to_json()) for bundle in bundles)
    differing = {key for key in first if first[key] != second[key]}
    assert differing <= {"provenance"}  # has the time of the run
