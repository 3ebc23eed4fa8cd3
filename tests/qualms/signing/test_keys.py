import stat
import subprocess
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from qualms.bundle.signature import encode_key
from qualms.errors import BundleError
from qualms.signing.keys import MAX_KEY_FILE_BYTES, SigningKey, SigningKeyError, TrustedKeys

OTHER = encode_key(bytes(range(32)))


def error_of(path: Path, *, private: bool = False) -> str:
    with pytest.raises(SigningKeyError) as caught:
        SigningKey.read(path) if private else TrustedKeys.read(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Private keys


def test_a_written_key_pair_is_read_back(key: SigningKey, key_file: Path, trusted_file: Path) -> None:
    assert SigningKey.read(key_file).public == key.public
    assert TrustedKeys.read(trusted_file).names == {key.public: "release"}


def test_only_the_owner_can_read_the_private_key(key_file: Path, trusted_file: Path) -> None:
    assert stat.S_IMODE(key_file.stat().st_mode) == 0o600
    assert stat.S_IMODE(trusted_file.stat().st_mode) == 0o644


@pytest.mark.parametrize("existing", ["release", "release.pub"])
def test_keys_are_never_replaced_and_nothing_else_is_written(tmp_path: Path, key: SigningKey, existing: str) -> None:
    (tmp_path / existing).write_text("precious")
    with pytest.raises(SigningKeyError, match=rf"^The file .*/{existing} exists, and keys are never replaced"):
        key.write(tmp_path / "release", "release")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [(existing, "precious")]


@pytest.mark.parametrize("name", ["", "two words", "-x", "é", "x" * 65, "a\nb"])
def test_names_that_would_break_the_line_are_refused(tmp_path: Path, key: SigningKey, name: str) -> None:
    with pytest.raises(SigningKeyError, match="^The name of a key is "):
        key.write(tmp_path / "file", name)
    assert list(tmp_path.iterdir()) == []


def test_openssl_reads_the_private_key_and_verifies_a_signature(
    tmp_path: Path, key: SigningKey, key_file: Path
) -> None:
    """An oracle that shares no code with the library that signs here."""
    public, message, signature = tmp_path / "public.pem", tmp_path / "message", tmp_path / "signature"
    subprocess.run(["openssl", "pkey", "-in", key_file, "-pubout", "-out", public], check=True, timeout=30)
    message.write_bytes(b"a message")
    signature.write_bytes(key.sign(b"a message").value)
    files = ["-inkey", str(public), "-in", str(message), "-sigfile", str(signature)]
    verify = ["openssl", "pkeyutl", "-verify", "-pubin", "-rawin", *files]
    assert subprocess.run(verify, capture_output=True, check=False, timeout=30).returncode == 0
    message.write_bytes(b"another one")
    assert subprocess.run(verify, capture_output=True, check=False, timeout=30).returncode != 0


def test_files_without_an_ed25519_private_key_are_refused_without_their_content(tmp_path: Path, key_file: Path) -> None:
    path = tmp_path / "file"
    other = generate_private_key(SECP256R1())
    public = Ed25519PrivateKey.generate().public_key()
    contents = {
        "text": b"secret passphrase",
        "truncated": key_file.read_bytes()[:60],
        "another kind": other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        "public": public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo),
    }
    for data in contents.values():
        path.write_bytes(data)
        assert (
            error_of(path, private=True)
            == f"{path} has no Ed25519 private key in PEM; qualms signing-key new makes one."
        )


def test_an_encrypted_private_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    encryption = BestAvailableEncryption(b"passphrase")
    path.write_bytes(Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption))
    assert (
        error_of(path, private=True)
        == f"The key in {path} is encrypted; a private key without a passphrase is accepted."
    )


# Trusted keys


def test_a_file_may_have_several_keys_comments_and_blank_lines(tmp_path: Path, key: SigningKey) -> None:
    path = tmp_path / "trusted"
    path.write_text(f"# ours\n\n  release {encode_key(key.public)}  \nold {OTHER}\n")
    assert TrustedKeys.read(path).names == {key.public: "release", bytes(range(32)): "old"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "has no key; at least one line NAME KEY is accepted."),
        ("# nothing\n", "has no key; at least one line NAME KEY is accepted."),
        (f"name\n{OTHER}", "Line 1 of "),
        (f"ok {OTHER}\nname {OTHER[:-4]}", "Line 2 of "),
        (f"name {OTHER} more", "Line 1 of "),
        (f"na/me {OTHER}", "Line 1 of "),
        (f"a {OTHER}\nb {OTHER}", "repeats a name or a key"),
        (f"a {OTHER}\na {encode_key(bytes(32))}", "repeats a name or a key"),
        ("-----BEGIN PUBLIC KEY-----\nAAAA\n", "Line 1 of "),
    ],
)
def test_malformed_files_of_trusted_keys_are_refused(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "trusted"
    path.write_text(text)
    assert expected in error_of(path)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    assert error_of(tmp_path / "missing") == f"The file of keys {tmp_path / 'missing'} does not exist."
    assert error_of(tmp_path) == f"{tmp_path} is not a regular file."
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert "not ASCII" in error_of(tmp_path / "binary")
    (tmp_path / "huge").write_bytes(b"#" * (MAX_KEY_FILE_BYTES + 1))
    assert "no file of keys" in error_of(tmp_path / "huge")


def test_verify_accepts_only_the_message_that_a_trusted_key_signed(key: SigningKey, trusted_file: Path) -> None:
    trusted = TrustedKeys.read(trusted_file)
    trusted.verify(key.sign(b"message"), b"message", "x.onnx")
    for signature, message, expected in (
        (None, b"message", "x.onnx is not signed, "),
        (SigningKey.generate().sign(b"message"), b"message", "which is not one of the 1 in "),
        (key.sign(b"message"), b"massage", "x.onnx does not match its signature by release: "),
    ):
        with pytest.raises(BundleError) as caught:
            trusted.verify(signature, message, "x.onnx")
        assert expected in str(caught.value)
