"""The bytes of one planned file: straight from the pieces to a writer, or first as an image in host memory.

Runs of pieces that lie back to back go through one copy; where a format puts something between them (`Framing`), each
has its own place, and what depends on the data is made when the file is written, behind the training loop if need be.
Knows no directories and no processes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

import torch

from safepoint.manager.device_copies import DeviceCopies
from safepoint.manager.events import sized
from safepoint.manager.packing import SMALL_BYTES, Packer
from safepoint.manager.sources import (
    PlannedPiece,
    Source,
    StateSource,
    batches,
    byte_view,
    flat_bytes,
    packed,
    piece_bytes,
    raw_view,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from safepoint.formats.base import FileLayout, Framing, Placement
    from safepoint.formats.manifest import ShardEntry, TreePath
    from safepoint.formats.storage import FileWriter
    from safepoint.manager.staging import HostSlab

__all__ = ["Located", "PlannedFile", "append_image", "append_pieces", "has_room", "loaded_pieces", "stage_files"]

logger = logging.getLogger("safepoint")

Located = tuple["tuple[tuple[TreePath, ShardEntry], ...]", "tuple[tuple[TreePath, ShardEntry], ...]"]
"""Shards, and copies of shards."""

_PACKED_BYTES = 1 << 20
"""How much of small pieces is put together before it is written: no more than stays in a core's cache."""


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """One file of this process: its layout, its pieces in file order, and what the manifest will say of them."""

    path: str
    layout: FileLayout
    pieces: tuple[PlannedPiece, ...]
    shards: tuple[tuple[TreePath, ShardEntry], ...]
    copies: tuple[tuple[TreePath, ShardEntry], ...] = ()
    """What it will not say, since another file has it too; for those who read this one by other means."""

    def located(self, number: int) -> Located:
        """Return shards and copies in a report whose file of this number this is."""
        first = next(iter((*self.shards[:1], *self.copies[:1])), None)
        if first is None or first[1].file == number:
            return self.shards, self.copies
        return _moved(self.shards, number), _moved(self.copies, number)


def _moved(shards: tuple[tuple[TreePath, ShardEntry], ...], number: int) -> tuple[tuple[TreePath, ShardEntry], ...]:
    return tuple((path, entry._replace(file=number)) for path, entry in shards)


def has_room(slab: HostSlab, files: Sequence[PlannedFile], *, step: int) -> bool:
    """Say whether there is memory for the images of these files, and log it where there is not."""
    sizes = [file.layout.num_bytes for file in files]
    shortage = slab.shortage(sizes)
    if shortage:
        logger.warning(
            "step %d is saved before save() returns: to copy it first would take %s of memory, which is %s too much",
            step,
            sized(sum(sizes)),
            sized(shortage),
        )
    return not shortage


def stage_files(
    files: Sequence[PlannedFile], source: StateSource, slab: HostSlab, progress: Callable[[int], None]
) -> list[memoryview]:
    """Make the image of each file in the slab; when this returns, the caller may change anything.

    Args:
        files: of this process.
        source: of their pieces.
        slab: lends the memory.
        progress: called with the bytes that were copied.
    """
    images = slab.images([file.layout.num_bytes for file in files])
    with Packer(sum(image.numel() for image in images)) as packer, DeviceCopies(slab.pin) as copies:
        for file, image in zip(files, images, strict=True):
            header = file.layout.header
            image.numpy()[: len(header)] = memoryview(header)
            if file.layout.framing is None:
                _stage_packed(file, source, image, packer, copies, progress)
            else:
                _stage_apart(file, source, image, progress)
    return [image.numpy().data for image in images]


def _stage_packed(
    file: PlannedFile,
    source: StateSource,
    image: torch.Tensor,
    packer: Packer,
    copies: DeviceCopies,
    progress: Callable[[int], None],
) -> None:
    position = len(file.layout.header)

    def room_for(num_bytes: int) -> torch.Tensor:
        nonlocal position
        position += num_bytes
        return image[position - num_bytes : position]

    for is_on_device, run in _by_place(file.pieces, source):
        if is_on_device:
            for piece in run:
                live = source.on_device(piece)
                assert live is not None
                copies.begin(live, room_for(piece.num_bytes))
                progress(piece.num_bytes)
        else:
            for out in packed(tuple(run), source, room_for, copy=packer.pack):
                progress(len(out))


def _by_place(pieces: Sequence[PlannedPiece], source: StateSource) -> Iterable[tuple[bool, Iterable[PlannedPiece]]]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [(False, pieces)]  # nor asked of each
    return groupby(pieces, key=lambda piece: source.on_device(piece) is not None)


def _stage_apart(file: PlannedFile, source: Source, image: torch.Tensor, progress: Callable[[int], None]) -> None:
    for placement, data in loaded_pieces(file, source):
        image[placement.offset : placement.offset + placement.num_bytes] = flat_bytes(data)
        progress(placement.num_bytes)


def append_image(writer: FileWriter, file: PlannedFile, image: memoryview) -> None:
    """Append a file whose pieces are in its image."""
    framing = file.layout.framing
    if framing is not None:
        checks: list[int] = []
        for placement in file.layout.placements:
            end = placement.offset + placement.num_bytes
            between = _after(framing, image[placement.offset : end], checks)
            image[end : end + len(between)] = between
    writer.append(image)


def append_pieces(writer: FileWriter, file: PlannedFile, source: Source) -> None:
    """Append the header and every piece; runs of small ones at once, through a buffer of their own."""
    writer.append(file.layout.header)
    framing = file.layout.framing
    if framing is not None:
        checks: list[int] = []
        for _, data in loaded_pieces(file, source):
            writer.append(byte_view(data))
            writer.append(_after(framing, byte_view(data), checks))
        return
    room = torch.empty(_PACKED_BYTES, dtype=torch.uint8)
    for is_small, run in groupby(file.pieces, key=_is_small):
        if is_small:
            for packed_run in packed(tuple(run), source, lambda size: room[:size], run_bytes=_PACKED_BYTES):
                writer.append(byte_view(packed_run))
        else:
            for batch in batches(run, piece_bytes):
                source.prepare(batch)
                for piece in batch:
                    writer.append(byte_view(source.load(piece)))


def _after(framing: Framing, data: memoryview, checks: list[int]) -> bytes:
    checks.append(framing.check(data))
    return framing.after(len(checks) - 1, checks)


def loaded_pieces(file: PlannedFile, source: Source) -> Iterator[tuple[Placement, torch.Tensor]]:
    """Yield each piece in file order as it is stored: with zeros around it where its box is larger."""
    placements = iter(file.layout.placements)
    for batch in batches(file.pieces, piece_bytes):
        source.prepare(batch)
        for piece in batch:
            placement = next(placements)
            yield placement, _padded(source.load(piece), placement.piece.shape)


def _padded(data: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(data.shape) == shape:
        return data
    whole = torch.zeros(shape, dtype=raw_view(data).dtype)
    whole[tuple(slice(0, size) for size in data.shape)] = raw_view(data)
    return whole


def _is_small(piece: PlannedPiece) -> bool:
    return piece.num_bytes < SMALL_BYTES
