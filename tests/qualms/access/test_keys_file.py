"""The file of keys and the commands that change it."""

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qualms.access.cli import app
from qualms.access.keys import Key, KeysError, token_digest
from qualms.access.keys_file import add_key, read_keys, remove_key

Add = Callable[..., str]


def test_an_added_key_is_stored_by_its_digest_only(keys_file: Path, add: Add) -> None:
    token = add("app", rate=5.0)
    (key,) = read_keys(keys_file)
    assert (key.name, key.digest, key.rate) == ("app", token_digest(token.encode()), 5.0)
    assert token not in keys_file.read_text()
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o600
    assert [path.name for path in keys_file.parent.iterdir()] == ["keys"]


def test_other_lines_comments_and_the_mode_of_the_file_stay(keys_file: Path, add: Add) -> None:
    add("first")
    keys_file.write_text(f"# ours\n{keys_file.read_text()}")
    keys_file.chmod(0o640)
    add("second")
    remove_key(keys_file, "first")
    assert keys_file.read_text().startswith("# ours\n")
    assert [key.name for key in read_keys(keys_file)] == ["second"]
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o640


def test_a_link_to_the_file_stays(tmp_path: Path, keys_file: Path, add: Add) -> None:
    add("first")
    keys_file.chmod(0o640)
    link = tmp_path / "link"
    link.symlink_to(keys_file)
    add_key(link, lambda digest: Key("second", digest))
    remove_key(link, "first")
    assert link.is_symlink()
    assert [key.name for key in read_keys(keys_file)] == ["second"]
    assert stat.S_IMODE(keys_file.stat().st_mode) == 0o640


def test_files_of_other_systems_are_read(keys_file: Path, add: Add) -> None:
    add("app")
    keys_file.write_bytes(b"\xef\xbb\xbf" + keys_file.read_bytes().replace(b"\n", b"\r\n"))
    assert [key.name for key in read_keys(keys_file)] == ["app"]
    add("other")
    assert [key.name for key in read_keys(keys_file)] == ["app", "other"]


def test_a_pipe_is_refused_because_opening_it_would_block(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "keys")
    with pytest.raises(KeysError, match="not a regular file"):
        read_keys(tmp_path / "keys")


def test_a_name_is_added_once_and_an_unknown_one_is_not_removed(keys_file: Path, add: Add) -> None:
    add("app")
    before = keys_file.read_bytes()
    with pytest.raises(KeysError, match="has a key app already"):
        add("app")
    with pytest.raises(KeysError, match="has no key 'other'; its keys: app"):
        remove_key(keys_file, "other")
    assert keys_file.read_bytes() == before


def test_keys_that_are_added_at_the_same_time_are_all_kept(keys_file: Path, add: Add) -> None:
    threads = [threading.Thread(target=add, args=(f"app-{number}",)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {key.name for key in read_keys(keys_file)} == {f"app-{number}" for number in range(16)}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read: no such file"), (b"\xff\xfe", "not text in UTF-8"), (b"#" * (2**20 + 1), "more than 1,0")],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, message: str) -> None:
    path = tmp_path / "keys"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(KeysError, match=f"{path}.*{message}"):
        read_keys(path)


def test_the_commands_add_list_and_remove(keys_file: Path) -> None:
    runner, variables = CliRunner(), {"QUALMS_KEYS_FILE": str(keys_file)}
    options = ["--rate", "2.5", "--concurrency", "4", "--only", "predict", "--only", "metrics"]
    added = runner.invoke(app, ["add", "app", *options], env=variables)
    token = added.stdout.strip()
    (key,) = read_keys(keys_file)
    assert (added.exit_code, key.digest) == (0, token_digest(token.encode()))
    listed = runner.invoke(app, ["list"], env=variables)
    assert listed.stdout == "app rate=2.5 concurrency=4 only=predict,metrics\n"
    removed = runner.invoke(app, ["remove", "app"], env=variables)
    assert (removed.exit_code, read_keys(keys_file)) == (0, [])


@pytest.mark.parametrize(
    "options", [["a b"], ["app", "--rate", "0"], ["app", "--concurrency", "0"], ["app", "--only", "everything"]]
)
def test_an_invalid_key_is_not_added(keys_file: Path, options: list[str]) -> None:
    result = CliRunner().invoke(app, ["add", *options, "--file", str(keys_file)])
    assert isinstance(result.exception, KeysError)
    assert "accepted" in str(result.exception)
    assert not keys_file.exists()
