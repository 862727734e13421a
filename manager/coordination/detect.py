"""Which processes belong together, found out from what is running.

Owns the order in which that is asked, and the explicit `store="host:port"`. Must not know how they meet.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

from safepoint.manager.coordination.device_sync import xla_is_in_use
from safepoint.manager.coordination.single import Alone, SingleProcess
from safepoint.manager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from safepoint.manager.coordination.base import Coordinator

__all__ = ["ALONE", "detect_coordinator"]

ALONE = "alone"
"""As a store: this process saves by itself, whatever others run with it."""

logger = logging.getLogger("safepoint.coordination")


def detect_coordinator(*, store: str | None = None, deadline_secs: float = 600.0) -> Coordinator:
    """Return the coordinator of the processes that run together.

    *Called by* all processes, after the process group (or the XLA replicas) have been started.

    Args:
        store: "host:port" at which process 0 shall serve the meeting place; RANK and WORLD_SIZE of the environment
            say who is who. "alone": no others, whatever runs. None: torch.distributed, XLA replicas, or one process,
            whichever runs.
        deadline_secs: how long to wait for the others.

    Raises:
        RendezvousTimeoutError: names those that did not come.
        InvalidArgumentError: what runs gives these processes no way to meet; says what to add.
    """
    import torch.distributed as dist  # noqa: PLC0415 - heavy, and not in every build of torch

    if store == ALONE:
        return Alone()
    if store is not None:
        from safepoint.manager.coordination.explicit import open_at  # noqa: PLC0415

        return open_at(store, deadline_secs=deadline_secs)
    if dist.is_available() and dist.is_initialized():
        if dist.get_world_size() == 1:
            return SingleProcess()
        from safepoint.manager.coordination.distributed import DistributedCoordinator  # noqa: PLC0415

        return DistributedCoordinator.from_default_group(deadline_secs=deadline_secs)
    if xla_is_in_use():
        from safepoint.manager.coordination.xla import detect_replicas  # noqa: PLC0415

        replicas = detect_replicas(deadline_secs=deadline_secs)
        if replicas is not None:
            return replicas
    _warn_of_processes_that_cannot_meet()
    return SingleProcess()


def _warn_of_processes_that_cannot_meet() -> None:
    count = os.environ.get("WORLD_SIZE", "1")
    if count not in {"", "1"}:
        logger.warning(
            "WORLD_SIZE is %s, but torch.distributed is not initialised: this process saves on its own. "
            "Call torch.distributed.init_process_group() before the manager is made.",
            count,
        )


def parse_store(store: object) -> tuple[str, int]:
    """Return host and port of "host:port", "[v6 address]:port" included."""
    if not isinstance(store, str):
        raise InvalidArgumentError(f'store must be "host:port", not {store!r}.')
    host, _, port = store.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise InvalidArgumentError(f'store must be "host:port", not {store!r}.')
    return host.removeprefix("[").removesuffix("]"), int(port)
