"""Saves that link what did not change: what is known of the step to link from, and one process's part of a save.

In this order, each after the one before it is certain:

    digest    every piece that a full save would write, from the very bytes that would be written
    choose    files of the base that are at least half unchanged (`unchanged`)
    recheck   those files are read and compared, unless they were since the base's commit (`rechecking`)
    link      each into the attempt's directory, its link count durable; what cannot be linked is written
    write     what is in no linked file into one new file; where nothing is linked, the files of a full save
    sync      the directory (`writing.write_files`), before this process reports

Whatever goes wrong up to here leaves names in the attempt's own directory, which goes with it. Knows no coordination.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from safepoint.manager.errors import CheckpointError, CorruptDataError
from safepoint.manager.piece_digests import ImageSource, digest_pieces
from safepoint.manager.rechecking import Recheck
from safepoint.manager.sources import GatherSource
from safepoint.manager.step_reading import step_at
from safepoint.manager.unchanged import MAX_LINKS, LinkBase, Takeover, Wanted, linked_path, take_over
from safepoint.manager.writing import PlannedFile, WriteReport, plan_pieces, write_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from safepoint.formats.base import Format, WriteJob
    from safepoint.formats.entries import FileEntry, ShardEntry
    from safepoint.formats.manifest import Manifest, TreePath
    from safepoint.formats.region import Region
    from safepoint.formats.storage import Storage
    from safepoint.manager.adapters import ArraySpec
    from safepoint.manager.sources import Source
    from safepoint.manager.step_reading import StepReader

__all__ = ["LinkMemory", "LinkedWrite"]

logger = logging.getLogger("safepoint")

NO_BASE = "there is no step of this run to link from"
GONE = "the step to link from is gone"
NO_DIGESTS = "the step before was saved without digests of its leaves"
NOTHING_SHARED = f"no file of the step before is unchanged by half, sound, and linked on less than {MAX_LINKS} times"
TOO_SOON = "the files of the step before are not read again yet: this save came too soon after it, or after a restore"
NOTHING_WANTED = "this process writes nothing"
REFUSED = "this storage refuses hard links"


PATIENCE_BYTES = 64 << 20
"""How much a save that somebody waits for reads again of the files that it links, in any case."""

READ_COST = 3
"""It reads more where that is at most so small a part of what it does not write: reads measured a third as fast."""


def _why_none(wanted: Sequence[Wanted]) -> str:
    return NOTHING_SHARED if wanted else NOTHING_WANTED


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """Files of a step that can be linked.

    Attributes:
        base: the step.
        prefix: where its files lie, relative to the root.
        takeovers: the files, and what of them is wanted.
    """

    base: LinkBase
    prefix: str
    takeovers: tuple[Takeover, ...]


class LinkMemory:
    """The step that the next save may link from, on one process."""

    def __init__(self, storage: Storage, reader: StepReader) -> None:
        """Start without a step.

        Args:
            storage: of the root.
            reader: of its steps.
        """
        self._storage = storage
        self._reader = reader
        self._base: LinkBase | None = None
        self._next: LinkBase | None = None
        self._recheck: Recheck | None = None
        self.reason = NO_BASE
        """Why the last save linked nothing; "" if it did."""
        self.is_refused = False
        """Whether this storage has no links: nothing is tried any more."""
        if not storage.renames:
            self.refuse()

    def offer(self, base: LinkBase) -> None:
        """Note what becomes the base once its attempt is committed."""
        self._next = base

    def adopt(self, attempt: str) -> None:
        """Go on from the attempt, which is committed: read it again while nobody waits, for the save after it."""
        base, self._next = self._next, None
        if base is None or base.attempt != attempt:
            return
        self._go_on_from(base)
        if self._recheck is not None and not self.is_refused:
            self._recheck.start(lambda: self._find_prefix(base), base.linkable)

    def restart(self, manifest: Manifest, file_format: str) -> None:
        """Go on from a step that was restored. Reads nothing: the next save does, what it links.

        Steps in other formats have no digests of regions, nor have those that were saved without the option.
        """
        self._go_on_from(LinkBase.of_manifest(manifest, file_format))

    def settle(self, timeout_secs: float) -> bool:
        """Wait until what was committed is read again; say whether it is."""
        return self._recheck is None or self._recheck.wait(timeout_secs)

    def close(self) -> None:
        """Stop reading."""
        if self._recheck is not None:
            self._recheck.stop()

    def find(self, wanted: Sequence[Wanted], *, is_patient: bool) -> Found | None:
        """Return sound files to link; None where there are none, for `reason`.

        Args:
            wanted: what is to be saved.
            is_patient: whether nobody waits for the save.
        """
        if self._base is None or self._recheck is None:
            self.reason = NO_BASE
            return None
        prefix = self._find_prefix(self._base)
        if prefix is None:
            self.reason = GONE
            return None
        if not self._base.shards and wanted:
            self.reason = NO_DIGESTS
            return None
        chosen = take_over(self._base, wanted)
        spared = sum(shard.num_bytes for takeover in chosen for _, shard in takeover.held)
        patience = None if is_patient else max(PATIENCE_BYTES, spared // READ_COST)
        files = [takeover.file for takeover in chosen]
        sound = frozenset(self._recheck.sound(prefix, files, patience_bytes=patience))
        self.reason = "" if sound else TOO_SOON if self._recheck.is_behind(files) else _why_none(wanted)
        kept = [takeover for takeover in chosen if takeover.file in sound]
        return Found(base=self._base, prefix=prefix, takeovers=tuple(kept)) if kept else None

    def refuse(self) -> None:
        """Stop trying."""
        if not self.is_refused:
            logger.warning("%s: every leaf of every step is written (%s)", REFUSED, self._storage.location)
        self.is_refused = True
        self.reason = REFUSED
        self.close()

    def _go_on_from(self, base: LinkBase) -> None:
        self.close()
        self._base = base
        self._recheck = Recheck(self._storage, base)

    def _find_prefix(self, base: LinkBase) -> str | None:
        """Return where the files of the step lie now: replacing it moves it aside."""
        try:
            step = step_at(self._storage, str(base.step))
            if step is None or step.record.attempt != base.attempt:
                steps = self._reader.list_steps()
                step = next((step for step in steps if step.record.attempt == base.attempt), None)
        except CheckpointError as error:
            logger.warning("cannot look for the step to link from: %s", error)
            return None
        return None if step is None else step.files_prefix


@dataclass(frozen=True, kw_only=True)
class LinkedWrite:
    """One process's part of one save.

    Attributes:
        storage: of the root.
        memory: of the manager.
        step: the step.
        attempt: that writes.
        prefix: of the attempt.
        specs: of at least the leaves that are written here.
        file_format: of the files.
        job: what they are part of.
        progress: called with the bytes that are with the storage, and with those that were linked.
    """

    storage: Storage
    memory: LinkMemory
    step: int
    attempt: str
    prefix: str
    specs: Mapping[TreePath, ArraySpec]
    file_format: Format
    job: WriteJob
    progress: Callable[[int], None]

    def run(self, files: Sequence[PlannedFile], source: Source | Sequence[memoryview]) -> WriteReport:
        """Link and write; return when all of it is durable.

        Args:
            files: that a full save would write.
            source: of their pieces, or the image of each file.

        Raises:
            StorageError: the storage failed.
        """
        pieces = [piece for file in files for piece in file.pieces]
        loads: Source = ImageSource(files, source) if isinstance(source, Sequence) else source
        digests = digest_pieces(pieces, loads)
        wanted = [Wanted(p.path, p.region, p.dtype, digest) for p, digest in zip(pieces, digests, strict=True)]
        linked = self._link(wanted, is_patient=isinstance(source, Sequence))
        if linked is None:
            writes = list(files)
        else:
            held = {index: entry.num_bytes for takeover in linked.takeovers for index, entry in takeover.held}
            self.progress(sum(held.values()))
            rest = [piece for index, piece in enumerate(pieces) if index not in held]
            writes = plan_pieces(rest, self.specs, file_format=self.file_format, job=self.job)
        if isinstance(loads, GatherSource):
            loads.ask_again(pieces, [piece for file in writes for piece in file.pieces])
        report = write_files(
            self.storage,
            self.prefix,
            writes,
            source if linked is None else loads,
            process_index=self.job.process_index,
            attempt=self.attempt,
            progress=self.progress,
        )
        report = _with_digests(report, {(one.path, one.region): one.digest for one in wanted})
        if linked is not None:
            report = _joined(report, self._entries(linked), wanted)
        dtypes = {piece.path: piece.dtype for piece in pieces}
        held_now = ((path, dtypes[path], entry) for path, entry in report.shards)
        self.memory.offer(LinkBase.of(self.step, self.attempt, report.files, held_now))
        return report

    def _link(self, wanted: Sequence[Wanted], *, is_patient: bool) -> Found | None:
        found = self.memory.find(wanted, is_patient=is_patient)
        if found is None:
            return None
        done = [takeover for takeover in found.takeovers if self._link_one(found, found.base.files[takeover.file])]
        if not done:
            self.memory.reason = self.memory.reason or NOTHING_SHARED
            return None
        return replace(found, takeovers=tuple(done))

    def _link_one(self, found: Found, file: FileEntry) -> bool:
        if self.memory.is_refused:
            return False
        source, target = f"{found.prefix}/{file.path}", f"{self.prefix}/{linked_path(file)}"
        try:
            if self.storage.link_file(source, target):
                return True
            if self.storage.size(source) is not None:
                self.memory.refuse()
        except CorruptDataError as error:
            logger.warning("a file is not linked on, what is wanted of it is written anew: %s", error)
        return False

    def _entries(self, linked: Found) -> list[tuple[FileEntry, Takeover]]:
        entries = []
        for takeover in linked.takeovers:
            file = linked.base.files[takeover.file]
            path, process_index = linked_path(file), self.job.process_index
            entries.append((replace(file, path=path, process_index=process_index, links=file.links + 1), takeover))
        return entries


def _with_digests(report: WriteReport, digests: Mapping[tuple[TreePath, Region], str]) -> WriteReport:
    shards = tuple((path, entry._replace(digest=digests[path, entry.region])) for path, entry in report.shards)
    return replace(report, shards=shards)


def _joined(report: WriteReport, linked: Sequence[tuple[FileEntry, Takeover]], wanted: Sequence[Wanted]) -> WriteReport:
    files = list(report.files)
    shards: list[tuple[TreePath, ShardEntry]] = list(report.shards)
    for file, takeover in linked:
        number = len(files)
        shards += [
            (wanted[index].path, entry if entry.file == number else entry._replace(file=number))
            for index, entry in takeover.held
        ]
        files.append(file)
    return WriteReport(files=tuple(files), shards=tuple(shards))
