"""Downloads become complete npz files or none; the publishers are replaced by a server on loopback."""

import gc
import gzip
import hashlib
import io
import pickle
import struct
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy.io import savemat

from qualms_training.data import load
from qualms_training.data.sources.download import download
from qualms_training.data.sources.npz import DOWNLOADABLE
from qualms_training.errors import DataError
from qualms_training.models.libraries.torchvision_compat import import_torchvision

GREY = np.random.default_rng(0).integers(0, 256, (4, 28, 28), dtype=np.uint8)
COLOUR = np.random.default_rng(1).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
LABELS = np.array([3, 0, 9, 3])


class Mirror:
    """A server on loopback that records the requested paths."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requested: list[str] = []
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                mirror.requested.append(self.path)
                body = mirror.files.get(self.path)
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                """Print nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_address[1]}/sets"

    def add(self, path: str, body: bytes) -> str:
        """Serve a file, and return its MD5 checksum."""
        self.files[f"/sets/{path}"] = body
        return hashlib.md5(body).hexdigest()


@pytest.fixture
def mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mirror]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "QUALMS_MIRROR", "QUALMS_DATA"):
        monkeypatch.delenv(name, raising=False)
    served = Mirror()
    thread = threading.Thread(target=served.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield served
    served.server.shutdown()
    thread.join()
    served.server.server_close()


def idx(array: NDArray[np.uint8]) -> bytes:
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return gzip.compress(header + array.tobytes(), mtime=0)


def tar(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, body in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    return buffer.getvalue()


def serve_mnist(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, name: str, kind: str) -> None:
    resources = []
    for part, n in (("train", 4), ("t10k", 2)):
        for what, array in (("images-idx3", GREY[:n]), ("labels-idx1", LABELS[:n].astype(np.uint8))):
            file = f"{part}-{what}-ubyte.gz"
            resources.append((file, mirror.add(f"{name}/{file}", idx(array))))
    monkeypatch.setattr(getattr(import_torchvision().datasets, kind), "resources", resources)


@pytest.mark.parametrize(
    ("name", "kind"), [("mnist", "MNIST"), ("fashion_mnist", "FashionMNIST"), ("kmnist", "KMNIST")]
)
def test_mnist_fashion_mnist_and_kmnist_are_downloaded(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, kind: str
) -> None:
    serve_mnist(mirror, monkeypatch, name, kind)
    out = tmp_path / "new/data"
    paths = download(name, out, mirror.address + "/")
    assert paths == [out / f"{name}-train.npz", out / f"{name}-test.npz"]
    assert sorted(out.iterdir()) == sorted(paths)
    train, test = load(name, "train", out), load(name, "test", out)
    np.testing.assert_array_equal(np.asarray(train.images), GREY)
    np.testing.assert_array_equal(train.labels, LABELS)
    assert len(test) == 2
    assert len(train.classes) == 10
    if name == "mnist":
        assert train.classes == tuple("0123456789")


def test_cifar_is_downloaded(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def batch(part: slice) -> bytes:
        rows = COLOUR[part].transpose(0, 3, 1, 2).reshape(-1, 3072)
        return pickle.dumps({"data": rows, "labels": LABELS[part].tolist()})

    names = [f"kind{index}" for index in range(10)]
    files = {
        "data_batch_1": batch(slice(0, 3)),
        "test_batch": batch(slice(3, 4)),
        "batches.meta": pickle.dumps({"label_names": names}),
    }
    sums = {name: hashlib.md5(body).hexdigest() for name, body in files.items()}
    archive = mirror.add(
        "cifar10/cifar-10-python.tar.gz",
        tar({f"cifar-10-batches-py/{name}": body for name, body in files.items()}),
    )
    source = import_torchvision().datasets.CIFAR10
    monkeypatch.setattr(source, "tgz_md5", archive)
    monkeypatch.setattr(source, "train_list", [["data_batch_1", sums["data_batch_1"]]])
    monkeypatch.setattr(source, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(source, "meta", {**source.meta, "md5": sums["batches.meta"]})
    download("cifar10", tmp_path, mirror.address)
    train, test = load("cifar10", "train", tmp_path), load("cifar10", "test", tmp_path)
    np.testing.assert_array_equal(np.asarray(train.images), COLOUR[:3])
    np.testing.assert_array_equal(np.asarray(test.images), COLOUR[3:])
    assert train.classes == tuple(names)
    assert test.labels.tolist() == [3]


def test_svhn_is_downloaded_with_channels_last(mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    listing = {}
    for split in ("train", "test"):
        stored = tmp_path / "stored.mat"
        ten_for_zero = np.where(LABELS == 0, 10, LABELS).astype(np.uint8)
        savemat(stored, {"X": COLOUR.transpose(1, 2, 3, 0), "y": ten_for_zero[:, None]})
        file = f"{split}_32x32.mat"
        listing[split] = [
            "http://publisher.invalid/" + file,
            file,
            mirror.add(f"svhn/{file}", stored.read_bytes()),
        ]
    monkeypatch.setattr(import_torchvision().datasets.SVHN, "split_list", listing)
    download("svhn", tmp_path, mirror.address)
    test = load("svhn", "test", tmp_path)
    np.testing.assert_array_equal(np.asarray(test.images), COLOUR)
    np.testing.assert_array_equal(test.labels, LABELS)


def test_omniglot_is_downloaded_in_sorted_order(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sums = {}
    for folder in ("images_background", "images_evaluation"):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            for value, name in enumerate(["Z/character02/2.png", "Z/character01/1.png", "A/character01/3.png"]):
                image = io.BytesIO()
                Image.new("1", (105, 105), value % 2).save(image, "PNG")
                archive.writestr(f"{folder}/{name}", image.getvalue())
        sums[folder] = mirror.add(f"omniglot/{folder}.zip", buffer.getvalue())
    monkeypatch.setattr(import_torchvision().datasets.Omniglot, "zips_md5", sums)
    download("omniglot", tmp_path, mirror.address)
    test = load("omniglot", "test", tmp_path)
    assert test.classes == ("A/character01", "Z/character01", "Z/character02")
    assert test.labels.tolist() == [0, 1, 2]
    assert np.asarray(test.images)[:, 0, 0].tolist() == [0, 255, 0]


def test_the_mirror_can_be_set_by_environment_variable(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_mnist(mirror, monkeypatch, "mnist", "MNIST")
    monkeypatch.setenv("QUALMS_MIRROR", mirror.address)
    download("mnist", tmp_path)
    assert len(load("mnist", "train", tmp_path)) == 4


def test_existing_files_are_not_downloaded_again(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    serve_mnist(mirror, monkeypatch, "mnist", "MNIST")
    paths = download("mnist", tmp_path, mirror.address)
    mirror.requested.clear()
    assert download("mnist", tmp_path, mirror.address) == paths
    assert mirror.requested == []


def test_the_mirror_does_not_change_torchvisions_classes(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = import_torchvision().datasets.MNIST
    before = list(source.mirrors)
    serve_mnist(mirror, monkeypatch, "mnist", "MNIST")
    download("mnist", tmp_path, mirror.address)
    assert source.mirrors == before


def error_message(out: Path, mirror: str) -> str:
    """The message of a download that must fail."""
    with pytest.raises(DataError) as caught:
        download("mnist", out, mirror)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # torchvision does not close a failed response
@pytest.mark.parametrize("fault", ["absent", "wrong checksum", "no server", "no URL"])
def test_a_failed_download_is_one_sentence_and_leaves_no_files(
    mirror: Mirror, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    serve_mnist(mirror, monkeypatch, "mnist", "MNIST")
    address = mirror.address
    if fault == "absent":
        mirror.files.clear()
    elif fault == "wrong checksum":
        mirror.add("mnist/t10k-labels-idx1-ubyte.gz", idx(LABELS.astype(np.uint8)))
    else:
        address = {"no server": "http://127.0.0.1:1/sets", "no URL": "over there"}[fault]
    message = error_message(tmp_path, address)
    gc.collect()  # while the warning is still ignored
    assert message.startswith(f"Data set 'mnist' could not be downloaded from {address} to {tmp_path}: ")
    assert message.endswith("--mirror or QUALMS_MIRROR.")
    assert "\n" not in message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_named(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DataError, match=r"file/data"):
        download("mnist", tmp_path / "file/data", mirror.address)


def test_the_error_for_an_unknown_name_lists_the_data_sets(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="'imagenet' cannot be downloaded; accepted are mnist, fashion_mnist") as caught:
        download("imagenet", tmp_path)
    assert all(name in str(caught.value) for name in DOWNLOADABLE)
