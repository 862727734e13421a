"""What the arrays of a target share, against what those of the step do.

Owns two things: views of other leaves are filled through a buffer of that leaf, unless the target shows the same part
of the same array; and where the target shares memory between leaves that the step has apart, their data are read and
compared first, so that a target that cannot hold both is refused before anything is changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from safepoint.formats.dtypes import torch_dtype
from safepoint.formats.errors import CorruptDataError
from safepoint.formats.manifest import LeafEntry, TreePath, display_path
from safepoint.formats.region import Region
from safepoint.manager.adapters import ArrayLeaf, ArraySpec, wrap_array
from safepoint.manager.adapters.tensor import Piece, TensorLeaf
from safepoint.manager.aliases import SameMemory
from safepoint.manager.errors import StructureMismatchError
from safepoint.manager.overlaps import Sharing, find_sharings
from safepoint.manager.shared_memory import put, take, window_on
from safepoint.manager.windows import Window, whole_window

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Claim", "Read", "SharedTargets"]

Read: TypeAlias = "Callable[[Mapping[TreePath, ArrayLeaf]], object]"
"""Fills leaves with the data of the step."""


@dataclass(kw_only=True, eq=False, slots=True)  # not frozen: there is one for each array, and that takes twice as long
class Claim:
    """A live array and what of the step it takes. Nothing of it changes.

    Attributes:
        path: of the array in the target.
        source: the stored leaf.
        window: the part of it; None for all.
        live: the array; kept, so that its address stays its own.
        leaf: of the array.
        filled: what takes the stored data; another leaf than `leaf` where it is cast.
        entry: of the stored leaf.
    """

    path: TreePath
    source: TreePath
    window: Window | None
    live: Any
    leaf: ArrayLeaf
    filled: ArrayLeaf
    entry: LeafEntry

    @property
    def content(self) -> tuple[TreePath, Window | None]:
        """What decides the data."""
        return self.source, self.window

    @property
    def place(self) -> Window:
        """Where in the stored leaf the data is."""
        return self.window or whole_window(self.entry.shape, self.entry.dtype)


@dataclass(kw_only=True)
class SharedTargets:
    """The arrays of one target, and what they share."""

    _claims: list[Claim] = field(default_factory=list)
    _taken: SameMemory[Claim] = field(default_factory=SameMemory)
    _ties: list[tuple[Claim, Claim]] = field(default_factory=list)
    _conflicts: list[tuple[Sharing, list[Claim]]] = field(default_factory=list)
    _windows: list[tuple[Claim, torch.Tensor]] = field(default_factory=list)

    def add(self, claim: Claim, owner: object) -> bool:
        """Note that an array takes data; return whether nobody fills its memory yet.

        Args:
            claim: the array.
            owner: that it is a detached view of, see `aliases`; None where nothing is known.
        """
        other = self._taken.first(claim.live, owner, claim)
        if other is None:
            self._claims.append(claim)
            return True
        if other.content != claim.content:
            self._ties.append((other, claim))
        return False

    def settle(self) -> list[tuple[TreePath, ArrayLeaf]]:
        """Decide, once all arrays are known, how views and shared memory are filled.

        Returns:
            Leaves that must be read as well, for `finish`.
        """
        served: set[int] = set()
        for sharing in find_sharings([claim.leaf for claim in self._claims]):
            members = sorted({*sharing.places, *([] if sharing.base is None else [sharing.base])})
            claims = [self._claims[number] for number in members]
            if not _is_saved_so(claims):
                self._conflicts.append((sharing, self._claims))
            elif any(claim.window is None for claim in claims):
                served.update(number for number in members if self._claims[number].window is not None)
        buffers: dict[TreePath, torch.Tensor] = {}
        leaves = []
        for number, claim in enumerate(self._claims):
            if claim.window is None or number in served:
                continue
            if claim.source not in buffers:
                buffers[claim.source], leaf = _buffer(claim.entry)
                leaves.append((claim.source, leaf))
            self._windows.append((claim, buffers[claim.source]))
        return leaves

    def check(self, read: Read) -> None:
        """Compare the data of leaves that share memory in the target only. Changes nothing of the target.

        Raises:
            StructureMismatchError: they differ, so that the target could not hold both.
            CorruptDataError: bytes differ from their digest.
        """
        problems = [
            f"{display_path(second.path)}: the target ties it to {display_path(first.path)}, and the step has other "
            "data for it"
            for first, second in self._ties
            if not _same(_values(first, read), _values(second, read))
        ]
        for sharing, claims in self._conflicts:
            problems += _disagreements(sharing, claims, read)
        if problems:
            raise StructureMismatchError(
                "the target ties what the step holds apart: " + "; ".join(problems),
                mismatches=tuple(problems),
                hint="Untie them in the target, or restore them one by one. Nothing was changed.",
            )

    def finish(self) -> None:
        """Fill the views from the buffers; call it when all leaves are read."""
        for claim, buffer in self._windows:
            assert claim.window is not None  # only those have a buffer
            value = take(buffer, claim.window)
            whole = Region.whole(claim.filled.spec.shape)
            for region in claim.filled.spec.regions:
                claim.filled.write(region, value[region.slices_in(whole)].contiguous())
            claim.filled.finish()


def _is_saved_so(claims: Sequence[Claim]) -> bool:
    """Say whether arrays lie in memory as what they take lies in one stored leaf."""
    offsets = set()
    for claim in claims:
        memory, place = claim.leaf.memory(), claim.place
        if memory is None or claim.filled is not claim.leaf:
            return False
        strides = zip(memory.shape, memory.strides, place.strides, strict=True)
        if any(size > 1 and one != other for size, one, other in strides):
            return False
        if (memory.is_conj, memory.is_neg) != (place.is_conj, place.is_neg):
            return False
        offsets.add((claim.source, memory.start - place.start))
    return len(offsets) == 1


def _buffer(entry: LeafEntry) -> tuple[torch.Tensor, ArrayLeaf]:
    buffer = torch.empty(entry.shape, dtype=torch_dtype(entry.dtype))
    leaf = wrap_array(buffer, entry.path)
    assert leaf is not None  # it is a tensor
    return buffer, leaf


def _values(claim: Claim, read: Read) -> list[torch.Tensor]:
    """Read what an array would hold, region by region."""
    spec = claim.leaf.spec
    try:
        if claim.window is None:
            pieces = [
                Piece(region, torch.empty(region.shape, dtype=torch_dtype(claim.entry.dtype)))
                for region in spec.regions
            ]
            host = ArraySpec(dtype=claim.entry.dtype, shape=spec.shape, regions=spec.regions, kind="host")
            read({claim.source: TensorLeaf(host, claim.leaf.name, pieces)})
            return [piece.tensor for piece in pieces]
        buffer, leaf = _buffer(claim.entry)
        read({claim.source: leaf})
    except CorruptDataError as error:
        error.target_modified = False
        raise
    value = take(buffer, claim.window)
    return [value[region.slices_in(Region.whole(spec.shape))].contiguous() for region in spec.regions]


def _same(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(one, other, strict=True)
    )


def _disagreements(sharing: Sharing, claims: Sequence[Claim], read: Read) -> list[str]:
    """Put into a copy of the shared memory what each array would hold, and see which one it does not show then."""
    windows = {number: window_on(claims[number].leaf, place) for number, place in sharing.places.items()}
    num_bytes = sharing.num_bytes
    if sharing.base is not None:
        spec = claims[sharing.base].leaf.spec
        windows = {sharing.base: whole_window(spec.shape, spec.dtype), **windows}
        num_bytes = Region.whole(spec.shape).num_elements * torch_dtype(spec.dtype).itemsize
    if any(claims[number].filled is not claims[number].leaf for number in windows):
        first, *others = [display_path(claims[number].path) for number in windows]
        return [f"{first}: it shares memory with {', '.join(others)}, and is cast"]
    memory = torch.zeros(num_bytes, dtype=torch.uint8)
    values = {number: _values(claims[number], read)[0] for number in windows}
    for number, window in windows.items():
        put(values[number], memory, window)
    paths = {number: display_path(claims[number].path) for number in windows}
    return [
        f"{paths[number]}: it shares memory with {_others(paths, number)} in the target, and the step has other data"
        for number, window in windows.items()
        if not _same([take(memory, window)], [values[number]])
    ]


def _others(paths: Mapping[int, str], number: int) -> str:
    others = [path for other, path in paths.items() if other != number]
    return ", ".join(others[:3]) + (f" and {len(others) - 3} more" if len(others) > 3 else "")  # noqa: PLR2004
