"""Which stored blocks several processes of one host want alike, and which of them reads which from the storage.

Pure: every process that is given the same wants comes to the same plan. Knows nothing of reading and of transports.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.blocks import block_bounds
from safepoint.formats.run_reading import BlockRun, run_bytes
from safepoint.manager.fetching import collects, stored_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.manager.fetching import Fetch

__all__ = [
    "ROUND_BYTES",
    "BlockAt",
    "Group",
    "Round",
    "groups_of",
    "rounds_of",
    "split_fetches",
    "wants_from_bytes",
    "wants_to_bytes",
]


WORTH_BYTES = 16 << 20
"""Below this it takes longer to agree on who reads what than to read it once more."""

ROUND_BYTES = 64 << 20
"""How much is handed on at once, by all members of a group together."""

BlockAt = tuple[int, int]
"""A file's index and a block's number in it."""


@dataclass(frozen=True, slots=True)
class Group:
    """Processes of one host, and what exactly these want.

    Attributes:
        members: their indices, ascending.
        runs: the blocks of what they want, one run for each thing, in the order in which the first member takes them.
    """

    members: tuple[int, ...]
    runs: tuple[BlockRun, ...]

    def may_be_late(self, own: int, earlier: Iterable[Group]) -> bool:
        """Say whether another member may still be busy with an earlier group, of which `own` is no member."""
        others = set(self.members)
        return any(own not in group.members and not others.isdisjoint(group.members) for group in earlier)


@dataclass(frozen=True, slots=True)
class Round:
    """Blocks that are handed on together.

    Attributes:
        shares: for each member of the group, in order, what it reads and hands to the others.
    """

    shares: tuple[tuple[BlockRun, ...], ...]

    def blocks(self) -> list[BlockAt]:
        """Return all blocks, by file and number."""
        return sorted(_blocks_of(run for share in self.shares for run in share))


def blocks_touched(fetch: Fetch, files: Sequence[FileEntry]) -> BlockRun | None:
    """Return the blocks that a fetch reads; None where they do not follow each other."""
    span = stored_bytes(fetch)
    if span is None:
        return None
    file, (start, end) = fetch.shard.file, span
    block_bytes = files[file].block_bytes
    return BlockRun(file, start // block_bytes, (end - 1) // block_bytes)


def wants_to_bytes(fetches: Iterable[Fetch], files: Sequence[FileEntry]) -> bytes:
    """Return what a process wants, each run of blocks once, in order, as JSON."""
    runs = dict.fromkeys(run for fetch in fetches if (run := blocks_touched(fetch, files)) is not None)
    return json.dumps(list(runs), separators=(",", ":")).encode()


def wants_from_bytes(data: bytes) -> list[BlockRun]:
    """Return what `wants_to_bytes` was made from."""
    return [BlockRun(*run) for run in json.loads(data)]


def groups_of(wants: Mapping[int, Sequence[BlockRun]], files: Sequence[FileEntry]) -> list[Group]:
    """Return all groups of one host that are worth it, in the order in which they are served.

    Args:
        wants: by process.
        files: as in the step's manifest.
    """
    wanted_by: dict[BlockRun, list[int]] = {}
    for member in sorted(wants):
        for run in wants[member]:
            wanted_by.setdefault(run, []).append(member)
    runs_of: dict[tuple[int, ...], list[BlockRun]] = {}
    for run, members in wanted_by.items():
        if len(members) > 1:
            runs_of.setdefault(tuple(members), []).append(run)
    groups = [Group(members, tuple(runs)) for members, runs in sorted(runs_of.items())]
    return [group for group in groups if _block_bytes(_blocks_of(group.runs), files) >= WORTH_BYTES]


def split_fetches(
    fetches: Sequence[Fetch], groups: Sequence[Group], files: Sequence[FileEntry]
) -> tuple[list[list[Fetch]], list[Fetch]]:
    """Return what is fetched with each group, and what alone; in the order of `fetches`.

    A leaf that is taken to its device as a whole is never split.
    """
    group_of = {run: number for number, group in enumerate(groups) for run in group.runs}
    numbers: list[int | None] = []
    for fetch in fetches:
        run = blocks_touched(fetch, files)
        numbers.append(None if run is None else group_of.get(run))
    groups_of_leaf: dict[int, set[int | None]] = {}
    for fetch, number in zip(fetches, numbers, strict=True):
        if collects(fetch.leaf):
            groups_of_leaf.setdefault(id(fetch.leaf), set()).add(number)
    shared: list[list[Fetch]] = [[] for _ in groups]
    alone: list[Fetch] = []
    for fetch, number in zip(fetches, numbers, strict=True):
        is_split = len(groups_of_leaf.get(id(fetch.leaf), ())) > 1
        (alone if number is None or is_split else shared[number]).append(fetch)
    return shared, alone


def rounds_of(
    runs: Sequence[BlockRun],
    num_members: int,
    files: Sequence[FileEntry],
    *,
    request_bytes: int,
    round_bytes: int = ROUND_BYTES,
) -> list[Round]:
    """Cut the blocks of runs into rounds, and each round into one share a member, even in bytes over all rounds.

    Args:
        runs: in the order in which they are wanted; a block in several of them is read once.
        num_members: who share them.
        files: as in the step's manifest.
        request_bytes: what a run of blocks may have at most, unless one block has more.
        round_bytes: what a round may have at most, unless one block has more.
    """
    read_bytes = [0] * num_members
    rounds = []
    for blocks in _limited(_blocks_of(runs), files, round_bytes):
        shares: list[tuple[BlockRun, ...]] = [()] * num_members
        rest = list(blocks)
        turns = sorted(range(num_members), key=lambda member: (read_bytes[member], member))
        for place, member in enumerate(turns):
            goal = (sum(read_bytes[other] for other in turns[place:]) + _block_bytes(rest, files)) / (
                num_members - place
            )
            taken = _up_to(rest, goal - read_bytes[member], files)
            share, rest = rest[:taken], rest[taken:]
            read_bytes[member] += _block_bytes(share, files)
            shares[member] = tuple(_joined(share, files, request_bytes))
        rounds.append(Round(tuple(shares)))
    return rounds


def _blocks_of(runs: Iterable[BlockRun]) -> list[BlockAt]:
    return list(dict.fromkeys((run.file, number) for run in runs for number in range(run.first, run.last + 1)))


def _block_bytes(blocks: Iterable[BlockAt], files: Sequence[FileEntry]) -> int:
    return sum(run_bytes(files, BlockRun(file, number, number)) for file, number in blocks)


def _limited(blocks: Sequence[BlockAt], files: Sequence[FileEntry], most_bytes: int) -> Iterator[list[BlockAt]]:
    taken: list[BlockAt] = []
    total = 0
    for block in blocks:
        size = _block_bytes([block], files)
        if taken and total + size > most_bytes:
            yield taken
            taken, total = [], 0
        taken.append(block)
        total += size
    if taken:
        yield taken


def _up_to(blocks: Sequence[BlockAt], goal_bytes: float, files: Sequence[FileEntry]) -> int:
    """Return how many of the first blocks come closest to so many bytes."""
    total = 0.0
    for count, block in enumerate(blocks):
        size = _block_bytes([block], files)
        if total + size / 2 > goal_bytes:
            return count
        total += size
    return len(blocks)


def _joined(blocks: Iterable[BlockAt], files: Sequence[FileEntry], most_bytes: int) -> Iterator[BlockRun]:
    run: BlockRun | None = None
    for file, number in blocks:
        if run is not None and (file, number) == (run.file, run.last + 1):
            longer = run._replace(last=number)
            if block_bounds(files[file], number)[1] - block_bounds(files[file], run.first)[0] <= most_bytes:
                run = longer
                continue
        if run is not None:
            yield run
        run = BlockRun(file, number, number)
    if run is not None:
        yield run
