"""Foreign arrays as a target wants them: one layer of those that are stacked, matrices the other way round, flattened.

    unstack    params.layers.kernel [in, layers, out]  ->  params.layers.0.kernel [in, out], params.layers.1.kernel, …
    View       kernel [in, heads, size]                ->  weight [heads × size, in]

Reads no more than the rows and columns that are asked for, rounded out to whole steps of the outer dimensions where
some are flattened. Knows no names but those it is given, and no live targets.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint
from safepoint.formats.region import Region
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.sources import byte_view, raw_view

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.formats.manifest import TreePath

__all__ = ["View", "unstack"]

_MATRIX = 2


def unstack(
    checkpoint: ForeignCheckpoint, names: Mapping[str, Any], stacked: Mapping[str, int]
) -> tuple[ForeignCheckpoint, dict[str, Any]]:
    """Return checkpoint and names with an array for each layer in the place of those that hold all layers.

    Args:
        checkpoint: with the arrays.
        names: its leaves by dotted name.
        stacked: dotted names, with the dimension along which all arrays below them are stacked.

    Raises:
        InvalidArgumentError: nothing is below such a name, or an array does not have the dimension.
    """
    found: dict[str, Any] = {}
    arrays = dict(checkpoint.arrays)
    met = set()
    for name, value in names.items():
        above = next((above for above in stacked if name.startswith(f"{above}.")), None)
        if above is None or not isinstance(value, LeafRef):
            found[name] = value
            continue
        met.add(above)
        array = checkpoint.arrays[value.path]
        axis = stacked[above]
        if not 0 <= axis < len(array.shape):
            raise InvalidArgumentError(f"an array of the shape {array.shape} has no dimension {axis}", leaf=name)
        for index in range(array.shape[axis]):
            path: TreePath = (*value.path, f"[{axis}]", index)
            arrays[path] = _Layer(array, axis, index)
            found[f"{above}.{index}{name[len(above) :]}"] = LeafRef(path)
    missing = sorted(set(stacked) - met)
    if missing:
        raise InvalidArgumentError(
            f"the checkpoint has no arrays below {', '.join(missing)}", path=checkpoint.location, leaf=missing[0]
        )
    return replace(checkpoint, arrays=arrays), found


class _Layer(ForeignArray):
    """One index of one dimension of an array."""

    def __init__(self, array: ForeignArray, axis: int, index: int) -> None:
        self._array = array
        self._axis = axis
        self._index = index
        self.dtype = array.dtype
        self.shape = (*array.shape[:axis], *array.shape[axis + 1 :])

    def read_into(self, region: Region, out: memoryview) -> None:
        axis = self._axis
        offsets = (*region.offsets[:axis], self._index, *region.offsets[axis:])
        sizes = (*region.shape[:axis], 1, *region.shape[axis:])
        self._array.read_into(Region(offsets, sizes), out)


class View:
    """A foreign array as it is, or as the weight that a kernel of flax is.

    Attributes:
        dtype: our name of the dtype.
        shape: as the target sees it.
    """

    def __init__(self, array: ForeignArray, *, is_kernel: bool, wanted: Sequence[int] | None) -> None:
        """Remember how to read it.

        Args:
            array: which.
            is_kernel: whether a matrix is stored transposed, with its inputs or outputs in several dimensions perhaps.
            wanted: shape of the target's array, which says how these are grouped; None where it has none.
        """
        self._array = array
        self.dtype = array.dtype
        self._split = _split(array.shape, wanted) if is_kernel else None
        if self._split is None:
            self.shape = array.shape
        else:
            sizes = [math.prod(group) for group in self._groups()]
            self.shape = tuple(reversed(sizes))

    def read(self, region: Region, memory: memoryview) -> None:
        """Fill memory with a region of the view."""
        if self._split is None:
            self._array.read_into(region, memory)
            return
        if region.is_empty:
            return
        starts, sizes = region.offsets[::-1], region.shape[::-1]
        groups = self._groups()
        boxes = [_bounding(group, start, size) for group, start, size in zip(groups, starts, sizes, strict=True)]
        box = Region(sum((offsets for offsets, _ in boxes), ()), sum((shape for _, shape in boxes), ()))
        # As bytes first: torch warns of tensors of rare dtypes that it makes itself.
        read = torch.empty(box.num_elements * ITEM_BYTES[self.dtype], dtype=torch.uint8)
        self._array.read_into(box, byte_view(read))
        flat = raw_view(read.view(torch_dtype(self.dtype))).reshape([math.prod(shape) for _, shape in boxes])
        for dim, (group, (offsets, _)) in enumerate(zip(groups, boxes, strict=True)):
            first = offsets[0] * math.prod(group[1:])
            flat = flat.narrow(dim, starts[dim] - first, sizes[dim])
        target = torch.frombuffer(memory, dtype=flat.dtype).reshape(region.shape)
        target.copy_(flat.permute(*reversed(range(flat.ndim))))

    def _groups(self) -> list[tuple[int, ...]]:
        """Return the dimensions of the array that make up each of the view's, from the last of these to the first."""
        assert self._split is not None
        edges = (0, *self._split, len(self._array.shape))
        return [self._array.shape[start:end] for start, end in itertools.pairwise(edges)]


def _split(shape: tuple[int, ...], wanted: Sequence[int] | None) -> tuple[int, ...] | None:
    """Return where the dimensions are cut into groups; None where the array is no kernel, and taken as it is."""
    is_grouped = wanted is not None and len(wanted) < len(shape) and math.prod(wanted) == math.prod(shape)
    if wanted is not None and is_grouped and len(wanted) == 1:  # a bias of several dimensions
        return ()
    if wanted is not None and is_grouped and len(wanted) == _MATRIX:
        return next(((cut,) for cut in range(1, len(shape)) if math.prod(shape[:cut]) == wanted[1]), None)
    return (1,) if len(shape) == _MATRIX else None


def _bounding(group: Sequence[int], start: int, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a box of some dimensions that holds a range of them flattened, and is a range itself."""
    inner = math.prod(group[1:])
    first, last = start // inner, -(-(start + size) // inner)
    return (first, *(0 for _ in group[1:])), (last - first, *group[1:])
