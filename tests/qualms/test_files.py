import stat
from pathlib import Path

import pytest

from qualms.files import replacing, write_bytes


def test_a_file_and_the_folders_it_needs_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "model.onnx"
    write_bytes(path, b"new")
    assert path.read_bytes() == b"new"
    assert list(path.parent.iterdir()) == [path]


def test_others_may_read_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    write_bytes(path, b"new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o644


def test_a_reader_sees_the_old_file_until_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    with replacing(path) as temporary:
        temporary.write_bytes(b"new")
        assert path.read_bytes() == b"old"
    assert path.read_bytes() == b"new"
    assert list(tmp_path.iterdir()) == [path]


def test_the_temporary_file_is_beside_the_final_one_and_ends_alike(tmp_path: Path) -> None:
    """Beside it, a rename cannot cross a file system; the suffix is what writers choose a format by."""
    path = tmp_path / "plot.png"
    with replacing(path) as temporary:
        assert temporary.parent == path.parent
        assert temporary.suffix == ".png"
        assert temporary != path


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, error: type[BaseException]) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(b"old")
    with pytest.raises(error), replacing(path) as temporary:
        temporary.write_bytes(b"half")
        raise error
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_first_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no"), replacing(tmp_path / "model.onnx") as temporary:
        temporary.write_bytes(b"half")
        raise ValueError("no")
    assert list(tmp_path.iterdir()) == []


def test_a_rename_that_fails_leaves_no_temporary_file(tmp_path: Path) -> None:
    folder = tmp_path / "model.onnx"
    folder.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_bytes(folder, b"new")
    assert list(tmp_path.iterdir()) == [folder]
    assert list(folder.iterdir()) == []
