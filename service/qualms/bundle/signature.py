"""The signature of a bundle: its text in the file, and the message that is signed.

The text is `ed25519 PUBLIC-KEY SIGNATURE`, both in base64. Signing and verifying are in `qualms.signing`, which needs a library.
"""

import base64
import hashlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self, TypeAlias

from qualms.errors import BundleError

ALGORITHM: Final = "ed25519"
KEY_BYTES: Final = 32
_SIGNATURE_BYTES: Final = 64
_CONTEXT: Final = b"qualms bundle signature 1\n"
"""so that a signature by the same key for another purpose is never one of a bundle"""


@dataclass(frozen=True)
class Signature:
    """A signature, and the public key that belongs to the private key it was made with."""

    key: bytes
    value: bytes

    @classmethod
    def from_text(cls, text: str, source: str) -> Self:
        """Parse the text in a file; the BundleError names `source`."""
        algorithm, _, rest = text.partition(" ")
        key, _, value = rest.partition(" ")
        signature: Self | None = None
        with suppress(ValueError):  # also that of base64
            signature = cls(decode_key(key), base64.b64decode(value, validate=True))
        if algorithm != ALGORITHM or signature is None or signature.to_text() != text:
            raise BundleError(
                f"{source} has a malformed signature; {ALGORITHM}, a public key and a signature in base64 are accepted."
            )
        return signature

    def __post_init__(self) -> None:
        if len(self.value) != _SIGNATURE_BYTES:
            raise ValueError(f"a signature has {_SIGNATURE_BYTES} bytes")

    def to_text(self) -> str:
        """The text in the file."""
        return f"{ALGORITHM} {encode_key(self.key)} {base64.b64encode(self.value).decode()}"


Verify: TypeAlias = Callable[[Signature | None, bytes, str], None]
"""(signature of a file or None, signed message, name of the file for errors): raises BundleError to refuse the file"""


def signed_message(unsigned: bytes | memoryview) -> bytes:
    """The message that is signed for a file with these bytes before its signature."""
    return _CONTEXT + hashlib.sha256(unsigned).digest()


def encode_key(key: bytes) -> str:
    """A public key as text."""
    return base64.b64encode(key).decode()


def decode_key(text: str) -> bytes:
    """A public key from its text; ValueError if it is none."""
    key = base64.b64decode(text, validate=True)
    if len(key) != KEY_BYTES or encode_key(key) != text:
        raise ValueError(f"a public key has {KEY_BYTES} bytes")
    return key
