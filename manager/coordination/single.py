"""One process on its own: nothing to meet, nothing to wait for.

Must not know of stores or process groups.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import TYPE_CHECKING

from safepoint.manager.coordination.base import Coordinator, Transport
from safepoint.manager.coordination.device_sync import sync_devices
from safepoint.manager.errors import InvalidArgumentError, RendezvousTimeoutError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from safepoint.manager.coordination.base import Decide

__all__ = ["Alone", "SingleProcess"]

_KEPT_BLOBS = 64


class SingleProcess(Coordinator):
    """The coordinator of a job of one process."""

    def __init__(self) -> None:
        self.process_index = 0
        self.process_count = 1
        self.description = "one process"
        self._blobs: OrderedDict[str, bytes] = OrderedDict()
        self._transport = _NobodyElse()
        self._note: bytes | None = None
        self._counters: dict[str, int] = {}
        self._views: dict[str, SingleProcess] = {}

    def sync_devices(self) -> None:
        """See `Coordinator.sync_devices`."""
        self.emit("sync_devices")
        sync_devices()

    def meet(self, name: str, payload: bytes, *, deadline_secs: float, decide: Decide | None = None) -> bytes:
        """Return what `decide` makes of the one payload.

        Raises:
            InvalidArgumentError: this process has become one of several since.
        """
        del deadline_secs
        self._check_still_alone()
        self.emit(f"meet:{name}")
        answer = b"" if decide is None else decide([payload])
        if isinstance(answer, bytes):
            return answer
        (own,) = answer
        return own

    def share_blob(self, data: bytes, *, deadline_secs: float = 60.0) -> str:
        """See `Coordinator.share_blob`."""
        del deadline_secs
        digest = hashlib.blake2b(data, digest_size=16).hexdigest()
        self._blobs[digest] = data
        self._blobs.move_to_end(digest)
        while len(self._blobs) > _KEPT_BLOBS:
            self._blobs.popitem(last=False)
        return digest

    def fetch_blob(self, digest: str, *, deadline_secs: float) -> bytes:
        """See `Coordinator.fetch_blob`; what is not here will never be, so it does not wait."""
        if digest not in self._blobs:
            raise RendezvousTimeoutError(f"Nobody shared the blob {digest}.", absent=(), deadline_secs=deadline_secs)
        return self._blobs[digest]

    def open_transport(self, deadline_secs: float) -> Transport:
        """Return a transport that has nobody to talk to."""
        del deadline_secs
        return self._transport

    def transport(self) -> Transport:
        """See `Coordinator.transport`."""
        return self._transport

    def open_circle(self, members: Sequence[int], deadline_secs: float) -> Transport | None:
        """Return None: there is nobody to be connected with."""
        del members, deadline_secs
        return None

    def background(self, name: str = "async") -> Coordinator:
        """See `Coordinator.background`."""
        if name not in self._views:
            view = self._views[name] = type(self)()
            view._blobs = self._blobs  # noqa: SLF001  # what one view shares, the other fetches
            view.on_event = self.emit
        return self._views[name]

    def leave_note(self, note: bytes, *, deadline_secs: float) -> bytes:
        """See `Coordinator.leave_note`."""
        del deadline_secs
        if self._note is None:
            self._note = note
        return self._note

    def find_note(self, *, deadline_secs: float) -> bytes | None:
        """See `Coordinator.find_note`."""
        del deadline_secs
        return self._note

    def count(self, name: str, amount: int, *, deadline_secs: float) -> int:
        """See `Coordinator.count`."""
        del deadline_secs
        self._counters[name] = self._counters.get(name, 0) + amount
        return self._counters[name]

    def drop_count(self, name: str, *, deadline_secs: float) -> None:
        """See `Coordinator.drop_count`."""
        del deadline_secs
        self._counters.pop(name, None)

    def close(self) -> None:
        """Nothing to let go of."""

    def _check_still_alone(self) -> None:
        import torch.distributed as dist  # noqa: PLC0415 - heavy, and not in every build of torch

        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise InvalidArgumentError(
                "this manager was opened before torch.distributed was initialised: it knows of one process, and there "
                f"are {dist.get_world_size()}",
                hint="Call torch.distributed.init_process_group() first, then open the manager on every process.",
            )


class Alone(SingleProcess):
    """The coordinator of a process that saves by itself on purpose, whatever others run with it."""

    def _check_still_alone(self) -> None:
        """There may be others."""


class _NobodyElse(Transport):
    def send(self, buffer: torch.Tensor, to: int, deadline_secs: float) -> None:
        del buffer, deadline_secs
        raise InvalidArgumentError(f"There is no process {to} to send to: this job has one process.")

    def receive(self, buffer: torch.Tensor, source: int, deadline_secs: float) -> None:
        del buffer, deadline_secs
        raise InvalidArgumentError(f"There is no process {source} to receive from: this job has one process.")

    def close(self) -> None:
        """Nothing to let go of."""
