from __future__ import annotations

import gc
import itertools
import weakref
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import InvalidArgumentError, UnsupportedValueError
from safepoint.formats.region import Region
from safepoint.manager.adapters import ArrayLeaf, empty_like_parameter, prefetch, wrap_array
from safepoint.manager.adapters.numpy_array import NumpyLeaf, dtype_of

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = [
    pytest.param(dtype, id=name) for name in ITEM_BYTES if isinstance(dtype := getattr(torch, name, None), torch.dtype)
]
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(), (1,), (0,), (7,), (3, 5), (2, 0, 3), (2, 3, 4)]
NUMPY_NAMES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *(f"float{bits}" for bits in (16, 32, 64)),
    *(f"complex{bits}" for bits in (64, 128)),
]


def leaf_of(value: object) -> ArrayLeaf:
    leaf = wrap_array(value, ("model", "w", 0))
    assert leaf is not None
    return leaf


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return a tensor of any bits: NaNs with payloads, infinities, negative zeros, denormals."""
    generator = torch.Generator().manual_seed(seed)
    size = dtype.itemsize
    count = int(np.prod(shape, dtype=np.int64))
    high = 2 if dtype == torch.bool else 256
    raw = torch.randint(0, high, (count * size,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().tobytes()


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)


def whole(value: Any) -> Region:
    return Region.whole(tuple(value.shape))


def restore(leaf: ArrayLeaf, region: Region, data: torch.Tensor) -> None:
    """Put data where a restore would: straight into memory where the leaf offers that."""
    buffer = leaf.target_buffer(region)
    if buffer is None:
        leaf.write(region, data)
    else:
        buffer[:] = raw(data)
    leaf.finish()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_dtype_and_shape_comes_out_and_goes_back_bit_for_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source, target = random_tensor(shape, dtype), random_tensor(shape, dtype, seed=1)
    leaf = leaf_of(source)
    assert leaf.spec.dtype == str(dtype).removeprefix("torch.")
    assert leaf.spec.shape == shape
    assert leaf.spec.regions == (whole(source),)
    data = leaf.read(whole(source))
    assert same_bits(data, source)
    leaf_of(target).write(whole(target), data)
    assert same_bits(target, source)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_target_buffer_is_the_live_memory_as_writable_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source, target = random_tensor(shape, dtype), random_tensor(shape, dtype, seed=1)
    leaf = leaf_of(target)
    buffer = leaf.target_buffer(whole(target))
    assert buffer is not None
    assert (buffer.format, buffer.ndim, buffer.readonly) == ("B", 1, False)
    assert buffer.nbytes == source.numel() * dtype.itemsize
    buffer[:] = raw(source)
    leaf.finish()
    assert same_bits(target, source)


def test_a_target_buffer_keeps_the_memory_alive() -> None:
    buffer = leaf_of(torch.full((1000,), 3, dtype=torch.uint8)).target_buffer(Region((0,), (1000,)))
    gc.collect()
    torch.zeros(1000, dtype=torch.uint8)
    assert buffer is not None
    assert bytes(buffer) == b"\x03" * 1000


def test_reading_contiguous_host_memory_copies_nothing() -> None:
    tensor = torch.arange(24.0).reshape(4, 6)
    for region in (Region((0, 0), (4, 6)), Region((1, 0), (2, 6)), Region((2, 3), (1, 2))):
        data = leaf_of(tensor).read(region)
        assert data.data_ptr() == tensor[region.slices_in(whole(tensor))].data_ptr()
        assert data.is_contiguous()


def test_a_part_of_a_region_is_read_and_written_where_it_lies() -> None:
    tensor = torch.arange(30).reshape(5, 6)
    region = Region((1, 2), (3, 2))
    expected = tensor[1:4, 2:4].clone()
    data = leaf_of(tensor).read(region)
    assert data.is_contiguous()
    assert torch.equal(data, expected)
    target = torch.zeros(5, 6, dtype=torch.int64)
    leaf_of(target).write(region, data)
    assert torch.equal(target[1:4, 2:4], expected)
    assert target.sum() == expected.sum()


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda base: base[:, :6].t(),
    "strided": lambda base: base[1::2, ::3],
    "offset": lambda base: base[3:, 2:5],
    "permuted": lambda base: base.reshape(2, 4, 9).permute(2, 0, 1),
    "column": lambda base: base[:, 4],
    "element": lambda base: base[2, 3],
    "channels last": lambda base: base[:, :8].reshape(1, 2, 4, 8).contiguous(memory_format=torch.channels_last),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex128, torch.uint16, torch.bool])
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_read_and_written_through_and_nothing_else_changes(view: str, dtype: torch.dtype) -> None:
    base, other = random_tensor((8, 9), dtype), random_tensor((8, 9), dtype, seed=1)
    source, target = VIEWS[view](base), VIEWS[view](other)
    expected = other.clone()
    VIEWS[view](expected).copy_(source)
    data = leaf_of(source).read(whole(source))
    assert data.is_contiguous()
    assert data.numel() == source.numel()
    restore(leaf_of(target), whole(target), data)
    assert same_bits(target.contiguous(), source.contiguous())
    if view != "channels last":
        assert same_bits(other, expected)


def lazy_views(seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    found = {}
    for dtype in (torch.complex64, torch.complex128):
        base = random_tensor((4, 6), dtype, seed)
        found[f"conj {dtype}"] = (base, base.conj())
        found[f"neg {dtype}"] = (base, base.conj().imag)
        found[f"strided conj {dtype}"] = (base, base.conj().t()[::2])
        found[f"conj and neg {dtype}"] = (base, torch._neg_view(base.conj()))
    return found


@pytest.mark.parametrize("name", lazy_views(0))
def test_conjugate_and_negative_views_keep_their_values_bit_for_bit(name: str) -> None:
    _, source = lazy_views(0)[name]
    base, target = lazy_views(1)[name]
    expected = source.resolve_conj().resolve_neg().contiguous()
    leaf = leaf_of(target)
    assert leaf.target_buffer(whole(target)) is None
    data = leaf_of(source).read(whole(source))
    assert same_bits(data, expected)
    leaf.write(whole(target), data)
    leaf.finish()
    assert same_bits(target.resolve_conj().resolve_neg().contiguous(), expected)
    assert not base.is_conj()


SHARING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "expanded row": lambda base: base[:1].expand(5, 6),
    "expanded column": lambda base: base[:, 1:2].expand(4, 5),
    "expanded scalar": lambda base: base[1, 1].expand(3, 2),
    "windows": lambda base: base.reshape(-1).unfold(0, 5, 2),
    "expanded conj": lambda base: base[:1].conj().expand(5, 6),
}


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("name", SHARING)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_elements_that_share_memory_take_the_one_value_that_was_saved(
    name: str, dtype: torch.dtype, num_parts: int
) -> None:
    source, base = SHARING[name](random_tensor((4, 6), dtype)), random_tensor((4, 6), dtype, seed=1)
    target = SHARING[name](base)
    data = leaf_of(source).read(whole(source))
    assert data.is_contiguous()
    leaf = leaf_of(target)
    assert leaf.target_buffer(whole(target)) is None
    for part in torch.arange(source.shape[0]).chunk(num_parts):
        region = Region((int(part[0]), *(0,) * (source.ndim - 1)), (len(part), *source.shape[1:]))
        leaf.write(region, data[region.slices_in(whole(source))])
    leaf.finish()
    assert same_bits(target.resolve_conj().contiguous(), data)


def test_values_that_differ_are_refused_where_elements_share_memory_and_nothing_changes() -> None:
    base = torch.tensor([[1.0, 2.0]])
    leaf = leaf_of(base.expand(3, 2))
    leaf.write(Region((0, 0), (2, 2)), torch.tensor([[5.0, 6.0], [5.0, 6.0]]))
    leaf.write(Region((2, 0), (1, 2)), torch.tensor([[5.0, 7.0]]))
    with pytest.raises(UnsupportedValueError, match=r"share memory.*\[leaf model.w.0\]"):
        leaf.finish()
    assert torch.equal(base, torch.tensor([[1.0, 2.0]]))


@pytest.mark.parametrize("make", [torch.nn.Parameter, lambda t: t.requires_grad_()], ids=["parameter", "leaf"])
def test_a_leaf_that_requires_grad_is_written_in_place_and_stays_one(make: Callable[..., torch.Tensor]) -> None:
    target = make(torch.zeros(3, 4))
    restore(leaf_of(target), Region((0, 0), (3, 4)), torch.ones(3, 4))
    leaf_of(target).write(Region((1, 0), (1, 4)), torch.full((1, 4), 2.0))
    assert target.detach().sum() == 16
    assert target.is_leaf
    assert target.requires_grad
    assert not leaf_of(target).read(Region((0, 0), (3, 4))).requires_grad


@pytest.mark.parametrize("direct", [False, True])
def test_a_graph_that_saved_the_old_value_notices_the_restore(direct: bool) -> None:  # noqa: FBT001
    weight = torch.nn.Parameter(torch.ones(3))
    loss = (weight * weight).sum()
    leaf, region = leaf_of(weight), Region((0,), (3,))
    if direct:
        restore(leaf, region, torch.zeros(3))
    else:
        leaf.write(region, torch.zeros(3))
        leaf.finish()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("strided", [False, True])
def test_inference_tensors_are_read_and_written(strided: bool) -> None:  # noqa: FBT001
    with torch.inference_mode():
        target = torch.zeros(4, 4)
    view = target.t() if strided else target
    data = torch.arange(16.0).reshape(4, 4)
    restore(leaf_of(view), whole(view), data)
    assert torch.equal(leaf_of(view).read(whole(view)), data)


def test_reading_and_writing_work_in_inference_mode() -> None:
    target = torch.nn.Parameter(torch.zeros(3, 3))
    with torch.inference_mode():
        leaf_of(target.t()).write(Region((0, 0), (3, 3)), torch.arange(9.0).reshape(3, 3))
    assert torch.equal(target.detach().t(), torch.arange(9.0).reshape(3, 3))
    (target * 2).sum().backward()


def test_a_leaf_keeps_no_memory_once_it_is_gone() -> None:
    array = np.zeros(5)
    gone = weakref.ref(array)
    leaf = leaf_of(torch.from_numpy(array))
    data, buffer = leaf.read(Region((0,), (5,))), leaf.target_buffer(Region((0,), (5,)))
    del array, leaf
    gc.collect()
    assert gone() is not None
    del data, buffer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "value", [None, 3, 2.5, "x", b"x", [1], {"a": 1}, np.float32(3), np.datetime64("2020"), object()]
)
def test_what_is_no_array_is_left_to_others(value: object) -> None:
    assert wrap_array(value, "x") is None


def refused_tensors() -> dict[str, Callable[[], Any]]:
    class Labelled(torch.Tensor):
        pass

    def fake() -> torch.Tensor:
        with FakeTensorMode():
            return torch.zeros(3)

    matrix = torch.eye(4)
    return {
        "meta": lambda: torch.zeros(3, device="meta"),
        "coo": matrix.to_sparse,
        "csr": matrix.to_sparse_csr,
        "csc": matrix.to_sparse_csc,
        "bsr": lambda: matrix.to_sparse_bsr((2, 2)),
        "bsc": lambda: matrix.to_sparse_bsc((2, 2)),
        "quantised": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "jagged": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
        "subclass": lambda: torch.zeros(3).as_subclass(Labelled),
        "fake": fake,
        "lazy": lambda: torch.nn.LazyLinear(3).weight,
        "mkldnn": lambda: torch.zeros(2, 2).to_mkldnn(),
    }


@pytest.mark.filterwarnings("ignore:Sparse.*beta state:UserWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.filterwarnings("ignore:.*[qQ]uantiz.*")
@pytest.mark.parametrize("name", refused_tensors())
def test_what_has_no_plain_values_is_refused_by_name_with_a_way_out(name: str) -> None:
    try:
        value = refused_tensors()[name]()
    except RuntimeError as error:
        pytest.skip(f"this torch cannot make one: {error}")
    with pytest.raises(UnsupportedValueError) as caught:
        wrap_array(value, ("model", "w"))
    assert caught.value.leaf == "model.w"
    assert caught.value.hint


def test_a_tensor_inside_vmap_is_refused() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        with pytest.raises(UnsupportedValueError, match="vmap"):
            wrap_array(x, "x")
        return x

    torch.vmap(function)(torch.zeros(3, 2))


def test_a_region_that_is_not_held_is_refused() -> None:
    for value in (torch.zeros(3, 3), np.zeros((3, 3))):
        for region in (Region((2, 0), (2, 3)), Region((0,), (3,)), Region((0, 0), (3, 4))):
            with pytest.raises(InvalidArgumentError, match="not held"):
                leaf_of(value).read(region)


@pytest.mark.parametrize("value", [torch.zeros(3, 3), np.zeros((3, 3), np.float32)], ids=["tensor", "numpy"])
def test_data_of_another_dtype_or_shape_is_never_cast(value: Any) -> None:
    leaf = leaf_of(value)
    for data in (torch.ones(3, 3, dtype=torch.float64), torch.ones(3, 1), torch.ones(9)):
        with pytest.raises(InvalidArgumentError, match="cannot be written"):
            leaf.write(whole(value), data)
    assert float(value.sum()) == 0


def numpy_layouts(array: Any) -> dict[str, Any]:
    swapped = array.astype(array.dtype.newbyteorder(">"))
    unaligned = np.ndarray(array.shape, array.dtype, bytearray(array.nbytes + 1), offset=1)
    unaligned[...] = array
    read_only = array.copy()
    read_only.flags.writeable = False
    return {
        "plain": array,
        "fortran": np.asfortranarray(array),
        "strided": np.repeat(array, 2, axis=1)[:, ::2],
        "reversed": np.ascontiguousarray(array[::-1])[::-1],
        "big-endian": swapped,
        "unaligned": unaligned,
        "read-only": read_only,
    }


@pytest.mark.parametrize("layout", numpy_layouts(np.zeros((3, 4))))
@pytest.mark.parametrize("dtype", NUMPY_NAMES)
def test_numpy_arrays_of_every_layout_and_dtype_come_out_and_go_back(dtype: str, layout: str) -> None:
    plain = random_tensor((3, 4), getattr(torch, dtype))
    array = numpy_layouts(plain.numpy().copy())[layout]
    leaf = leaf_of(array)
    assert leaf.spec.dtype == dtype
    data = leaf.read(whole(array))
    assert same_bits(data, plain)
    assert same_bits(leaf.read(Region((1, 1), (2, 2))), plain[1:, 1:3].contiguous())
    target = numpy_layouts(np.zeros((3, 4), dtype))[layout]
    if layout == "read-only":
        assert leaf_of(target).why_not_writable()
        assert leaf_of(target).target_buffer(whole(target)) is None
        with pytest.raises(UnsupportedValueError, match="read-only"):
            leaf_of(target).write(whole(target), data)
        return
    restore(leaf_of(target), whole(target), data)
    assert target.tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", ["<", ">"])
def test_numpy_arrays_of_every_shape_come_out_and_go_back(shape: tuple[int, ...], order: str) -> None:
    array = np.arange(int(np.prod(shape)), dtype=f"{order}i4").reshape(shape)
    target = np.zeros_like(array)
    data = leaf_of(array).read(whole(array))
    assert tuple(data.shape) == shape
    restore(leaf_of(target), whole(target), data)
    assert np.array_equal(target, array)


def test_a_plain_numpy_array_is_read_without_a_copy() -> None:
    array = np.arange(6.0)
    assert leaf_of(array).read(Region((2,), (3,))).data_ptr() == array[2:].ctypes.data


def byte_arrays() -> dict[str, Any]:
    return {
        "dates": np.array([["2020-01-01", "NaT"], ["1969-12-31", "2262-04-11"]], "datetime64[ns]"),
        "durations": np.array([[1, -2], [0, 7]], "timedelta64[s]"),
        "text": np.array([["a", "bc"], ["", "\u00e4\0x"]]),
        "bytes": np.array([[b"a", b"\0b"], [b"", b"cde"]]),
        "records": np.array([[(1, 2.5), (3, -0.0)]] * 2, [("a", "i2"), ("b", ">f8")]),
        "raw": np.frombuffer(bytes(range(12)), "V3").reshape(2, 2).copy(),
        "long double": np.array([[1, np.nan], [-0.0, np.inf]], np.longdouble),
        "long complex": np.array([[1 + 2j, 3], [4j, 0]], np.clongdouble),
    }


@pytest.mark.parametrize("layout", ["plain", "fortran", "strided", "reversed", "read-only"])
@pytest.mark.parametrize("name", byte_arrays())
def test_numpy_arrays_that_torch_has_no_name_for_are_kept_as_their_bytes(name: str, layout: str) -> None:
    plain = byte_arrays()[name]
    array, target = numpy_layouts(plain)[layout], numpy_layouts(np.zeros_like(plain))[layout]
    leaf = leaf_of(array)
    assert isinstance(leaf, NumpyLeaf)
    assert (leaf.is_bytes, leaf.numpy_dtype) == (True, plain.dtype)
    assert (leaf.spec.dtype, leaf.spec.shape) == ("uint8", (2, 2, plain.dtype.itemsize))
    region = Region.whole(leaf.spec.shape)
    data = leaf.read(region)
    assert raw(data) == plain.tobytes()
    if layout != "read-only":
        restore(leaf_of(target), region, data)
        assert target.tobytes() == plain.tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["datetime64[s]", ">M8[s]", "U3", "V0"])
def test_numpy_arrays_kept_as_bytes_may_have_any_shape(shape: tuple[int, ...], dtype: str) -> None:
    array = np.zeros(shape, dtype)
    leaf = leaf_of(array)
    region = Region.whole(leaf.spec.shape)
    assert leaf.spec.shape == (*shape, array.dtype.itemsize)
    restore(leaf_of(array.copy()), region, leaf.read(region))


@pytest.mark.parametrize(
    "array",
    [
        np.array([object()]),
        np.zeros(2, [("a", "i4"), ("b", "O")]),
        np.array(["a"], np.dtypes.StringDType()),
        np.ma.masked_array([1, 2], mask=[True, False]),
        np.zeros(2, [("a", "i4")]).view(np.recarray),
    ],
    ids=["objects", "records with objects", "strings of any length", "masked", "recarray"],
)
def test_numpy_arrays_that_are_more_than_their_bytes_are_refused_with_a_way_out(array: Any) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        wrap_array(array, ("stats", "x"))
    assert caught.value.leaf == "stats.x"
    assert caught.value.hint


def test_bfloat16_and_float8_arrays_keep_their_names() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    names = [name for name in ITEM_BYTES if "float8" in name or name == "bfloat16"]
    for name in (name for name in names if hasattr(ml_dtypes, name) and hasattr(torch, name)):
        source = random_tensor((5,), getattr(torch, name))
        array = source.view(torch.uint8).numpy().view(getattr(ml_dtypes, name))
        assert leaf_of(array).spec.dtype == name
        assert same_bits(leaf_of(array).read(Region((0,), (5,))), source)
        target = np.zeros(10, array.dtype)[::2]
        leaf_of(target).write(Region((0,), (5,)), source)
        assert target.tobytes() == array.tobytes()
    assert dtype_of(np.dtype(ml_dtypes.int4)) is None


def test_empty_like_parameter_takes_the_parameters_device_only_for_its_shape() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    like = empty_like_parameter(parameter, (3, 4), torch.float64)
    assert (like.shape, like.dtype, like.requires_grad) == ((3, 4), torch.float64, False)
    assert empty_like_parameter(parameter, (), torch.float32).shape == ()
    on_meta = torch.nn.Parameter(torch.zeros(3, device="meta"))
    assert empty_like_parameter(on_meta, (3,), torch.float32).device.type == "meta"
    assert empty_like_parameter(on_meta, (2,), torch.float32).device.type == "cpu"


def test_prefetch_leaves_host_memory_alone() -> None:
    leaves = [leaf_of(torch.zeros(3)), leaf_of(np.zeros(3))]
    prefetch(leaves)
    for leaf in leaves:
        leaf.release()
    assert list(itertools.chain.from_iterable(leaf.read(Region((0,), (3,))).tolist() for leaf in leaves)) == [0.0] * 6
