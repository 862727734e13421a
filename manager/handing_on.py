"""Blocks that several processes of one host want: each reads its share of them from the storage and hands it on.

Owns the exchange of one group. All members go through the same rounds in the same order, whatever their leaves are, and
find what they want in the round that has it: the order of their own reads decides only how much passes by unused and
has to be read again. What is received is verified, as what is read is.

A member that fails says so in the next round, in place of bytes, so that nobody waits for it. One that is gone, or
stalls, is no failure of the others: they read the rest from the storage, each for itself, and the meeting after that
names it.
"""

from __future__ import annotations

import json
import logging
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.blocks import block_bounds, blocks_of
from safepoint.formats.checksum import digest_of_parts
from safepoint.formats.run_reading import BlockRun, run_bytes
from safepoint.formats.segments import by_file
from safepoint.formats.storage.buffers import BUFFERS
from safepoint.manager.errors import CheckpointError, PeerFailedError, RendezvousTimeoutError, error_from_json
from safepoint.manager.host_plan import ROUND_BYTES, rounds_of
from safepoint.manager.read_ahead import ReadAhead
from safepoint.manager.sources import flat_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from safepoint.formats.entries import FileEntry
    from safepoint.formats.run_reading import RunReader
    from safepoint.formats.segments import ReadSegment
    from safepoint.manager.coordination import Transport
    from safepoint.manager.host_plan import BlockAt, Group, Round

__all__ = ["Exchange", "Sharing"]

logger = logging.getLogger("safepoint")


@dataclass(frozen=True, kw_only=True)
class Sharing:
    """What a process needs to share the reading of a step.

    Attributes:
        transport: to the others of its host.
        process_index: of this process.
        files: of the step.
        reader: of the step.
        request_bytes: how many bytes are best asked for at once.
        num_threads: how many requests are worth making at once.
        patience_secs: how long to wait for another process before everybody reads alone.
        progress: told of the bytes of each block that has come, from the storage or from another process.
        round_bytes: see `rounds_of`.
    """

    transport: Transport
    process_index: int
    files: Sequence[FileEntry]
    reader: RunReader
    request_bytes: int
    num_threads: int
    patience_secs: float
    progress: Callable[[int], None] | None = None
    round_bytes: int = ROUND_BYTES


@dataclass
class _Arrived:
    """A round's blocks, and the buffers that hold them."""

    blocks: dict[BlockAt, memoryview] = field(default_factory=dict)
    buffers: dict[BlockRun, memoryview] = field(default_factory=dict)

    def add(self, run: BlockRun, buffer: memoryview, files: Sequence[FileEntry]) -> dict[BlockAt, memoryview]:
        """Take a run that lies at the beginning of a buffer; return all blocks."""
        self.buffers[run] = buffer
        entry = files[run.file]
        start, _ = block_bounds(entry, run.first)
        for number in range(run.first, run.last + 1):
            first, last = block_bounds(entry, number)
            self.blocks[run.file, number] = buffer[first - start : last - start]
        return self.blocks

    def free(self) -> None:
        """Give the buffers back."""
        self.blocks.clear()
        while self.buffers:
            BUFFERS.give_back(self.buffers.popitem()[1])


class Exchange:
    """One group's rounds, on one of its members."""

    def __init__(self, group: Group, sharing: Sharing, *, first_patience_secs: float | None = None) -> None:
        """Plan the rounds; the first read begins them.

        Called by: all members.

        Args:
            group: which of them, and what they want.
            sharing: what they need.
            first_patience_secs: how long to wait for the others in the first round, if not as long as in any.
        """
        self._first_patience_secs = first_patience_secs or sharing.patience_secs
        self._sharing = sharing
        self._files = sharing.files
        self._members = group.members
        self._own = group.members.index(sharing.process_index)
        self._rounds: list[Round] = []
        self._round_of: dict[BlockAt, int] = {}
        self._next = 0
        self._arrived = _Arrived()
        self._read_bytes = 0
        self._ahead: ReadAhead | None = None
        self._plan(group.runs)

    def read(self, segments: Sequence[ReadSegment]) -> int:
        """Fill the targets of segments, all of them in blocks of this group; return the bytes read from the storage.

        Raises:
            CorruptDataError: a block differs from its digest, here or on another member.
            StorageError: the storage failed, here or on another member.
            PeerFailedError: another member failed in any other way.
        """
        before = self._read_bytes
        wanted = [
            ((file, block.number), block.segments)
            for file, of_file in by_file(segments, self._files).items()
            for block in blocks_of(self._files[file], sorted(of_file, key=lambda one: one.offset))
        ]
        for at, touching in sorted(wanted, key=lambda one: self._round_of[one[0]]):
            start, _ = block_bounds(self._files[at[0]], at[1])
            with self._block(at) as data:
                for segment in touching:
                    segment.put(data, start)
                if self._sharing.progress is not None:
                    self._sharing.progress(len(data))
        return self._read_bytes - before

    def finish(self) -> int:
        """Go through the rounds that are left; return the bytes read from the storage meanwhile."""
        before = self._read_bytes
        while self._next < len(self._rounds):
            self._advance()
        return self._read_bytes - before

    def tell(self, error: Exception) -> None:
        """Let the other members know, in the next round if there is one, that this process has failed."""
        if self._next < len(self._rounds):
            with suppress(PeerFailedError, RendezvousTimeoutError):
                self._swap([], error)
            self._next = len(self._rounds)

    def close(self) -> None:
        """Stop reading and give all memory back. Idempotent."""
        self._stop_reading()
        self._arrived.free()

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _plan(self, runs: Sequence[BlockRun]) -> None:
        """Plan the rounds for all that is left."""
        sharing = self._sharing
        planned = rounds_of(
            runs,
            len(self._members),
            self._files,
            request_bytes=sharing.request_bytes,
            round_bytes=sharing.round_bytes,
        )
        for number, one in enumerate(planned, len(self._rounds)):
            for block in one.blocks():
                self._round_of[block] = number
        self._rounds += planned

    def _reading(self) -> ReadAhead:
        """Begin to read what is left of this process's share, if that has not begun."""
        if self._ahead is None:
            own = [run for one in self._rounds[self._next :] for run in one.shares[self._own]]
            sharing = self._sharing
            self._ahead = ReadAhead(own, self._files, sharing.reader.read, num_threads=sharing.num_threads)
        return self._ahead

    def _stop_reading(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None

    def _advance(self) -> None:
        """Go through one round, and keep what it brings until the next."""
        self._arrived.free()
        failure: Exception | None = None
        told: list[bytes] = []
        own = self._rounds[self._next].shares[self._own]
        try:
            for run in own:
                self._arrived.add(run, self._reading().take(), self._files)
                self._read_bytes += run_bytes(self._files, run)
        except Exception as error:  # noqa: BLE001 - raised below, once the others know
            failure = error
        try:
            told = self._swap(own, failure)
        except (PeerFailedError, RendezvousTimeoutError) as error:
            if failure is None:
                self._go_alone(error)
                return
        if failure is not None or told:
            self._next = len(self._rounds)
            raise failure or error_from_json(json.loads(told[0]))
        self._next += 1

    def _go_alone(self, error: CheckpointError) -> None:
        """Read what is left as if this were the only process: the others do not hand on any more."""
        logger.warning("handing on of what is read ended, each process reads the rest for itself: %s", error)
        self._sharing.transport.close()  # so that the others need not wait to find that out
        self._stop_reading()
        self._arrived.free()
        left = [BlockRun(file, number, number) for one in self._rounds[self._next :] for file, number in one.blocks()]
        del self._rounds[self._next :]
        self._members, self._own = (self._sharing.process_index,), 0
        self._plan(left)

    @contextmanager
    def _block(self, at: BlockAt) -> Iterator[memoryview]:
        """Lend a block: from the round that has it, or read anew where that is over."""
        while at not in self._arrived.blocks and self._round_of[at] >= self._next:
            self._advance()
        if at in self._arrived.blocks:
            yield self._arrived.blocks[at]
            return
        alone = BlockRun(*at, at[1])
        num_bytes = run_bytes(self._files, alone)
        buffer = BUFFERS.take_anyway(num_bytes)
        try:
            self._sharing.reader.read(alone, buffer[:num_bytes])
            self._read_bytes += num_bytes
            yield buffer[:num_bytes]
        finally:
            BUFFERS.give_back(buffer)

    # -- one round ---------------------------------------------------------------------------------------------------

    def _swap(self, own: Sequence[BlockRun], failure: Exception | None) -> list[bytes]:
        """Exchange shares with each other member; return the failures that were told instead, as JSON.

        In turn t, members i and t - i meet: each pair once, and in the same order on both sides.

        Raises:
            RendezvousTimeoutError: a member did not come within the patience.
            PeerFailedError: the connection to a member is gone.
        """
        mine = [self._arrived.buffers[run][: run_bytes(self._files, run)] for run in own] if failure is None else []
        failed = b"" if failure is None else json.dumps(_as_known(failure, self._sharing.process_index)).encode()
        told = []
        for turn in range(len(self._members)):
            place = (turn - self._own) % len(self._members)
            if place == self._own:
                continue
            theirs = self._hear(place, failed)
            if theirs:
                told.append(theirs)
            elif not failed:
                self._trade(place, mine)
        return told

    def _hear(self, place: int, failed: bytes) -> bytes:
        """Tell another member how it is here, and return its failure, b"" if there is none."""
        length = torch.zeros(1, dtype=torch.int64)
        for is_own in (True, False) if self._own < place else (False, True):
            if is_own:
                self._send(place, flat_bytes(torch.tensor([len(failed)])))
                if failed:
                    self._send(place, torch.frombuffer(bytearray(failed), dtype=torch.uint8))
            else:
                self._receive(place, flat_bytes(length))
                text = bytearray(int(length))
                if text:
                    self._receive(place, torch.frombuffer(text, dtype=torch.uint8))
        return bytes(text)

    def _trade(self, place: int, mine: Sequence[memoryview]) -> None:
        for is_own in (True, False) if self._own < place else (False, True):
            if is_own:
                for data in mine:
                    self._send(place, torch.frombuffer(data, dtype=torch.uint8))
            else:
                for run in self._rounds[self._next].shares[place]:
                    self._take(place, run)

    def _take(self, place: int, run: BlockRun) -> None:
        num_bytes = run_bytes(self._files, run)
        buffer = BUFFERS.take_anyway(num_bytes)
        try:
            self._receive(place, torch.frombuffer(buffer[:num_bytes], dtype=torch.uint8))
        except BaseException:
            BUFFERS.forfeit(buffer)  # it may still come
            raise
        blocks = self._arrived.add(run, buffer, self._files)
        for number in range(run.first, run.last + 1):
            if digest_of_parts([blocks[run.file, number]]) != self._files[run.file].digests[number]:
                del blocks[run.file, number]  # to be read again

    def _patience_secs(self) -> float:
        return self._sharing.patience_secs if self._next else self._first_patience_secs

    def _send(self, place: int, data: torch.Tensor) -> None:
        self._sharing.transport.send(data, to=self._members[place], deadline_secs=self._patience_secs())

    def _receive(self, place: int, data: torch.Tensor) -> None:
        self._sharing.transport.receive(data, source=self._members[place], deadline_secs=self._patience_secs())


def _as_known(error: Exception, process_index: int) -> dict[str, Any]:
    """Return an error as JSON, any but our own as the failure of this process."""
    if not isinstance(error, CheckpointError):
        text = f"Process {process_index} failed: {type(error).__name__}: {error}"
        error = PeerFailedError(text, process_index=process_index)
    return error.with_context(process_index=process_index).to_json()
