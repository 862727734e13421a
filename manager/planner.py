"""Who writes which region of which leaf, and which stored regions a restore reads.

Pure: works on shapes, regions and process indices. Knows nothing of tensors, files' bytes, storage or communication;
the same tables give the same plan, whoever computes it.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, get_args

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import IncompleteCoverageError, InvalidArgumentError
from safepoint.formats.manifest import LeafEntry, Mode, Scope, ShardEntry, TreePath, display_path
from safepoint.formats.region import Region, check_tiling, subtract

if TYPE_CHECKING:
    from safepoint.manager.adapters.base import ArraySpec

__all__ = [
    "AUTO_CONSOLIDATED_BYTES",
    "SavePlan",
    "Scope",
    "WriteAssignment",
    "choose_mode",
    "plan_restore",
    "plan_save",
]

AUTO_CONSOLIDATED_BYTES = 1 << 30
"""Largest replicated state, in bytes, for which mode "auto" lets the primary write all of it."""

Table = Mapping[TreePath, "ArraySpec"]


@dataclass(frozen=True, slots=True)
class WriteAssignment:
    """One region of one leaf, written once.

    Attributes:
        path: the leaf.
        region: in the leaf's global coordinates; inside one region that `source` holds.
        source: the process whose copy is the truth.
        writer: the process that puts it in a file; another one than `source` only in consolidated mode.
    """

    path: TreePath
    region: Region
    source: int
    writer: int


@dataclass(frozen=True, slots=True)
class SavePlan:
    """All assignments of a save, in the order in which every process works through its own.

    Both ends of each transfer meet them in this one order, so that transfers between processes need no tags.
    """

    mode: Mode
    scope: Scope
    assignments: tuple[WriteAssignment, ...]

    def written_by(self, process_index: int) -> tuple[WriteAssignment, ...]:
        """Return what this process puts into its files."""
        return tuple(item for item in self.assignments if item.writer == process_index)

    def involving(self, process_index: int) -> SavePlan:
        """Return the part of the plan in which this process reads or writes."""
        mine = (item for item in self.assignments if process_index in (item.source, item.writer))
        return SavePlan(self.mode, self.scope, tuple(mine))


def choose_mode(
    requested: str, *, process_count: int, table_by_process: Sequence[Table], scope: Scope
) -> tuple[Mode, str]:
    """Choose the mode of a save; return it and the reason, for people.

    "auto" is consolidated for one process, and for a state of at most `AUTO_CONSOLIDATED_BYTES` that the primary
    holds as a whole; it is sharded otherwise, and always where each process has a root of its own.

    Called by: the primary only.
    """
    modes = get_args(Mode)
    if requested not in (*modes, "auto"):
        raise InvalidArgumentError(f'mode is one of "auto", {", ".join(map(repr, modes))}, got {requested!r}')
    if scope == "per_process":
        if requested == "consolidated":
            raise InvalidArgumentError(
                "consolidated mode needs one root that all processes see",
                hint='Use mode="sharded" (or "auto") with root_scope="per_process".',
            )
        return "sharded", "each process has a root of its own"
    if requested == "consolidated":
        return "consolidated", "as requested"
    if requested == "sharded":
        return "sharded", "as requested"
    if process_count == 1:
        return "consolidated", "one process"
    return _choose_for_many(table_by_process)


def _choose_for_many(tables: Sequence[Table]) -> tuple[Mode, str]:
    primary = tables[0]
    num_bytes = 0
    seen: set[TreePath] = set()
    for table in _distinct(tables):
        for path, spec in table.items():
            if path in seen:
                continue
            seen.add(path)
            if not _holds_whole(primary.get(path)):
                return "sharded", f"process 0 does not hold the whole of {display_path(path)}"
            num_bytes += _num_bytes(spec.dtype, Region.whole(spec.shape))
            if num_bytes > AUTO_CONSOLIDATED_BYTES:
                return "sharded", f"the state is larger than {AUTO_CONSOLIDATED_BYTES >> 20} MiB"
    return "consolidated", "process 0 holds the whole state and it is small"


def _holds_whole(spec: ArraySpec | None) -> bool:
    if spec is None:
        return False
    whole = Region.whole(spec.shape)
    return whole in spec.regions or not subtract(whole, spec.regions)


def plan_save(tables: Sequence[Table], mode: Mode, scope: Scope) -> SavePlan:
    """Plan a save over what each process holds.

    In sharded mode each distinct region has one writer, which holds it. Regions that overlap without being equal are
    cut until the pieces tile the leaf. Replicas are spread so that no piece could move to another of its holders
    and leave the two more even: where all processes hold everything, their bytes differ by less than one leaf.
    In consolidated mode the primary writes everything; with private roots each process writes all that it holds.

    Called by: the primary only.

    Args:
        tables: array leaves by process index. Processes that hold the same should share one object: it is then
            looked at once.
        mode: as `choose_mode` returned it.
        scope: of the root.

    Raises:
        IncompleteCoverageError: no process holds some elements of a leaf; names it.
    """
    if scope == "per_process":
        return SavePlan(mode, scope, tuple(_private_assignments(tables)))
    pieces = _cut_all(tables)
    if mode == "consolidated":
        sources = (piece.holders[0] for piece in pieces)
        chosen = tuple(WriteAssignment(p.path, p.region, src, 0) for p, src in zip(pieces, sources, strict=True))
    else:
        _balance(pieces, len(tables))
        chosen = tuple(WriteAssignment(p.path, p.region, p.writer, p.writer) for p in pieces)
    return SavePlan(mode, scope, chosen)


def _private_assignments(tables: Sequence[Table]) -> Iterator[WriteAssignment]:
    for process, table in enumerate(tables):
        for path, spec in table.items():
            held: _Held = [(region, ()) for region in spec.regions]
            if len(held) > 1:
                held = sorted(_cut_overlaps(held))
            for region, _ in held:
                yield WriteAssignment(path, region, process, process)


@dataclass(slots=True)
class _Piece:
    path: TreePath
    region: Region
    num_bytes: int
    holders: tuple[int, ...]
    writer: int = field(default=-1)


def _distinct(tables: Sequence[Table]) -> list[Table]:
    return list({id(table): table for table in tables}.values())


def _cut_all(tables: Sequence[Table]) -> list[_Piece]:
    """Return the pieces that tile every leaf, with their holders in ascending order; leaves in first-seen order."""
    sharers: dict[int, list[int]] = {}
    for process, table in enumerate(tables):
        sharers.setdefault(id(table), []).append(process)
    held: dict[TreePath, list[tuple[ArraySpec, list[int]]]] = {}
    for table in _distinct(tables):
        processes = sharers[id(table)]
        for path, spec in table.items():
            held.setdefault(path, []).append((spec, processes))
    merged: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}  # tuples of holders are shared between leaves
    pieces: list[_Piece] = []
    for path, specs in held.items():
        dtype = specs[0][0].dtype
        for region, groups in _cut(path, specs):
            holders = merged.get(groups)
            if holders is None:
                holders = merged[groups] = tuple(sorted({process for group in groups for process in group}))
            pieces.append(_Piece(path, region, _num_bytes(dtype, region), holders))
    return pieces


_Held = list[tuple[Region, tuple[tuple[int, ...], ...]]]
"""Regions, each with the groups of processes that hold it."""


def _cut(path: TreePath, specs: Sequence[tuple[ArraySpec, list[int]]]) -> _Held:
    shape = specs[0][0].shape
    whole = Region.whole(shape)
    if whole.is_empty:
        # Nothing to hold, but the leaf is written all the same; best by a process that has a part of it.
        groups = tuple(tuple(processes) for spec, processes in specs if spec.regions)
        return [(whole, groups or tuple(tuple(processes) for _, processes in specs))]
    by_region: dict[Region, list[tuple[int, ...]]] = {}
    for spec, processes in specs:
        for region in spec.regions:
            if not region.is_empty:
                by_region.setdefault(region, []).append(tuple(processes))
    distinct: _Held = [(region, tuple(groups)) for region, groups in by_region.items()]
    if len(distinct) == 1 and distinct[0][0] == whole:
        return distinct
    if sum(region.num_elements for region, _ in distinct) > whole.num_elements:
        distinct = _cut_overlaps(distinct)
    distinct.sort(key=_offsets)
    check_tiling(shape, [region for region, _ in distinct], leaf=display_path(path))
    return distinct


def _offsets(item: tuple[Region, tuple[tuple[int, ...], ...]]) -> tuple[int, ...]:
    return item[0].offsets


def _cut_overlaps(held: _Held) -> _Held:
    """Cut regions along each other's borders: the pieces are disjoint and each knows everybody that holds it."""
    pieces: _Held = []
    # Large regions first: they are then cut by the small ones, and not the small ones by each other.
    for region, groups in sorted(held, key=lambda item: (-item[0].num_elements, item[0])):
        cut: _Held = []
        rest = [region]
        for piece, holders in pieces:
            common = piece.intersect(region) if rest else None
            if common is None:
                cut.append((piece, holders))
                continue
            cut.append((common, holders + groups))
            cut.extend((part, holders) for part in subtract(piece, [common]))
            rest = [part for whole in rest for part in subtract(whole, [common])]
        cut.extend((part, groups) for part in rest)
        pieces = cut
    return pieces


def _balance(pieces: Sequence[_Piece], process_count: int) -> None:
    """Give each piece a writer among its holders, evenly by bytes."""
    loads = [0] * process_count
    # Pieces with few holders have little choice: they come first, and the more widely held ones fill the gaps.
    ordered = sorted(
        range(len(pieces)), key=lambda i: (len(pieces[i].holders), pieces[i].holders, -pieces[i].num_bytes, i)
    )
    groups = [
        (holders, [pieces[i] for i in indices])
        for holders, indices in groupby(ordered, key=lambda i: pieces[i].holders)
    ]
    for holders, members in groups:
        lightest = [(loads[process], process) for process in holders]
        heapq.heapify(lightest)
        for piece in members:
            load, piece.writer = lightest[0]
            loads[piece.writer] = load + piece.num_bytes
            heapq.heapreplace(lightest, (loads[piece.writer], piece.writer))
    replicated = [group for group in groups if len(group[0]) > 1]
    # Each move makes the sum of the squared loads smaller, so this ends; two or three rounds are usual.
    while any([_improve(holders, members, loads) for holders, members in replicated]):  # noqa: C419 each must run
        pass


def _improve(holders: Sequence[int], members: Sequence[_Piece], loads: list[int]) -> bool:
    """Move pieces from holders that write more than need be to the one that writes least."""
    moved = False
    lightest = min(holders, key=loads.__getitem__)
    for piece in members:
        if loads[piece.writer] - loads[lightest] > piece.num_bytes > 0:
            loads[piece.writer] -= piece.num_bytes
            loads[lightest] += piece.num_bytes
            piece.writer = lightest
            lightest = min(holders, key=loads.__getitem__)
            moved = True
    return moved


def _num_bytes(dtype: str, region: Region) -> int:
    return region.num_elements * ITEM_BYTES[dtype]


def plan_restore(leaf: LeafEntry, region: Region) -> list[tuple[ShardEntry, Region]]:
    """Return which part of which stored shard makes up `region` of this leaf, each element once, in file order.

    Raises:
        IncompleteCoverageError: the stored shards do not hold all of it.
    """
    if region.is_empty:
        return []
    if len(leaf.shards) == 1 and (leaf.shards[0].region is region or leaf.shards[0].region == region):
        return [(leaf.shards[0], region)]
    parts = [(shard, common) for shard in leaf.shards if (common := shard.region.intersect(region)) is not None]
    if len(parts) == 1 and parts[0][1] == region:
        return parts
    if sum(common.num_elements for _, common in parts) > region.num_elements:
        parts = _without_repeats(parts)
    moved = (
        Region(tuple(o - base for o, base in zip(common.offsets, region.offsets, strict=True)), common.shape)
        for _, common in parts
    )
    try:
        check_tiling(region.shape, moved, leaf=display_path(leaf.path))
    except IncompleteCoverageError as error:
        raise IncompleteCoverageError(
            f"the step does not hold all of the region {region.to_json()}: {error.message}",
            leaf=error.leaf,
            hint="A step written to private roots can only be restored where the same regions are wanted.",
        ) from None
    return sorted(parts, key=lambda part: (part[0].file, part[0].offset, part[1]))


def _without_repeats(parts: Sequence[tuple[ShardEntry, Region]]) -> list[tuple[ShardEntry, Region]]:
    taken: list[Region] = []
    kept: list[tuple[ShardEntry, Region]] = []
    for shard, common in parts:
        kept.extend((shard, rest) for rest in subtract(common, taken))
        taken.append(common)
    return kept
