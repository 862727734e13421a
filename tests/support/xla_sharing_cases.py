"""What is handed on reaches leaves on XLA devices as it reaches host tensors; a case of `xla_adapter_cases.py`."""

from __future__ import annotations

import tempfile
from concurrent.futures import ThreadPoolExecutor

import torch
import torch_xla
import torch_xla.distributed.spmd as xs

from safepoint.manager import CheckpointManager
from safepoint.manager.adapters import ArrayLeaf, wrap_array
from safepoint.manager.fetching import plan_fetches
from safepoint.manager.host_plan import Group, wants_from_bytes, wants_to_bytes
from safepoint.manager.host_sharing import HostReading

from support.thread_transport import Switchboard, ThreadTransport

__all__ = ["check_handing_on"]

NUM_LEAVES = 5  # of five MiB: two share a block of eight


def wanted(number: int) -> torch.Tensor:
    return (torch.arange(5 << 18, dtype=torch.int32) * (number + 1)).reshape(1280, -1)


def check_handing_on(mesh: xs.Mesh) -> None:
    """One process has leaves on devices, sharded and whole, in another order than the other has host tensors."""
    with tempfile.TemporaryDirectory() as root, CheckpointManager(root) as manager:
        manager.save(1, {str(number): wanted(number) for number in range(NUM_LEAVES)})
        (step,) = manager._session.committer.list_steps()
        manifest = manager._session.committer.load_manifest(step)
        on_devices = {
            str(number): torch.zeros_like(wanted(number)).to(torch_xla.device()) for number in (3, 1, 4, 0, 2)
        }
        for number in (0, 3):
            xs.mark_sharding(on_devices[str(number)], mesh, ("a", "b"))
        torch_xla.sync(wait=True)
        on_host = {str(number): torch.zeros_like(wanted(number)) for number in range(NUM_LEAVES)}
        leaves: list[dict[tuple[str, ...], ArrayLeaf]] = [
            {(name,): wrap_array(value, (name,)) for name, value in state.items()} for state in (on_devices, on_host)
        ]
        fetches = [plan_fetches(manifest, own) for own in leaves]
        group = Group((0, 1), tuple(wants_from_bytes(wants_to_bytes(fetches[0], manifest.files))))
        board = Switchboard()

        def restore(own: int) -> int:
            reading = HostReading(
                transport=ThreadTransport(board, own), process_index=own, groups=((group, 30.0),), patience_secs=30.0
            )
            return reading.fetch(manager._session.storage, step.files_prefix, manifest, fetches[own])

        with ThreadPoolExecutor(1) as other:
            told = other.submit(restore, 1)
            read = restore(0)
            assert read > 0
            assert told.result() > 0
        torch_xla.sync(wait=True)
        for number in range(NUM_LEAVES):
            assert torch.equal(on_devices[str(number)].cpu(), wanted(number))
            assert torch.equal(on_host[str(number)], wanted(number))
