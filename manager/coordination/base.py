"""What the rest of safepoint may ask of the processes that save together.

Owns the contracts `Coordinator` and `Transport`, and `run_together`, which makes one process's failure everybody's.
Must not know of torch.distributed, of XLA, of stores, of steps or of files: those are its implementations' and its
callers' business.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from safepoint.manager.errors import CheckpointError, InvalidArgumentError, PeerFailedError, error_from_json

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    import torch

__all__ = ["Coordinator", "Decide", "Transport", "run_together"]

Decide = Callable[[Sequence[bytes]], "bytes | Sequence[bytes]"]
"""From the payloads, by process index, to one answer for all, or a sequence of one a process. Without effects."""


class Transport(ABC):
    """Point to point copies of host memory, for gathers that go leaf by leaf.

    Both sides name each other and agree on the number of bytes beforehand; messages of one pair arrive in order.
    """

    @abstractmethod
    def send(self, buffer: torch.Tensor, to: int, deadline_secs: float) -> None:
        """Send a contiguous one-dimensional uint8 host tensor.

        *Blocks until* the buffer may be reused; the other side may not have received it yet.

        Raises:
            RendezvousTimeoutError: `to` did not receive within the deadline.
            PeerFailedError: the connection to `to` is gone.
        """

    @abstractmethod
    def receive(self, buffer: torch.Tensor, source: int, deadline_secs: float) -> None:
        """Fill a contiguous one-dimensional uint8 host tensor with what `source` sends.

        Raises:
            RendezvousTimeoutError: `source` did not send within the deadline.
            PeerFailedError: the connection to `source` is gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of the connections. Idempotent; whoever waits for this process learns at once that nothing comes."""


class Coordinator(ABC):
    """The processes that save and restore together, seen from one of them.

    Attributes:
        process_index: index of this process, from 0.
        process_count: how many there are.
        description: for people, such as "torch.distributed, 4 processes".
        host: the same for processes of one host; "" where that is not known.
        on_event: called with "sync_devices", "meet:<name>", … as each begins; for tests that record an order.
    """

    process_index: int
    process_count: int
    description: str
    host: str = ""
    on_event: Callable[[str], None] | None = None

    @property
    def is_primary(self) -> bool:
        """Whether this is process 0, which decides, plans and publishes."""
        return self.process_index == 0

    @abstractmethod
    def sync_devices(self) -> None:
        """Finish what the devices were asked to do, so that sharding is known and memory may be read.

        *Called by* all processes, before sharding is inspected or a byte is read. Initialises no runtime.
        """

    @abstractmethod
    def meet(self, name: str, payload: bytes, *, deadline_secs: float, decide: Decide | None = None) -> bytes:
        """Bring a payload to a meeting of all processes and return the answer of the primary.

        *Called by* all processes, under the same name. *Blocks until* the primary has answered, or the deadline.

        Args:
            name: what the meeting is about; all must bring the same one.
            payload: this process's part.
            deadline_secs: how long to wait for the others, counted from this call. It holds whatever the others do.
            decide: run on the primary over all payloads. None answers b"". If it raises a `CheckpointError`, that
                error is raised on every process. After a `DisagreementError` it may run again, in the same call, over
                new payloads of processes that had missed a meeting; so it must have no effects.

        Returns:
            The answer, or this process's own one where `decide` gave one a process.

        Raises:
            RendezvousTimeoutError: names who was absent, on every process that came.
            DisagreementError: processes came under different names.
            PeerFailedError: another process left the meeting, or `decide` failed on the primary.
        """

    @abstractmethod
    def share_blob(self, data: bytes, *, deadline_secs: float = 60.0) -> str:
        """Put data where every process can fetch it and return its digest; equal data is put once.

        Only the latest few blobs for each process are kept: share one again before each meeting that refers to it.

        Raises:
            RendezvousTimeoutError: process 0 cannot be reached.
        """

    @abstractmethod
    def fetch_blob(self, digest: str, *, deadline_secs: float) -> bytes:
        """Return the data of a digest that some process shared.

        Raises:
            RendezvousTimeoutError: nobody has shared it, or process 0 cannot be reached.
        """

    @abstractmethod
    def open_transport(self, deadline_secs: float) -> Transport:
        """Connect all processes with each other, or return what is connected already.

        *Called by* all processes.
        """

    @abstractmethod
    def open_circle(self, members: Sequence[int], deadline_secs: float) -> Transport | None:
        """Connect this process with some others, each of which gives the same members; for what can be done without.

        *Called by* all processes. The primary logs why some could not be connected.

        Args:
            members: indices of processes, this one included; empty where this process needs nobody.
            deadline_secs: for each of the meetings that this takes.

        Returns:
            None for those who need nobody, and for all where some could not be connected.

        Raises:
            RendezvousTimeoutError: names who did not come.
        """

    def transport(self) -> Transport:
        """Return what `open_transport` connected."""
        raise InvalidArgumentError("The transport is not open.", hint="Call open_transport() on all processes first.")

    @abstractmethod
    def background(self, name: str = "async") -> Coordinator:
        """Return the view for another thread, whose meetings and note do not mix with this one's.

        Args:
            name: of the view: "async" is the one behind an asynchronous save. All processes use the same names.
        """

    @abstractmethod
    def leave_note(self, note: bytes, *, deadline_secs: float) -> bytes:
        """Leave a short ASCII note for all processes, unless there is one, and return the one that is there now.

        *Called by* any process, at any time: it meets nobody. A view holds one note at most, for good.

        Raises:
            RendezvousTimeoutError: process 0, which keeps it, has left or does not answer.
        """

    @abstractmethod
    def find_note(self, *, deadline_secs: float) -> bytes | None:
        """Return the note that a process has left in this view, None if there is none. Does not wait for one.

        Raises:
            RendezvousTimeoutError: process 0, which keeps it, has left or does not answer.
        """

    @abstractmethod
    def count(self, name: str, amount: int, *, deadline_secs: float) -> int:
        """Add to a counter that all processes share, and return its sum; a counter begins at 0.

        *Called by* any process, at any time: it meets nobody. For people: after a broken connection an amount may
        have been added twice.

        Raises:
            RendezvousTimeoutError: process 0, which keeps it, has left or does not answer.
        """

    @abstractmethod
    def drop_count(self, name: str, *, deadline_secs: float) -> None:
        """Forget a counter, if there is one.

        Raises:
            RendezvousTimeoutError: process 0, which keeps it, has left or does not answer.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of connections. Idempotent and bounded: the primary waits briefly for the last answers to be read."""

    def emit(self, event: str) -> None:
        """Tell the observer, if there is one."""
        if self.on_event is not None:
            self.on_event(event)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


_OK = b"\x00"
_FAILED = b"\x01"


def run_together(
    coordinator: Coordinator,
    name: str,
    deadline_secs: float,
    work: Callable[[], bytes],
    decide: Decide | None = None,
) -> bytes:
    """Do work on every process, then meet; if one fails, nobody continues.

    *Called by* all processes. `decide` sees what `work` returned, and only if it succeeded everywhere.

    Raises:
        Exception: what `work` raised here, if it did.
        PeerFailedError: `work` failed on other processes; names the lowest one and its cause.
    """
    own: Exception | None = None
    try:
        payload = _OK + work()
    except Exception as error:  # noqa: BLE001 - brought to the meeting, then raised again below
        own = error
        payload = _FAILED + _describe(error, coordinator.process_index)

    def decide_if_all_well(payloads: Sequence[bytes]) -> bytes | Sequence[bytes]:
        for brought in payloads:
            if brought[:1] == _FAILED:
                return brought
        answer = b"" if decide is None else decide([brought[1:] for brought in payloads])
        return _OK + answer if isinstance(answer, bytes) else [_OK + one for one in answer]

    try:
        answer = coordinator.meet(name, payload, deadline_secs=deadline_secs, decide=decide_if_all_well)
    except CheckpointError as error:
        if own is None:
            raise
        own.add_note(f"While telling the other processes: {error}")
        raise own from None
    if own is not None:
        raise own
    if answer[:1] == _FAILED:
        raise _peer_failed(answer[1:])
    return answer[1:]


def _describe(error: Exception, process_index: int) -> bytes:
    known = error.to_json() if isinstance(error, CheckpointError) else None
    cause = {"process": process_index, "type": type(error).__name__, "text": str(error), "error": known}
    return json.dumps(cause).encode()


def _peer_failed(described: bytes) -> PeerFailedError:
    cause: dict[str, Any] = json.loads(described)
    context: dict[str, Any] = {}
    if cause["error"] is not None:
        error = error_from_json(cause["error"])
        context = {field: getattr(error, field) for field in ("step", "leaf", "path", "outcome")}
    return PeerFailedError(
        f"Process {cause['process']} failed: {cause['type']}: {cause['text']}",
        process_index=cause["process"],
        hint=f"Mend the cause on process {cause['process']}, then call this again on all processes.",
        **context,
    )
