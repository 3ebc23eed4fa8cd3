"""Keys and certificates on disk."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from qualms.access.keys import Key
from qualms.access.keys_file import add_key

OPENSSL = shutil.which("openssl")


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """A path for a file of keys."""
    return tmp_path / "secrets" / "keys"


@pytest.fixture
def add(keys_file: Path) -> Callable[..., str]:
    """(name, limits) → token of a new key."""

    def add_one(name: str, **options: object) -> str:
        return add_key(keys_file, lambda digest: Key(name, digest, **options))  # type: ignore[arg-type]

    return add_one


@pytest.fixture(scope="session")
def make_certificate(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Path]]:
    """(name) → files of a new self-signed certificate for 127.0.0.1 and of its key."""
    if OPENSSL is None:
        pytest.skip("openssl is not installed")

    def make(name: str = "localhost") -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("certificate")
        certificate, key = folder / "cert.pem", folder / "key.pem"
        algorithm = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        names = ("-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
        files = ("-keyout", key, "-out", certificate, "-days", "2")
        subprocess.run(
            [OPENSSL, "req", "-x509", *algorithm, *names, *files], check=True, capture_output=True, timeout=60
        )
        return certificate, key

    return make
