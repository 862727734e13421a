"""What `tests/xla/test_xla_adapter.py` runs in a process of its own, with the real torch_xla on CPU devices.

python xla_adapter_cases.py spmd|plain      reads names of cases, one a line; answers each with one line of JSON
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import traceback
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr

from safepoint.formats.errors import IncompleteCoverageError, InvalidArgumentError, UnsupportedValueError
from safepoint.formats.region import Region, check_tiling
from safepoint.manager.adapters import ArrayLeaf, empty_like_parameter, prefetch, wrap_array

from support.xla_sharing_cases import check_handing_on

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

DTYPES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
]
SHAPES = [(8, 4), (5, 3), (1,), (11,), (0, 4), (3, 0), (1, 1), (16, 2), (), (2, 5, 3)]
FEW_SHAPES = [(5, 3), (1,), (0, 4), ()]
ALL_SHAPES_FOR = {"bool", "uint16", "bfloat16", "float32", "complex64"}  # one an item size, and an odd one


def shapes_for(dtype: str) -> list[tuple[int, ...]]:
    shapes = SHAPES if dtype in ALL_SHAPES_FOR else FEW_SHAPES
    return [shape for shape in shapes if shape or "float8" not in dtype]  # torch_xla has no float8 scalars


def random_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return random bits; of float16, NaNs with the one payload that torch_xla lets through."""
    tensor = torch.empty(tuple(shape), dtype=dtype)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (tensor.numel() * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).reshape(tensor.shape)
    if dtype == torch.float16:
        quiet = torch.where(tensor.view(torch.int16) < 0, -0x200, 0x7E00).to(torch.int16)
        tensor = torch.where(tensor.isnan(), quiet.view(dtype), tensor)
    return tensor


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and raw_bytes(a) == raw_bytes(b)


def sync() -> None:
    torch_xla.sync(wait=True)
    xm.wait_device_ops()


def meshes() -> list[xs.Mesh]:
    count = xr.global_runtime_device_count()
    devices = np.arange(count)
    return [
        xs.Mesh(devices, (count // 2, 2), ("a", "b")),
        xs.Mesh(devices[::-1].copy(), (2, count // 2), ("a", "b")),
        xs.Mesh(devices, (count, 1), ("a", "b")),
    ]


def shardings(ndim: int) -> list[tuple[Any, ...]]:
    """Return every way to put the two mesh axes onto the dimensions: each on one, both on one, or on none."""
    found = []
    for a, b in itertools.product(range(-1, ndim), repeat=2):
        axes = [tuple(axis for axis, dim in (("a", a), ("b", b)) if dim == d) for d in range(ndim)]
        found.append(tuple(axis if len(axis) > 1 else (axis[0] if axis else None) for axis in axes))
        if a == b and a >= 0:
            found.append(tuple(axis[::-1] if len(axis) > 1 else None for axis in axes))
    return found


def put(host: torch.Tensor, mesh: xs.Mesh | None = None, spec: tuple[Any, ...] | None = None) -> torch.Tensor:
    if mesh is not None:
        with contextlib.suppress(RuntimeError):  # torch_xla cannot pad a shard that is empty in two dimensions
            xs.mark_sharding(tensor := host.to("xla"), mesh, spec)
            return tensor
    return host.to("xla")


def leaf_of(value: torch.Tensor) -> ArrayLeaf:
    leaf = wrap_array(value, ("model", "w"))
    assert leaf is not None
    return leaf


def sharding_of(value: torch.Tensor) -> str:
    return str(torch_xla._XLAC._get_xla_sharding_spec(value))


def gathered(leaf: ArrayLeaf) -> torch.Tensor:
    """Assemble the leaf from its regions, which must tile it."""
    shape = leaf.spec.shape
    check_tiling(shape, leaf.spec.regions, leaf="w")
    whole = torch.empty(shape, dtype=getattr(torch, leaf.spec.dtype))
    bits = whole.view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[whole.element_size()])
    for region in leaf.spec.regions:
        data = leaf.read(region)
        assert data.is_contiguous()
        assert (data.dtype, data.shape) == (whole.dtype, region.shape)
        bits[region.slices_in(Region.whole(shape))] = data.view(bits.dtype)
    return whole


def fill(leaf: ArrayLeaf, full: torch.Tensor, regions: Iterable[Region], *, direct: bool) -> None:
    """Write parts of `full`, wherever they lie in the regions that the leaf holds."""
    whole = Region.whole(leaf.spec.shape)
    for region in regions:
        for held in leaf.spec.regions:
            common = held if held == region else held.intersect(region)
            if common is None:
                continue
            data = full[common.slices_in(whole)].contiguous()
            buffer = leaf.target_buffer(common) if direct else None
            if buffer is None:
                leaf.write(common, data)
            else:
                buffer[:] = raw_bytes(data)
    leaf.finish()


def check_layouts(dtype: str) -> None:
    """Out of every layout, and into another one, for every shape; sharding and padding stay what they were."""
    torch_dtype = getattr(torch, dtype)
    for shape in shapes_for(dtype):
        layouts = [(mesh, spec) for mesh in meshes() for spec in shardings(len(shape))] + [(None, None)]
        truths = [random_tensor(shape, torch_dtype) for _ in layouts]
        values = [put(truth, *layout) for truth, layout in zip(truths, layouts, strict=True)]
        sync()
        before = [sharding_of(value) for value in values]
        leaves = [leaf_of(value) for value in values]
        if 0 not in shape:
            assert sum(leaf.spec.kind == "xla_sharded" for leaf in leaves) >= len(shape)
        prefetch(leaves)
        regions = [leaf.spec.regions for leaf in leaves]
        for leaf, truth in zip(leaves, truths, strict=True):
            assert (leaf.spec.dtype, leaf.spec.shape) == (dtype, shape)
            assert same_bits(gathered(leaf), truth), (shape, leaf.spec)
        # Each layout takes the values of its neighbour, cut as its neighbour holds them.
        moved = truths[1:] + truths[:1]
        cuts = regions[1:] + regions[:1]
        for i, value in enumerate(values):
            fill(leaf_of(value), moved[i], cuts[i], direct=i % 2 == 0)
        sync()
        for value, truth, sharding in zip(values, moved, before, strict=True):
            assert sharding_of(value) == sharding
            assert same_bits(gathered(leaf_of(value)), truth), (shape, sharding)
            assert torch.equal(torch.isnan(value.cpu()), torch.isnan(truth)) or not truth.dtype.is_floating_point


def check_geometry() -> None:
    mesh = meshes()[0]
    tensors = {
        "tiled": put(torch.zeros(5, 3), mesh, ("a", "b")),
        "partial": put(torch.zeros(8, 4), mesh, ("a", None)),
        "replicated": put(torch.zeros(8, 4), mesh, (None, None)),
        "plain": put(torch.zeros(3)),
    }
    sync()
    specs = {name: leaf_of(tensor).spec for name, tensor in tensors.items()}
    assert [specs[name].kind for name in tensors] == ["xla_sharded", "xla_sharded", "xla", "xla"]
    assert specs["tiled"].regions == tuple(
        Region((row, column), (rows, columns))
        for row, rows in ((0, 2), (2, 2), (4, 1))
        for column, columns in ((0, 2), (2, 1))
    )
    assert specs["partial"].regions == tuple(Region((row, 0), (2, 4)) for row in (0, 2, 4, 6))
    assert specs["replicated"].regions == (Region((0, 0), (8, 4)),)


def check_batches() -> None:
    """One transfer brings all leaves; each copy is served once, then let go."""
    mesh = meshes()[0]
    values = [put(torch.full((8, 4), float(i)) + 0, mesh, ("a", "b")) for i in range(6)]
    values += [put(torch.full((8, 4), float(i))) * 1 for i in range(6, 9)]
    sync()
    leaves = [leaf_of(value) for value in values]

    def transfers() -> int:
        data = met.metric_data("TransferFromDeviceTime")
        return 0 if data is None else int(data[0])

    before = transfers()
    prefetch(leaves)
    after = transfers()
    assert 0 < after - before <= 3
    for i, leaf in enumerate(leaves):
        assert (gathered(leaf) == i).all()
    assert transfers() == after
    assert not any(leaf.is_on_host for leaf in leaves)  # type: ignore[attr-defined]
    assert (gathered(leaves[2]) == 2).all()
    assert transfers() == after + 1
    prefetch(leaves[:2])
    leaves[0].release()
    assert not leaves[0].is_on_host  # type: ignore[attr-defined]
    part = Region((1, 0), (1, 2))
    assert leaves[1].read(part).tolist() == [[1.0, 1.0]]
    assert leaves[1].is_on_host  # type: ignore[attr-defined]


def check_modules() -> None:
    """Parameters stay leaves that require grad, and the detached tensors of a state dict are the parameters."""
    mesh = meshes()[0]
    model = torch.nn.Linear(4, 8).to("xla")
    xs.mark_sharding(model.weight, mesh, ("a", "b"))
    sync()
    weight, bias = random_tensor((8, 4), torch.float32), random_tensor((8,), torch.float32)
    for tensors in ({"weight": model.weight, "bias": model.bias}, model.state_dict()):
        weight, bias = weight.roll(1), bias.roll(1)
        fill(leaf_of(tensors["weight"]), weight, [Region((0, 0), (8, 4))], direct=True)
        fill(leaf_of(tensors["bias"]), bias, [Region((0,), (8,))], direct=False)
        sync()
        assert same_bits(gathered(leaf_of(model.weight)), weight)
        assert same_bits(gathered(leaf_of(model.bias)), bias)
    assert model.weight.requires_grad
    assert model.weight.is_leaf
    assert "devices" in sharding_of(model.weight)
    model(torch.ones(2, 4).to("xla")).sum().backward()
    sync()


def check_wrapper() -> None:
    value = xs.mark_sharding(put(torch.arange(32.0).reshape(8, 4)), meshes()[0], ("a", "b"))
    sync()
    assert type(value).__name__ == "XLAShardedTensor"
    assert same_bits(gathered(leaf_of(value)), torch.arange(32.0).reshape(8, 4))
    fill(leaf_of(value), torch.ones(8, 4), [Region((0, 0), (8, 4))], direct=False)
    assert same_bits(gathered(leaf_of(value)), torch.ones(8, 4))


def check_computed() -> None:
    """A result of SPMD propagation has its sharding after the sync, and is saved as what it is."""
    mesh = meshes()[0]
    a = put(torch.arange(32.0).reshape(8, 4), mesh, ("a", "b"))
    result = a * 2 + 1
    sync()
    assert leaf_of(result).spec.kind == "xla_sharded"
    assert same_bits(gathered(leaf_of(result)), torch.arange(32.0).reshape(8, 4) * 2 + 1)


def check_incomplete() -> None:
    """Nothing is changed where a part was not written."""
    sharded, plain = put(torch.zeros(8, 4), meshes()[0], ("a", "b")), put(torch.zeros(8, 4))
    sync()
    for value in (sharded, plain):
        leaf = leaf_of(value)
        leaf.write(Region((0, 0), (1, 1)), torch.ones(1, 1))
        with pytest.raises(IncompleteCoverageError) as caught:
            leaf.finish()
        assert caught.value.leaf == "model.w"
        assert same_bits(gathered(leaf_of(value)), torch.zeros(8, 4))
        leaf.finish()  # nothing is staged any more


def check_wrong_data() -> None:
    """What would abort the client, or reinterpret bits, never gets there."""
    value = put(torch.zeros(8, 4), meshes()[0], ("a", "b"))
    sync()
    leaf = leaf_of(value)
    held = leaf.spec.regions[0]
    for data in (torch.ones(2, 2, dtype=torch.int32), torch.ones(2, 1), torch.ones(2, 2, dtype=torch.float64)):
        with pytest.raises(InvalidArgumentError, match="cannot be written"):
            leaf.write(held, data)
    with pytest.raises(InvalidArgumentError, match="not held"):
        leaf.write(Region((1, 1), (2, 2)), torch.ones(2, 2))


def check_refusals() -> None:
    mesh = meshes()[0]
    for value in (
        put(torch.zeros(4, dtype=torch.complex128)),
        put(torch.zeros(8, dtype=torch.complex128), mesh, ("a",)),
    ):
        sync()
        with pytest.raises(UnsupportedValueError, match="complex128") as caught:
            wrap_array(value, "w")
        assert caught.value.hint
    manual = put(torch.zeros(8, 4)) + 1
    xs.xla_sharding._mark_manual_sharding(manual)
    with pytest.raises(UnsupportedValueError, match="manual"):
        wrap_array(manual, "w")


def check_views() -> None:
    """A view is saved; as a target it is refused, since torch_xla would add to its base, or reshard it."""
    base = put(torch.arange(32.0).reshape(8, 4), meshes()[0], ("a", "b"))
    sync()
    view = base.t()
    sync()
    assert same_bits(gathered(leaf_of(view)), torch.arange(32.0).reshape(8, 4).t().contiguous())
    leaf = leaf_of(view)
    assert leaf.why_not_writable()
    with pytest.raises(UnsupportedValueError, match="view"):
        leaf.write(leaf.spec.regions[0], leaf.read(leaf.spec.regions[0]))


def check_empty_like() -> None:
    mesh = meshes()[1]
    for spec in (("a", "b"), (None, "b"), (None, None)):
        parameter = torch.nn.Parameter(put(torch.zeros(5, 3), mesh, spec))
        xs.mark_sharding(parameter, mesh, spec)
        sync()
        made = empty_like_parameter(parameter, (5, 3), torch.float64)
        truth = random_tensor((5, 3), torch.float64)
        fill(leaf_of(made), truth, leaf_of(made).spec.regions, direct=True)
        sync()
        assert sharding_of(made) == sharding_of(parameter)
        assert same_bits(gathered(leaf_of(made)), truth)
        assert not made.requires_grad
    assert empty_like_parameter(parameter, (), torch.float32).device.type == "cpu"


def check_plain(dtype: str) -> None:
    """One device, no SPMD."""
    torch_dtype = getattr(torch, dtype)
    truths = [random_tensor(shape, torch_dtype) for shape in shapes_for(dtype)]
    values = [put(truth) for truth in truths]
    sync()
    leaves = [leaf_of(value) for value in values]
    prefetch(leaves)
    for leaf, truth, value in zip(leaves, truths, values, strict=True):
        assert leaf.spec.kind == "xla"
        assert same_bits(gathered(leaf), truth)
        new = random_tensor(truth.shape, torch_dtype)
        fill(leaf_of(value), new, leaf.spec.regions, direct=False)
        sync()
        assert same_bits(gathered(leaf_of(value)), new)


def cases(mode: str) -> dict[str, Callable[[], None]]:
    """Return the cases for a process with SPMD, or without."""
    if mode == "plain":
        return {f"plain {dtype}": lambda dtype=dtype: check_plain(dtype) for dtype in DTYPES}
    found: dict[str, Callable[[], None]] = {
        "geometry": check_geometry,
        "batched transfers": check_batches,
        "modules": check_modules,
        "wrapper": check_wrapper,
        "computed": check_computed,
        "incomplete writes": check_incomplete,
        "wrong data": check_wrong_data,
        "refusals": check_refusals,
        "views": check_views,
        "new state like a parameter": check_empty_like,
        "handing on": lambda: check_handing_on(meshes()[0]),
    }
    for dtype in DTYPES:
        found[f"layouts of {dtype}"] = lambda dtype=dtype: check_layouts(dtype)
    return found


def main(mode: str) -> None:
    """Answer the names that come on standard input."""
    if mode == "spmd":
        xr.use_spmd()
    known = cases(mode)
    for line in sys.stdin:
        torch.manual_seed(0)
        try:
            known[line.strip()]()
            error = None
        except BaseException:  # noqa: BLE001 - told by the test
            error = traceback.format_exc()
        sys.stdout.write(json.dumps({"error": error}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
