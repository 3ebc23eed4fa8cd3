"""The file of keys: read by the service, changed by `qualms keys`. Readers see the old file or the complete new one."""

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from qualms.access.keys import MAX_KEYS, Key, KeysError, new_token, parse_keys, token_digest
from qualms.files import atomic_path

_MAX_BYTES = 2**20
_HEADER = "# API keys of a Qualms service; see `qualms keys --help`. Tokens are not stored, only their SHA-256.\n"
_MODE = 0o600


def read_keys(path: Path) -> list[Key]:
    """All keys; KeysError if the file cannot be read or a line is not accepted."""
    return parse_keys(_read(path), str(path))


def add_key(path: Path, make: Callable[[bytes], Key]) -> str:
    """Add the key that `make` returns for the digest of a new token, and return the token. The file is made if it is missing."""
    path = _target(path)
    token = new_token()
    key = make(token_digest(token.encode()))
    with _locked(path):
        text = _read(path) if path.exists() else _HEADER
        keys = parse_keys(text, str(path))
        if any(other.name == key.name for other in keys):
            raise KeysError(f"{path} has a key {key.name} already; remove it first, or choose another name.")
        if len(keys) >= MAX_KEYS:
            raise KeysError(f"{path} has {len(keys):,} keys, which is the maximum; remove one first.")
        end = "" if not text or text.endswith("\n") else "\n"
        _write(path, f"{text}{end}{key.line()}\n")
    return token


def remove_key(path: Path, name: str) -> None:
    """Remove a key; comments and all other lines stay as they are."""
    path = _target(path)
    with _locked(path):
        text = _read(path)
        names = [key.name for key in parse_keys(text, str(path))]
        if name not in names:
            raise KeysError(f"{path} has no key {name[:80]!r}; its keys: {', '.join(names[:20]) or 'none'}.")
        lines = [line for line in text.splitlines(keepends=True) if line.split()[:1] != [name]]
        _write(path, "".join(lines))


def _target(path: Path) -> Path:
    """The file that a symbolic link leads to: it is replaced, and the link stays."""
    return Path(os.path.realpath(path)) if path.is_symlink() else path


def _read(path: Path) -> str:
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):  # opening a pipe would block
            raise KeysError(f"The file of keys {path} is not a regular file.")
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        if len(data) > _MAX_BYTES:
            raise KeysError(f"The file of keys {path} has more than {_MAX_BYTES:,} bytes.")
        return data.decode("utf-8-sig")  # some editors write a byte order mark
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise KeysError(f"The file of keys {path} cannot be read: {reason}.") from None
    except UnicodeDecodeError:
        raise KeysError(f"The file of keys {path} is not text in UTF-8.") from None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time change the file. Its folder is locked, because the file itself is replaced."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            yield
        finally:
            os.close(folder)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise KeysError(f"The file of keys {path} cannot be written: {reason}.") from None


def _write(path: Path, text: str) -> None:
    """Replace the file. A new one is readable by its owner only; an existing one keeps its mode and, if allowed, its owner."""
    before = path.stat() if path.exists() else None
    with atomic_path(path, mode=_MODE if before is None else stat.S_IMODE(before.st_mode)) as temporary:
        temporary.write_text(text, encoding="utf-8")
        if before is not None:
            with suppress(OSError):
                os.chown(temporary, before.st_uid, before.st_gid)
