"""Which files are scored, and in which order."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from qualms.errors import ImageError
from qualms.score import listing
from qualms.score.items import Item, ScoreError, file_item, read_item
from qualms.score.listing import Listing


@pytest.fixture
def listed(tmp_path: Path) -> Callable[..., list[str]]:
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def names(*arguments: object) -> list[str]:
        return [item.name for item in Listing(map(str, arguments), scratch)]

    return names


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """b.png, a.JPG and sub/c.webp, with a hidden folder and file, and a text."""
    root = tmp_path / "tree"
    (root / "sub").mkdir(parents=True)
    (root / ".cache").mkdir()
    for name in ("b.png", "a.JPG", "sub/c.webp", ".cache/d.png", ".e.png", "readme.md"):
        (root / name).write_bytes(name.encode())
    return root


def relative(paths: Sequence[str], root: Path) -> list[str]:
    return [str(Path(path).relative_to(root)) for path in paths]


def test_a_folder_gives_its_images_at_all_depths_in_sorted_order_without_hidden_ones(
    listed: Callable[..., list[str]], tree: Path
) -> None:
    assert relative(listed(tree), tree) == ["a.JPG", "b.png", "sub/c.webp"]


def test_other_files_of_a_folder_are_counted(tree: Path, tmp_path: Path) -> None:
    files = Listing([str(tree)], tmp_path)
    assert len(list(files)) == 3
    assert files.others == 1


def test_a_folder_that_links_to_itself_is_read_once(listed: Callable[..., list[str]], tree: Path) -> None:
    (tree / "sub" / "loop").symlink_to(tree)
    (tree / "again").symlink_to(tree / "sub")
    names = relative(listed(tree), tree)
    assert sorted(Path(name).name for name in names) == ["a.JPG", "b.png", "c.webp"]
    assert names == relative(listed(tree), tree)


def test_a_broken_link_and_a_named_pipe_become_errors(listed: Callable[..., list[str]], tree: Path) -> None:
    (tree / "gone.png").symlink_to(tree / "nowhere")
    os.mkfifo(tree / "pipe.png")
    assert relative(listed(tree), tree) == ["a.JPG", "b.png", "gone.png", "pipe.png", "sub/c.webp"]
    with pytest.raises(ImageError, match="The file cannot be read: No such file"):
        read_item(file_item(str(tree / "gone.png")))
    with pytest.raises(ImageError, match="The path is not a regular file"):
        read_item(file_item(str(tree / "pipe.png")))


def test_more_paths_than_fit_into_memory_are_sorted_on_disk(
    tree: Path, listed: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for index in range(23):
        (tree / f"{index * 7 % 23:02}\n.png").write_bytes(b"")
    expected = listed(tree)
    monkeypatch.setattr(listing, "_SORTED_AT_ONCE", 4)
    assert listed(tree) == expected == sorted(expected)


def test_a_glob_gives_files_and_a_double_star_each_file_once(listed: Callable[..., list[str]], tree: Path) -> None:
    assert relative(listed(tree / "*.png"), tree) == ["b.png"]
    assert relative(listed(tree / "**" / "*.webp"), tree) == ["sub/c.webp"]
    assert relative(listed(tree / "**"), tree) == ["a.JPG", "b.png", "readme.md", "sub/c.webp"]


def test_a_double_star_reads_each_folder_once_whatever_links_there_are(
    listed: Callable[..., list[str]], tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("loop", "second", "sub/third"):
        (tree / name).symlink_to(tree)
    (tree / "od[d]").mkdir()
    (tree / "od[d]" / "f.png").write_bytes(b"f")
    assert relative(listed(tree / "**" / "*.png"), tree) == ["b.png", "od[d]/f.png"]
    assert relative(listed(tree / "**" / "sub" / "*"), tree) == ["sub/c.webp"]
    monkeypatch.chdir(tree)
    assert listed("**/*.png") == ["b.png", "od[d]/f.png"]


def test_a_list_gives_its_lines_in_their_order_with_folders_and_files_that_are_missing(
    listed: Callable[..., list[str]], tree: Path, tmp_path: Path
) -> None:
    paths = [f"{tree}/readme.md", f"{tree}/sub", "", f"{tree}/missing.png"]
    (tmp_path / "list.txt").write_text("\r\n".join(paths))
    assert relative(listed(tmp_path / "list.txt"), tree) == ["readme.md", "sub/c.webp", "missing.png"]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("missing", "There is no file or folder"),
        ("missing*.png", "No file matches"),
        ("missing.txt", "The list .*missing.txt cannot be read: No such file"),
        ("other.7z", "is an archive of another kind; accepted are .zip"),
    ],
)
def test_an_argument_that_names_nothing_is_an_error(
    listed: Callable[..., list[str]], tmp_path: Path, argument: str, message: str
) -> None:
    (tmp_path / "other.7z").write_bytes(b"")
    with pytest.raises(ScoreError, match=message):
        listed(tmp_path / argument)


def test_names_that_are_not_text_survive_the_list_and_are_escaped_in_rows(
    tree: Path, listed: Callable[..., list[str]]
) -> None:
    path = os.fsdecode(os.fsencode(tree) + b"/caf\xe9.png")
    Path(path).write_bytes(b"data")
    item = file_item(path)
    assert Item.from_json(item.to_json()) == item
    assert read_item(Item.from_json(item.to_json())) == b"data"
    assert item.path.endswith("caf\\xe9.png")
    assert path in listed(tree)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.png"
    with path.open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(ImageError, match=r"has 67,108,865 bytes; at most 67,108,864"):
        read_item(file_item(str(path)))
