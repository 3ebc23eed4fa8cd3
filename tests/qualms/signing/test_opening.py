"""Which bundles are opened with a file of trusted keys: every change of a signed file is refused in one sentence."""

import random
from pathlib import Path

import pytest

from qualms.bundle.container import SIGNATURE_KEY, signed_part, unpack, with_signature
from qualms.bundle.embedded import resolve_model
from qualms.bundle.file import open_bundle, sign_bundle, write_bundle
from qualms.bundle.manifest import Manifest
from qualms.errors import BundleError
from qualms.model import open_model
from qualms.signing.keys import SigningKey
from qualms.signing.opening import open_trusted


def refusal(path: Path, trusted_file: Path) -> str:
    with pytest.raises(BundleError) as caught:
        open_trusted(str(path), str(trusted_file))
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    assert message.endswith(".")
    return message


def test_a_signed_bundle_is_opened_and_predicts(signed_file: Path, trusted_file: Path, key: SigningKey) -> None:
    bundle = open_trusted(str(signed_file), str(trusted_file))
    assert bundle.signature is not None
    assert bundle.signature.key == key.public
    model = open_model(signed_file, trusted_keys=trusted_file)
    assert model.bundle.digest == bundle.digest


def test_a_signature_changes_neither_graph_nor_manifest(bundle_file: Path, signed_file: Path) -> None:
    plain, signed = open_bundle(bundle_file), open_bundle(signed_file)
    assert (plain.graph, plain.manifest.to_json()) == (signed.graph, signed.manifest.to_json())
    assert plain.digest != signed.digest
    assert signed_file.read_bytes().startswith(bundle_file.read_bytes())


def test_signing_again_with_the_same_key_gives_the_same_file(signed_file: Path, key: SigningKey) -> None:
    before = signed_file.read_bytes()
    sign_bundle(signed_file, signed_file, key.sign)
    assert signed_file.read_bytes() == before


def test_an_unsigned_bundle_is_refused(bundle_file: Path, trusted_file: Path) -> None:
    expected = f"{bundle_file} is not signed, and only bundles signed with a key in {trusted_file} are accepted."
    assert refusal(bundle_file, trusted_file) == expected


def test_a_bundle_signed_with_a_foreign_key_is_refused(bundle_file: Path, trusted_file: Path) -> None:
    sign_bundle(bundle_file, bundle_file, SigningKey.generate().sign)
    assert f", which is not one of the 1 in {trusted_file}." in refusal(bundle_file, trusted_file)


def test_a_signature_copied_from_another_bundle_is_refused(
    tmp_path: Path, bundle_file: Path, trusted_file: Path, signed_file: Path, graph: bytes, manifest: Manifest
) -> None:
    """The other bundle has the same graph, and differs in one field of its manifest."""
    other = tmp_path / "other.onnx"
    write_bundle(other, graph, manifest.model_copy(update={"version": "1.3"}))
    signature = unpack(signed_file.read_bytes()).signature
    assert signature is not None
    other.write_bytes(with_signature(other.read_bytes(), signature))
    open_bundle(other)
    assert "does not match its signature by release" in refusal(other, trusted_file)


def test_a_signature_with_a_trusted_key_in_the_place_of_the_foreign_one_is_refused(
    bundle_file: Path, trusted_file: Path, key: SigningKey
) -> None:
    foreign = SigningKey.generate()
    sign_bundle(bundle_file, bundle_file, foreign.sign)
    data = bundle_file.read_bytes()
    text = unpack(data).signature
    assert text is not None
    forged = text.replace(foreign.sign(b"").to_text().split()[1], key.sign(b"").to_text().split()[1])
    bundle_file.write_bytes(with_signature(signed_part(data, text), forged))
    assert "does not match its signature by release" in refusal(bundle_file, trusted_file)


def test_a_flipped_bit_in_any_part_of_the_file_is_refused(signed_file: Path, trusted_file: Path) -> None:
    """All bytes of the signature and of the file's ends, and 300 others."""
    data = signed_file.read_bytes()
    rng = random.Random(0)
    positions = {*range(40), *range(len(data) - 240, len(data)), *rng.sample(range(len(data)), 300)}
    for position in sorted(positions):
        changed = bytearray(data)
        changed[position] ^= 1 << rng.randrange(8)
        signed_file.write_bytes(changed)
        refusal(signed_file, trusted_file)


def test_added_and_removed_bytes_are_refused(signed_file: Path, trusted_file: Path) -> None:
    data = signed_file.read_bytes()
    signature = unpack(data).signature
    assert signature is not None
    entry = len(data) - len(signed_part(data, signature))
    producer_name = b"\x12\x01x"
    for changed in (
        data[:-1],
        data[:-entry],
        data + b"\0",
        data + producer_name,
        producer_name + data,
        data[:-entry] + producer_name + data[-entry:],
        data + data[-entry:],
        data[-entry:] + data[:-entry],
    ):
        signed_file.write_bytes(changed)
        refusal(signed_file, trusted_file)


@pytest.mark.parametrize(
    "text",
    ["", "ed25519", "ed25519 AAAA AAAA", "rsa " + "A" * 43 + "= " + "A" * 86 + "==", "ed25519  x y", "é", "x" * 2000],
)
def test_a_malformed_signature_is_refused_even_without_trusted_keys(bundle_file: Path, text: str) -> None:
    bundle_file.write_bytes(with_signature(bundle_file.read_bytes(), text))
    with pytest.raises(BundleError, match="signature"):
        open_bundle(bundle_file)


def test_a_signature_in_another_encoding_is_refused(signed_file: Path) -> None:
    """A longer varint for the length means the same in protobuf, and would be a second file for one signature."""
    data = signed_file.read_bytes()
    start = data.rindex(SIGNATURE_KEY.encode()) - 2
    assert data[start] == 0x0A
    longer = data[: start + 1] + bytes([data[start + 1] | 0x80, 0]) + data[start + 2 :]
    entry = len(data) - start
    outer = start - (2 if entry > 127 else 1)
    changed = longer[:outer] + bytes([((entry + 1) & 0x7F) | 0x80, (entry + 1) >> 7]) + longer[start:]
    signed_file.write_bytes(changed)
    with pytest.raises(BundleError, match="its signature has another encoding"):
        open_bundle(signed_file)


def test_recalibration_removes_the_signature(signed_file: Path, manifest: Manifest) -> None:
    bundle = open_bundle(signed_file)
    assert write_bundle(signed_file, bundle.graph, manifest.model_copy(update={"version": "2"})).signature is None


@pytest.mark.parametrize("name", ["mnist", "demo"])
def test_embedded_models_need_no_signature_and_copies_of_them_do(tmp_path: Path, trusted_file: Path, name: str) -> None:
    assert open_trusted(name, str(trusted_file)).signature is None
    copy = tmp_path / f"{name}.onnx"
    copy.write_bytes(resolve_model(name).read_bytes())
    assert " is not signed, " in refusal(copy, trusted_file)
