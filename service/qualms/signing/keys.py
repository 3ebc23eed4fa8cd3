"""Files of signing keys.

A private key is a file in PEM (PKCS #8), as OpenSSL writes it. A public key is a line `NAME KEY` with the key in base64; a file of
trusted keys has one line for each, blank lines, and comments that begin with #.
"""

import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from qualms.bundle.signature import Signature, decode_key, encode_key
from qualms.errors import BundleError, QualmsError

MAX_KEY_FILE_BYTES: Final = 2**20
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_NAME_TEXT = "1 to 64 letters, digits and . _ @ -, of which the first is a letter or digit"


class SigningKeyError(QualmsError):
    """A file of signing keys cannot be read, written or understood."""


class SigningKey:
    """A private key that signs bundles."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key

    @classmethod
    def generate(cls) -> "SigningKey":
        """A new key from the system's random numbers."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def read(cls, path: Path) -> "SigningKey":
        """The key in a PEM file; no error message contains anything of the file."""
        try:
            key = load_pem_private_key(_read(path), password=None)
        except TypeError:
            raise SigningKeyError(
                f"The key in {path} is encrypted; a private key without a passphrase is accepted."
            ) from None
        except (ValueError, UnsupportedAlgorithm):
            key = None
        if not isinstance(key, Ed25519PrivateKey):
            raise SigningKeyError(f"{path} has no Ed25519 private key in PEM; qualms signing-key new makes one.")
        return cls(key)

    @property
    def public(self) -> bytes:
        """The public key, 32 bytes."""
        return self._key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)

    def sign(self, message: bytes) -> Signature:
        """The signature of a message."""
        return Signature(self.public, self._key.sign(message))

    def write(self, path: Path, name: str) -> str:
        """Write the private key to `path` and the public one to `path`.pub; return the public line.

        Only the owner can read the private key. Files that exist are never replaced.
        """
        if not _NAME.fullmatch(name):
            raise SigningKeyError(f"The name of a key is {name!r}; accepted are {_NAME_TEXT}.")
        line = f"{name} {encode_key(self.public)}"
        pem = self._key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        public = path.with_name(f"{path.name}.pub")
        _write_new(public, f"{line}\n".encode(), 0o644)
        try:
            _write_new(path, pem, 0o600)
        except SigningKeyError:
            public.unlink(missing_ok=True)
            raise
        return line


@dataclass(frozen=True)
class TrustedKeys:
    """The public keys whose signatures are accepted."""

    path: Path
    names: dict[bytes, str]
    """by public key"""

    @classmethod
    def read(cls, path: Path) -> "TrustedKeys":
        """The keys in a file; an error names the line."""
        names: dict[bytes, str] = {}
        try:
            lines = _read(path).decode("ascii").splitlines()
        except UnicodeDecodeError:
            raise SigningKeyError(f"{path} has bytes that are not ASCII text; lines NAME KEY are accepted.") from None
        for number, line in enumerate(lines, start=1):
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            words = line.split()
            try:
                name, text = words
                key = decode_key(text)
            except ValueError:
                key, name = b"", ""
            if not _NAME.fullmatch(name):
                raise SigningKeyError(
                    f"Line {number} of {path} is not a public key: NAME KEY is accepted, as in the .pub file of "
                    "qualms signing-key new."
                )
            if key in names or name in names.values():
                raise SigningKeyError(f"Line {number} of {path} repeats a name or a key; each is accepted once.")
            names[key] = name
        if not names:
            raise SigningKeyError(f"{path} has no key; at least one line NAME KEY is accepted.")
        return cls(path, names)

    def verify(self, signature: Signature | None, message: bytes, source: str) -> None:
        """Raise BundleError unless the message of the file `source` was signed with one of these keys."""
        if signature is None:
            raise BundleError(
                f"{source} is not signed, and only bundles signed with a key in {self.path} are accepted."
            )
        name = self.names.get(signature.key)
        if name is None:
            raise BundleError(
                f"{source} is signed with the key {encode_key(signature.key)}, which is not one of the {len(self.names)} "
                f"in {self.path}."
            )
        try:
            Ed25519PublicKey.from_public_bytes(signature.key).verify(signature.value, message)
        except InvalidSignature:
            raise BundleError(
                f"{source} does not match its signature by {name}: the file was changed after it was signed, or the "
                "signature is another file's."
            ) from None


def _read(path: Path) -> bytes:
    try:
        if not path.is_file() and path.exists():
            raise SigningKeyError(f"{path} is not a regular file.")
        with path.open("rb") as file:
            data = file.read(MAX_KEY_FILE_BYTES + 1)
    except FileNotFoundError:
        raise SigningKeyError(f"The file of keys {path} does not exist.") from None
    except OSError as error:
        raise SigningKeyError(f"The file of keys {path} cannot be read: {error.strerror}.") from None
    if len(data) > MAX_KEY_FILE_BYTES:
        raise SigningKeyError(f"{path} has more than {MAX_KEY_FILE_BYTES:,} bytes, which is no file of keys.")
    return data


def _write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file that did not exist, complete or not at all."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # readable by its owner only
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                os.fchmod(handle, mode)
            os.link(name, path)
        finally:
            Path(name).unlink()
    except FileExistsError:
        raise SigningKeyError(f"The file {path} exists, and keys are never replaced; name another file.") from None
    except OSError as error:
        raise SigningKeyError(f"The file of keys {path} cannot be written: {error.strerror}.") from None
