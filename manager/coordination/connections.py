"""The connections over which a process moves host memory to others: to all of them, or to a few.

Owns when they are made, by all at once, and the store in which gloo finds its peers. Must not know what is sent.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from safepoint.manager.coordination.address import Server, open_server
from safepoint.manager.coordination.base import run_together
from safepoint.manager.coordination.store import PrefixStore, Store, connect_tcp
from safepoint.manager.coordination.transport import GlooTransport
from safepoint.manager.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from safepoint.manager.coordination.base import Coordinator

__all__ = ["Connections"]

_NONE, _SOUND = b"none", b"sound"


class Connections:
    """One set of connections of one process.

    Args:
        coordinator: in which all meet to make them.
        host: under which the primary's host answers from here.
        name: of the meetings.
    """

    def __init__(self, coordinator: Coordinator, host: str, name: str) -> None:
        self._coordinator = coordinator
        self._host = host
        self._name = name
        self._members: tuple[int, ...] = ()
        self.transport: GlooTransport | None = None

    def open(self, members: Sequence[int], deadline_secs: float) -> GlooTransport | None:
        """Connect this process with the others of `members`, or return what is connected already.

        *Called by* all processes, those with nobody to be connected with included.

        Raises:
            RendezvousTimeoutError: some process did not come, or could not be connected.
            PeerFailedError: that happened to another process.
        """
        with self._agreed_port(members, deadline_secs) as port:
            if port is not None:
                run_together(
                    self._coordinator,
                    f"{self._name} open",
                    deadline_secs,
                    lambda: self._connect(members, port, deadline_secs),
                )
        return self.transport if members else None

    def try_open(self, members: Sequence[int], deadline_secs: float, connect_secs: float) -> str:
        """Do as `open` does; return why some process could not be connected within `connect_secs`, "" if all are.

        Nor within half of the deadline, so that whoever fails at once has not waited in vain for the verdict.

        *Called by* all processes; all get the same answer.

        Raises:
            RendezvousTimeoutError: some process did not come.
        """

        def connect(port: int) -> bytes:
            try:
                return self._connect(members, port, min(connect_secs, deadline_secs / 2))  # the others wait meanwhile
            except CheckpointError as error:
                return f"process {self._coordinator.process_index}: {error.message}".encode()

        with self._agreed_port(members, deadline_secs) as port:
            if port is None:
                return ""
            failure = run_together(
                self._coordinator,
                f"{self._name} open",
                deadline_secs,
                lambda: connect(port),
                lambda brought: next((text for text in brought if text), b""),
            ).decode()
        if failure:
            self.close()
        return failure

    def close(self) -> None:
        """Let go of them. Idempotent."""
        if self.transport is not None:
            self.transport.close()
        self.transport = None

    @contextlib.contextmanager
    def _agreed_port(self, members: Sequence[int], deadline_secs: float) -> Iterator[int | None]:
        """Yield the port of a store to connect through, for all processes; None where nobody needs to."""
        is_sound = self.transport is not None and self.transport.is_sound and self._members == tuple(members)
        own = _NONE if not members else _SOUND if is_sound else b"connect"
        server: Server | None = None

        def agree(brought: Sequence[bytes]) -> bytes:
            nonlocal server
            if all(payload in (_NONE, _SOUND) for payload in brought):
                return b""
            # A store for this only: what gloo writes there goes away with it.
            server = open_server()
            return str(server.address.port).encode()

        try:
            port = self._coordinator.meet(self._name, own, deadline_secs=deadline_secs, decide=agree)
            yield int(port) if port else None
        finally:
            if server is not None:
                server.close()

    def _connect(self, members: Sequence[int], port: int, deadline_secs: float) -> bytes:
        self.close()
        if not members:
            return b""

        def connect() -> Store:
            return PrefixStore(f"from-{min(members)}", connect_tcp(self._host, port))

        self.transport = GlooTransport(
            connect,
            process_index=self._coordinator.process_index,
            members=members,
            deadline_secs=deadline_secs,
        )
        self._members = tuple(members)
        return b""
