"""Finishing what devices were asked to do.

Owns the order of calls that cuts XLA's lazy graph and waits for it, and the synchronise of other devices. Must not
initialise a runtime: a process that has not touched a device must not open it for the sake of a checkpoint.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["sync_devices", "xla_is_in_use"]

_DEVICE_MODULES = ("cuda", "xpu")


def sync_devices() -> None:
    """Wait until every device in use by this process has done what it was asked to."""
    if xla_is_in_use():
        _sync_xla()
    for name in _DEVICE_MODULES:
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            for index in range(device.device_count()):
                if _is_open(name, index):
                    device.synchronize(index)


def _is_open(name: str, index: int) -> bool:
    """Say whether this process uses a device; to wait for one that it does not would take memory on it.

    Of the devices that it sees, a process of several on a host uses one.
    """
    if name != "cuda":
        return True
    return bool(torch._C._cuda_hasPrimaryContext(index))  # type: ignore[attr-defined] # noqa: SLF001 - nothing public


def xla_is_in_use() -> bool:
    """Return whether this process can have XLA tensors; never imports torch_xla, never starts its runtime.

    Under SPMD the device is virtual, and lazy tensors can be there before the runtime is.
    """
    torch_xla = sys.modules.get("torch_xla")
    extension: Any = getattr(torch_xla, "_XLAC", None)
    if torch_xla is None or extension is None:
        return False
    if extension._xla_runtime_is_initialized():  # noqa: SLF001 - torch_xla has no public name for it
        return True
    runtime = sys.modules.get("torch_xla.runtime")
    return runtime is not None and bool(runtime.is_spmd())


def _sync_xla() -> None:
    # Both: sync(wait=True) alone does not wait on CPU, and before it the sharding of a lazy tensor is not known.
    # Called through their modules, so that a recorder can stand in between.
    import torch_xla  # noqa: PLC0415 - optional, and only once it runs
    import torch_xla.core.xla_model as xm  # noqa: PLC0415

    # Cutting the graph moves XLA's generator on. It is put back: a run draws the same numbers whether it saves or not.
    seed = xm.get_rng_state()
    torch_xla.sync(wait=True)
    xm.wait_device_ops()
    xm.set_rng_state(seed)
