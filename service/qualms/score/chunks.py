"""The chunks of a run: consecutive files of the list, with the bytes of members of compressed tar files."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from qualms.bundle.runtime import BATCH_VALUES, MAX_BATCH
from qualms.errors import ImageError, first_line
from qualms.images.input_spec import InputSpec
from qualms.score.archives import ArchiveError, TarStream, open_stream
from qualms.score.items import Item, read_list

CHUNK_BATCHES, MIN_CHUNK, MAX_CHUNK = 4, 64, 128
"""batches of a chunk, within bounds on its number of files"""
CHUNK_BYTES = 32 * 2**20
"""bytes of members of compressed tar files in a chunk, because these are sent with it"""


class Chunk(NamedTuple):
    """Consecutive items that become one part."""

    number: int
    items: list[Item]
    data: list[bytes | ImageError | None]
    """the bytes of members of compressed tar files, which can be read only in their order; None for all other items"""


@dataclass(frozen=True)
class Chunks:
    """The chunks of a list from number `skip` on; it can be iterated by another process of this machine."""

    path: Path
    """of the list"""
    rows: int
    """items in a chunk"""
    skip: int = 0

    def __iter__(self) -> Iterator[Chunk]:
        with closing(StreamMembers()) as streams:
            for number, items in enumerate(split(read_list(self.path), self.rows)):
                if number >= self.skip:
                    yield Chunk(
                        number, items, [streams.read(item) if item.kind == "stream" else None for item in items]
                    )


def chunk_rows(spec: InputSpec) -> int:
    """Number of items in a chunk. It does not depend on the machine, so that all runs have the same batches."""
    batch = min(MAX_BATCH, BATCH_VALUES // max(1, int(np.prod(spec.shape))))
    return max(MIN_CHUNK, min(MAX_CHUNK, CHUNK_BATCHES * batch))


def split(items: Iterable[Item], rows: int) -> Iterator[list[Item]]:
    """The items of each chunk: `rows` items, or fewer if they are sent with their bytes and these are many."""
    chunk: list[Item] = []
    size = 0
    for item in items:
        sent = item.size if item.kind == "stream" else 0
        if chunk and (len(chunk) >= rows or size + sent > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(item)
        size += sent
    if chunk:
        yield chunk


class StreamMembers:
    """Reads members of compressed tar files in their order, so that each archive is decompressed once."""

    def __init__(self) -> None:
        self._stream: TarStream | None = None
        self._source = ""

    def read(self, item: Item) -> bytes | ImageError:
        """The bytes of a member, or why they cannot be read."""
        try:
            if self._stream is None or self._source != item.source or self._stream.tell() > item.offset:
                self.close()
                self._stream, self._source = open_stream(item.source), item.source
            self._stream.seek(item.offset)
            data = self._stream.read(item.size)
        except (ArchiveError, OSError) as error:
            return ImageError(f"The archive cannot be read: {first_line(error)}.")
        except Exception as error:  # the decompressors raise many kinds of errors on hostile bytes
            return ImageError(f"The archive is damaged: {first_line(error)}.")
        return data if len(data) == item.size else ImageError("The archive is damaged: it ends early.")

    def close(self) -> None:
        """Close the archive."""
        if self._stream is not None:
            self._stream.close()
        self._stream = None
