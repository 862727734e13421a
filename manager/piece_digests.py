"""The digest of each piece that a save would write, taken at the speed of memory.

A few threads share each batch; none holds the GIL over large pieces. Knows nothing of files and earlier steps.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch

from safepoint.formats.checksum import digest
from safepoint.manager.collecting import paused_collection
from safepoint.manager.packing import num_cores
from safepoint.manager.sources import batches, byte_view, piece_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safepoint.manager.file_bytes import PlannedFile
from safepoint.manager.sources import PlannedPiece, Source

__all__ = ["ImageSource", "digest_pieces"]

_BYTES_WORTH_A_THREAD = 4 << 20
_MOST_HELPERS = 3  # beyond it memory is the limit


def digest_pieces(pieces: Sequence[PlannedPiece], source: Source) -> list[str]:
    """Return the digest of each piece's bytes. No more of a state is on the host twice than one batch.

    Raises:
        CheckpointError: a piece cannot be read.
    """
    digests: list[str] = []
    with ThreadPoolExecutor(max_workers=_MOST_HELPERS, thread_name_prefix="safepoint-digest") as helpers:
        for batch in batches(pieces, piece_bytes):
            source.prepare(batch)
            with paused_collection():
                views = [byte_view(source.load(piece)) for piece in batch]
            digests += _digest_batch(views, helpers)
    return digests


def _digest_batch(views: list[memoryview], helpers: ThreadPoolExecutor) -> list[str]:
    shares = _shares(views)
    try:
        others = [helpers.submit(_digest_all, share) for share in shares[1:]]
    except RuntimeError:  # no more threads to be had, or the interpreter is shutting down
        return _digest_all(views)
    found = _digest_all(shares[0])
    for other in others:
        found += other.result()
    return found


def _shares(views: list[memoryview]) -> list[list[memoryview]]:
    """Cut what is to be digested into runs of about the same size, one a thread."""
    total = sum(map(len, views))
    threads = min(num_cores(), 1 + _MOST_HELPERS, max(1, total // _BYTES_WORTH_A_THREAD))
    shares: list[list[memoryview]] = [[]]
    size = 0
    for view in views:
        if len(shares) < threads and size * threads >= total * len(shares):
            shares.append([])
        shares[-1].append(view)
        size += len(view)
    return shares


def _digest_all(views: list[memoryview]) -> list[str]:
    return [digest(view) for view in views]


class ImageSource:
    """Pieces out of the staged images of the files that were planned for them (`file_bytes.stage_files`)."""

    def __init__(self, files: Sequence[PlannedFile], images: Sequence[memoryview]) -> None:
        self._views = {
            (piece.path, piece.region): image[placement.offset : placement.offset + placement.num_bytes]
            for file, image in zip(files, images, strict=True)
            for piece, placement in zip(file.pieces, file.layout.placements, strict=True)
        }

    def prepare(self, pieces: Sequence[PlannedPiece]) -> None:
        """Do nothing: all is there."""

    def load(self, piece: PlannedPiece) -> torch.Tensor:
        """Return the piece's bytes where they lie."""
        view = self._views[piece.path, piece.region]
        return torch.frombuffer(view, dtype=torch.uint8) if len(view) else torch.empty(0, dtype=torch.uint8)
