"""Copies many host tensors back to back into one piece of host memory, at the speed of a plain copy.

Large tensors are cut into parts that a few threads copy without the GIL; torch's own parallel copy meets after every
tensor, which on a busy machine costs several times the copy. Runs of small ones go through one call for all of them,
since what counts there is the calls. Knows nothing of leaves and files.
"""

from __future__ import annotations

import os
import threading
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["SMALL_BYTES", "num_cores", "pack"]

SMALL_BYTES = 32 << 10
"""Tensors smaller than this are copied many at once."""

_PART_BYTES = 4 << 20
_BYTES_WORTH_A_THREAD = 32 << 20
_MOST_THREADS = 4
_CAT_DTYPES = {torch.float32, torch.float64, torch.float16, torch.bfloat16}
"""For which `torch.cat` is one copy of memory after the other."""

_Part = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]


def pack(tensors: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Copy contiguous host tensors, bit for bit, one after the other into `out`, which they fill exactly.

    Args:
        tensors: neither conjugate nor negative views.
        out: bytes, one dimension.
    """
    parts: list[_Part] = []
    start = 0
    for is_small, run in groupby(tensors, key=_is_small):
        if is_small:
            start = _pack_small(list(run), out, start)
            continue
        for tensor in run:
            end = start + tensor.nbytes
            parts.extend(_cut(out[start:end].numpy(), _bytes_of(tensor).numpy()))
            start = end
    _copy_all(parts)


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


def _copy_all(parts: list[_Part]) -> None:
    num_bytes = sum(len(source) for _, source in parts)
    threads = min(_MOST_THREADS, num_cores(), num_bytes // _BYTES_WORTH_A_THREAD)
    waiting = iter(parts)
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                part = next(waiting, None)
            if part is None:
                return
            np.copyto(*part)

    helpers = []
    for _ in range(1, threads):
        helper = threading.Thread(target=work, name="safepoint-copy", daemon=True)
        try:
            helper.start()
        except RuntimeError:  # no more threads to be had, or the interpreter is shutting down
            break
        helpers.append(helper)
    work()
    for helper in helpers:
        helper.join()


def num_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
