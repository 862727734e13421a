# ruff: noqa: TID251 - compares with the placements of torch itself; no process group is made
from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from safepoint.formats.region import Region, check_tiling
from safepoint.manager.adapters.dtensor import _candidates, _cuts_nested, _matching_runs
from safepoint.manager.adapters.sharding import Cut, Runs, boxes, local_runs, run_length, shard_order

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

MESHES = [(1,), (2,), (4,), (2, 2), (3, 2), (2, 3), (4, 2), (2, 2, 2), (2, 1, 3)]
SIZES = [0, 1, 2, 3, 5, 8, 11]


def coordinates(mesh: Sequence[int]) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(size) for size in mesh))


def cuts_of(placements: Sequence[Placement]) -> tuple[Cut, ...]:
    cuts = []
    for mesh_dim, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            cuts.append(Cut(mesh_dim, placement.dim, placement.split_factor, is_strided=True))
        elif isinstance(placement, Shard):
            cuts.append(Cut(mesh_dim, placement.dim))
    return tuple(cuts)


def indices(runs: Runs) -> list[int]:
    return [i for start, stop in runs for i in range(start, stop)]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_plain_placements_give_what_torch_says(mesh: tuple[int, ...], size: int) -> None:
    shape = (size, 3)
    for placements in itertools.product([Shard(0), Shard(1), Replicate()], repeat=len(mesh)):
        for coordinate in coordinates(mesh):
            sizes, offsets = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), placements)
            runs = local_runs(shape, mesh, coordinate, cuts_of(placements))
            assert tuple(run_length(dim) for dim in runs) == tuple(sizes)
            regions = [region for region, _ in boxes(runs)]
            if 0 in sizes:
                assert regions == []
            else:
                assert regions == [Region(tuple(offsets), tuple(sizes))]


@pytest.mark.parametrize("mesh", MESHES, ids=str)
@pytest.mark.parametrize("size", SIZES)
def test_the_distinct_boxes_of_a_mesh_tile_the_tensor(mesh: tuple[int, ...], size: int) -> None:
    options = [Shard(0), Shard(1), Replicate(), _StridedShard(0, split_factor=2), _StridedShard(0, split_factor=3)]
    for placements in itertools.product(options, repeat=len(mesh)):
        for nested in (True, False):
            found = {
                region
                for coordinate in coordinates(mesh)
                for region, _ in boxes(local_runs((size, 4), mesh, coordinate, cuts_of(placements), nested=nested))
            }
            check_tiling((size, 4), found, leaf="x")


@pytest.mark.parametrize(("dp", "tp"), [(2, 2), (3, 2), (2, 4), (4, 3)])
@pytest.mark.parametrize("size", range(14))
def test_fsdp_over_tensor_parallel_is_read_as_it_cuts(dp: int, tp: int, size: int) -> None:
    """The outer mesh dimension cuts what the inner one has cut, whatever the placements look like."""
    cuts = cuts_of([_StridedShard(0, split_factor=tp), Shard(0)])
    order = shard_order(cuts, (dp, tp))
    assert order == [Cut(1, 0), Cut(0, 0)]
    for i, j in coordinates((dp, tp)):
        expected = chunk(chunk(torch.arange(size), tp, j), dp, i).tolist()
        assert indices(local_runs((size,), (dp, tp), (i, j), order)[0]) == expected
        runs = _matching_runs((size,), (dp, tp), (i, j), cuts, (len(expected),))
        # Where the local size cannot tell FSDP's cut from distribute_tensor's, nothing is guessed.
        assert isinstance(runs, str) or indices(runs[0]) == expected
        if size % (dp * tp) == 0:
            assert not isinstance(runs, str)


def chunk(tensor: torch.Tensor, count: int, index: int) -> torch.Tensor:
    parts = tensor.chunk(count)
    return parts[index] if index < len(parts) else tensor[:0]


@pytest.mark.parametrize("size", range(14))
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_a_strided_shard_alone_is_dealt_out_as_torch_does(size: int, factor: int) -> None:
    placement = _StridedShard(0, split_factor=factor)
    shards, _ = placement._split_tensor(torch.arange(size), 3, with_padding=False, contiguous=False)
    for i in range(3):
        runs = local_runs((size,), (3,), (i,), cuts_of([placement]), nested=_cuts_nested())[0]
        assert indices(runs) == shards[i].tolist()


def test_the_boxes_of_a_shard_in_pieces_lie_one_after_another_in_the_local_tensor() -> None:
    runs = local_runs((8, 6), (2, 2), (1, 0), cuts_of([_StridedShard(0, split_factor=2), Shard(1)]))
    assert list(boxes(runs)) == [
        (Region((2, 0), (2, 3)), Region((0, 0), (2, 3))),
        (Region((6, 0), (2, 3)), Region((2, 0), (2, 3))),
    ]
    whole = torch.arange(48).reshape(8, 6)
    local = torch.cat([whole[2:4, :3], whole[6:8, :3]])
    for region, inside in boxes(runs):
        picked = local[inside.slices_in(Region.whole((4, 3)))]
        assert torch.equal(picked, whole[region.slices_in(Region.whole((8, 6)))])


def test_no_order_of_plain_cuts_makes_a_strided_shard_alone() -> None:
    assert shard_order(cuts_of([_StridedShard(0, split_factor=2), Replicate()]), (2, 2)) is None
    assert shard_order(cuts_of([Shard(0), _StridedShard(0, split_factor=2), Shard(0)]), (2, 3, 2)) == [
        Cut(0, 0),
        Cut(2, 0),
        Cut(1, 0),
    ]


def test_a_local_tensor_that_is_not_what_its_placements_say_is_no_match() -> None:
    assert isinstance(_matching_runs((5,), (2,), (0,), (Cut(0, 0),), (2,)), str)
    assert not isinstance(_matching_runs((5,), (2,), (0,), (Cut(0, 0),), (3,)), str)
    assert len(_candidates((5,), (2,), (0,), (Cut(0, 0),))) == 1
