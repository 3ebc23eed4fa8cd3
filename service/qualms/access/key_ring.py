"""The keys that are accepted now, each with its limits and the statuses of its replies.

Keys are found by the digest of the token, so the time of a look-up does not depend on how much of a token is right: a client
cannot choose a token by its digest. The digests are then compared in constant time.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from hmac import compare_digest

from qualms.access.keys import Key
from qualms.access.limits import ConcurrencyLimit, RateLimit

STATUSES = (200, 403, 429)
"""the statuses whose series exist from the start"""


class KeyHolder:
    """One accepted key: what it may be used for, and how often it was."""

    __slots__ = ("_clock", "_concurrency", "_rate", "counts", "digest", "key", "name", "only")

    def __init__(self, key: Key, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.counts = dict.fromkeys(STATUSES, 0)
        """number of replies by status"""
        self._set(key)
        self._rate, self._concurrency = _rate_limit(key), _concurrency_limit(key)

    def _set(self, key: Key) -> None:
        self.key, self.name, self.digest, self.only = key, key.name, key.digest, frozenset(key.only)

    def update(self, key: Key) -> None:
        """Use the key of a file that was read again. Limits that have not changed keep their state."""
        before = self.key
        self._set(key)
        if key.rate != before.rate:
            self._rate = _rate_limit(key)
        if key.concurrency != before.concurrency:
            self._concurrency = _concurrency_limit(key, 0 if self._concurrency is None else self._concurrency.active)

    def acquire(self) -> tuple[str, float] | None:
        """Begin a request, or return which limit it exceeds, and after how many seconds it may be sent again.

        A request that is refused does not count towards the other limit.
        """
        if self._concurrency is not None and (wait := self._concurrency.wait()):
            return "concurrency", wait
        if self._rate is not None and (wait := self._rate.wait(self._clock())):
            return "rate", wait
        if self._concurrency is not None:
            self._concurrency.take(self._clock())
        return None

    def release(self) -> None:
        """End a request."""
        if self._concurrency is not None and self._concurrency.active:
            self._concurrency.release(self._clock())

    def count(self, status: int) -> None:
        """Count a reply."""
        try:
            self.counts[status] += 1
        except KeyError:
            self.counts[status] = 1


def _rate_limit(key: Key) -> RateLimit | None:
    return None if key.rate is None else RateLimit(key.rate)


def _concurrency_limit(key: Key, active: int = 0) -> ConcurrencyLimit | None:
    return None if key.concurrency is None else ConcurrencyLimit(key.concurrency, active)


class KeyRing:
    """All accepted keys."""

    def __init__(self, keys: Iterable[Key], clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_digest: dict[bytes, KeyHolder] = {}
        self.replace(keys)

    def __len__(self) -> int:
        return len(self._by_digest)

    def __iter__(self) -> Iterator[KeyHolder]:
        return iter(self._by_digest.values())

    def replace(self, keys: Iterable[Key]) -> None:
        """Accept these keys and no others. A key that keeps its name keeps its counts."""
        before = {holder.name: holder for holder in self}
        after: dict[bytes, KeyHolder] = {}
        for key in keys:
            holder = before.get(key.name)
            if holder is None:
                holder = KeyHolder(key, self._clock)
            else:
                holder.update(key)
            after[key.digest] = holder
        self._by_digest = after

    def find(self, token: bytes) -> KeyHolder | None:
        """The holder of a token; None if it is unknown."""
        digest = sha256(token).digest()
        holder = self._by_digest.get(digest)
        return holder if holder is not None and compare_digest(holder.digest, digest) else None
