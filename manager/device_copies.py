"""Copies from CUDA devices to host memory, all under way at once, and beside what the training loop's stream does.

Each device has a stream of its own for them, which begins where the current stream is. Nothing is copied twice: a
copy goes straight to where it belongs, at the full speed of the bus where that memory is pinned. Knows nothing of
leaves and files.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Self

import torch

from safepoint.manager.adapters.bits import as_bits

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

__all__ = ["DeviceCopies", "pin_memory"]

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for all devices


class DeviceCopies:
    """Begins copies; all of them are done when it is left.

    Args:
        prepare: told of each device before the first copy from it.
    """

    def __init__(self, prepare: Callable[[torch.device], None]) -> None:
        self._prepare = prepare
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for stream in self._streams.values():
            stream.synchronize()  # after an error too: the memory that is copied to is the caller's again

    def begin(self, live: torch.Tensor, out: torch.Tensor) -> None:
        """Begin to copy a tensor's elements in C order, bit for bit.

        Args:
            live: on a CUDA device, strided, neither a conjugate nor a negative view; not to be changed before the end.
            out: as many bytes on the host, one dimension.
        """
        stream = self._streams.get(live.device)
        if stream is None:
            self._prepare(live.device)
            stream = self._streams[live.device] = torch.cuda.Stream(device=live.device)  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream(live.device))
        with torch.cuda.stream(stream), torch.no_grad():
            out.copy_(as_bits(live).contiguous().reshape(-1).view(torch.uint8), non_blocking=True)


def pin_memory(memory: torch.Tensor, owner: object, device: torch.device) -> weakref.finalize[..., Any] | None:
    """Pin host memory, so that devices copy to it directly; return what lets go of it, None where that is refused.

    Args:
        memory: bytes, one dimension.
        owner: lets go, too, when it is gone; must not live longer than the memory.
        device: whose context does it; one that this process uses already.
    """
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    with torch.cuda.device(device):
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.numel(), _PORTABLE)):
            return None
    pin = weakref.finalize(owner, _unpin, memory.data_ptr(), device)
    pin.atexit = False  # the driver does it, when the runtime may be gone already
    return pin


def _unpin(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
