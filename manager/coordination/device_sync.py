"""Finishing what devices were asked to do.

Owns the order of calls that cuts XLA's lazy graph and waits for it, and the synchronise of other devices. Must not
initialise a runtime: a process that has not touched a device must not open it for the sake of a checkpoint.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

__all__ = ["sync_devices", "xla_is_initialized"]

_DEVICE_MODULES = ("cuda", "xpu")


def sync_devices() -> None:
    """Wait until every device in use by this process has done what it was asked to."""
    if xla_is_initialized():
        _sync_xla()
    for name in _DEVICE_MODULES:
        device = getattr(torch, name, None)
        if device is not None and device.is_initialized():
            for index in range(device.device_count()):
                device.synchronize(index)


def xla_is_initialized() -> bool:
    """Return whether this process has an XLA runtime already; never imports torch_xla, never starts it."""
    torch_xla = sys.modules.get("torch_xla")
    if torch_xla is None:
        return False
    extension: Any = getattr(torch_xla, "_XLAC", None)
    return extension is not None and bool(extension._xla_runtime_is_initialized())  # noqa: SLF001 - no public name


def _sync_xla() -> None:
    # Both: sync(wait=True) alone does not wait on CPU, and before it the sharding of a lazy tensor is not known.
    # Called through their modules, so that a recorder can stand in between.
    import torch_xla  # noqa: PLC0415 - optional, and only once it runs
    import torch_xla.core.xla_model as xm  # noqa: PLC0415

    torch_xla.sync(wait=True)
    xm.wait_device_ops()
