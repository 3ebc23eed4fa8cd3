import stat
from pathlib import Path

import pytest

from qualms.files import atomic_path, write_bytes


def test_missing_folders_are_created(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "model.onnx"
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_the_file_is_readable_by_other_users(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_bytes(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_readers_see_the_old_file_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    with atomic_path(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_has_the_same_folder_and_suffix(tmp_path: Path) -> None:
    """In the same folder, the rename stays within one file system; Matplotlib derives the format from the suffix."""
    path = tmp_path / "plot.png"
    with atomic_path(path) as temporary:
        assert temporary.parent == path.parent
        assert temporary.suffix == ".png"
        assert temporary != path


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_exception_in_the_block_leaves_only_the_old_file(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    with pytest.raises(error), atomic_path(path) as temporary:
        temporary.write_bytes(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_failed_first_write_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), atomic_path(tmp_path / "model.onnx") as temporary:
        temporary.write_bytes(b"half")
        raise ValueError("no")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_rename_leaves_no_temporary_file(tmp_path: Path) -> None:
    folder = tmp_path / "model.onnx"
    folder.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_bytes(folder, b"new")
    assert list(tmp_path.iterdir()) == [folder]
    assert list(folder.iterdir()) == []
