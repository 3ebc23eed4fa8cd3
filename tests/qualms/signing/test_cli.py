import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import sign_bundle
from qualms.signing.keys import SigningKey

TIMEOUT = 300.0


def qualms(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "qualms", *map(str, arguments)]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=TIMEOUT, env=environment)


def test_a_key_signs_a_bundle_that_verify_accepts(tmp_path: Path, bundle_file: Path) -> None:
    key = tmp_path / "release.key"
    made = qualms("signing-key", "new", key)
    assert (made.returncode, made.stderr) == (0, "")
    assert made.stdout == (tmp_path / "release.key.pub").read_text()
    assert made.stdout.startswith("release ")
    signed = qualms("sign", bundle_file, "--key", key)
    digest = hashlib.sha256(bundle_file.read_bytes()).hexdigest()
    assert (signed.returncode, signed.stdout) == (0, f"Signed {bundle_file}; its digest is now {digest}.\n")
    verified = qualms("verify", bundle_file, QUALMS_TRUSTED_KEYS=f"{key}.pub")
    assert (verified.returncode, verified.stdout) == (0, f"{bundle_file} is signed by release.\n")
    inspected = qualms("inspect", bundle_file, COLUMNS="200")
    assert f"with the key {made.stdout.split()[1]}" in inspected.stdout


def test_verify_refuses_an_unsigned_bundle_in_one_sentence(bundle_file: Path, trusted_file: Path) -> None:
    done = qualms("verify", bundle_file, "--keys", trusted_file)
    expected = (
        f"qualms: {bundle_file} is not signed, and only bundles signed with a key in {trusted_file} are accepted.\n"
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", expected)


def test_an_embedded_model_is_signed_to_another_file_only(tmp_path: Path, key_file: Path, trusted_file: Path) -> None:
    before = resolve_model("demo").read_bytes()
    done = qualms("sign", "demo", "--key", key_file)
    assert done.returncode == 2
    assert (
        done.stderr
        == "qualms: demo is an embedded model, which is not changed; name the file of a signed copy with --out.\n"
    )
    out = tmp_path / "new" / "demo.onnx"
    assert qualms("sign", "demo", "--key", key_file, "--out", out).returncode == 0
    assert qualms("verify", out, "--keys", trusted_file).returncode == 0
    assert resolve_model("demo").read_bytes() == before


def test_sign_writes_nothing_for_a_file_that_is_no_bundle(tmp_path: Path, key_file: Path, graph: bytes) -> None:
    path, out = tmp_path / "plain.onnx", tmp_path / "out.onnx"
    path.write_bytes(graph)
    done = qualms("sign", path, "--key", key_file, "--out", out)
    assert (done.returncode, done.stderr) == (2, f"qualms: {path} is not a Qualms bundle: it has no manifest.\n")
    assert not out.exists()


# The service


@pytest.mark.slow
@pytest.mark.parametrize("case", ["unsigned", "foreign", "flipped"])
def test_the_service_refuses_what_no_trusted_key_signed(
    bundle_file: Path, signed_file: Path, trusted_file: Path, case: str
) -> None:
    if case == "foreign":
        sign_bundle(bundle_file, bundle_file, SigningKey.generate().sign)
    if case == "flipped":
        data = bytearray(signed_file.read_bytes())
        data[len(data) // 2] ^= 1
        bundle_file.write_bytes(data)
    done = qualms("serve", bundle_file, "--port", 0, QUALMS_TRUSTED_KEYS=str(trusted_file))
    reasons = {
        "unsigned": f"is not signed, and only bundles signed with a key in {trusted_file} are accepted.",
        "foreign": f", which is not one of the 1 in {trusted_file}.",
        "flipped": "does not match its signature by release: the file was changed after it was signed, or the signature is "
        "another file's.",
    }
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"qualms: {bundle_file} ")
    assert done.stderr.endswith(f"{reasons[case]}\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_the_service_does_not_start_with_an_unusable_file_of_keys(tmp_path: Path) -> None:
    done = qualms("serve", "mnist", "--port", 0, QUALMS_TRUSTED_KEYS=str(tmp_path / "missing"))
    assert (done.returncode, done.stderr) == (2, f"qualms: The file of keys {tmp_path / 'missing'} does not exist.\n")


@pytest.mark.slow
def test_the_service_serves_a_signed_bundle(signed_file: Path, trusted_file: Path) -> None:
    environment = {**os.environ, "QUALMS_TRUSTED_KEYS": str(trusted_file), "QUALMS_DRAIN_SECONDS": "0"}
    command = [sys.executable, "-m", "qualms", "serve", str(signed_file), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as service:
        try:
            assert service.stdout is not None
            assert any('"message":"ready"' in line for line in service.stdout)
        finally:
            service.terminate()
    assert service.returncode == 0
