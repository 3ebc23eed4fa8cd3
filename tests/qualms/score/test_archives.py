"""Members of zip and tar archives, and hostile archives."""

import bz2
import gzip
import io
import lzma
import random
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from qualms.errors import ImageError
from qualms.score import archives
from qualms.score.archives import members, open_stream
from qualms.score.items import Item, read_item

FILES = {"a.png": b"first", "deep/er/b.jpg": b"second" * 1000, "ü.png": b"third", "x" * 150 + ".png": b"long"}


def is_image(name: str) -> bool:
    return name.endswith((".png", ".jpg"))


def read(item: Item) -> bytes:
    if item.kind != "stream":
        return read_item(item)
    stream = open_stream(item.source)
    stream.seek(item.offset)
    data = stream.read(item.size)
    stream.close()
    return data


def write_tar(path: Path, files: dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    packers: dict[str, Callable[[bytes], bytes]] = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
    pack = packers.get(path.suffix, bytes)
    path.write_bytes(pack(stream.getvalue()))
    return path.read_bytes()


def write_zip(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path.read_bytes()


@pytest.mark.parametrize("name", ["a.zip", "stored.zip", "a.tar", "a.tar.gz", "a.tar.bz2", "a.tar.xz"])
def test_members_have_the_bytes_that_were_packed(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    files = {**FILES, "notes.txt": b"no image", "folder/": b""}
    if name.endswith(".zip"):
        write_zip(path, files, zipfile.ZIP_STORED if name == "stored.zip" else zipfile.ZIP_DEFLATED)
    else:
        write_tar(path, files)
    found = list(members(str(path), is_image))
    assert {item.name: read(item) for item in found} == {f"{path}/{name}": data for name, data in FILES.items()}


def test_a_zip_after_other_bytes_and_one_of_large_numbers_are_read(tmp_path: Path) -> None:
    path = tmp_path / "self.zip"
    path.write_bytes(b"#!program" + write_zip(path, FILES))
    assert [read(item) for item in members(str(path), is_image)] == list(FILES.values())
    with zipfile.ZipFile(path, "w") as archive, archive.open("a.png", "w", force_zip64=True) as file:
        file.write(b"large")
    assert [read(item) for item in members(str(path), is_image)] == [b"large"]


@pytest.mark.parametrize("name", ["a.zip", "a.tar"])
def test_hidden_members_and_those_in_hidden_folders_are_left_out(tmp_path: Path, name: str) -> None:
    path = tmp_path / ".hidden" / name
    path.parent.mkdir()
    write = write_zip if name.endswith(".zip") else write_tar
    write(path, {"./a.png": b"1", ".cache/b.png": b"2", "deep/.c.png": b"3", "__MACOSX/._a.png": b"4", "d.png": b"5"})
    assert [item.name for item in members(str(path), is_image)] == [f"{path}/./a.png", f"{path}/d.png"]


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (0, "it ends early"),
        (100, "it ends early"),
        (-1, "one of its headers is damaged"),
    ],
)
def test_a_tar_file_that_was_cut_off_or_has_a_damaged_header_ends_with_an_error(
    tmp_path: Path, more: int, error: str
) -> None:
    path = tmp_path / "a.tar"
    data = write_tar(path, {"a.png": b"1", "b.png": b"2"})
    second = 2 * tarfile.BLOCKSIZE  # position of its header
    path.write_bytes(data[: second + more] if more >= 0 else data[:second] + b"x" + data[second + 1 :])
    found = list(members(str(path), is_image))
    assert [item.kind for item in found] == ["range", "error"]
    assert found[1].error == f"The archive is not read after 1 images: {error}."


def test_several_gzip_streams_are_one_archive(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    whole = gzip.decompress(write_tar(path, FILES))
    path.write_bytes(gzip.compress(whole[:700]) + gzip.compress(whole[700:]))
    assert [read(item) for item in members(str(path), is_image)] == list(FILES.values())


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz", "a.tar.xz", "a.tar.bz2"])
def test_a_file_that_is_no_archive_or_missing_is_one_error(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    (missing,) = members(str(path), is_image)
    assert missing.error == "The archive cannot be read: No such file or directory."
    path.write_bytes(b"something else" * 100)
    (damaged,) = members(str(path), is_image)
    assert damaged.kind == "error"
    assert damaged.error.startswith(("The archive is ", "The archive cannot be read: Invalid data"))


def test_a_truncated_archive_gives_the_members_before_and_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.tar.gz"
    rng = random.Random(0)
    files = {f"{index}.png": rng.randbytes(5000) for index in range(20)}
    path.write_bytes(write_tar(path, files)[:50_000])
    *found, error = members(str(path), is_image)
    assert 5 < len(found) < 20
    assert error.error == f"The archive is not read after {len(found)} images: it ends early."


def test_a_member_that_expands_too_much_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "bomb.zip"
    write_zip(path, {"bomb.png": bytes(3 * 2**20), "a.png": b"good"})
    bomb, good = members(str(path), is_image)
    assert bomb.error == "The member of the archive expands to more than 200 times its size."
    assert read(good) == b"good"


def test_a_zip_whose_members_expand_too_much_together_is_not_read_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archives, "FREE_BYTES", 2**20)
    path = tmp_path / "bomb.zip"
    write_zip(path, {f"{index}.png": bytes(2**19) for index in range(100)})
    *found, error = members(str(path), is_image)
    assert len(found) < 50
    assert "it expands to more than 200 times its size" in error.error


def test_a_tar_that_expands_too_much_is_not_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "FREE_BYTES", 2**20)
    path = tmp_path / "bomb.tar.gz"
    write_tar(path, {"a.png": b"good", "bomb.png": bytes(30 * 2**20), "b.png": b"never"})
    *found, error = members(str(path), is_image)
    assert [item.name for item in found] == [f"{path}/a.png", f"{path}/bomb.png"]
    assert "it expands to more than 200 times its size" in error.error


def test_an_archive_with_too_many_members_is_not_read_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archives, "MAX_MEMBERS", 3)
    path = tmp_path / "a.zip"
    write_zip(path, FILES)
    assert [item.kind for item in members(str(path), is_image)] == ["zip", "zip", "zip", "error"]


def test_a_tar_with_a_long_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    info = tarfile.TarInfo("pax")
    info.type, info.size = tarfile.XHDTYPE, 2**30
    path = tmp_path / "a.tar"
    path.write_bytes(info.tobuf() + bytes(1024))
    (error,) = members(str(path), is_image)
    assert "it has a header of 1,073,741,824 bytes" in error.error


def test_a_size_larger_than_the_limit_is_an_error(tmp_path: Path) -> None:
    info = tarfile.TarInfo("large.png")
    info.size = 2**33 - 1
    path = tmp_path / "a.tar"
    path.write_bytes(info.tobuf() + bytes(1024))
    large = next(iter(members(str(path), is_image)))
    assert large.error == "The file has 8,589,934,591 bytes; at most 67,108,864 are accepted."


def test_an_encrypted_member_and_another_method_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    data = bytearray(write_zip(path, {"a.png": b"secret"}))
    directory = data.rindex(b"PK\x01\x02")
    struct.pack_into("<H", data, directory + 8, 1)
    path.write_bytes(data)
    (encrypted,) = members(str(path), is_image)
    assert encrypted.error.startswith("The member of the archive is encrypted")
    write_zip(path, {"a.png": b"data"}, zipfile.ZIP_LZMA)
    (other,) = members(str(path), is_image)
    assert other.error.startswith("The member of the archive is compressed by method 14")


def test_a_member_with_wrong_bytes_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    data = write_zip(path, {"a.png": b"0123456789"}, zipfile.ZIP_STORED)
    path.write_bytes(data.replace(b"0123456789", b"0123456780"))
    (item,) = members(str(path), is_image)
    with pytest.raises(ImageError, match="do not have the stated size and checksum"):
        read(item)


def test_links_in_a_tar_file_are_errors(tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in {
            "hard.png": tarfile.LNKTYPE,
            "link.png": tarfile.SYMTYPE,
            "dir.png": tarfile.DIRTYPE,
        }.items():
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "a.png"
            tar.addfile(info)
    found = list(members(str(path), is_image))
    assert [item.name for item in found] == [f"{path}/hard.png", f"{path}/link.png"]
    assert {item.error for item in found} == {
        "The member of the archive is a link or another special file; accepted are regular files."
    }


def test_all_members_of_a_zip_are_read_if_their_number_exceeds_16_bits(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    data = bytearray(write_zip(path, FILES))
    struct.pack_into("<HH", data, len(data) - 14, 2, 2)  # as if 65,536 + 2 were written without zip64
    path.write_bytes(data)
    assert [read(item) for item in members(str(path), is_image)] == list(FILES.values())


@pytest.mark.parametrize("name", ["a.zip", "a.tar", "a.tar.gz"])
def test_random_damage_gives_members_or_errors_and_no_exception(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    whole = (write_zip if name == "a.zip" else write_tar)(path, FILES)
    rng = random.Random(1)
    errors = 0
    for _ in range(300):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        path.write_bytes(data[: rng.randint(1, len(data))] if rng.random() < 0.3 else data)
        for item in members(str(path), is_image):
            errors += item.kind == "error"
            if item.kind in ("zip", "range"):
                try:
                    assert len(read(item)) == item.size
                except ImageError:
                    errors += 1
    assert errors > 50
