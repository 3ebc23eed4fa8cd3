from pathlib import Path

import pytest

from qualms.bundle.file import sign_bundle
from qualms.signing.keys import SigningKey


@pytest.fixture(scope="session")
def key() -> SigningKey:
    return SigningKey.generate()


@pytest.fixture
def key_file(tmp_path: Path, key: SigningKey) -> Path:
    """The private key; the public one is in the file with .pub appended."""
    path = tmp_path / "release"
    key.write(path, "release")
    return path


@pytest.fixture
def trusted_file(key_file: Path) -> Path:
    return key_file.with_name("release.pub")


@pytest.fixture
def signed_file(tmp_path: Path, bundle_file: Path, key: SigningKey) -> Path:
    path = tmp_path / "signed.onnx"
    sign_bundle(bundle_file, path, key.sign)
    return path
