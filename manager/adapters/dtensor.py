"""`DTensor`: which boxes of the global tensor the local one holds, for every mix of `Shard` and `Replicate`.

Owns the reading of a DTensor's mesh and placements. The geometry is in `sharding`, the bytes go through `tensor`.
No collective is ever called here. Must not know XLA's own sharded tensors, plans or processes.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.dtypes import dtype_name
from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.region import Region
from safepoint.manager.adapters.base import ArraySpec, held_regions
from safepoint.manager.adapters.sharding import Cut, Runs, boxes, local_runs, run_length, shard_order
from safepoint.manager.adapters.tensor import Piece, TensorLeaf

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["is_dtensor", "wrap_dtensor"]


def is_dtensor(value: torch.Tensor) -> bool:
    """Say whether this is exactly a `DTensor`, without importing torch.distributed for those who do not use it."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and type(value) is module.DTensor


def wrap_dtensor(value: DTensor, name: str) -> TensorLeaf:
    """Return the leaf of a DTensor: its pieces are the boxes that this process holds, replicas included.

    Raises:
        UnsupportedValueError: partial sums, unknown placements, or a local tensor that is not what they say.
    """
    shape = tuple(value.shape)
    coordinate = value.device_mesh.get_coordinate()
    pieces: list[Piece] = []
    if coordinate is not None:
        local = _local_tensor(value, name)
        cuts = _cuts(value, name)
        runs = _matching_runs(shape, tuple(value.device_mesh.shape), tuple(coordinate), cuts, tuple(local.shape))
        if isinstance(runs, str):
            raise UnsupportedValueError(
                f"DTensor of shape {shape} with placements {_display(value)} on a mesh of shape "
                f"{tuple(value.device_mesh.shape)}: {runs}",
                leaf=name,
                hint="Redistribute it to placements that cut the dimension evenly, or to Replicate(), before the save.",
            )
        if 0 in shape:
            pieces = [Piece(Region.whole(shape), local.reshape(shape))]
        else:
            outer = Region.whole(tuple(local.shape))
            pieces = [Piece(region, local[inside.slices_in(outer)]) for region, inside in boxes(runs)]
    spec = ArraySpec(
        dtype=dtype_name(value.dtype),
        shape=shape,
        regions=held_regions(shape, (piece.region for piece in pieces)),
        kind="dtensor",
    )
    return TensorLeaf(spec, name, pieces)


def _display(value: DTensor) -> str:
    return "[" + ", ".join(repr(placement) for placement in value.placements) + "]"


def _local_tensor(value: DTensor, name: str) -> torch.Tensor:
    local: torch.Tensor = value._local_tensor  # noqa: SLF001 - to_local() would record a node for autograd
    wait = getattr(local, "wait", None)
    if type(local).__name__ == "AsyncCollectiveTensor" and wait is not None:
        local = wait()
    if type(local) not in (torch.Tensor, torch.nn.Parameter) or local.is_meta:
        what = "meta" if local.is_meta else type(local).__name__
        raise UnsupportedValueError(
            f"the local part of this DTensor is a {what} tensor",
            leaf=name,
            hint="Save plain tensors: materialise or convert it first (`to_empty`, `dequantize`, …).",
        )
    return local.detach()


def _cuts(value: DTensor, name: str) -> tuple[Cut, ...]:
    """Return the cuts in mesh order; replicated mesh dimensions cut nothing."""
    from torch.distributed.tensor import Replicate, Shard  # noqa: PLC0415 - loaded already, or there is no DTensor
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415

    cuts = []
    for mesh_dim, placement in enumerate(value.placements):
        if isinstance(placement, _StridedShard):  # before Shard: it derives from it in torch 2.9
            cuts.append(Cut(mesh_dim, placement.dim, int(placement.split_factor), is_strided=True))
        elif type(placement) is Shard:
            cuts.append(Cut(mesh_dim, placement.dim))
        elif type(placement) is not Replicate:
            partial = "partial sums, which are no values yet, " if placement.is_partial() else ""
            raise UnsupportedValueError(
                f"DTensor has {partial}placement {placement!r}",
                leaf=name,
                hint="Call `.redistribute(placements=[Replicate()])` (or Shard) on it before the save.",
            )
    return _in_declared_order(value, tuple(cuts))


def _in_declared_order(value: DTensor, cuts: tuple[Cut, ...]) -> tuple[Cut, ...]:
    """Follow the spec's own shard order, which newer torch keeps apart from the placements."""
    declared: Any = getattr(value._spec, "shard_order", None)  # noqa: SLF001 - there is no public way to it
    if not declared or any(cut.is_strided for cut in cuts):
        return cuts
    place = {dim: i for entry in declared for i, dim in enumerate(entry.mesh_dims)}
    return tuple(sorted(cuts, key=lambda cut: place.get(cut.mesh_dim, cut.mesh_dim)))


def _matching_runs(
    shape: tuple[int, ...],
    mesh_shape: tuple[int, ...],
    coordinate: tuple[int, ...],
    cuts: tuple[Cut, ...],
    local_shape: tuple[int, ...],
) -> tuple[Runs, ...] | str:
    """Return the runs of each dimension that agree with the local shape, or why there are none.

    The placements of an unevenly cut `_StridedShard` can be read in two ways: as the cuts that FSDP2 over tensor
    parallel really makes (`shard_order`), and as what `distribute_tensor` makes of the same placements, from left to
    right. Where they differ the local shape tells; where it cannot, nothing is guessed.
    """
    found = []
    for runs in _candidates(shape, mesh_shape, coordinate, cuts):
        sizes = tuple(run_length(dim) for dim in runs)
        is_alike = sizes == local_shape or (0 in sizes and 0 in local_shape)
        if is_alike and runs not in found:
            found.append(runs)
    if len(found) == 1:
        return found[0]
    if found:
        return "the dimension is cut unevenly in one of two ways, and the local tensor fits both"
    return f"the local tensor has shape {local_shape}, which is not what these placements give this process"


@functools.lru_cache(maxsize=4096)
def _candidates(
    shape: tuple[int, ...], mesh_shape: tuple[int, ...], coordinate: tuple[int, ...], cuts: tuple[Cut, ...]
) -> tuple[tuple[Runs, ...], ...]:
    if not any(cut.is_strided for cut in cuts):
        return (tuple(local_runs(shape, mesh_shape, coordinate, cuts)),)
    candidates = []
    order = shard_order(cuts, mesh_shape)
    nested = _cuts_nested()
    if order is not None:
        candidates.append(tuple(local_runs(shape, mesh_shape, coordinate, order)))
    if order is None or nested:
        # Torch 2.9 has only the first reading for placements that have an order.
        candidates.append(tuple(local_runs(shape, mesh_shape, coordinate, cuts, nested=nested)))
    return tuple(candidates)


@functools.cache
def _cuts_nested() -> bool:
    """Ask torch how it makes a strided cut of an uneven dimension (see `sharding.local_runs`)."""
    from torch.distributed.tensor.placement_types import _StridedShard  # noqa: PLC0415

    shards, _ = _StridedShard(0, split_factor=2)._split_tensor(  # noqa: SLF001 - there is no public way to it
        torch.arange(5), 2, with_padding=False, contiguous=False
    )
    return shards[0].tolist() == [0, 1, 3]
