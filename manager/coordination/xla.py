"""Replicas of torch_xla as the processes of a job.

Owns telling replicas from SPMD, and handing the store's address to replicas once. Imports torch_xla only where its
runtime runs already. Must not know how processes meet.

`xm.rendezvous` is used once: it has no deadline, ignores its tag, and runs on the devices. Under SPMD it is no meeting
at all, and `xr` tells every process that it is the first of one: there the processes must be torch.distributed's, or
be told where to meet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Self

from safepoint.manager.coordination.address import Address, find_server, open_server
from safepoint.manager.coordination.distributed import StoreCoordinator
from safepoint.manager.errors import InvalidArgumentError

__all__ = ["Exchange", "XlaReplicasCoordinator", "detect_replicas"]

Exchange = Callable[[bytes], Sequence[bytes]]
"""Gives every replica the payloads of all, by ordinal."""


class XlaReplicasCoordinator(StoreCoordinator):
    """The replicas of a job that does not use SPMD: one a process, or several threads of one."""

    @classmethod
    def from_replicas(cls, exchange: Exchange, *, process_index: int, process_count: int, deadline_secs: float) -> Self:
        """Open through one exchange of all replicas.

        *Called by* all replicas.

        Args:
            exchange: `xm.rendezvous`, or what stands in for it.
            process_index: this replica's global ordinal.
            process_count: how many replicas there are.
            deadline_secs: for reaching the primary's store; the exchange itself has no deadline.
        """
        server = open_server() if process_index == 0 else None
        try:
            brought = exchange(b"" if server is None else server.address.to_bytes())
            address = Address.from_bytes(brought[0])
            host = "127.0.0.1" if server is not None else find_server(address, deadline_secs=deadline_secs)
            coordinator = cls(
                address,
                host,
                process_index=process_index,
                process_count=process_count,
                description=f"XLA, {process_count} replicas",
                server=server,
            )
        except BaseException:
            if server is not None:
                server.close()
            raise
        try:
            coordinator.meet("opened", b"", deadline_secs=deadline_secs)
        except BaseException:
            coordinator.close()
            raise
        return coordinator


def detect_replicas(*, deadline_secs: float) -> XlaReplicasCoordinator | None:
    """Return the coordinator of this job's replicas; None if this process is the only one.

    Raises:
        InvalidArgumentError: several SPMD processes, which have no way to meet.
    """
    import torch_xla.core.xla_model as xm  # noqa: PLC0415 - optional, and only once it runs
    import torch_xla.runtime as xr  # noqa: PLC0415

    if xr.is_spmd():
        _refuse_several_hosts(xr.global_runtime_device_count(), xr.addressable_runtime_device_count())
        return None
    if xr.world_size() == 1:
        return None
    return XlaReplicasCoordinator.from_replicas(
        lambda payload: xm.rendezvous("safepoint", payload),
        process_index=xr.global_ordinal(),
        process_count=xr.world_size(),
        deadline_secs=deadline_secs,
    )


def _refuse_several_hosts(num_devices: int, num_addressable: int) -> None:
    if num_devices > num_addressable:
        raise InvalidArgumentError(
            f"Several SPMD processes share {num_devices} devices, of which {num_addressable} are here, but nothing "
            "says how the processes can meet.",
            hint='Call torch.distributed.init_process_group("gloo") before the manager is made, '
            'or pass store="host:port" with RANK and WORLD_SIZE in the environment.',
        )
