from __future__ import annotations

import collections
import dataclasses
import enum
import math
import time
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from safepoint.formats.errors import InvalidArgumentError, UnsupportedValueError
from safepoint.formats.manifest import Node, TaggedKey
from safepoint.manager.leaf_table import LeafTable
from safepoint.manager.per_process import PerProcess
from safepoint.manager.state import flatten

from support.round_trip import save_step


class Color(enum.Enum):
    RED = 1


class Point(NamedTuple):
    x: int
    y: float


@dataclasses.dataclass
class Config:
    lr: float
    names: list[str]


class Box:
    """Has a state, and nothing else."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def flat(**state: Any) -> Any:
    return flatten(state, process_index=0, process_count=1)


def test_the_tree_has_parents_first_in_the_order_of_the_state() -> None:
    tree = flat(b={"z": 1, "a": [torch.zeros(2), None]}, a=())
    assert list(tree.nodes) == [
        (),
        ("b",),
        ("b", "z"),
        ("b", "a"),
        ("b", "a", 0),
        ("b", "a", 1),
        ("a",),
    ]
    assert list(tree.arrays) == [("b", "a", 0)]
    assert tree.nodes["b", "a"] == Node(kind="list", data={"length": 2})


def test_the_table_comes_back_from_its_bytes_and_equal_states_give_equal_bytes() -> None:
    def state() -> dict[str, Any]:
        return {"m": torch.nn.Linear(3, 2), "v": {1: "x", "1": -0.0, None: math.nan}, "e": torch.zeros(0, 3)}

    one, other = (flatten(state(), process_index=0, process_count=1).table() for _ in range(2))
    assert one.to_bytes() == other.to_bytes()
    back = LeafTable.from_bytes(one.to_bytes())
    assert back == one
    assert list(back.nodes) == list(one.nodes)


def test_flattening_copies_no_tensor_and_alters_nothing() -> None:
    tensor = torch.arange(6.0)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    tree = flat(t=tensor, m=model, o=optimizer)
    (region,) = tree.arrays["t",].spec.regions
    assert tree.arrays["t",].read(region).data_ptr() == tensor.data_ptr()
    assert tree.arrays["m", "weight"].read(tree.arrays["m", "weight"].spec.regions[0]).data_ptr() == (
        model.weight.data_ptr()
    )
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert list(optimizer.state_dict()["state"]) == [0, 1]
    assert model.weight.requires_grad
    assert model.weight.grad is not None


def test_tied_arrays_are_stored_once_across_the_whole_state() -> None:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    array = np.zeros(3)
    tree = flat(model=model, again=[model["embed"].weight.detach()], a=array, b=array, c=array[:2], d=array.copy())
    assert list(tree.arrays) == [("model", "embed.weight"), ("a",), ("d",)]
    assert tree.nodes["model", "head.weight"] == Node(kind="alias", data={"path": ["model", "embed.weight"]})
    assert tree.nodes["again", 0].kind == "alias"


def test_arrays_without_elements_share_nothing() -> None:
    base = torch.zeros(4)
    assert len(flat(a=torch.zeros(0), b=base[:0], c=base, d=base[4:], e=np.zeros(0), f=np.zeros(0)[:0]).arrays) == 6


def test_what_has_a_state_is_kept_by_its_state() -> None:
    tree = flat(box=Box({"x": 1, "t": torch.zeros(1)}), wrapped=Box([1, 2]), generator=torch.Generator())
    assert tree.nodes["box",].data["form"] == "object"
    assert ("box", "t") in tree.arrays
    assert tree.nodes["wrapped",].data["wrapped"] is True
    assert tree.nodes["wrapped", "state"].kind == "list"
    assert tree.nodes["generator",].data["form"] == "generator"


def test_state_per_process_is_keyed_by_the_process() -> None:
    tree = flatten({"p": PerProcess({"x": 1})}, process_index=2, process_count=4)
    assert tree.nodes["p",] == Node(kind="per_process", data={"process_count": 4})
    assert tree.nodes["p", 2, "x"].data == 1


def test_keys_that_look_alike_stay_apart() -> None:
    keys = ["1", 1, True and "True", 1.5, None, "None", b"a", "a", (1, "a"), "a.b", "a/../b", "", "x" * 400]
    tree = flat(d=dict.fromkeys(keys, 0))
    assert len(tree.nodes) == 2 + len(keys)
    assert ("d", TaggedKey("none", "null")) in tree.nodes


class Unknown:
    pass


class OnlyGet:
    def state_dict(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("value", "type_text", "way_out"),
    [
        (lambda: 0, "function", "Code is not kept"),
        (len, "builtin_function_or_method", "Code is not kept"),
        (Unknown(), "Unknown", "state_dict"),
        (Unknown, "type", "class"),
        (OnlyGet(), "OnlyGet", "no load_state_dict"),
        (iter([]), "list_iterator", "iterator"),
        (math, "module", "name"),
        (np.array([object()]), "numpy", "numbers"),
        (collections.ChainMap({}), "ChainMap", "dict"),
        (type("Names", (list,), {})(), "Names", "list"),
        (torch.zeros(2, device="meta"), "meta", ""),
        (torch.zeros(2).to_sparse(), "sparse", ""),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_kept_is_refused_with_path_type_and_a_way_out(value: Any, type_text: str, way_out: str) -> None:
    with pytest.raises(UnsupportedValueError) as caught:
        flat(item={"a": [0, value]})
    assert caught.value.leaf == "item.a.1"
    assert type_text in str(caught.value)
    assert caught.value.hint is not None
    assert way_out in caught.value.hint


def test_an_open_file_is_refused(tmp_path: Any) -> None:
    with (tmp_path / "x").open("w") as file, pytest.raises(UnsupportedValueError, match="open file"):
        flat(f=file)


def test_cycles_and_bottomless_states_are_refused() -> None:
    loop: list[Any] = []
    loop.append({"again": loop})
    with pytest.raises(UnsupportedValueError, match="contains itself") as caught:
        flat(a=loop)
    assert caught.value.leaf == "a.0.again"
    deep: list[Any] = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(UnsupportedValueError, match="deeper than 64"):
        flat(a=deep)
    shared = [1]
    assert len(flat(a=[shared, shared]).nodes) == 6


def test_a_mapping_that_holds_more_than_its_items_is_refused() -> None:
    class Named(dict):  # type: ignore[type-arg]
        pass

    assert flat(a=Named(x=1)).nodes["a",].data["class"].endswith("Named")
    named = Named(x=1)
    named.note = "lost"  # type: ignore[attr-defined]
    with pytest.raises(UnsupportedValueError, match="'note'"):
        flat(a=named)


def test_a_state_is_a_mapping_of_names() -> None:
    for state in ([1], {1: 2}, {"": 1}, {"a\n": 1}, torch.nn.Linear(1, 1)):
        with pytest.raises(InvalidArgumentError):
            flatten(state, process_index=0, process_count=1)  # type: ignore[arg-type]


def test_an_object_whose_state_fails_is_named() -> None:
    class Broken(Box):
        def state_dict(self) -> Any:
            raise OSError("no")

    with pytest.raises(Exception, match=r"state_dict\(\) of the Broken raised OSError: no") as caught:
        flat(a={"b": Broken(None)})
    assert caught.value.leaf == "a.b"  # type: ignore[attr-defined]


def test_without_a_target_standard_containers_come_back_and_classes_as_mappings() -> None:
    state = {
        "plain": {"a": [1, (2, None)], 3: {"x"}, (1, 2): b""},
        "ordered": collections.OrderedDict(b=1, a=2),
        "default": collections.defaultdict(list, a=[1]),
        "count": collections.Counter("aab"),
        "deque": collections.deque([1, 2], maxlen=4),
        "point": Point(1, 2.5),
        "config": Config(0.1, ["a"]),
        "color": Color.RED,
        "array": np.arange(3, dtype=np.int16),
        "tensor": torch.arange(3),
        "model": torch.nn.Linear(1, 1),
        "box": Box([1]),
        "keyed": {Color.RED: 1},
        "empty": [{}, [], (), set()],
    }
    back = save_step(state).without_target()
    for name in ("plain", "ordered", "default", "count", "deque", "empty"):
        assert back[name] == state[name]
        assert type(back[name]) is type(state[name])
    assert list(back["ordered"]) == ["b", "a"]
    assert back["default"].default_factory is list
    assert back["deque"].maxlen == 4
    assert back["point"] == {"x": 1, "y": 2.5}
    assert back["config"] == {"lr": 0.1, "names": ["a"]}
    assert back["color"] == 1
    assert back["box"] == [1]
    assert back["keyed"] == {"Color.RED": 1}
    assert isinstance(back["array"], np.ndarray)
    assert back["array"].tolist() == [0, 1, 2]
    assert torch.equal(back["tensor"], state["tensor"])  # type: ignore[arg-type]
    torch.nn.Linear(1, 1).load_state_dict(back["model"])


def test_without_a_target_a_part_is_chosen_by_item_and_pattern() -> None:
    shared = torch.arange(2)
    step = save_step({"a": {"x": shared, "y": 1}, "b": [2, shared], "p": PerProcess(5)})
    assert list(step.without_target(items=["b"])["b"][1]) == [0, 1]
    assert step.without_target(keys=["a.y", "b.0"]) == {"a": {"y": 1}, "b": {0: 2}}
    assert step.without_target(keys=["p"]) == {"p": 5}
    assert step.without_target(keys=["p"], own=(0, 2)) == {"p": {0: 5}}
    with pytest.raises(InvalidArgumentError, match="no item 'c'"):
        step.without_target(items=["c"])
    with pytest.raises(InvalidArgumentError, match="nothing in the step matches"):
        step.without_target(keys=["c*"])


@pytest.mark.parametrize("size", [30_000])
def test_time_grows_with_the_number_of_leaves(size: int) -> None:
    def seconds(count: int) -> float:
        state = {"d": {f"layer.{i}": torch.zeros(1) for i in range(count)}, "l": list(range(count))}
        start = time.process_time()
        LeafTable.from_bytes(flat(**state).table().to_bytes())
        return time.process_time() - start

    seconds(100)
    small = seconds(size // 10)
    assert seconds(size) < 40 * small + 1
