"""Boxes in a leaf's global coordinates, and what can be asked of them.

Pure integer geometry: knows nothing of tensors, dtypes, files or processes.
"""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from safepoint.formats.errors import IncompleteCoverageError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["Region", "check_tiling", "subtract"]

_PRIME = 2**61 - 1


@dataclass(frozen=True, slots=True, order=True)
class Region:
    """A box: `offsets[d] <= index < offsets[d] + shape[d]` for each dimension d.

    A scalar leaf has the one region `Region((), ())`, which holds one element.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if len(self.offsets) != len(self.shape):
            raise InvalidArgumentError(f"a region needs as many offsets as sizes, got {self.offsets} and {self.shape}")
        if self.shape and (min(self.offsets) < 0 or min(self.shape) < 0):
            raise InvalidArgumentError(f"a region has no negative numbers, got {self.offsets} and {self.shape}")

    @classmethod
    def whole(cls, shape: Sequence[int]) -> Region:
        """Return the region of a whole leaf of this global shape."""
        return _whole(tuple(shape))

    @property
    def num_elements(self) -> int:
        """Number of elements inside."""
        return math.prod(self.shape)

    @property
    def is_empty(self) -> bool:
        """Whether no element is inside."""
        return self.num_elements == 0

    @property
    def end(self) -> tuple[int, ...]:
        """First index past the region, per dimension."""
        return tuple(o + n for o, n in zip(self.offsets, self.shape, strict=True))

    def cut(self, max_elements: int) -> Iterator[Region]:
        """Yield parts of at most so many elements, at least one, that are together the region, in C order."""
        pending = [self]
        while pending:
            part = pending.pop()
            if part.num_elements <= max(1, max_elements):
                yield part
                continue
            axis = next(axis for axis, size in enumerate(part.shape) if size > 1)
            rows = max(1, max_elements * part.shape[axis] // part.num_elements)
            pending += reversed([_rows(part, axis, start, rows) for start in range(0, part.shape[axis], rows)])

    def contains(self, other: Region) -> bool:
        """Say whether every element of `other` is inside."""
        return other.is_empty or all(
            a <= c and d <= b for a, b, c, d in zip(self.offsets, self.end, other.offsets, other.end, strict=True)
        )

    def intersect(self, other: Region) -> Region | None:
        """Return the common part, or None where no element is common."""
        if self.offsets == other.offsets and self.shape == other.shape:
            return None if self.is_empty else self
        start = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        stop = tuple(min(a, b) for a, b in zip(self.end, other.end, strict=True))
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        if any(n <= 0 for n in shape):
            return None
        return Region(start, shape)

    def slices_in(self, outer: Region) -> tuple[slice, ...]:
        """Return the index that picks this region out of an array which holds `outer`."""
        return tuple(
            slice(o - base, o - base + n) for o, n, base in zip(self.offsets, self.shape, outer.offsets, strict=True)
        )

    def runs_in(self, outer: Region) -> Iterator[tuple[int, int]]:
        """Yield (first element, number of elements) of each contiguous run in `outer`'s C order.

        The runs come in the C order of this region, so they concatenate to this region's own array.
        """
        if self.is_empty:
            return
        if self.shape == outer.shape:
            yield 0, self.num_elements
            return
        ndim = len(self.shape)
        split = ndim
        while split > 0 and self.shape[split - 1] == outer.shape[split - 1]:
            split -= 1
        # Dimensions from `split` on are whole; the one before it is cut, and still contiguous.
        strides = [0] * ndim
        stride = 1
        for d in range(ndim - 1, -1, -1):
            strides[d] = stride
            stride *= outer.shape[d]
        first = max(split - 1, 0)
        run = math.prod(self.shape[first:])
        base = sum((o - b) * s for o, b, s in zip(self.offsets, outer.offsets, strides, strict=True))
        counters = [0] * first
        while True:
            yield base + sum(c * s for c, s in zip(counters, strides, strict=False)), run
            for d in range(first - 1, -1, -1):
                counters[d] += 1
                if counters[d] < self.shape[d]:
                    break
                counters[d] = 0
            else:
                return

    def to_json(self) -> list[list[int]]:
        """Return `[offsets, shape]`."""
        return [list(self.offsets), list(self.shape)]


@lru_cache(maxsize=4096)
def _whole(shape: tuple[int, ...]) -> Region:
    # What is kept serves all equal shapes, and (True, 1.0) equals (1, 1): so it is made of plain ints.
    return Region((0,) * len(shape), tuple(int(size) for size in shape))


def subtract(region: Region, taken: Iterable[Region]) -> list[Region]:
    """Return disjoint regions that hold the elements of `region` which none of `taken` holds."""
    rest = [region] if not region.is_empty else []
    for other in taken:
        rest = [piece for whole in rest for piece in _minus(whole, other)]
        if not rest:
            break
    return rest


def _minus(whole: Region, other: Region) -> list[Region]:
    common = whole.intersect(other)
    if common is None:
        return [whole]
    pieces = []
    offsets, shape = list(whole.offsets), list(whole.shape)
    for d, (start, size) in enumerate(zip(common.offsets, common.shape, strict=True)):
        before = start - offsets[d]
        after = offsets[d] + shape[d] - (start + size)
        if before:
            pieces.append(Region(tuple(offsets), (*shape[:d], before, *shape[d + 1 :])))
        if after:
            pieces.append(Region((*offsets[:d], start + size, *offsets[d + 1 :]), (*shape[:d], after, *shape[d + 1 :])))
        offsets[d], shape[d] = start, size
    return pieces


def _rows(region: Region, axis: int, start: int, rows: int) -> Region:
    offsets, shape = list(region.offsets), list(region.shape)
    offsets[axis] += start
    shape[axis] = min(rows, shape[axis] - start)
    return Region(tuple(offsets), tuple(shape))


def check_tiling(shape: Sequence[int], regions: Iterable[Region], *, leaf: str) -> None:
    """Check that `regions` tile a leaf: each element of `shape` in exactly one of them.

    Raises:
        IncompleteCoverageError: elements are missing or held twice, or a region reaches outside; names `leaf`.
    """
    whole = Region.whole(shape)
    parts = [region for region in regions if not region.is_empty]
    for region in parts:
        if len(region.shape) != len(whole.shape) or not whole.contains(region):
            raise IncompleteCoverageError(f"region {region} reaches outside the shape {tuple(shape)}", leaf=leaf)
    held = sum(region.num_elements for region in parts)
    if held != whole.num_elements:
        raise IncompleteCoverageError(
            f"{held} of {whole.num_elements} elements of shape {tuple(shape)} are held",
            leaf=leaf,
            hint="A process that holds a part of this leaf did not bring it to the save, or brought it twice.",
        )
    if len(parts) > 1 and not _is_tiled(whole, parts):
        raise IncompleteCoverageError(f"regions of shape {tuple(shape)} overlap", leaf=leaf)


def _is_tiled(whole: Region, parts: Sequence[Region]) -> bool:
    """Say whether `parts`, not empty and inside `whole`, hold each element once, in time linear in their number.

    Give each boundary coordinate of each dimension a random number, and each box the product over the dimensions of
    (number at its end - number at its start). That measure is additive when a box is cut, so the parts of a tiling add
    up to the whole. Otherwise the difference is a polynomial in those numbers, of degree `ndim` and not zero, since a
    function with bounded support is determined by its signed corners. By the Schwartz-Zippel lemma it vanishes modulo
    the prime with a probability of at most ndim / 2**61, whatever the parts are: the numbers are drawn after them.
    """
    drawn: dict[tuple[int, int], int] = {}

    def number(boundary: tuple[int, int]) -> int:
        value = drawn.get(boundary)
        if value is None:
            value = drawn[boundary] = secrets.randbelow(_PRIME)
        return value

    def measure(region: Region) -> int:
        product = 1
        for d, (start, stop) in enumerate(zip(region.offsets, region.end, strict=True)):
            product = product * (number((d, stop)) - number((d, start))) % _PRIME
        return product

    return sum(map(measure, parts)) % _PRIME == measure(whole)
