"""Which boxes of a global tensor a DTensor's placements give to one process: pure integer geometry.

torch answers that itself only with the offset of the first element (`compute_local_shape_and_global_offset`), which
says nothing of shards that are not one box, and in 2.9 ignores a `_StridedShard` without its `Shard`. So it is
worked out here for every mix of placements, and compared with torch's answer in the tests. Must not know tensors.

A dimension's local indices are *runs*: half-open ranges of global indices, in the order of the local tensor.
"""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.region import Region

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = ["Cut", "Runs", "boxes", "local_runs", "shard_order"]

Runs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Cut:
    """One mesh dimension that shards a tensor dimension.

    Attributes:
        mesh_dim: the mesh dimension.
        tensor_dim: the tensor dimension that it shards.
        split_factor: 1 for `Shard`. For `_StridedShard`, the number of shards that the dimension was cut into, by
            mesh dimensions further right, before this one cut each of them.
        is_strided: whether it is a `_StridedShard`, even one of factor 1.
    """

    mesh_dim: int
    tensor_dim: int
    split_factor: int = 1
    is_strided: bool = False


def shard_order(cuts: Sequence[Cut], mesh_shape: Sequence[int]) -> list[Cut] | None:
    """Return the order in which plain cuts make what these cuts describe, or None where there is no such order.

    The right-most mesh dimension is placed first; each other goes behind as many shards as its split factor says.
    That is torch's own reading of `_StridedShard` (`DTensorSpec._maybe_convert_StridedShard_to_shard_order`), and
    the order in which FSDP2 over tensor parallel cuts for real.
    """
    ordered: dict[int, list[Cut]] = {}
    for cut in sorted(cuts, key=lambda one: -one.mesh_dim):
        others = ordered.setdefault(cut.tensor_dim, [])
        sizes = itertools.accumulate((mesh_shape[other.mesh_dim] for other in others), operator.mul, initial=1)
        place = next((i for i, size in enumerate(sizes) if size == cut.split_factor), None)
        if place is None:
            return None
        others.insert(place, Cut(cut.mesh_dim, cut.tensor_dim))
    return [cut for others in ordered.values() for cut in others]


def local_runs(
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    coordinate: Sequence[int],
    cuts: Sequence[Cut],
    *,
    nested: bool = True,
) -> list[Runs]:
    """Return the runs of each tensor dimension that remain at `coordinate` after all cuts, applied in this order.

    Args:
        shape: the global shape.
        mesh_shape: the mesh's.
        coordinate: of the process in the mesh.
        cuts: in the order of cutting.
        nested: how a strided cut of an uneven dimension is made. True: into `split_factor` parts, each of which is cut
            on its own (torch from 2.10 on). False: into `split_factor * mesh size` equal parts, dealt out in turn.
    """
    runs: list[Runs] = [((0, size),) for size in shape]
    for cut in cuts:
        size, index = mesh_shape[cut.mesh_dim], coordinate[cut.mesh_dim]
        old = runs[cut.tensor_dim]
        if not cut.is_strided:
            new = _chunk(old, size, index)
        elif nested:
            parts = [_chunk(old, cut.split_factor, part) for part in range(cut.split_factor)]
            new = tuple(run for part in parts for run in _chunk(part, size, index))
        else:
            total = size * cut.split_factor
            new = tuple(run for part in range(cut.split_factor) for run in _chunk(old, total, index + part * size))
        runs[cut.tensor_dim] = _joined(new)
    return runs


def boxes(runs: Sequence[Runs]) -> Iterator[tuple[Region, Region]]:
    """Yield (region of the global tensor, the same elements as region of the local one), for non-empty boxes."""
    spans: list[list[tuple[int, int, int]]] = []
    for dim in runs:
        starts = itertools.accumulate((stop - start for start, stop in dim), initial=0)
        spans.append([(start, local, stop - start) for (start, stop), local in zip(dim, starts, strict=False)])
    for combination in itertools.product(*spans):
        sizes = tuple(size for _, _, size in combination)
        if math.prod(sizes):
            yield (
                Region(tuple(start for start, _, _ in combination), sizes),
                Region(tuple(local for _, local, _ in combination), sizes),
            )


def run_length(runs: Runs) -> int:
    """Return the number of indices in the runs."""
    return sum(stop - start for start, stop in runs)


def _chunk(runs: Runs, num_chunks: int, index: int) -> Runs:
    """Return chunk `index` as `torch.chunk` cuts: equal sizes rounded up, the last ones short or empty."""
    size = -(-run_length(runs) // num_chunks)
    first, last = size * index, size * (index + 1)
    chunk = []
    position = 0
    for start, stop in runs:
        low, high = max(first - position, 0), min(last - position, stop - start)
        if low < high:
            chunk.append((start + low, start + high))
        position += stop - start
    return tuple(chunk)


def _joined(runs: Runs) -> Runs:
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
