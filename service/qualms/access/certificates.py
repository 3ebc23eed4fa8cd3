"""The TLS configuration from files. New files become a new context: connections that exist keep the one they began with."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from qualms.errors import QualmsError

CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""of TLS 1.2: forward secrecy and authenticated encryption only; all ciphers of TLS 1.3 have both"""


class TlsError(QualmsError):
    """The certificate, its key or the client CA cannot be used."""


class _EncryptedKeyError(Exception):
    """The private key needs a password."""


@dataclass(frozen=True)
class TlsFiles:
    """The files of a TLS configuration."""

    certificate: Path
    """the chain, the server's own certificate first (PEM)"""
    key: Path
    client_ca: Path | None = None
    """if given, clients need a certificate that one of these has signed"""

    @property
    def paths(self) -> list[Path]:
        """All of them."""
        return [path for path in (self.certificate, self.key, self.client_ca) if path is not None]


def read_context(files: TlsFiles) -> ssl.SSLContext:
    """The context that the files describe; TlsError names the file that cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(CIPHERS)
    context.set_alpn_protocols(["http/1.1"])
    context.options |= ssl.OP_NO_COMPRESSION | ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
    for variable, path in zip(("QUALMS_TLS_CERT", "QUALMS_TLS_KEY", "QUALMS_TLS_CLIENT_CA"), files.paths, strict=False):
        _check_readable(variable, path)
    try:
        context.load_cert_chain(files.certificate, files.key, _no_password)
    except _EncryptedKeyError:
        raise TlsError(f"QUALMS_TLS_KEY {files.key} has a password; a key without one is needed.") from None
    except (ssl.SSLError, OSError) as error:
        raise TlsError(
            f"QUALMS_TLS_CERT {files.certificate} and QUALMS_TLS_KEY {files.key} cannot be used together: {_reason(error)}; "
            "they should be a chain of certificates and the key of the first one, in PEM format."
        ) from None
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        try:
            context.load_verify_locations(files.client_ca)
        except (ssl.SSLError, OSError) as error:
            raise TlsError(
                f"QUALMS_TLS_CLIENT_CA {files.client_ca} cannot be used: {_reason(error)}; "
                "it should be certificates in PEM format."
            ) from None
    return context


def _check_readable(variable: str, path: Path) -> None:
    try:
        if path.is_fifo():  # opening it would block
            raise TlsError(f"{variable} {path} is a pipe; a regular file is needed.")
        with path.open("rb"):
            pass
    except OSError as error:
        raise TlsError(f"{variable} {path} cannot be read: {(error.strerror or str(error)).lower()}.") from None


def _no_password() -> str:
    """Called for a key with a password; OpenSSL would otherwise ask for it on the terminal."""
    raise _EncryptedKeyError


def _reason(error: Exception) -> str:
    """OpenSSL's reason in words, such as `key values mismatch`."""
    reason = getattr(error, "reason", None)
    return str(reason).replace("_", " ").lower() if reason else "they are not in PEM format"
