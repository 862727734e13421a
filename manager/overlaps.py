"""Which arrays show overlapping parts of one memory, and how that memory is stored once.

An array that holds all that another one shows keeps it: the other becomes a window on it. Arrays of which none holds
the others, as `x[:6]` and `x[4:]`, become windows on a pool, which holds what they show together.

Where a pool would hold much that none of them shows (a row and a column of a large matrix, say), they are stored one by
one, and where each lies in their common memory is told beside them.

Pure: works on addresses. Arrays that merely interleave, as the columns of a matrix, share nothing.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from safepoint.manager.windows import Axis, Lattice

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from safepoint.manager.adapters import ArrayLeaf, Memory

__all__ = ["Sharing", "find_sharings", "tell_places"]

_MAX_POOL = 2  # times the bytes that its arrays show
_MAX_WORK = 100_000  # steps for finding out whether two arrays share an element; it takes some dozens but by design
_ALIGNMENT = 16  # of the largest item

Place = tuple[int, tuple[int, ...]]
"""Start and strides of a window, in bytes."""


@dataclass(kw_only=True, slots=True)
class Sharing:
    """Arrays that show one memory.

    Attributes:
        base: the number of the array that holds what all show; None for a pool.
        num_bytes: of the pool; 0 where an array is the base.
        places: by the number of each other array, where in the base or pool it lies.
        is_stored: whether the pool is what is stored. Else each array is, and `places` tells where it lies in memory.
    """

    base: int | None
    num_bytes: int = 0
    places: dict[int, Place] = field(default_factory=dict)
    is_stored: bool = True


@dataclass(slots=True)
class _Array:
    number: int
    memory: Memory
    low: int
    high: int
    num_bytes: int
    lattice: Lattice | None = None
    inside: list[tuple[_Array, Place]] = field(default_factory=list)
    """Smaller arrays in this one, and where."""


def find_sharings(leaves: Sequence[ArrayLeaf]) -> list[Sharing]:
    """Return which arrays show one memory; those that share nothing are in none of it.

    Args:
        leaves: distinct arrays.
    """
    found: list[Sharing] = []
    for numbers in _neighbours(leaves):
        roots = _nest(_measured(leaves, numbers))
        pools = list(_pools(roots))
        found += pools
        pooled = {number for pool in pools for number in pool.places}
        roots = [root for root in roots if root.number not in pooled]
        for root in roots:
            if root.inside:
                places = {array.number: place for array, place in root.inside}
                found.append(Sharing(base=root.number, places=places))
    return found


def tell_places(leaves: Sequence[ArrayLeaf], sharing: Sharing) -> Sharing:
    """Return where the arrays of a sharing lie in memory, for storing each of them by itself."""
    numbers = sorted({*sharing.places, *([] if sharing.base is None else [sharing.base])})
    return _spread(_measured(leaves, numbers))


def _spread(arrays: Sequence[_Array]) -> Sharing:
    origin = min(array.low for array in arrays)
    origin -= origin % _ALIGNMENT
    return Sharing(
        base=None,
        num_bytes=max(array.high for array in arrays) - origin,
        places={array.number: (array.memory.start - origin, array.memory.strides) for array in arrays},
        is_stored=False,
    )


def _neighbours(leaves: Sequence[ArrayLeaf]) -> Iterator[list[int]]:
    """Yield groups of arrays whose address ranges touch, by number; most arrays are alone, and in none."""
    spaces: dict[str, list[tuple[int, int, int]]] = {}
    for number, leaf in enumerate(leaves):
        extent = leaf.extent()
        if extent is not None:
            space, low, high = extent
            spaces.setdefault(space, []).append((low, high, number))
    for space in sorted(spaces):
        yield from _touching(sorted(spaces[space]))


def _touching(ranges: Sequence[tuple[int, int, int]]) -> Iterator[list[int]]:
    lows, highs, _ = zip(*ranges, strict=True)
    if all(map(operator.ge, lows[1:], highs)):
        return  # each begins where the one before has ended, as nearly always
    group: list[int] = []
    reach = 0
    for low, high, number in ranges:
        if low < reach:
            group.append(number)
        else:
            if len(group) > 1:
                yield group
            group = [number]
        reach = max(reach, high)
    if len(group) > 1:
        yield group


def _measured(leaves: Sequence[ArrayLeaf], numbers: Iterable[int]) -> list[_Array]:
    return [_measure(number, memory) for number in numbers if (memory := leaves[number].memory()) is not None]


def _measure(number: int, memory: Memory) -> _Array:
    num_bytes = memory.item_bytes
    for size in memory.shape:
        num_bytes *= size
    low, high = memory.bounds
    return _Array(number=number, memory=memory, low=low, high=high, num_bytes=num_bytes)


def _nest(group: Iterable[_Array]) -> list[_Array]:
    """Return the arrays that no other one holds, each with those that it holds."""
    roots: list[_Array] = []
    for array in sorted(group, key=lambda item: (-item.num_bytes, item.memory.is_lazy, item.number)):
        for root in roots:
            if root.lattice is None or array.low < root.low or array.high > root.high:
                continue
            place = root.lattice.locate(array.memory)
            if place is not None:
                root.inside.append((array, place))
                break
        else:
            array.lattice = None if array.memory.is_lazy else _lattice_of(array.memory)
            roots.append(array)
    return roots


def _lattice_of(memory: Memory) -> Lattice | None:
    try:
        return Lattice.of(memory)
    except ValueError:
        return None


# -- pools -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Box:
    array: _Array
    low: tuple[int, ...]
    high: tuple[int, ...]


def _pools(roots: Sequence[_Array]) -> Iterator[Sharing]:
    """Yield a pool for each set of arrays that overlap without one holding the others."""
    if len(roots) < 2:  # noqa: PLR2004 - it takes two
        return
    origin = min(root.low for root in roots)
    strides = sorted({abs(s) for root in roots for s in _steps(root)} | {1}, reverse=True)
    boxes = [_box(root, origin, strides) for root in roots]
    together = [_Box(root, (root.low - origin,), (root.high - origin - 1,)) for root in roots]
    is_regular = _tells_apart(boxes, strides)
    if not is_regular:
        boxes, strides = together, [1]
    for members in _overlapping(boxes, _meet if is_regular else _share_an_element):
        pool = _pool(members, origin, strides)
        if pool is None:
            inner = [array for box in members for array, _ in box.array.inside]
            pool = _spread([*(box.array for box in members), *inner])
        yield pool


def _steps(array: _Array) -> list[int]:
    return [
        stride for size, stride in zip(array.memory.shape, array.memory.strides, strict=True) if size > 1 and stride
    ]


def _box(array: _Array, origin: int, strides: Sequence[int]) -> _Box:
    """Return the places of an array by lattice axis, those between its ends included."""
    low = []
    rest = array.low - origin
    for stride in strides:
        place, rest = divmod(rest, stride)
        low.append(place)
    high = list(low)
    memory = array.memory
    for size, step in (*zip(memory.shape, memory.strides, strict=True), (memory.item_bytes, 1)):
        if size > 1 and step:
            high[strides.index(abs(step))] += size - 1
    return _Box(array, tuple(low), tuple(high))


def _tells_apart(boxes: Sequence[_Box], strides: Sequence[int]) -> bool:
    """Say whether two places of these boxes are one address only when they are one place."""
    reach = 0
    for number in reversed(range(len(strides))):
        if strides[number] <= reach:
            return False
        reach += strides[number] * max(box.high[number] for box in boxes)
    return True


def _overlapping(boxes: Sequence[_Box], meet: Callable[[_Box, _Box], bool]) -> Iterator[list[_Box]]:
    """Yield each connected set of at least two boxes that overlap."""
    leader = list(range(len(boxes)))

    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    order = sorted(range(len(boxes)), key=lambda number: boxes[number].array.low)
    active: list[int] = []
    for number in order:
        box = boxes[number]
        active = [other for other in active if boxes[other].array.high > box.array.low]
        for other in active:
            if find(number) != find(other) and meet(box, boxes[other]):
                leader[find(number)] = find(other)
        active.append(number)
    members: dict[int, list[_Box]] = {}
    for number, box in enumerate(boxes):
        members.setdefault(find(number), []).append(box)
    yield from (found for found in members.values() if len(found) > 1)


def _meet(one: _Box, other: _Box) -> bool:
    return all(
        low <= other_high and other_low <= high
        for low, high, other_low, other_high in zip(one.low, one.high, other.low, other.high, strict=True)
    )


def _share_an_element(one: _Box, other: _Box) -> bool:
    try:
        return np.shares_memory(_ghost(one.array.memory), _ghost(other.array.memory), max_work=_MAX_WORK)  # type: ignore[arg-type]  # any number
    except np.exceptions.TooHardError:
        return True


def _ghost(memory: Memory) -> np.ndarray[Any, Any]:
    """Return an array of the same places, of which only the geometry is ever looked at: it may be on a device."""
    interface = {
        "version": 3,
        "typestr": f"|V{memory.item_bytes}",
        "data": (memory.start, True),
        "shape": memory.shape,
        "strides": memory.strides,
    }
    return np.asarray(SimpleNamespace(__array_interface__=interface))


def _pool(members: Sequence[_Box], origin: int, strides: Sequence[int]) -> Sharing | None:
    low = [min(box.low[axis] for box in members) for axis in range(len(strides))]
    sizes = [max(box.high[axis] for box in members) - low[axis] + 1 for axis in range(len(strides))]
    axes, stored = [], 1
    for size, stride in zip(reversed(sizes), reversed(strides), strict=True):
        axes.append(Axis(size, stride, stored))
        stored *= size
    if stored > _MAX_POOL * sum(box.array.num_bytes for box in members):
        return None
    start = origin + sum(place * stride for place, stride in zip(low, strides, strict=True))
    lattice = Lattice(start, axes)
    pool = Sharing(base=None, num_bytes=stored)
    for array in [box.array for box in members]:
        place = lattice.locate(array.memory)
        if place is None:
            return None
        pool.places[array.number] = place
        for inner, _ in array.inside:
            moved = lattice.locate(inner.memory)
            if moved is not None:  # else it is stored by itself
                pool.places[inner.number] = moved
    return pool
