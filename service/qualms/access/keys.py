"""API keys as lines of text: a name, the SHA-256 of a random token, and optional limits.

    mobile-app sha256:9f86d0…  rate=20 concurrency=4 only=predict

Only the digest of a token is stored. The token has 256 random bits, so that a salt or a slow hash would add nothing. Error
messages never repeat what a line contains, because it may be a token that was pasted by mistake.
"""

import hashlib
import math
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass, fields

from qualms.errors import QualmsError

PREDICT, READ, METRICS = "predict", "read", "metrics"
SCOPES = (PREDICT, READ, METRICS)
"""what a key may be restricted to: predictions; models, status and documentation; /metrics"""
MAX_KEYS = 1000
"""each key has series of its own in /metrics"""
MAX_RATE = 1e6
MAX_CONCURRENCY = 1_000_000
TOKEN_PREFIX = "qualms_"  # lets scanners for secrets recognise a token
_TOKEN_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
NAME_RULE = "1 to 64 letters, digits, dots, dashes and underscores, of which the first is a letter or digit"


class KeysError(QualmsError):
    """The file of keys cannot be read or written, or one of its lines is not accepted."""


@dataclass(frozen=True)
class Key:
    """One key: who has it, and what it may be used for."""

    name: str
    digest: bytes
    """SHA-256 of the token"""
    rate: float | None = None
    """requests per second; None if there is no limit"""
    concurrency: int | None = None
    """simultaneous requests; None if there is no limit"""
    only: tuple[str, ...] = SCOPES

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise KeysError(f"The name {self.name[:80]!r} of a key is not accepted; accepted: {NAME_RULE}.")
        if self.rate is not None and not 0 < self.rate <= MAX_RATE:
            raise KeysError(
                f"The rate of a key is {self.rate!r}; accepted: requests per second, up to {MAX_RATE:,.0f}."
            )
        if self.concurrency is not None and not 1 <= self.concurrency <= MAX_CONCURRENCY:
            raise KeysError(f"The concurrency of a key is {self.concurrency!r}; accepted: 1 to {MAX_CONCURRENCY:,}.")
        if not self.only or not set(self.only) <= set(SCOPES):
            raise KeysError(f"A key is restricted to {','.join(self.only)!r}; accepted: some of {', '.join(SCOPES)}.")

    def line(self) -> str:
        """The key as a line of the file."""
        words = [self.name, f"sha256:{self.digest.hex()}"]
        if self.rate is not None:
            words.append(f"rate={self.rate:.12g}")
        if self.concurrency is not None:
            words.append(f"concurrency={self.concurrency}")
        if self.only != SCOPES:
            words.append(f"only={','.join(self.only)}")
        return " ".join(words)


_OPTIONS = tuple(field.name for field in fields(Key) if field.name not in ("name", "digest"))


def new_token() -> str:
    """A random token of 256 bits."""
    return TOKEN_PREFIX + secrets.token_urlsafe(_TOKEN_BYTES)


def token_digest(token: bytes) -> bytes:
    """The digest under which a token is stored."""
    return hashlib.sha256(token).digest()


def parse_keys(text: str, source: str) -> list[Key]:
    """The keys in the text of a file; empty lines and lines that begin with # are skipped. KeysError names the line."""
    keys: list[Key] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            keys.append(_parse(words))
            _check_unique(keys)
        except KeysError as error:
            raise KeysError(f"Line {number} of {source} is not accepted: {str(error).rstrip('.')}.") from None
    return keys


def _parse(words: list[str]) -> Key:
    name, *rest = words
    if not _NAME.fullmatch(name):
        raise KeysError(f"its first word should be a name of {NAME_RULE}")
    digest = _DIGEST.fullmatch(rest[0]) if rest else None
    if digest is None:
        raise KeysError("its second word should be sha256: and 64 lower-case hex digits, as qualms keys add writes it")
    options = _parse_options(rest[1:])
    only = tuple(scope for scope in SCOPES if scope in options.get("only", ",".join(SCOPES)).split(","))
    if len(only) != len(options.get("only", ",".join(SCOPES)).split(",")):
        raise KeysError(f"only= should be some of {', '.join(SCOPES)}, separated by commas")
    return Key(
        name,
        bytes.fromhex(digest[1]),
        _number(options.get("rate"), "rate", f"requests per second, up to {MAX_RATE:,.0f}"),
        _integer(options.get("concurrency")),
        only,
    )


def _parse_options(words: Iterable[str]) -> dict[str, str]:
    options: dict[str, str] = {}
    for word in words:
        name, separator, value = word.partition("=")
        if not separator or name not in _OPTIONS or name in options:
            raise KeysError(f"after the digest, each of {', '.join(f'{one}=' for one in _OPTIONS)} may follow once")
        options[name] = value
    return options


def _number(text: str | None, name: str, accepted: str) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MAX_RATE:
        raise KeysError(f"{name}= should be {accepted}")
    return value


def _integer(text: str | None) -> int | None:
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= 7 and 1 <= int(text) <= MAX_CONCURRENCY):
        raise KeysError(f"concurrency= should be 1 to {MAX_CONCURRENCY:,}")
    return int(text)


def _check_unique(keys: list[Key]) -> None:
    """Check the last of the keys against those before it."""
    *others, last = keys
    if len(keys) > MAX_KEYS:
        raise KeysError(f"there may be at most {MAX_KEYS:,} keys")
    if any(other.name == last.name for other in others):
        raise KeysError(f"the name {last.name} is used by an earlier line")
    if any(other.digest == last.digest for other in others):
        raise KeysError("an earlier line has the same digest")
