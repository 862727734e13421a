"""Writing pieces that are encoded on the way: how long they get is known only then, and so where they lie.

Encoded pieces are gathered, and written as a file when there are enough, while the next ones are being encoded; no more
than these is in memory beside the state. Knows no formats and no processes.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from safepoint.manager.file_bytes import Located, PlannedFile, loaded_pieces
from safepoint.manager.sources import byte_view

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from safepoint.formats.codecs import Codec
    from safepoint.formats.manifest import ShardEntry, TreePath
    from safepoint.formats.storage import Storage, WrittenFile
    from safepoint.manager.sources import PlannedPiece, Source

__all__ = ["PACK_BYTES", "stored_pieces", "write_encoded"]

PACK_BYTES = 64 << 20
"""Of encoded pieces in one file, and of pieces that are being encoded, unless one alone is larger."""

_MOST_AHEAD = 8
"""How many pieces are encoded at once."""


def stored_pieces(file: PlannedFile, source: Source | memoryview) -> Iterator[memoryview]:
    """Yield the bytes of each piece as they are before they are encoded, in order.

    Args:
        file: whose pieces.
        source: of the pieces, or the image of the file.
    """
    if isinstance(source, memoryview):
        for placement in file.layout.placements:
            yield source[placement.offset : placement.offset + placement.num_bytes]
        return
    for _, data in loaded_pieces(file, source):
        yield byte_view(data)


def write_encoded(
    storage: Storage,
    prefix: str,
    file: PlannedFile,
    stored: Iterable[memoryview],
    number: int,
    finished: Callable[[str, WrittenFile], None],
    progress: Callable[[int], None] | None = None,
) -> Located:
    """Write the pieces of a planned file, encoded, into as many files as it takes.

    Args:
        storage: of the root.
        prefix: of the attempt.
        file: with a codec; its path is how the names of the files begin.
        stored: bytes of its pieces, in order.
        number: that the first of the files has in the report.
        finished: called with path and content of each file that is written.
        progress: called with the bytes of each piece, as they were before it was encoded.

    Returns:
        Where its shards, and the copies of shards, lie.

    Raises:
        StorageError: the storage refused; the file in question is removed.
    """
    pack = _Pack(file)
    shards: list[tuple[TreePath, ShardEntry]] = []
    copies: list[tuple[TreePath, ShardEntry]] = []
    entries = {False: iter(file.shards), True: iter(file.copies)}
    count = 0

    def write_pack() -> None:
        nonlocal count
        path = f"{file.path}{count:08x}"
        with storage.open_writer(f"{prefix}/{path}", num_bytes=pack.num_bytes) as writer:
            for part in pack.parts:
                writer.append(part)
            finished(path, writer.finish())
        count += 1
        pack.clear()

    for piece, num_bytes, encoded in _encoded_ahead(pack.codec, file.pieces, stored):
        if pack.parts and pack.num_bytes + len(encoded) > PACK_BYTES:
            write_pack()
        path, entry = next(entries[piece.is_copy])
        offset = pack.append(encoded)
        place = entry._replace(file=number + count, offset=offset, num_bytes=len(encoded), codec=pack.codec.name)
        (copies if piece.is_copy else shards).append((path, place))
        if progress is not None:
            progress(num_bytes)
    if pack.parts:
        write_pack()
    return tuple(shards), tuple(copies)


def _encoded_ahead(
    codec: Codec, pieces: Iterable[PlannedPiece], stored: Iterable[memoryview]
) -> Iterator[tuple[PlannedPiece, int, bytes]]:
    """Yield each piece with its bytes encoded, and how many they were; the next ones are under way meanwhile."""
    waiting: deque[tuple[PlannedPiece, memoryview, Callable[[], bytes]]] = deque()
    under_way = 0

    def first() -> tuple[PlannedPiece, int, bytes]:
        nonlocal under_way
        piece, data, wait = waiting.popleft()
        under_way -= len(data)
        return piece, len(data), wait()

    for piece, data in zip(pieces, stored, strict=True):
        while waiting and (len(waiting) >= _MOST_AHEAD or under_way + len(data) > PACK_BYTES):
            yield first()
        waiting.append((piece, data, codec.encode(data)))
        under_way += len(data)
    while waiting:
        yield first()


class _Pack:
    """Encoded pieces that will be a file together."""

    def __init__(self, file: PlannedFile) -> None:
        assert file.layout.codec is not None
        self.codec = file.layout.codec
        self._framing = file.layout.framing
        self.clear()

    def clear(self) -> None:
        """Begin another one."""
        self.parts: list[bytes] = []
        self.num_bytes = 0
        self._checks: list[int] = []

    def append(self, encoded: bytes) -> int:
        """Add an encoded piece and what its framing puts after it; return where it lies."""
        offset = self.num_bytes
        end = b""
        if self._framing is not None:
            self._checks.append(self._framing.check(memoryview(encoded)))
            end = self._framing.after(len(self._checks) - 1, self._checks)
        self.parts += [encoded, end]
        self.num_bytes += len(encoded) + len(end)
        return offset
