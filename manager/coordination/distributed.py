"""Processes that meet in a store of their own, and how torch.distributed tells them where it is.

Owns the coordinator over a store and its opening through the default process group's store, or at a given host and
port. No collective of the training's groups is used, and none of their timeouts applies. Must not know of steps or
files.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from safepoint.manager.coordination.address import Address, Server, boot_id, find_server, open_server
from safepoint.manager.coordination.base import Coordinator, Decide, Transport
from safepoint.manager.coordination.blobs import Blobs
from safepoint.manager.coordination.connections import Connections
from safepoint.manager.coordination.device_sync import sync_devices
from safepoint.manager.coordination.meeting import Patience
from safepoint.manager.coordination.peer_side import PeerSide
from safepoint.manager.coordination.primary_side import PrimarySide
from safepoint.manager.coordination.store import Line, Store, StoreGoneError, StoreStuckError, Values, connect_tcp
from safepoint.manager.errors import InvalidArgumentError, RendezvousTimeoutError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Self

__all__ = ["DistributedCoordinator", "Meetings", "StoreCoordinator"]

T = TypeVar("T")

logger = logging.getLogger("safepoint.coordination")

WARN_EVERY_SECS = 30.0
CONNECT_SECS = 30.0
"""How long the processes of a circle may take to be connected, once all have come: it can be done without."""

_CLOSE_SECS = 2.0


_open_coordinators: weakref.WeakSet[StoreCoordinator] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """Let a primary that forgot to close wait, too, until its last answer is read."""
    for coordinator in list(_open_coordinators):
        coordinator.close()


class Meetings:
    """Meetings in one namespace of one store, from one process.

    Args:
        connect: makes a connection to the store.
        prefix: of all keys.
        process_index: of this process.
        process_count: how many meet.
        store_owner: who is lost when the store is, for messages.
    """

    def __init__(
        self,
        connect: Callable[[], Store],
        prefix: str,
        *,
        process_index: int,
        process_count: int,
        store_owner: str = "process 0",
    ) -> None:
        self._line = Line("safepoint-meet", connect, prefix)
        self._aside = Line("safepoint-aside", connect, prefix)
        self._aside.post(lambda _: None)  # connected before it is needed: where names are looked up that takes a second
        self._busy = threading.Lock()
        self._store_owner = store_owner
        self._primary: PrimarySide | None = None
        self._peer: PeerSide | None = None
        if process_index == 0:
            self._primary = PrimarySide(self._line, self._aside, process_count)
        else:
            self._peer = PeerSide(self._line, self._aside, process_index, process_count, store_owner)

    def meet(self, name: str, payload: bytes, *, deadline_secs: float, decide: Decide | None = None) -> bytes:
        """See `Coordinator.meet`."""
        if not deadline_secs > 0:
            raise InvalidArgumentError(f"deadline_secs must be positive, not {deadline_secs!r}.")
        if not self._busy.acquire(blocking=False):
            raise InvalidArgumentError(
                f"Meeting {name!r} was called while another thread, or `decide`, is in a meeting of this coordinator.",
                hint="Use background() for meetings of another thread.",
            )
        try:
            patience = Patience(name, deadline_secs, WARN_EVERY_SECS)
            if self._primary is not None:
                return self._primary.meet(name, payload, patience, decide)
            assert self._peer is not None
            return self._peer.meet(name, payload, patience)
        finally:
            self._busy.release()

    def ask(self, call: Callable[[Values], T], *, deadline_secs: float) -> T:
        """Return what the store says, outside of meetings.

        Raises:
            RendezvousTimeoutError: it does not answer, or has gone.
        """
        try:
            return self._line.call(call, until=time.monotonic() + deadline_secs)
        except (StoreStuckError, StoreGoneError) as error:
            what = "left" if isinstance(error, StoreGoneError) else "did not answer"
            raise RendezvousTimeoutError(
                f"{self._store_owner.capitalize()} {what}.", absent=(0,), deadline_secs=deadline_secs
            ) from error

    def close(self, *, until: float) -> None:
        """Let go of the connection; the primary waits until `until` (monotonic) for the last answer to be read."""
        if self._primary is not None:
            self._primary.wait_until_read(until=until)
        self._line.close()
        self._aside.close()


class StoreCoordinator(Coordinator):
    """Processes that meet in a TCPStore which the primary serves.

    Args:
        address: of the store.
        host: under which it answers from here.
        process_index: of this process.
        process_count: how many there are.
        description: for people.
        server: on the primary, what to shut down in the end.
    """

    def __init__(
        self,
        address: Address,
        host: str,
        *,
        process_index: int,
        process_count: int,
        description: str,
        server: Server | None = None,
        namespace: str = "main",
    ) -> None:
        self.process_index = process_index
        self.process_count = process_count
        self.description = description
        self.host = boot_id()
        self._address = address
        self._host = host
        self._server = server
        run = f"safepoint/{address.nonce[:8]}"
        self._meetings = Meetings(
            self._connect, f"{run}/{namespace}/", process_index=process_index, process_count=process_count
        )
        # What one view shares, the other fetches.
        self._blobs = Blobs(Line("safepoint-blobs", self._connect, f"{run}/"), process_count)
        self._views: dict[str, StoreCoordinator] = {}
        self._mesh = Connections(self, host, "transport")
        self._circle = Connections(self, host, "circle")
        self._is_open = True
        _open_coordinators.add(self)

    @classmethod
    def open(
        cls, bootstrap: Meetings, *, process_index: int, process_count: int, description: str, deadline_secs: float
    ) -> Self:
        """Make the primary serve a store and everybody connect to it.

        *Called by* all processes.

        Args:
            bootstrap: where they can meet already, to tell the address.
            process_index: of this process.
            process_count: how many there are.
            description: for people.
            deadline_secs: for each of the two meetings that this takes.

        Raises:
            RendezvousTimeoutError: some did not come, or cannot reach the primary.
        """
        server = open_server() if process_index == 0 else None
        try:
            own = b"" if server is None else server.address.to_bytes()
            told = bootstrap.meet("open", own, deadline_secs=deadline_secs, decide=lambda brought: brought[0])
            address = Address.from_bytes(told)
            host = "127.0.0.1" if server is not None else find_server(address, deadline_secs=deadline_secs)
        except BaseException:
            if server is not None:
                server.close()
            raise
        coordinator = cls(
            address,
            host,
            process_index=process_index,
            process_count=process_count,
            description=description,
            server=server,
        )
        try:
            coordinator.meet("opened", b"", deadline_secs=deadline_secs)
        except BaseException:
            coordinator.close()
            raise
        return coordinator

    def sync_devices(self) -> None:
        """See `Coordinator.sync_devices`."""
        self.emit("sync_devices")
        sync_devices()

    def meet(self, name: str, payload: bytes, *, deadline_secs: float, decide: Decide | None = None) -> bytes:
        """See `Coordinator.meet`."""
        self._check_open()
        self.emit(f"meet:{name}")
        return self._meetings.meet(name, payload, deadline_secs=deadline_secs, decide=decide)

    def share_blob(self, data: bytes, *, deadline_secs: float = 60.0) -> str:
        """See `Coordinator.share_blob`."""
        self._check_open()
        return self._blobs.share(data, deadline_secs=deadline_secs)

    def fetch_blob(self, digest: str, *, deadline_secs: float) -> bytes:
        """See `Coordinator.fetch_blob`."""
        self._check_open()
        return self._blobs.fetch(digest, deadline_secs=deadline_secs)

    def open_transport(self, deadline_secs: float) -> Transport:
        """See `Coordinator.open_transport`."""
        self._mesh.open(range(self.process_count), deadline_secs)
        return self.transport()

    def open_circle(self, members: Sequence[int], deadline_secs: float) -> Transport | None:
        """See `Coordinator.open_circle`."""
        failure = self._circle.try_open(members, deadline_secs, CONNECT_SECS)
        if failure and self.is_primary:
            logger.warning("processes of one host could not be connected with each other: %s", failure)
        return self._circle.transport if members else None

    def transport(self) -> Transport:
        """See `Coordinator.transport`."""
        return super().transport() if self._mesh.transport is None else self._mesh.transport

    def background(self, name: str = "async") -> Coordinator:
        """See `Coordinator.background`; it is the same one each time, and closed with this one."""
        if name not in self._views:
            view = self._views[name] = type(self)(
                self._address,
                self._host,
                process_index=self.process_index,
                process_count=self.process_count,
                description=self.description,
                namespace=name,
            )
            view.on_event = self.emit
        return self._views[name]

    def leave_note(self, note: bytes, *, deadline_secs: float) -> bytes:
        """See `Coordinator.leave_note`."""
        self._check_open()
        return self._meetings.ask(lambda values: values.claim("note", note), deadline_secs=deadline_secs)

    def find_note(self, *, deadline_secs: float) -> bytes | None:
        """See `Coordinator.find_note`."""
        self._check_open()
        return self._meetings.ask(lambda values: values.read("note"), deadline_secs=deadline_secs)

    def count(self, name: str, amount: int, *, deadline_secs: float) -> int:
        """See `Coordinator.count`."""
        self._check_open()
        return self._meetings.ask(lambda values: values.add(f"count/{name}", amount), deadline_secs=deadline_secs)

    def drop_count(self, name: str, *, deadline_secs: float) -> None:
        """See `Coordinator.drop_count`."""
        self._check_open()
        self._meetings.ask(lambda values: values.forget(f"count/{name}"), deadline_secs=deadline_secs)

    def close(self) -> None:
        """See `Coordinator.close`."""
        if not self._is_open:
            return
        self._is_open = False
        _open_coordinators.discard(self)
        until = time.monotonic() + _CLOSE_SECS
        for view in self._views.values():
            view.close()
        self._mesh.close()
        self._circle.close()
        self._blobs.close()
        self._meetings.close(until=until)
        if self._server is not None:
            self._server.close()

    def _connect(self) -> Store:
        return connect_tcp(self._host, self._address.port)

    def _check_open(self) -> None:
        if not self._is_open:
            raise InvalidArgumentError("This coordinator is closed.")


class DistributedCoordinator(StoreCoordinator):
    """The processes of torch.distributed's default group."""

    @classmethod
    def from_default_group(cls, *, deadline_secs: float) -> Self:
        """Open through the store of the default group.

        *Called by* all processes of the group.

        Raises:
            RendezvousTimeoutError: names those that did not come.
        """
        index, count = dist.get_rank(), dist.get_world_size()
        group_store: Any = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public name for it
        bootstrap = Meetings(
            # A connection of its own: calls on the group's would wait for, and hold up, those of the training.
            group_store.clone,
            "safepoint/open/",
            process_index=index,
            process_count=count,
            store_owner="the process group",
        )
        try:
            return cls.open(
                bootstrap,
                process_index=index,
                process_count=count,
                description=f"torch.distributed, {count} processes",
                deadline_secs=deadline_secs,
            )
        finally:
            bootstrap.close(until=time.monotonic())
