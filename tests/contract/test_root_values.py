"""Every kind of thing that people put into a state, through the real manager, on every kind of root.

In a directory in both modes and behind the loop; elsewhere, where only the way of the bytes is another, in one.
"""

from __future__ import annotations

import collections
import dataclasses
import datetime as dt
import enum
import math
import pathlib
import random
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.manager.errors import UnsupportedValueError

from support.roots import KINDS_WITHOUT_RENAMES
from support.strategies import same_content

if TYPE_CHECKING:
    from support.roots import Root

SHAPES: list[tuple[int, ...]] = [(), (0,), (0, 3), (1,), (3, 5)]
DTYPES = sorted(
    (dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)),
    key=str,
)
QUANTISED = [dtype for dtype in DTYPES if str(dtype).removeprefix("torch.")[:2] in ("qi", "qu")]
KEPT = list(dict.fromkeys(dtype for dtype in DTYPES if dtype not in QUANTISED))
WAYS: list[dict[str, Any]] = [{"mode": "consolidated"}, {"mode": "sharded"}, {"mode": "auto", "blocking": False}]
EVERY_KIND = [("directory", way) for way in WAYS] + [(kind, WAYS[1]) for kind in KINDS_WITHOUT_RENAMES]

in_every_way = pytest.mark.parametrize(("root", "way"), EVERY_KIND, indirect=["root"], ids=str)


def bits(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    limit = 2 if dtype is torch.bool else 256
    generator = torch.Generator().manual_seed(seed)
    raw = torch.randint(0, limit, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(shape)


def raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.reshape(-1).view(torch.uint8).tolist())


def there_and_back(root: Root, state: dict[str, Any], live: dict[str, Any], way: dict[str, Any]) -> dict[str, Any]:
    """Save, restore into `live`, and return what comes without a target."""
    with root.manager(mode=way["mode"]) as manager:
        manager.save(1, state, blocking=way.get("blocking", True))
        manager.wait()
        manager.restore(1, live)
        found = manager.restore(1).state
    assert found is not None
    return found


def test_every_dtype_of_this_torch_is_kept_or_refused() -> None:
    assert {str(dtype).removeprefix("torch.") for dtype in KEPT} <= set(ITEM_BYTES)
    assert len(QUANTISED) >= 5


@pytest.mark.filterwarnings("ignore:(BComplex32|ComplexHalf) support is experimental")
@in_every_way
def test_every_dtype_comes_back_in_every_shape(root: Root, way: dict[str, Any]) -> None:
    state = {str(dtype): [bits(dtype, shape, index) for index, shape in enumerate(SHAPES)] for dtype in KEPT}
    live = {name: [torch.empty_like(value) for value in values] for name, values in state.items()}
    before = {name: list(values) for name, values in live.items()}
    found = there_and_back(root, state, live, way)
    for back in (live, found):
        for name, values in state.items():
            for one, other in zip(values, back[name], strict=True):
                assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride()), name
                assert raw(one) == raw(other), (name, one.shape)
    assert all(value is before[name][index] for name in live for index, value in enumerate(live[name]))


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.parametrize("dtype", QUANTISED, ids=str)
def test_quantised_tensors_are_refused_by_name_before_anything_is_written(root: Root, dtype: torch.dtype) -> None:
    try:
        value = torch._empty_affine_quantized([8], scale=0.5, zero_point=0, dtype=dtype)
    except RuntimeError:
        pytest.skip("this torch makes no such tensor")
    with root.manager() as manager, pytest.raises(UnsupportedValueError, match="quantised") as caught:
        manager.save(1, {"model": {"w": value}})
    assert caught.value.leaf == "model.w"
    assert "int_repr" in str(caught.value.hint)
    root.check_holds()


VIEWS: dict[str, Any] = {
    "transposed": lambda x: x.t(),
    "strided": lambda x: x[::2, 1::2],
    "column": lambda x: x[:, 2],
    "permuted": lambda x: x.reshape(2, 2, 2, 3).permute(3, 0, 2, 1),
    "expanded": lambda x: x[0].expand(3, -1),
    "windows": lambda x: x.reshape(-1).unfold(0, 4, 2),
    "conjugate": lambda x: x.conj(),
    "conjugate, transposed": lambda x: x.t().conj(),
    "imaginary of a conjugate": lambda x: x.conj().imag,
    "channels last": lambda x: x.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
}


@in_every_way
@pytest.mark.parametrize("name", VIEWS)
def test_views_keep_their_strides_in_the_target_and_cost_their_own_bytes(
    root: Root, way: dict[str, Any], name: str
) -> None:
    def memory(value: float) -> torch.Tensor:
        return torch.complex(torch.arange(24.0), torch.arange(24.0) + value).reshape(4, 6)

    view, target = VIEWS[name](memory(100)), VIEWS[name](torch.zeros_like(memory(0)))
    strides = target.stride()
    live = {"v": target}
    found = there_and_back(root, {"v": view}, live, way)
    assert live["v"] is target
    assert target.stride() == strides == view.stride()
    assert (target.is_conj(), target.is_neg()) == (view.is_conj(), view.is_neg())
    assert torch.equal(target, view)
    assert torch.equal(found["v"], view)
    size = sum(len(data) for path, data in root.contents().items() if path.endswith(".safetensors"))
    assert size == 4096 + view.numel() * view.element_size()


NUMPY = [
    *"?bBhHiIlLqQefdFD",
    *("g", "G"),
    ">f4",
    ">i2",
    "M8[s]",
    ">M8[D]",
    "M8[25us]",
    "m8[ns]",
    "m8",
    "U4",
    ">U2",
    "S3",
    "V5",
    "i4,f8",
    [("a", "i1"), ("b", ">f8", (2, 2)), ("c", [("x", "U2"), ("y", "M8[D]")])],
    np.dtype([("a", "i1"), ("b", "f8")], align=True),
    np.dtype({"names": ["p"], "formats": ["i2"], "offsets": [3], "itemsize": 9}),
    [(("title", "a"), "i4")],
]


@in_every_way
def test_every_dtype_of_numpy_comes_back_in_every_shape_and_as_a_scalar(root: Root, way: dict[str, Any]) -> None:
    state: dict[str, Any] = {}
    for number, text in enumerate(NUMPY):
        dtype = np.dtype(text)
        values: list[Any] = []
        for shape in SHAPES:
            generator = np.random.default_rng(number)
            array = np.zeros(shape, dtype)
            if dtype.kind not in "US?V" or dtype.itemsize in (5, 9):
                array = (
                    generator.integers(0, 256, (*shape, dtype.itemsize), np.uint8)[..., :].view(dtype).reshape(shape)
                )
            elif dtype.kind in "US" and array.size:
                array[...] = "a"
            values.append(array)
        values.append(values[-1][1, 2])  # a scalar
        state[f"{number} {text}"] = values
    live = {
        name: [np.zeros_like(value) if isinstance(value, np.ndarray) else value for value in values]
        for name, values in state.items()
    }
    found = there_and_back(root, state, live, way)
    assert same_content(live, state)
    for name, values in state.items():
        for one, other in zip(values, found[name], strict=True):
            assert type(one) is type(other), name
            assert one.dtype == other.dtype, name
            assert one.tobytes() == other.tobytes(), name


@pytest.mark.parametrize(
    "value",
    [np.array([object()]), np.array([(1, None)], "i4,O"), np.ma.array([1]), np.rec.array([(1, 2.0)], dtype="i4,f8")],
)
def test_numpy_arrays_that_hold_more_than_their_bytes_are_refused_by_name(root: Root, value: Any) -> None:
    with root.manager() as manager, pytest.raises(UnsupportedValueError) as caught:
        manager.save(1, {"data": [value]})
    assert caught.value.leaf == "data.0"
    assert caught.value.hint


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Config:
    width: int
    weight: Any
    names: list[str] = dataclasses.field(default_factory=list)


def make_values() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    return {
        "big": [2**200, -(2**63), 2**53 + 1, True],
        "floats": [math.nan, math.inf, -math.inf, -0.0, 1e-320, 0.1],
        "complex": complex(-0.0, math.nan),
        "texts": ["", "a\x00b", "\ud800", b"\x00\xff", bytearray(b"x")],
        "times": [
            dt.datetime(2024, 2, 29, 1, 2, 3, 4, dt.timezone(dt.timedelta(hours=-3))),
            dt.date(1, 1, 1),
            dt.timedelta(-1),
        ],
        "path": pathlib.PurePosixPath("/a/b"),
        "numpy": [np.float16(0.1), np.int8(-1), np.datetime64("NaT"), np.str_("a"), np.longdouble("0.1")],
        "torch": [torch.bfloat16, torch.device("cpu"), torch.Size([1, 2])],
        "enum": Color.RED,
        "point": Point(1, torch.ones(2)),
        "config": Config(3, torch.ones(1), ["a"]),
        "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
        "default": collections.defaultdict(list, {"k": [1]}),
        "counter": collections.Counter("aab"),
        "deque": collections.deque([1, 2], maxlen=3),
        "empty": [{}, [], (), collections.OrderedDict(), set()],
        "keys": {1: "int", "1": "text", None: 0, (1, "a"): 2, 1.5: 3, b"k": 4, Color.RED: 5},
        "generator": generator,
        "random": random.Random(5),  # noqa: S311 - no secret
        "numpy generator": np.random.default_rng(6),
        "legacy": np.random.RandomState(7),
    }


def draws(state: dict[str, Any]) -> list[Any]:
    return [
        torch.rand(3, generator=state["generator"]).tolist(),
        state["random"].random(),
        state["numpy generator"].random(),
        state["legacy"].rand(),
    ]


@in_every_way
def test_values_structures_and_generators_come_back(root: Root, way: dict[str, Any]) -> None:
    state = make_values()
    live = make_values()
    draws(live)
    live["config"] = Config(0, torch.zeros(1))
    live["point"] = Point(0, torch.zeros(2))
    live["keys"] = {Color.RED: 0}
    live["floats"], live["counter"], live["empty"] = (
        [0.0] * 6,
        collections.Counter(),
        [{}, [], (), live["ordered"], set()],
    )
    live["empty"][3] = collections.OrderedDict()
    there_and_back(root, state, live, way)
    generators = ("generator", "random", "numpy generator", "legacy")
    for name in state:
        if name in ("config", *generators):
            continue
        assert same_content(live[name], state[name]), name
    assert isinstance(live["config"], Config)
    assert (live["config"].width, live["config"].names) == (3, ["a"])
    assert torch.equal(live["config"].weight, torch.ones(1))
    assert live["deque"].maxlen == 3
    assert draws(live) == draws(state)


@in_every_way
def test_parameters_and_buffers_stay_what_they_are(root: Root, way: dict[str, Any]) -> None:
    def make(seed: int) -> torch.nn.Module:
        torch.manual_seed(seed)
        module = torch.nn.BatchNorm1d(3)
        module.extra = torch.nn.Parameter(torch.rand(2), requires_grad=seed == 1)
        module.register_buffer("hidden", torch.rand(1), persistent=False)
        return module

    model, live = make(0), make(1)
    hidden, extra = live.hidden.clone(), live.extra
    there_and_back(root, {"m": model}, {"m": live}, way)
    assert live.extra is extra
    assert isinstance(extra, torch.nn.Parameter)
    assert extra.requires_grad
    assert torch.equal(extra, model.extra)
    assert torch.equal(live.hidden, hidden)
    assert set(dict(live.named_buffers())) == {"running_mean", "running_var", "num_batches_tracked", "hidden"}
