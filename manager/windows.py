"""Views of a stored leaf's bytes: where in them an array lies whose memory another one, or a pool, holds.

    window = Window(start=8, shape=(2, 3), strides=(16, 4), dtype="float32")     bytes, in the leaf's C order

Owns the geometry of shared memory, its form in a node, and the opening of a window on an array that was read. Pure but
for that. Must not know trees, targets or files.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.formats.errors import CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safepoint.formats.manifest import JSON
    from safepoint.manager.adapters import Memory

__all__ = ["Axis", "Lattice", "Window", "open_window", "whole_window"]

_MAX_DIMS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """A strided view of a leaf's bytes.

    Attributes:
        start: of its first element, in bytes.
        shape: in items.
        strides: in bytes; negative ones are numpy's.
        dtype: of its items, which may differ from the leaf's.
        is_conj: whether the bytes are the conjugate of the values.
        is_neg: whether they are the negative of them.
    """

    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str
    is_conj: bool = False
    is_neg: bool = False

    def to_json(self) -> dict[str, JSON]:
        """Return the part of a node's data that describes it."""
        flags = {name: True for name in ("is_conj", "is_neg") if getattr(self, name)}
        return {
            "start": self.start,
            "shape": list(self.shape),
            "strides": list(self.strides),
            "dtype": self.dtype,
            **flags,
        }

    @classmethod
    def from_json(cls, data: object, *, num_bytes: int) -> Window:
        """Return the window that a file describes.

        Args:
            data: that anybody may have written.
            num_bytes: of the leaf; the window lies inside.

        Raises:
            CorruptDataError: it is no window, or reaches beyond the leaf.
        """
        if not isinstance(data, dict):
            raise CorruptDataError("a view of another leaf does not say which")
        start, dtype = data.get("start"), data.get("dtype")
        shape, strides = _ints(data.get("shape")), _ints(data.get("strides"))
        item_bytes = ITEM_BYTES.get(dtype) if isinstance(dtype, str) else None
        if type(start) is not int or item_bytes is None or shape is None or strides is None:
            raise CorruptDataError("a view of another leaf is malformed")
        window = cls(
            start=start,
            shape=shape,
            strides=strides,
            dtype=str(dtype),
            is_conj=data.get("is_conj") is True,
            is_neg=data.get("is_neg") is True,
        )
        window._check(num_bytes, item_bytes)
        return window

    def _check(self, num_bytes: int, item_bytes: int) -> None:
        if min(self.shape, default=1) < 1 or len(self.shape) > _MAX_DIMS or len(self.shape) != len(self.strides):
            raise CorruptDataError("a view of another leaf has an impossible shape")
        reach = [stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True)]
        low = self.start + sum(part for part in reach if part < 0)
        high = self.start + sum(part for part in reach if part > 0) + item_bytes
        if low < 0 or high > num_bytes:
            raise CorruptDataError("a view of another leaf reaches beyond it")
        if not self.is_aligned:
            raise CorruptDataError("a view of another leaf lies between its items")

    @property
    def is_aligned(self) -> bool:
        """Whether start and strides are whole numbers of items."""
        item_bytes = ITEM_BYTES[self.dtype]
        return not any(offset % item_bytes for offset in (self.start, *self.strides))


def _ints(value: object) -> tuple[int, ...] | None:
    return tuple(value) if isinstance(value, list) and all(type(item) is int for item in value) else None


def whole_window(shape: Sequence[int], dtype: str) -> Window:
    """Return the window of all of a leaf."""
    strides = []
    step = ITEM_BYTES[dtype]
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return Window(start=0, shape=tuple(shape), strides=tuple(reversed(strides)), dtype=dtype)


def open_window(array: Any, window: Window) -> Any:
    """Return the window on an array of the leaf's data: a view of the same kind, tensor or numpy array.

    Args:
        array: contiguous, in C order, whatever its dtype; numpy arrays writable.
    """
    if isinstance(array, np.ndarray):
        memory = array.reshape(-1).view(np.uint8)
        return np.ndarray(
            window.shape, np.dtype(window.dtype), buffer=memory.data, offset=window.start, strides=window.strides
        )
    dtype = torch_dtype(window.dtype)
    flat = array.detach().reshape(-1)
    base = flat.storage_offset() * flat.element_size() + window.start
    item = dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=array.device).set_(
        flat.untyped_storage(), base // item, window.shape, [stride // item for stride in window.strides]
    )
    if window.is_conj:
        view = view.conj()
    return torch._neg_view(view) if window.is_neg else view  # noqa: SLF001 - the only way to make one


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a lattice: so many places, so far apart in memory, and so far apart in the leaf's C order."""

    size: int
    stride: int
    stored: int


class Lattice:
    """Places in memory, and where each is stored. In bytes: the innermost axis runs over the bytes of an item.

    Args:
        start: address of its first byte.
        axes: in any order; those of one place, or of stride 0, say nothing.

    Raises:
        ValueError: two places are the same, or it cannot be told that they are not.
    """

    def __init__(self, start: int, axes: Sequence[Axis]) -> None:
        self.start = start
        self.axes = _joined(sorted((a for a in axes if a.size > 1 and a.stride), key=lambda a: -a.stride))
        reach = 0
        for axis in reversed(self.axes):
            if axis.stride <= reach:
                raise ValueError("the places of a lattice overlap")
            reach += axis.stride * (axis.size - 1)

    @classmethod
    def of(cls, memory: Memory) -> Lattice:
        """Return the lattice of an array that is stored whole, in C order.

        Raises:
            ValueError: its elements share memory, or its strides are negative.
        """
        if min(memory.strides, default=0) < 0:
            raise ValueError("a lattice has positive strides")
        axes = [Axis(memory.item_bytes, 1, 1)]
        stored = memory.item_bytes
        for size, stride in zip(reversed(memory.shape), reversed(memory.strides), strict=True):
            axes.append(Axis(size, stride, stored))
            stored *= size
        return cls(memory.start, axes)

    def locate(self, memory: Memory) -> tuple[int, tuple[int, ...]] | None:
        """Return start and strides, as stored, of an array that lies on the lattice; None for any other."""
        low, high, start = [], [], 0
        rest = memory.start - self.start
        for axis in self.axes:
            place, rest = divmod(rest, axis.stride)
            start += place * axis.stored
            low.append(place)
            high.append(place)
        if rest:
            return None
        strides = []
        for size, stride in (*zip(memory.shape, memory.strides, strict=True), (memory.item_bytes, 1)):
            found = self._along(stride)
            if size > 1 and found is not None:
                number, steps = found
                ends = low if steps < 0 else high
                ends[number] += steps * (size - 1)
                strides.append(steps * self.axes[number].stored)
            elif size > 1 and stride:
                return None
            else:
                strides.append(0)
        inside = all(first >= 0 and last < axis.size for axis, first, last in zip(self.axes, low, high, strict=True))
        aligned = not any(offset % memory.item_bytes for offset in (start, *strides[:-1]))
        return (start, tuple(strides[:-1])) if inside and aligned else None

    def _along(self, stride: int) -> tuple[int, int] | None:
        """Return the axis along which this is a whole number of steps, and the number."""
        for number, axis in enumerate(self.axes):
            if stride and abs(stride) >= axis.stride:
                return None if stride % axis.stride else (number, stride // axis.stride)
        return None


def _joined(axes: list[Axis]) -> tuple[Axis, ...]:
    """Join neighbours that run on into each other, in memory and as stored alike."""
    joined: list[Axis] = []
    for axis in axes:
        last = joined[-1] if joined else None
        if last is not None and last.stride == axis.size * axis.stride and last.stored == axis.size * axis.stored:
            joined[-1] = Axis(last.size * axis.size, axis.stride, axis.stored)
        else:
            joined.append(axis)
    return tuple(joined)
