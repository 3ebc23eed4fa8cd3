"""TLS configurations from files."""

import os
import shutil
import ssl
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from qualms.access.certificates import TlsError, TlsFiles, read_context

Make = Callable[..., tuple[Path, Path]]


def test_old_versions_and_weak_ciphers_are_off(make_certificate: Make) -> None:
    context = read_context(TlsFiles(*make_certificate()))
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    names = [cipher["name"] for cipher in context.get_ciphers()]
    assert names
    assert all(name.startswith(("TLS_", "ECDHE-")) and ("GCM" in name or "CHACHA20" in name) for name in names)
    assert context.options & ssl.OP_NO_RENEGOTIATION
    assert context.verify_mode == ssl.CERT_NONE


def test_a_client_ca_makes_client_certificates_required(make_certificate: Make) -> None:
    certificate, key = make_certificate()
    assert read_context(TlsFiles(certificate, key, certificate)).verify_mode == ssl.CERT_REQUIRED


def test_the_key_of_another_certificate_is_refused(make_certificate: Make) -> None:
    certificate, _ = make_certificate()
    _, other = make_certificate()
    with pytest.raises(TlsError, match=r"cannot be used together: key values mismatch"):
        read_context(TlsFiles(certificate, other))


def test_a_file_that_is_missing_or_not_pem_is_named(make_certificate: Make, tmp_path: Path) -> None:
    certificate, key = make_certificate()
    text = tmp_path / "text.pem"
    text.write_text("hello")
    with pytest.raises(TlsError, match=f"QUALMS_TLS_CERT {tmp_path}/none cannot be read: no such file or directory"):
        read_context(TlsFiles(tmp_path / "none", key))
    with pytest.raises(TlsError, match=f"QUALMS_TLS_KEY {tmp_path}/none cannot be read"):
        read_context(TlsFiles(certificate, tmp_path / "none"))
    with pytest.raises(TlsError, match="PEM format"):
        read_context(TlsFiles(text, key))
    with pytest.raises(TlsError, match=f"QUALMS_TLS_CLIENT_CA {text} cannot be used"):
        read_context(TlsFiles(certificate, key, text))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TlsError, match=f"QUALMS_TLS_KEY {tmp_path}/pipe is a pipe"):
        read_context(TlsFiles(certificate, tmp_path / "pipe"))


def test_a_key_with_a_password_is_refused_without_asking_for_it(make_certificate: Make, tmp_path: Path) -> None:
    certificate, key = make_certificate()
    locked = tmp_path / "locked.pem"
    command = [shutil.which("openssl"), "ec", "-aes256", "-passout", "pass:secret", "-in", key, "-out", locked]
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)
    with pytest.raises(TlsError, match="has a password; a key without one is needed"):
        read_context(TlsFiles(certificate, locked))
