"""Where a writer takes the host bytes of a piece from: the live state, or other processes.

A writer asks for its pieces in file order, batch by batch, so that no more of the state than one batch (or one leaf,
where a leaf is larger) is on the host twice. Knows nothing of files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch

from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.manager.adapters import ArrayLeaf, prefetch
from safepoint.manager.collecting import paused_collection
from safepoint.manager.packing import pack

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from safepoint.formats.manifest import TreePath
    from safepoint.formats.region import Region
    from safepoint.manager.adapters import ArraySpec
    from safepoint.manager.coordination import Transport
    from safepoint.manager.planner import WriteAssignment

__all__ = [
    "GatherSource",
    "LiveSource",
    "PlannedPiece",
    "Source",
    "StateSource",
    "batches",
    "byte_view",
    "flat_bytes",
    "packed",
    "piece_bytes",
    "raw_view",
    "region_bytes",
    "send_parts",
]

BATCH_BYTES = 32 << 20
"""How much is brought from a device at once. Larger batches measured slower: their host memory is fresh each time."""

RUN_BYTES = 32 << 20
"""How much is copied at once: pieces that are not contiguous on the host exist twice until then."""

_END = -1
"""Fills the rest of an order of parts."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedPiece:
    """One contiguous entry of a file: a region of a leaf, and the held parts that make it up.

    A copy is there for other readers; the manifest lists the entry that it is a copy of.
    """

    path: TreePath
    key: str
    dtype: str
    region: Region
    num_bytes: int
    parts: tuple[WriteAssignment, ...]
    is_copy: bool = False


def region_bytes(spec: ArraySpec, region: Region) -> int:
    """Return the size of a region of a leaf in bytes."""
    return region.num_elements * ITEM_BYTES[spec.dtype]


def piece_bytes(piece: PlannedPiece) -> int:
    """Return the piece's size in bytes."""
    return piece.num_bytes


class Source(Protocol):
    """Gives a writer the bytes of its pieces."""

    def prepare(self, pieces: Sequence[PlannedPiece]) -> None:
        """Announce the pieces that will be loaded next."""

    def load(self, piece: PlannedPiece) -> torch.Tensor:
        """Return the piece as a contiguous host tensor, valid until its memory is changed."""


class StateSource(Source, Protocol):
    """Gives pieces of live state, which may be on a device."""

    def on_device(self, piece: PlannedPiece) -> torch.Tensor | None:
        """Return the piece as it lies on a CUDA device, strided, where it need not be loaded; else None."""


class LiveSource:
    """The state itself; every part is held by this process."""

    def __init__(self, arrays: Mapping[TreePath, ArrayLeaf]) -> None:
        self._arrays = arrays

    def prepare(self, pieces: Sequence[PlannedPiece]) -> None:
        """Start one device-to-host copy for all of them."""
        prefetch([self._arrays[path] for path in dict.fromkeys(piece.path for piece in pieces)])

    def load(self, piece: PlannedPiece) -> torch.Tensor:
        """Return live memory where the piece is contiguous on the host, a copy elsewhere."""
        leaf = self._arrays[piece.path]
        if len(piece.parts) == 1:
            return leaf.read(piece.region)
        whole = torch.empty(piece.region.shape, dtype=torch_dtype(piece.dtype))
        for part in piece.parts:
            raw_view(whole)[part.region.slices_in(piece.region)].copy_(raw_view(leaf.read(part.region)))
        return whole

    def on_device(self, piece: PlannedPiece) -> torch.Tensor | None:
        """Return live memory where that is in one place."""
        return self._arrays[piece.path].device_memory(piece.region) if len(piece.parts) == 1 else None


class GatherSource:
    """The state of all processes, gathered on the primary one leaf at a time."""

    def __init__(
        self,
        arrays: Mapping[TreePath, ArrayLeaf],
        transport: Transport,
        *,
        process_index: int,
        deadline_secs: float,
    ) -> None:
        self._arrays = arrays
        self._transport = transport
        self._process_index = process_index
        self._deadline_secs = deadline_secs

    def prepare(self, pieces: Sequence[PlannedPiece]) -> None:
        """Start one device-to-host copy for the parts that are held here."""
        here = (part.path for piece in pieces for part in piece.parts if part.source == self._process_index)
        prefetch([self._arrays[path] for path in dict.fromkeys(here)])

    def load(self, piece: PlannedPiece) -> torch.Tensor:
        """Receive the parts that others hold, in the order in which `send_parts` sends them."""
        if len(piece.parts) == 1 and piece.parts[0].source == self._process_index:
            return self._arrays[piece.path].read(piece.region)
        whole = torch.empty(piece.region.shape, dtype=torch_dtype(piece.dtype))
        for part in piece.parts:
            if part.source == self._process_index:
                data = self._arrays[piece.path].read(part.region)
            elif part.region == piece.region:
                self._receive(whole, part)
                continue
            else:
                data = torch.empty(part.region.shape, dtype=whole.dtype)
                self._receive(data, part)
            raw_view(whole)[part.region.slices_in(piece.region)].copy_(raw_view(data))
        return whole

    def on_device(self, piece: PlannedPiece) -> torch.Tensor | None:
        """Return live memory where that is in one place, and that is this process."""
        here = len(piece.parts) == 1 and piece.parts[0].source == self._process_index
        return self._arrays[piece.path].device_memory(piece.region) if here else None

    def _receive(self, data: torch.Tensor, part: WriteAssignment) -> None:
        self._transport.receive(flat_bytes(data), source=part.source, deadline_secs=self._deadline_secs)

    def ask_again(self, loaded: Sequence[PlannedPiece], again: Sequence[PlannedPiece]) -> None:
        """Have the parts of some pieces sent once more: none is kept here, and not all that is looked at is written.

        Called by: the primary, once after all pieces were loaded, whether or not it wants any again.

        Args:
            loaded: all pieces, in the order in which they were loaded.
            again: those to be loaded again, in the order in which they will be.
        """
        places: dict[int, dict[tuple[TreePath, Region], int]] = {}
        for part in self._sent(loaded):
            known = places.setdefault(part.source, {})
            known[part.path, part.region] = len(known)
        orders = {source: [_END] * len(known) for source, known in places.items()}
        counts = dict.fromkeys(places, 0)
        for part in self._sent(again):
            orders[part.source][counts[part.source]] = places[part.source][part.path, part.region]
            counts[part.source] += 1
        for source, order in orders.items():
            message = flat_bytes(torch.tensor(order, dtype=torch.int64))
            self._transport.send(message, to=source, deadline_secs=self._deadline_secs)

    def send_again(self, sent: Sequence[WriteAssignment]) -> None:
        """Send what the primary asks for again.

        Called by: every process that sent something, once after all of it was sent.
        """
        order = torch.empty(len(sent), dtype=torch.int64)
        self._transport.receive(flat_bytes(order), source=sent[0].writer, deadline_secs=self._deadline_secs)
        parts = [sent[index] for index in order.tolist() if index != _END]
        send_parts(parts, self._arrays, self._transport, deadline_secs=self._deadline_secs)

    def _sent(self, pieces: Sequence[PlannedPiece]) -> Iterator[WriteAssignment]:
        return (part for piece in pieces for part in piece.parts if part.source != self._process_index)


def packed(
    pieces: Sequence[PlannedPiece],
    source: Source,
    room_for: Callable[[int], torch.Tensor],
    *,
    run_bytes: int = RUN_BYTES,
    copy: Callable[[Sequence[torch.Tensor], torch.Tensor], None] = pack,
) -> Iterator[torch.Tensor]:
    """Load pieces run by run, and copy each run to where `room_for(num_bytes)` says; yield that.

    Args:
        pieces: all in one call.
        source: of them.
        room_for: returns the memory that a run fills.
        run_bytes: of a run at most, or of one piece.
        copy: puts the pieces of a run into the memory of the run.
    """
    for batch in batches(pieces, piece_bytes):
        source.prepare(batch)
        for run in batches(batch, piece_bytes, run_bytes):
            out = room_for(sum(piece.num_bytes for piece in run))
            with paused_collection():
                copy([source.load(piece) for piece in run], out)
            yield out


def send_parts(
    parts: Sequence[WriteAssignment],
    arrays: Mapping[TreePath, ArrayLeaf],
    transport: Transport,
    *,
    deadline_secs: float,
) -> None:
    """Send what the writers lack, in the order in which they write it.

    Called by: every process but the writer, for the parts that it is the source of.
    """

    def part_bytes(part: WriteAssignment) -> int:
        return region_bytes(arrays[part.path].spec, part.region)

    for batch in batches(parts, part_bytes):
        prefetch([arrays[path] for path in dict.fromkeys(part.path for part in batch)])
        for part in batch:
            data = arrays[part.path].read(part.region)
            transport.send(flat_bytes(data), to=part.writer, deadline_secs=deadline_secs)


def batches(items: Iterable[T], size_of: Callable[[T], int], limit_bytes: int = BATCH_BYTES) -> Iterator[list[T]]:
    """Cut items into runs of at most `limit_bytes`, or of one item."""
    batch: list[T] = []
    total = 0
    for item in items:
        size = size_of(item)
        if batch and total + size > limit_bytes:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size
    if batch:
        yield batch


def flat_bytes(data: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous host tensor as uint8, one dimension."""
    return data.detach().reshape(-1).view(torch.uint8)


def raw_view(data: torch.Tensor) -> torch.Tensor:
    """Return the tensor with an integer dtype of the same width, so that every dtype can be copied as bits."""
    same_width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
    return data.detach().view(same_width[data.element_size()])


def byte_view(data: torch.Tensor) -> memoryview:
    """Return the memory of a contiguous host tensor."""
    return flat_bytes(data).numpy().data
