"""Copies many host tensors back to back into one piece of host memory, at the speed of a plain copy.

Large tensors are cut into parts that a few threads copy without the GIL, and that go on from one tensor and one run to
the next; torch's own parallel copy meets after every tensor, which on a busy machine costs several times the copy. Runs
of small ones go through one call for all of them, since what counts there is the calls. Knows nothing of leaves and
files.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from itertools import groupby
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from safepoint.formats.threads import start_helpers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

__all__ = ["SMALL_BYTES", "Packer", "num_cores", "pack"]

SMALL_BYTES = 32 << 10
"""Tensors smaller than this are copied many at once."""

_PART_BYTES = 16 << 20
_WAITING_BYTES = 32 << 20
"""How much may wait to be copied: of tensors that were made for this, so much is in memory twice."""

_BYTES_WORTH_A_THREAD = 16 << 20
_MOST_THREADS = 4
_CAT_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
"""For which `torch.cat` is one copy of memory after the other."""

_Part = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


class Packer:
    """Copies run after run, with a thread a core where there is much to copy; all of it is done when it is left.

    Args:
        num_bytes: of all runs together, or more.
    """

    def __init__(self, num_bytes: int) -> None:
        self._num_helpers = min(_MOST_THREADS, num_cores(), num_bytes // _BYTES_WORTH_A_THREAD) - 1
        self._helpers: list[threading.Thread] = []
        self._waiting: deque[_Part] = deque()
        self._waiting_bytes = 0
        self._changed = threading.Condition()
        self._is_over = False
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._helpers.extend(start_helpers(self._help, count=self._num_helpers, name="safepoint-copy"))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._copy_until(0)
        finally:
            with self._changed:
                self._is_over = True
                self._waiting.clear()  # nothing is left but after an error
                self._changed.notify_all()
            for helper in self._helpers:
                helper.join()
        if self._failure is not None and error is None:
            raise self._failure

    def pack(self, tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        """Copy contiguous host tensors, bit for bit, one after the other into `out`, which they fill exactly.

        Args:
            tensors: neither conjugate nor negative views; not to be changed before the packer is left.
            out: bytes, one dimension.
        """
        start = 0
        for is_small, run in groupby(tensors, key=_is_small):
            if is_small:
                start = _pack_small(list(run), out, start)
                continue
            for tensor in run:
                end = start + tensor.nbytes
                self._add(_cut(out[start:end].numpy(), _bytes_of(tensor).numpy()), end - start)
                start = end

    def _add(self, parts: Iterator[_Part], num_bytes: int) -> None:
        with self._changed:
            self._waiting.extend(parts)
            self._waiting_bytes += num_bytes
            self._changed.notify_all()
        self._copy_until(_WAITING_BYTES if self._helpers else 0)

    def _copy_until(self, limit_bytes: int) -> None:
        while self._waiting_bytes > limit_bytes and self._copy_one():
            pass

    def _copy_one(self) -> bool:
        with self._changed:
            if not self._waiting:
                return False
            target, source = self._waiting.popleft()
            self._waiting_bytes -= len(source)
        np.copyto(target, source)
        return True

    def _help(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._is_over)
                    if self._is_over:
                        return
                self._copy_one()
        except BaseException as error:  # noqa: BLE001 - raised where the packer is left
            self._failure = error


def pack(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copy one run, as `Packer.pack` does, and return when it is done."""
    with Packer(out.numel()) as packer:
        packer.pack(tensors, out)


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.nbytes < SMALL_BYTES


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)


def _pack_small(tensors: list[torch.Tensor], out: torch.Tensor, start: int) -> int:
    """Copy each run of one dtype with one call; return where the next byte goes."""
    with torch.no_grad():
        return _cat_small(tensors, out, start)


def _cat_small(tensors: list[torch.Tensor], out: torch.Tensor, start: int) -> int:
    for dtype, group in groupby(tensors, key=_dtype_of):
        run = list(group)
        end = start + sum(tensor.nbytes for tensor in run)
        target = out[start:end]
        if dtype in _CAT_DTYPES and (out.storage_offset() + start) % dtype.itemsize == 0:
            torch.cat([tensor.view(-1) if tensor.dim() != 1 else tensor for tensor in run], out=target.view(dtype))
        else:
            torch.cat([_bytes_of(tensor) for tensor in run], out=target)
        start = end
    return start


def _dtype_of(tensor: torch.Tensor) -> torch.dtype:
    return tensor.dtype


def _cut(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> Iterator[_Part]:
    for start in range(0, len(source), _PART_BYTES):
        yield target[start : start + _PART_BYTES], source[start : start + _PART_BYTES]


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
