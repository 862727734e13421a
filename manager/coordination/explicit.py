"""Processes that were told where to meet: `store="host:port"`, with RANK and WORLD_SIZE of the environment.

Owns the server at that place, one for all managers of the process. Must not know how processes meet.
"""

from __future__ import annotations

import datetime
import os
import time
from typing import TYPE_CHECKING

import torch.distributed as dist

from safepoint.manager.coordination.detect import parse_store
from safepoint.manager.coordination.distributed import Meetings, StoreCoordinator
from safepoint.manager.coordination.single import SingleProcess
from safepoint.manager.coordination.store import Store, TCPStore, connect_tcp
from safepoint.manager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from safepoint.manager.coordination.base import Coordinator

__all__ = ["open_at"]

_RETRY_SECS = 0.05

_served: dict[int, TCPStore] = {}
"""Servers by port; they live as long as the process, since the next manager meets at the same place."""


def open_at(store: str, *, deadline_secs: float) -> Coordinator:
    """Serve there if this is process 0, and open a coordinator through it.

    *Called by* all processes.

    Raises:
        InvalidArgumentError: the place, or the environment, makes no sense, or the port is taken.
        RendezvousTimeoutError: names those that did not come.
    """
    host, port = parse_store(store)
    index, count = _own_place()
    if count == 1:
        return SingleProcess()
    if index == 0:
        _serve(port)
    until = time.monotonic() + deadline_secs

    def connect() -> Store:
        # The primary may start last: there is nobody yet, which here does not mean that somebody left.
        while True:
            try:
                return connect_tcp("127.0.0.1" if index == 0 else host, port)
            except OSError:
                if time.monotonic() >= until:
                    raise
                time.sleep(_RETRY_SECS)

    bootstrap = Meetings(connect, "safepoint/open/", process_index=index, process_count=count)
    try:
        return StoreCoordinator.open(
            bootstrap,
            process_index=index,
            process_count=count,
            description=f"a store at {store}, {count} processes",
            deadline_secs=deadline_secs,
        )
    finally:
        bootstrap.close(until=time.monotonic())


def _own_place() -> tuple[int, int]:
    try:
        index, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        index, count = -1, 0
    if not 0 <= index < count:
        raise InvalidArgumentError(
            f"With store=, the environment must hold RANK and WORLD_SIZE, but RANK is {os.environ.get('RANK')!r} "
            f"and WORLD_SIZE {os.environ.get('WORLD_SIZE')!r}.",
            hint="Start the processes with torchrun, or set both: RANK from 0 to WORLD_SIZE - 1.",
        )
    return index, count


def _serve(port: int) -> None:
    if port in _served:
        return
    timeout = datetime.timedelta(seconds=10)
    try:
        _served[port] = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=timeout)
    except (OSError, dist.DistError) as error:
        reason = str(error).split("\n", maxsplit=1)[0]
        raise InvalidArgumentError(
            f"Process 0 cannot serve the store on port {port}: {reason}", hint="Choose a port that is free."
        ) from error
