"""What differs between two steps: the trees, then every element of the leaves that both have, in bounded memory.

Elements are the same when their bits are: -0.0 and 0.0 differ, a NaN equals itself. Reads both steps once, verified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch

from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.formats.manifest import JSON, LeafEntry, Node, TreePath, display_path
from safepoint.manager.leaf_reading import Part, cut, part_bytes, read_parts
from safepoint.manager.progress import QUIET
from safepoint.manager.sources import batches, flat_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from safepoint.manager.progress import Progress
    from safepoint.manager.step_paths import OpenStep

__all__ = ["Comparison", "Difference", "DifferenceKind", "compare_steps"]

DifferenceKind = Literal["only_a", "only_b", "kind", "value", "dtype", "shape", "elements"]

PART_BYTES = 64 << 20
"""How much of each step is in memory at once."""

RUN_ELEMENTS = 1 << 15
"""How many are compared at once: what stays in the cache, and below what torch would spread over threads."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDEST = 8

_OPAQUE = frozenset(
    {
        *(name for name in ITEM_BYTES if name.startswith(("bits", "float4"))),
        *(f"{sign}int{bits}" for sign in ("u", "") for bits in range(1, 8)),
    }
)
"""Dtypes with whose values torch does not compute."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One node of the state, or one leaf, that differs.

    Attributes:
        path: dotted.
        kind: in what it differs.
        a: what the first step has; None for elements.
        b: what the second one has.
        num_changed: elements with other bits.
        num_elements: of the leaf.
        max_difference: largest absolute difference of two elements; infinite where one is finite and the other not;
            None where the dtype has no numbers.
    """

    path: str
    kind: DifferenceKind
    a: JSON = None
    b: JSON = None
    num_changed: int | None = None
    num_elements: int | None = None
    max_difference: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """All that differs.

    Attributes:
        structure: in the trees, dtypes, shapes and plain values.
        leaves: in elements; empty if those were not compared.
        num_equal: leaves found equal in every bit.
        num_bytes: of data read and compared, of each step.
    """

    structure: tuple[Difference, ...]
    leaves: tuple[Difference, ...]
    num_equal: int
    num_bytes: int

    @property
    def is_equal(self) -> bool:
        """Whether nothing differs."""
        return not self.structure and not self.leaves


def compare_steps(a: OpenStep, b: OpenStep, *, values: bool = True, progress: Progress = QUIET) -> Comparison:
    """Compare two steps, of one root or of two, saved by any number of processes in any mode.

    Args:
        a: the first.
        b: the second.
        values: whether elements are read; without it the manifests are all that is.
        progress: told of the bytes compared.

    Raises:
        CorruptDataError: a step is damaged; names leaf and file.
    """
    structure = list(_compare_nodes(a.manifest.structure, b.manifest.structure))
    others = {entry.path: entry for entry in b.manifest.leaves}
    pairs: list[tuple[LeafEntry, LeafEntry]] = []
    for entry in a.manifest.leaves:
        other = others.get(entry.path)
        if other is None:
            continue
        if (entry.dtype, entry.shape) == (other.dtype, other.shape):
            pairs.append((entry, other))
        else:
            structure.append(_geometry(entry, other))
    if not values:
        return Comparison(structure=tuple(structure), leaves=(), num_equal=0, num_bytes=0)
    changes = _compare_leaves(a, b, pairs, progress)
    order = {entry.path: index for index, entry in enumerate(a.manifest.leaves)}
    found = sorted(((path, tally) for path, tally in changes.items() if tally.num_changed), key=lambda p: order[p[0]])
    return Comparison(
        structure=tuple(structure),
        leaves=tuple(tally.difference(path) for path, tally in found),
        num_equal=len(pairs) - len(found),
        num_bytes=sum(tally.num_bytes for tally in changes.values()),
    )


def _geometry(entry: LeafEntry, other: LeafEntry) -> Difference:
    path = display_path(entry.path)
    if entry.dtype != other.dtype:
        return Difference(path=path, kind="dtype", a=entry.dtype, b=other.dtype)
    return Difference(path=path, kind="shape", a=list(entry.shape), b=list(other.shape))


def _compare_nodes(a: Mapping[TreePath, Node], b: Mapping[TreePath, Node]) -> Iterator[Difference]:
    """Yield differing nodes; of a subtree that only one has, its top."""
    for path, node in a.items():
        other = b.get(path)
        if other is None:
            if path[:-1] in b:
                yield Difference(path=display_path(path), kind="only_a", a=node.kind)
        elif other.kind != node.kind:
            yield Difference(path=display_path(path), kind="kind", a=node.kind, b=other.kind)
        elif other.data != node.data:
            yield Difference(path=display_path(path), kind="value", a=node.data, b=other.data)
    for path, node in b.items():
        if path not in a and path[:-1] in a:
            yield Difference(path=display_path(path), kind="only_b", b=node.kind)


@dataclass(slots=True)
class _Tally:
    """What was found in the parts of one leaf so far."""

    num_elements: int
    num_bytes: int = 0
    num_changed: int = 0
    max_difference: float | None = None

    def add(self, left: torch.Tensor, right: torch.Tensor, dtype: str) -> None:
        self.num_bytes += left.nbytes
        for mine, theirs in zip(_runs(left), _runs(right), strict=True):
            if torch.equal(mine, theirs):
                continue
            changed = mine != theirs
            changed = changed if changed.ndim == 1 else changed.any(dim=1)
            count = int(changed.sum())
            self.num_changed += count
            # Nearly always all of a leaf changes, and picking costs more than the rest.
            picked = (mine, theirs) if count == len(changed) else (mine[changed], theirs[changed])
            self._measure(*picked, dtype)

    def _measure(self, left: torch.Tensor, right: torch.Tensor, dtype: str) -> None:
        if dtype in _OPAQUE:
            return
        wide = torch.complex128 if dtype.startswith("complex") else torch.float64
        distance = (_as_dtype(left, dtype).to(wide) - _as_dtype(right, dtype).to(wide)).abs()
        largest = float(distance.max())  # a NaN if any is
        self.max_difference = max(math.inf if math.isnan(largest) else largest, self.max_difference or 0.0)

    def difference(self, path: TreePath) -> Difference:
        return Difference(
            path=display_path(path),
            kind="elements",
            num_changed=self.num_changed,
            num_elements=self.num_elements,
            max_difference=self.max_difference,
        )


def _compare_leaves(
    a: OpenStep, b: OpenStep, pairs: list[tuple[LeafEntry, LeafEntry]], progress: Progress
) -> dict[TreePath, _Tally]:
    tallies = {entry.path: _Tally(math.prod(entry.shape)) for entry, _ in pairs}
    others = {other.path: other for _, other in pairs}
    # In the order of the first step's files, so that leaves which share a block are read together.
    entries = sorted((entry for entry, _ in pairs if math.prod(entry.shape)), key=_place)
    progress.begin("compare", sum(part_bytes(part) for entry in entries for part in cut(entry, PART_BYTES)))
    parts = (part for entry in entries for part in cut(entry, PART_BYTES))
    for batch in batches(parts, part_bytes, PART_BYTES):
        theirs: list[Part] = [(others[entry.path], region) for entry, region in batch]
        for (entry, _), left, right in zip(batch, read_parts(a, batch), read_parts(b, theirs), strict=True):
            tallies[entry.path].add(left, right, entry.dtype)
        progress.advance(sum(map(part_bytes, batch)))
    return tallies


def _place(entry: LeafEntry) -> tuple[int, int]:
    return min(((shard.file, shard.offset) for shard in entry.shards), default=(0, 0))


def _runs(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the elements' bits, run after run: as integers, or as rows of two where no integer is so wide."""
    data = flat_bytes(tensor)
    size = tensor.element_size()
    bits = data.view(torch.int64).view(-1, 2) if size > _WIDEST else data.view(_INTEGERS[size])
    return torch.split(bits, RUN_ELEMENTS)


def _as_dtype(bits: torch.Tensor, dtype: str) -> torch.Tensor:
    return bits.reshape(-1).view(torch_dtype(dtype))
