"""The program of the init container, with a real server."""

import hashlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.docker.kubernetes.manifests import KUBERNETES

SCRIPT = KUBERNETES / "components" / "model-download" / "fetch_model.py"
MODEL = os.urandom(3_000_000)
DIGEST = hashlib.sha256(MODEL).hexdigest()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(MODEL)))
        self.end_headers()
        self.wfile.write(MODEL[:1000] if self.path == "/cut" else MODEL)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # its name in the base class
        """Print nothing."""


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def fetch(folder: Path, **variables: str) -> tuple[int, str]:
    """Run the program with Python alone; return its exit code and its message."""
    done = subprocess.run(
        [sys.executable, "-I", "-S", SCRIPT, folder / "model.onnx"],
        env=variables, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    return done.returncode, done.stderr


def test_a_file_with_the_expected_digest_is_kept(tmp_path: Path, server: str) -> None:
    assert fetch(tmp_path, MODEL_URL=f"{server}/model", MODEL_SHA256=DIGEST) == (0, "")
    assert (tmp_path / "model.onnx").read_bytes() == MODEL
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_an_earlier_file_is_replaced_and_left_alone_if_the_new_one_is_wrong(tmp_path: Path, server: str) -> None:
    (tmp_path / "model.onnx").write_bytes(b"old")
    assert fetch(tmp_path, MODEL_URL=f"{server}/model", MODEL_SHA256="0" * 64)[0] == 1
    assert (tmp_path / "model.onnx").read_bytes() == b"old"
    assert fetch(tmp_path, MODEL_URL=f"{server}/model", MODEL_SHA256=DIGEST)[0] == 0
    assert (tmp_path / "model.onnx").read_bytes() == MODEL


def test_a_correct_file_is_kept_without_a_download_because_two_copies_may_not_fit(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(MODEL)
    assert fetch(tmp_path, MODEL_URL="http://127.0.0.1:1/no-server", MODEL_SHA256=DIGEST) == (0, "")
    assert (tmp_path / "model.onnx").read_bytes() == MODEL


@pytest.mark.parametrize(
    "url", ["https://[::1/model", "https://127.0.0.1:port/model", "https://", "http://127.0.0.1:1/é"]
)
def test_a_malformed_url_is_one_sentence(tmp_path: Path, url: str) -> None:
    code, printed = fetch(tmp_path, MODEL_URL=url, MODEL_SHA256=DIGEST, LC_ALL="C.UTF-8")
    assert (code, printed.count("\n")) == (1, 1)
    assert printed.startswith(f"fetch_model: {url} cannot be fetched: ")


@pytest.mark.parametrize(
    ("path", "variables", "message"),
    [
        ("/model", {"MODEL_SHA256": "0" * 64}, f"The SHA-256 of URL is {DIGEST}; MODEL_SHA256 is {'0' * 64}."),
        ("/model", {"MODEL_SHA256": "abc"}, "MODEL_SHA256 is 'abc'; it should be 64 hexadecimal digits in lower case."),
        ("/model", {"MODEL_SHA256": ""}, "MODEL_SHA256 is ''; it should be 64 hexadecimal digits in lower case."),
        ("/model", {"MODEL_MAX_BYTES": "2999999"}, "URL is larger than MODEL_MAX_BYTES, 2999999."),
        ("/model", {"MODEL_MAX_BYTES": "2g"}, "MODEL_MAX_BYTES is '2g'; it should be a number of bytes."),
        ("/missing", {}, "URL cannot be fetched: HTTP Error 404: Not Found."),
        ("/cut", {}, "URL ended after 1000 of 3000000 bytes."),
    ],
)
def test_anything_else_is_one_sentence_and_leaves_no_file(
    tmp_path: Path, server: str, path: str, variables: dict[str, str], message: str
) -> None:
    url = server + path
    code, printed = fetch(tmp_path, **{"MODEL_URL": url, "MODEL_SHA256": DIGEST, **variables})
    assert (code, printed) == (1, f"fetch_model: {message.replace('URL', url, 1) if 'URL' in message else message}\n")
    assert list(tmp_path.iterdir()) == []


def test_other_schemes_are_refused(tmp_path: Path) -> None:
    """A file of the container is not a model."""
    code, printed = fetch(tmp_path, MODEL_URL="file:///etc/passwd", MODEL_SHA256=DIGEST)
    assert (code, printed) == (
        1,
        "fetch_model: MODEL_URL is 'file:///etc/passwd'; it should begin with https:// or http://.\n",
    )
