"""From the leaves that a restore wants to the bytes of the step's files, and back into the leaves.

Bytes go straight into a leaf's own memory where it is contiguous on the host; elsewhere through a buffer of bounded
size. Knows nothing of processes or of how a step was chosen.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

from safepoint.formats.codecs import CODECS
from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.formats.manifest import LeafEntry, Manifest, ShardEntry, TreePath, display_path
from safepoint.formats.reading import read_segments
from safepoint.formats.region import Region
from safepoint.formats.segments import ReadSegment
from safepoint.manager.adapters import XLA_KINDS
from safepoint.manager.errors import CorruptDataError
from safepoint.manager.planner import plan_restore
from safepoint.manager.sources import byte_view, raw_view
from safepoint.manager.unpacking import SMALL_BYTES, Unpacker

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from safepoint.formats.storage import Storage
    from safepoint.manager.adapters import ArrayLeaf

__all__ = ["Fetch", "collects", "fetch_leaves", "fill_leaves", "num_fetched_bytes", "plan_fetches", "stored_bytes"]

BUFFER_BYTES = 256 << 20
"""How much is read through buffers before it is handed to the leaves, unless one part alone is larger."""

SHORT_RUN_BYTES = 4096
"""Below this, the bytes between the runs are read too, and the runs picked out in memory."""


class Fetch(NamedTuple):
    """One stored region that a leaf wants (a part of)."""

    entry: LeafEntry
    leaf: ArrayLeaf
    target: Region
    """The region held by the leaf."""
    shard: ShardEntry
    common: Region
    """What the two have in common: to be read."""


def plan_fetches(manifest: Manifest, wanted: Mapping[TreePath, ArrayLeaf]) -> list[Fetch]:
    """Return all reads of this process: in file order, and leaf by leaf for those that collect on the host.

    Raises:
        IncompleteCoverageError: the step does not hold all of a wanted region.
    """
    entries = {entry.path: entry for entry in manifest.leaves}
    fetches: list[Fetch] = []
    collected: list[list[Fetch]] = []
    for path, leaf in wanted.items():
        entry = entries[path]
        own = fetches
        if collects(leaf):
            collected.append(own := [])
        for target in leaf.spec.regions:
            for shard, common in plan_restore(entry, target):
                own.append(Fetch(entry, leaf, target, shard, common))
    return [fetch for own in (fetches, *collected) for fetch in sorted(own, key=_place)]


_place = attrgetter("shard.file", "shard.offset")


def num_fetched_bytes(fetches: Sequence[Fetch]) -> int:
    """Return what the leaves want, in bytes; reads round out to blocks."""
    return sum(fetch.common.num_elements * ITEM_BYTES[fetch.entry.dtype] for fetch in fetches)


def fetch_leaves(
    storage: Storage,
    prefix: str,
    manifest: Manifest,
    fetches: Sequence[Fetch],
    *,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Read everything, verified, into the leaves; return the number of bytes read from the storage.

    Otherwise as `fill_leaves` does. `progress` is told as by `read_segments`.
    """
    return fill_leaves(
        fetches, lambda segments: read_segments(storage, prefix, manifest.files, segments, progress=progress)
    )


def fill_leaves(fetches: Sequence[Fetch], read: Callable[[Sequence[ReadSegment]], int]) -> int:
    """Have everything read, verified, into the leaves; return the sum of what `read` returns.

    A leaf of a device that takes its data as a whole gets it as soon as that is complete, so that no more than a batch
    is on the host. Otherwise the leaves' `finish` is the caller's to call.

    Args:
        fetches: of `plan_fetches`, all or some; all of a leaf that is taken to its device as a whole.
        read: fills the targets of segments, and returns how many bytes it read from the storage.

    Raises:
        CorruptDataError: bytes differ from their digest; `target_modified` is set, names leaf and file.
        StorageError: the storage failed.
    """
    num_bytes = 0
    waiting = _batches(fetches)
    while True:
        batch, complete = next(waiting, ([], []))
        segments = [segment for one in batch for segment in one.segments]
        if not batch:
            return num_bytes
        num_bytes += read(segments)
        for one in batch:
            if isinstance(one, _Encoded):
                one.begin()
        for one in batch:
            one.deliver()
        for leaf in complete:
            leaf.finish()


def collects(leaf: ArrayLeaf) -> bool:
    """Say whether the leaf collects its data on the host until `finish` takes it to the device as a whole."""
    return leaf.spec.kind in XLA_KINDS


class _Read(Protocol):
    segments: list[ReadSegment]
    buffer_bytes: int

    def deliver(self) -> None: ...


@dataclass(kw_only=True, slots=True)
class _Direct:
    """Straight into the leaf's memory."""

    segments: list[ReadSegment]
    buffer_bytes: int = 0

    def deliver(self) -> None:
        """Do nothing: it is there."""


@dataclass(kw_only=True, slots=True)
class _Buffered:
    """Through a buffer that holds `region`, of which `common` is wanted."""

    leaf: ArrayLeaf
    region: Region
    common: Region
    buffer: torch.Tensor
    buffer_bytes: int
    segments: list[ReadSegment] = field(default_factory=list)

    def deliver(self) -> None:
        """Hand the wanted part to the leaf and let the buffer go."""
        data = self.buffer
        if self.region != self.common:
            data = raw_view(data)[self.common.slices_in(self.region)].view(data.dtype)
        self.leaf.write(self.common, data)
        self.buffer = torch.empty(0)
        self.segments = []


@dataclass(kw_only=True, slots=True)
class _Encoded:
    """A shard that is encoded, read and decoded whole, of which `common` is wanted."""

    fetch: Fetch
    memory: torch.Tensor
    buffer_bytes: int
    segments: list[ReadSegment]
    decoded: torch.Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    wait: Callable[[], None] | None = None

    def begin(self) -> None:
        """Begin to decode what was read."""
        shard = self.fetch.shard
        num_bytes = shard.stored_region.num_elements * ITEM_BYTES[self.fetch.entry.dtype]
        self.decoded = torch.empty(num_bytes, dtype=torch.uint8)
        self.wait = CODECS[str(shard.codec)].decode(byte_view(self.memory), byte_view(self.decoded))

    def deliver(self) -> None:
        """Wait until it is decoded, hand the wanted part to the leaf, and let the buffers go."""
        leaf, stored = self.fetch.leaf, self.fetch.shard.stored_region
        assert self.wait is not None
        try:
            self.wait()
        except CorruptDataError as error:
            error.target_modified = True
            raise error.with_context(leaf=leaf.name) from None
        data = self.decoded.view(torch_dtype(self.fetch.entry.dtype)).reshape(stored.shape)
        if stored != self.fetch.common:
            data = raw_view(data)[self.fetch.common.slices_in(stored)].contiguous().view(data.dtype)
        leaf.write(self.fetch.common, data)
        self.memory = self.decoded = torch.empty(0)
        self.wait = None
        self.segments = []


def _encoded(fetch: Fetch) -> _Read:
    shard = fetch.shard
    memory = torch.empty(shard.num_bytes, dtype=torch.uint8)
    segment = ReadSegment(file=shard.file, offset=shard.offset, target=byte_view(memory), leaf=fetch.leaf.name)
    decoded = shard.stored_region.num_elements * ITEM_BYTES[fetch.entry.dtype]
    return _Encoded(fetch=fetch, memory=memory, buffer_bytes=shard.num_bytes + decoded, segments=[segment])


def _batches(fetches: Sequence[Fetch]) -> Iterator[tuple[list[_Read], list[ArrayLeaf]]]:
    """Cut the reads into batches of bounded memory, each with the collecting leaves that are complete after it."""
    last = {id(fetch.leaf): fetch for fetch in fetches if collects(fetch.leaf)}
    batch: list[_Read] = []
    complete: list[ArrayLeaf] = []
    total = 0
    for fetch, reads in _reads(fetches):
        for read in reads:
            if batch and total + read.buffer_bytes > BUFFER_BYTES:
                yield batch, complete
                batch, complete, total = [], [], 0
            batch.append(read)
            total += read.buffer_bytes
        if last.get(id(fetch.leaf)) is fetch:
            complete.append(fetch.leaf)
    if batch:
        yield batch, complete


def _reads(fetches: Sequence[Fetch]) -> Iterator[tuple[Fetch, Iterable[_Read]]]:
    """Yield what is to be read, with the last of the fetches that it serves; neighbours that are small are one read."""
    run: list[Fetch] = []
    addresses: list[int] = []
    file = end = 0
    for fetch in fetches:
        shard = fetch.shard
        address = _small_address(fetch)
        if run and (address is None or shard.offset != end or shard.file != file):
            yield run[-1], [_packed(run, addresses)]
            run, addresses = [], []
        if address is None:
            yield fetch, _unpacked(fetch)
            continue
        run.append(fetch)
        addresses.append(address)
        file, end = shard.file, shard.offset + shard.num_bytes
    if run:
        yield run[-1], [_packed(run, addresses)]


def _small_address(fetch: Fetch) -> int | None:
    """Return where a small leaf lives that is stored whole, as it is in memory; else None."""
    _, leaf, target, shard, common = fetch
    if not 0 < shard.num_bytes < SMALL_BYTES or common is not target:
        return None
    if shard.codec is not None or shard.stored_shape is not None:
        return None
    if shard.region is not target and shard.region != target:
        return None
    return leaf.address(target)


def _packed(run: Sequence[Fetch], addresses: Sequence[int]) -> _Read:
    first = run[0]
    target = Unpacker([fetch.leaf for fetch in run], addresses, [fetch.shard.num_bytes for fetch in run])
    return _Direct(
        segments=[ReadSegment(file=first.shard.file, offset=first.shard.offset, target=target, leaf=first.leaf.name)]
    )


def _unpacked(fetch: Fetch) -> Iterable[_Read]:
    if fetch.shard.codec is not None:
        return [_encoded(fetch)]
    read = _direct(fetch)
    return _buffered(fetch) if read is None else [read]


def _direct(fetch: Fetch) -> _Read | None:
    memory = fetch.leaf.target_buffer(fetch.target)
    if memory is None:
        return None
    item_bytes = ITEM_BYTES[fetch.entry.dtype]
    inside = _single_run(fetch.common, fetch.target)
    stored = _single_run(fetch.common, fetch.shard.stored_region)
    if inside is None or stored is None:
        return None
    num_bytes = fetch.common.num_elements * item_bytes
    start = inside * item_bytes
    segment = ReadSegment(
        file=fetch.shard.file,
        offset=fetch.shard.offset + stored * item_bytes,
        target=memory[start : start + num_bytes],
        leaf=fetch.leaf.name,
    )
    return _Direct(segments=[segment], buffer_bytes=num_bytes if collects(fetch.leaf) else 0)


def stored_bytes(fetch: Fetch) -> tuple[int, int] | None:
    """Return where what a fetch reads begins and ends in its file; None where its bytes do not follow each other."""
    shard, outer = fetch.shard, fetch.shard.stored_region
    if shard.codec is not None:
        return shard.offset, shard.offset + shard.num_bytes
    if fetch.common.is_empty:
        return None
    item_bytes = ITEM_BYTES[fetch.entry.dtype]
    region = _widened(fetch.common, outer, item_bytes)
    first = _single_run(region, outer)
    if first is None:
        return None
    start = shard.offset + first * item_bytes
    return start, start + region.num_elements * item_bytes


def _widened(region: Region, outer: Region, item_bytes: int) -> Region:
    """Return the region with what lies between its runs in `outer`, where these are so short that it is read, too."""
    _, run = next(region.runs_in(outer))
    if run < region.num_elements and run * item_bytes < SHORT_RUN_BYTES:
        return Region((region.offsets[0], *outer.offsets[1:]), (region.shape[0], *outer.shape[1:]))
    return region


def _single_run(region: Region, outer: Region) -> int | None:
    """Return the first element of `region` in `outer`'s C order if it is contiguous there."""
    if region is outer or region == outer:
        return 0
    runs = region.runs_in(outer)
    start, length = next(runs)
    return start if length == region.num_elements else None


def _buffered(fetch: Fetch) -> Iterator[_Read]:
    for part in _slabs(fetch.common, ITEM_BYTES[fetch.entry.dtype], fetch.shard.stored_region):
        yield _one_buffered(fetch, part)


def _slabs(common: Region, item_bytes: int, outer: Region) -> Iterator[Region]:
    """Cut along the first dimension so that each part, with what lies between its runs, fits a buffer."""
    if not common.shape or common.shape[0] <= 1:
        yield common
        return
    row_bytes = max(1, outer.num_elements // max(1, outer.shape[0])) * item_bytes
    rows = max(1, (BUFFER_BYTES // 4) // row_bytes)
    for start in range(0, common.shape[0], rows):
        size = min(rows, common.shape[0] - start)
        yield Region((common.offsets[0] + start, *common.offsets[1:]), (size, *common.shape[1:]))


def _one_buffered(fetch: Fetch, common: Region) -> _Read:
    item_bytes = ITEM_BYTES[fetch.entry.dtype]
    outer = fetch.shard.stored_region
    region = _widened(common, outer, item_bytes)
    buffer = torch.empty(region.shape, dtype=torch_dtype(fetch.entry.dtype))
    memory = byte_view(buffer)
    read = _Buffered(leaf=fetch.leaf, region=region, common=common, buffer=buffer, buffer_bytes=len(memory))
    filled = 0
    name = display_path(fetch.entry.path)
    for start, length in region.runs_in(outer):
        num_bytes = length * item_bytes
        read.segments.append(
            ReadSegment(
                file=fetch.shard.file,
                offset=fetch.shard.offset + start * item_bytes,
                target=memory[filled : filled + num_bytes],
                leaf=name,
            )
        )
        filled += num_bytes
    return read
