"""Writing to tensors whose elements share memory: expanded ones, overlapping windows.

torch refuses `copy_` to them. It is well defined where the elements that share memory are given the same bits, as
they are when the tensor was saved from such a view: that is checked first, for the whole leaf, then memory is written
once. Must not know leaves or regions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from safepoint.formats.errors import UnsupportedValueError
from safepoint.manager.adapters.bits import as_bits, changing, is_lazy_view, make_lazy_like, physical

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["shares_elements", "write_shared"]


def shares_elements(tensor: torch.Tensor) -> bool:
    """Say whether two elements may be the same memory. It may say so of unusual strides that merely interleave."""
    if tensor.numel() <= 1 or tensor.is_contiguous():
        return False
    reach = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False


def write_shared(writes: Sequence[tuple[torch.Tensor, torch.Tensor]], name: str) -> None:
    """Write values to views of one storage, element by element of the memory below.

    Args:
        writes: pairs of a live view and its values on the host, contiguous, of the same dtype and shape.
        name: the leaf's, for messages.

    Raises:
        UnsupportedValueError: one element of memory would get two values; nothing was changed.
    """
    views = [physical(live) for live, _ in writes]
    start = min(_offset(view) for view in views)
    stop = max(_offset(view) + _extent(view) for view in views)
    memory = torch.zeros((stop - start, views[0].element_size()), dtype=torch.uint8)
    is_written = torch.zeros(stop - start, dtype=torch.bool)
    places = [_places(view) - start for view in views]
    rows = [_rows(live, values) for live, values in writes]
    for place, row in zip(places, rows, strict=True):
        memory[place] = row
        is_written[place] = True
    if any(not torch.equal(memory[place], row) for place, row in zip(places, rows, strict=True)):
        raise UnsupportedValueError(
            "elements of the target share memory, and the stored ones differ",
            leaf=name,
            hint="Give the restore a target with memory of its own for every element: `tensor.contiguous()`.",
        )
    where = is_written.nonzero().squeeze(1)
    values = memory[where].reshape(-1).view(views[0].dtype)
    with changing(views[0]):
        flat = as_bits(views[0].as_strided((stop - start,), (1,), start))
        flat.index_copy_(0, where.to(flat.device), as_bits(values).to(flat.device))


def _offset(tensor: torch.Tensor) -> int:
    return int(tensor.storage_offset())


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum(int(stride) * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Return the storage index of each element, in C order."""
    places = torch.full((1,), _offset(tensor))
    for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
        places = (places.unsqueeze(1) + torch.arange(size) * stride).reshape(-1)
    return places


def _rows(live: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return what the memory under `live` must hold: a row of bytes an element, in C order."""
    if is_lazy_view(live):
        memory = torch.empty_like(values)
        make_lazy_like(memory, live).copy_(values)
        values = memory
    return values.reshape(-1).view(torch.uint8).reshape(-1, values.element_size())
