"""What `tests/multiprocess/test_dtensor_adapter.py` runs in each of its processes: one function a promise.

Every process builds the same tensors from the same seed, so the truth is known everywhere without communication.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.region import Region, check_tiling
from safepoint.manager.adapters import ArrayLeaf, empty_like_parameter, wrap_array

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch.distributed.tensor.placement_types import Placement

SHAPES = [(8, 6), (5, 3), (1, 1), (3, 7), (0, 4), (7,)]


def cases(world_size: int) -> dict[str, Callable[[], None]]:
    """Return the cases for this number of processes, by name."""
    meshes = {2: [(2,), (1, 2)], 4: [(4,), (2, 2), (4, 1)]}[world_size]
    found: dict[str, Callable[[], None]] = {}
    for shape in meshes:
        found[f"every mix of placements on {shape}"] = lambda shape=shape: check_all_placements(shape)
        found[f"every layout to every other on {shape}"] = lambda shape=shape: check_all_pairs(shape)
    found["every dtype"] = check_dtypes
    found["refusals"] = check_refusals
    found["new state like a parameter"] = check_empty_like
    if world_size == 4:
        found["fsdp over tensor parallel, even"] = lambda: check_fsdp_over_tp(8, 12)
        found["fsdp over tensor parallel, uneven"] = lambda: check_fsdp_over_tp(5, 7)
        found["a strided shard alone"] = check_lone_strided_shard
        found["a mesh of some processes"] = check_sub_mesh
        found["fsdp, uneven and empty shards"] = check_fsdp
    return found


def run_case(rank: int, world_size: int, name: str) -> None:
    """Run one case in one process of a group."""
    assert (dist.get_rank(), dist.get_world_size()) == (rank, world_size)
    torch.manual_seed(0)
    cases(world_size)[name]()


def random_tensor(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the same random bits on every process."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (tensor.numel() * dtype.itemsize,), dtype=torch.uint8)
    return raw.view(dtype).reshape(tensor.shape)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(raw_bytes(a), raw_bytes(b))


def all_placements(mesh_dims: int, tensor_dims: int) -> Iterator[tuple[Placement, ...]]:
    options: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(tensor_dims))]
    return itertools.product(options, repeat=mesh_dims)


def distribute(full: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Cut without communication: torch 2.9 cannot scatter some tensors that leave a process nothing."""
    return distribute_tensor(full, mesh, placements, src_data_rank=None)


def check_gather(value: DTensor, full: torch.Tensor) -> None:
    """Compare with torch's own gather, which in 2.9 fails where any process is left with nothing."""
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, value._local_tensor.numel())
    if all(sizes):
        assert same_bits(value.full_tensor(), full)


def leaf_of(value: torch.Tensor) -> ArrayLeaf:
    leaf = wrap_array(value, "w")
    assert leaf is not None
    return leaf


def check_read(value: DTensor, full: torch.Tensor) -> None:
    """The regions hold what they say, no more and no less than the local tensor, and tile it over all processes."""
    leaf = leaf_of(value)
    whole = Region.whole(tuple(full.shape))
    assert leaf.spec.shape == tuple(full.shape)
    for region in leaf.spec.regions:
        data = leaf.read(region)
        assert data.is_contiguous()
        assert same_bits(data, full[region.slices_in(whole)]), f"{value.placements} {region}"
    assert sum(region.num_elements for region in leaf.spec.regions) == value._local_tensor.numel()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, leaf.spec.regions)
    check_tiling(tuple(full.shape), {region for regions in everywhere for region in regions}, leaf="w")


def check_write(target: DTensor, full: torch.Tensor, *, direct: bool) -> None:
    """Fill each held region of the target, and find exactly `full` in it."""
    leaf = leaf_of(target)
    whole = Region.whole(tuple(full.shape))
    for region in leaf.spec.regions:
        data = full[region.slices_in(whole)].contiguous()
        buffer = leaf.target_buffer(region) if direct else None
        if buffer is None:
            leaf.write(region, data)
        else:
            buffer[:] = raw_bytes(data).numpy().tobytes()
    leaf.finish()
    check_read(target, full)


def check_all_placements(mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for shape in SHAPES:
        full = random_tensor(shape)
        for placements in all_placements(len(mesh_shape), len(shape)):
            value = distribute(full, mesh, placements)
            check_read(value, full)
            check_gather(value, full)
            regions = leaf_of(value).spec.regions
            sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
            if 0 not in sizes:
                assert regions == (Region(tuple(offsets), tuple(sizes)),)


def check_all_pairs(mesh_shape: tuple[int, ...]) -> None:
    mesh = init_device_mesh("cpu", mesh_shape)
    for index, shape in enumerate([(5, 3), (2, 7), (0, 4)]):
        full, other = random_tensor(shape), random_tensor(shape)
        for placements in all_placements(len(mesh_shape), len(shape)):
            target = distribute(other, mesh, placements)
            check_write(target, full, direct=index % 2 == 0)
            check_gather(target, full)
            target = torch.nn.Parameter(distribute(other.t().contiguous().t(), mesh, placements))
            check_write(target, full, direct=True)  # transposed memory: through the view where it is strided
            assert target.requires_grad


def check_dtypes() -> None:
    world_size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,))
    for name in ("bool", "uint8", "int16", "uint16", "int64", "bfloat16", "float64", "complex64", "float8_e4m3fn"):
        dtype = getattr(torch, name)
        full = random_tensor((5, 3), dtype)
        size, offset = Shard(0)._local_shard_size_and_offset(5, world_size, dist.get_rank())
        local = full[offset : offset + size].clone()
        value = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=full.shape, stride=(3, 1))
        check_read(value, full)
        other = random_tensor((5, 3), dtype)
        check_write(value, other, direct=False)


def check_refusals() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    partial = DTensor.from_local(torch.ones(3), mesh, [Partial()], run_check=False)
    expect_refusal(partial, "partial sums")
    shape = torch.Size((3 * dist.get_world_size(),))
    local = torch.ones(3 + dist.get_rank())
    uneven = DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(1,))
    if dist.get_rank() > 0:
        expect_refusal(uneven, "local tensor has shape")
    meta = DTensor.from_local(torch.ones(3, device="meta"), mesh, [Replicate()], run_check=False)
    expect_refusal(meta, "meta")


def expect_refusal(value: torch.Tensor, text: str) -> None:
    with pytest.raises(UnsupportedValueError, match=text) as caught:
        wrap_array(value, ("model", "w"))
    assert caught.value.leaf == "model.w"
    assert caught.value.hint


def check_empty_like() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = torch.nn.Parameter(distribute(torch.zeros(5, 3), mesh, [Shard(0)]))
    like = empty_like_parameter(parameter, (5, 3), torch.float64)
    assert isinstance(like, DTensor)
    assert like.placements == parameter.placements
    assert (like.dtype, like.requires_grad) == (torch.float64, False)
    check_write(like, random_tensor((5, 3), torch.float64), direct=True)
    assert not isinstance(empty_like_parameter(parameter, (), torch.float32), DTensor)


def check_fsdp_over_tp(hidden: int, out: int) -> None:
    """FSDP2 over tensor parallel, as people build it: two mesh dimensions cut the same dimension, the inner first."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def build() -> tuple[torch.nn.Sequential, dict[str, torch.Tensor]]:
        model = torch.nn.Sequential(torch.nn.Linear(6, hidden), torch.nn.Linear(hidden, out))
        truth = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
        return model, truth

    source, truth = build()
    target, other = build()
    assert any(isinstance(p, _StridedShard) for value in source.parameters() for p in value.placements)
    is_even = hidden % 4 == 0
    for (name, value), into in zip(source.named_parameters(), target.parameters(), strict=True):
        check_read(value, truth[name])
        check_read(into, other[name])
        if is_even:
            check_gather(value, truth[name])
        check_write(into, truth[name], direct=True)
        if is_even:
            check_gather(into, truth[name])


def check_fsdp() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 1))
    truth = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fully_shard(model, mesh=mesh)
    for name, value in model.named_parameters():
        check_read(value, truth[name])
        check_gather(value, truth[name])
        new = random_tensor(tuple(value.shape))
        check_write(value, new, direct=True)
        check_gather(value, new)


def check_lone_strided_shard() -> None:
    """A process may hold several boxes of the tensor; torch tells the offset of the first one only."""
    mesh = init_device_mesh("cpu", (2, 2))
    for size in (8, 5, 12):
        full = random_tensor((size, 3))
        placement = _StridedShard(0, split_factor=2)
        shards, _ = placement._split_tensor(full, 2, with_padding=False, contiguous=True)
        local = shards[mesh.get_coordinate()[0]].clone()
        placements = [placement, Replicate()]
        value = DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())
        check_read(value, full)
        check_write(value, random_tensor((size, 3)), direct=True)
        if size % 4 == 0:
            assert len(leaf_of(value).spec.regions) == 2


def check_sub_mesh() -> None:
    """A process outside the mesh holds nothing, and says so."""
    mesh = DeviceMesh("cpu", [0, 2])
    full = random_tensor((5, 3))
    value = distribute(full, mesh, [Shard(0)])
    regions = leaf_of(value).spec.regions
    expected = {0: (Region((0, 0), (3, 3)),), 2: (Region((3, 0), (2, 3)),)}
    assert regions == expected.get(dist.get_rank(), ())
    assert leaf_of(value).spec.shape == (5, 3)
