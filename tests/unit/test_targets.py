from __future__ import annotations

import collections
import dataclasses
import enum
import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from safepoint.formats.errors import InvalidArgumentError
from safepoint.manager.adapting import Partial
from safepoint.manager.errors import CheckpointError, StructureMismatchError
from safepoint.manager.per_process import PerProcess

from support.round_trip import save_step


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Config:
    lr: float
    steps: list[int]


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    a: int
    t: Any = None


class Box:
    def __init__(self, state: Any) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state
        self.loads += 1


def mismatches(state: dict[str, Any], into: dict[str, Any], **options: Any) -> list[str]:
    with pytest.raises(StructureMismatchError) as caught:
        save_step(state).restore(into, **options)
    assert caught.value.mismatches is not None
    return list(caught.value.mismatches)


# -- exact, and in place -----------------------------------------------------------------------------------------------


def test_tensors_are_filled_in_the_memory_that_they_have() -> None:
    live = {"t": torch.zeros(2, 3), "v": torch.zeros(3, 2).t(), "n": np.zeros(2), "l": [torch.zeros(1)]}
    where = [live["t"].data_ptr(), live["v"].data_ptr(), live["l"][0].data_ptr()]  # type: ignore[attr-defined]
    array, inner = live["n"], live["l"]
    state = {"t": torch.rand(2, 3), "v": torch.rand(2, 3), "n": np.ones(2), "l": [torch.ones(1)]}
    save_step(state).restore(live)
    assert torch.equal(live["t"], state["t"])  # type: ignore[arg-type]
    assert torch.equal(live["v"], state["v"])  # type: ignore[arg-type]
    assert live["v"].stride() == (1, 2)  # type: ignore[attr-defined]
    assert where == [live["t"].data_ptr(), live["v"].data_ptr(), live["l"][0].data_ptr()]  # type: ignore[attr-defined]
    assert live["n"] is array
    assert array.tolist() == [1, 1]  # type: ignore[attr-defined]
    assert live["l"] is inner


def test_parameters_keep_being_parameters_that_require_grad() -> None:
    parameter = torch.nn.Parameter(torch.zeros(2))
    live = {"p": parameter}
    save_step({"p": torch.ones(2)}).restore(live)
    assert live["p"] is parameter
    assert parameter.requires_grad
    assert parameter.tolist() == [1, 1]


def test_plain_values_and_containers_come_back_with_their_types_and_order() -> None:
    def state(n: int) -> dict[str, Any]:
        return {
            "int": 2**100 + n,
            "dict": {"b": n, "a": (n, [n]), "c": {n}},
            "ordered": collections.OrderedDict([("z", n), ("y", 0)]),
            "default": collections.defaultdict(lambda: n, {"k": n}),
            "counter": collections.Counter({"k": n, n: 1}),
            "deque": collections.deque([n], maxlen=3),
            "point": Point(n, [n]),
            "config": Config(0.5 * n, [n]),
            "frozen": Frozen(n, (n,)),
            "color": Color(n),
            "colors": {Color.RED: n, Color.BLUE: [Color(n)]},
            "array": np.float32(n),
        }

    live, wanted = state(1), state(2)
    before = dict(live)
    save_step(wanted).restore(live)
    factory = live["default"].default_factory
    assert factory() == 1
    assert {**live, "default": None} == {**wanted, "default": None}
    assert live["default"] == wanted["default"]
    for name in ("dict", "ordered", "default", "counter", "deque", "config", "colors"):
        assert live[name] is before[name]
    assert type(live["array"]) is np.float32
    assert [type(value) for value in live.values()] == [type(value) for value in wanted.values()]


def test_the_order_of_a_mapping_is_the_saved_one() -> None:
    live = {"d": {"a": torch.zeros(1), "b": torch.zeros(1), "c": 0}}
    save_step({"d": {"c": 1, "b": torch.ones(1), "a": torch.ones(1)}}).restore(live)
    assert list(live["d"]) == ["c", "b", "a"]


def test_plain_lists_and_tables_come_back_with_their_saved_length() -> None:
    state = {"losses": [1.0, 0.5], "by_step": {10: "a", 20: "b"}, "fresh": {"x": [1]}, "log": [{"n": 1}, {"n": 2}]}
    live: dict[str, Any] = {"losses": [], "by_step": {30: "c"}, "fresh": {}, "log": [{"n": 0}]}
    kept = live["losses"]
    save_step(state).restore(live)
    assert live == state
    assert live["losses"] is kept
    grown: dict[str, Any] = {"losses": [1.0, 0.5, 9.0], "by_step": {10: 0, 30: 0}, "fresh": {}, "log": []}
    save_step(state).restore(grown)
    assert grown == state


def test_new_keys_of_a_table_that_are_members_of_an_enum_need_one_to_tell_the_class() -> None:
    live: dict[str, Any] = {"seen": {Color.BLUE: 0}}
    save_step({"seen": {Color.RED: 1, Color.BLUE: 2}}).restore(live)
    assert live == {"seen": {Color.RED: 1, Color.BLUE: 2}}
    assert "member of an Enum" in mismatches({"seen": {Color.RED: 1}}, {"seen": {}})[0]


def test_tuples_and_frozen_classes_are_rebuilt_around_tensors_that_stay() -> None:
    tensor = torch.zeros(1)
    live = {"t": (1, tensor), "p": Point(tensor[:], 1), "f": Frozen(1, torch.zeros(1))}
    save_step({"t": (2, torch.ones(1)), "p": Point(torch.ones(1), 2), "f": Frozen(2, torch.ones(1))}).restore(live)
    assert live["t"][0] == 2
    assert live["t"][1] is tensor
    assert isinstance(live["p"], Point)
    assert live["f"].a == 2
    assert tensor.item() == 1


def test_none_and_a_container_of_plain_values_may_take_each_others_place() -> None:
    live: dict[str, Any] = {"a": None, "b": [1], "c": None}
    save_step({"a": {"x": [1]}, "b": None, "c": 1.5}).restore(live)
    assert live == {"a": {"x": [1]}, "b": None, "c": 1.5}


def test_a_read_only_array_is_replaced() -> None:
    frozen = np.zeros(2)
    frozen.flags.writeable = False
    live = {"a": frozen, "b": [frozen]}
    save_step({"a": np.ones(2), "b": [np.full(2, 2.0)]}).restore(live)
    assert frozen.tolist() == [0, 0]
    assert live["a"].tolist() == [1, 1]  # type: ignore[attr-defined]
    assert live["b"][0].tolist() == [2, 2]


# -- aliases -----------------------------------------------------------------------------------------------------------


def tied_model(*, tied: bool = True) -> torch.nn.Module:
    model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(4, 3), "head": torch.nn.Linear(3, 4, bias=False)})
    if tied:
        model["head"].weight = model["embed"].weight
    return model


def test_tied_parameters_are_read_once_and_stay_tied() -> None:
    source, live = tied_model(), tied_model()
    read = save_step({"m": source}).restore({"m": live})
    assert read == [("m", "embed.weight")]
    assert live["head"].weight is live["embed"].weight  # type: ignore[index]
    assert torch.equal(live["embed"].weight, source["embed"].weight)  # type: ignore[index]


def test_a_tied_leaf_fills_both_parameters_of_an_untied_target() -> None:
    source, live = tied_model(), tied_model(tied=False)
    save_step({"m": source}).restore({"m": live})
    for name in ("embed", "head"):
        assert torch.equal(live[name].weight, source["embed"].weight)  # type: ignore[index]


def test_an_alias_restores_alone() -> None:
    source, live = tied_model(), tied_model(tied=False)
    before = live["embed"].weight.clone()  # type: ignore[index]
    save_step({"m": source}).restore({"m": live}, keys=["m.head*"])
    assert torch.equal(live["head"].weight, source["head"].weight)  # type: ignore[index]
    assert torch.equal(live["embed"].weight, before)  # type: ignore[index]


def test_a_tied_target_takes_equal_leaves_and_refuses_different_ones() -> None:
    source = tied_model(tied=False)
    with pytest.raises(StructureMismatchError, match="ties what the step holds apart"):
        save_step({"m": source}).restore({"m": tied_model()})
    with torch.no_grad():
        source["head"].weight.copy_(source["embed"].weight)  # type: ignore[index]
    live = tied_model()
    save_step({"m": source}).restore({"m": live})
    assert torch.equal(live["head"].weight, source["head"].weight)  # type: ignore[index]


# -- strict ------------------------------------------------------------------------------------------------------------


def test_all_differences_are_listed_at_once_and_nothing_is_changed() -> None:
    state = {
        "m": {"same": torch.ones(1), "dtype": torch.zeros(1), "shape": torch.zeros(2), "extra": torch.zeros(1)},
        "kind": torch.zeros(1),
        "np": np.zeros(1),
        "list": [torch.zeros(1)],
        "color": Color.RED,
        "n": 5,
        "only_step": 1,
        "container": [1],
    }
    live = {
        "m": {"same": torch.zeros(1), "dtype": torch.zeros(1).half(), "shape": torch.zeros(3), "missing": 1},
        "kind": 3,
        "np": torch.zeros(1, dtype=torch.float64),
        "list": [],
        "color": 7,
        "n": 4,
        "only_target": 1,
        "container": (1,),
    }
    listed = mismatches(state, live)
    assert listed == [
        "m.missing: missing from the step; the target has an int there",
        "m.dtype: dtype: float32 in the step, float16 in the target",
        "m.shape: shape: [2] in the step, [3] in the target",
        "m.extra: extra in the step; the target has nothing there for a float32 tensor of shape [1]",
        "kind: the step has a float32 tensor of shape [1], the target an int",
        "np: kind: a numpy array in the step, a tensor in the target",
        "list: a list of length 1 in the step, 0 in the target",
        f"color: the step has a member of {__name__}.Color; int is no Enum",
        "only_target: missing from the step; the target has an int there",
        "container: the step has a list, the target a tuple",
        "only_step: extra in the step; the target has nothing there for a plain int",
    ]
    assert live["m"]["same"].item() == 0  # type: ignore[index]
    assert live["n"] == 4


def test_a_record_of_plain_values_must_have_the_saved_keys() -> None:
    assert len(mismatches({"c": {"a": 1, "b": 2}}, {"c": {"a": 0, "c": 0}})) == 2


def test_a_loose_restore_takes_what_both_have_and_still_refuses_other_shapes() -> None:
    live = {"a": torch.zeros(1), "b": 2, "d": {"x": 1, "y": 2}}
    save_step({"a": torch.ones(1), "c": 3, "d": {"x": 5, "z": 6}}).restore(live, adapt=[Partial()])
    assert live == {"a": torch.ones(1), "b": 2, "d": {"x": 5, "y": 2}}
    assert len(mismatches({"a": torch.zeros(2)}, {"a": torch.zeros(1)}, adapt=[Partial()])) == 1


def test_a_wrapped_module_is_recognised() -> None:
    with pytest.raises(StructureMismatchError, match="DistributedDataParallel"):
        save_step({"m": {"module.w": torch.zeros(1)}}).restore({"m": {"w": torch.zeros(1)}})


def test_a_target_that_cannot_hold_new_values_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="dict"):
        save_step({"a": 1}).restore(types.MappingProxyType({"a": 0}))


# -- parts -------------------------------------------------------------------------------------------------------------


def test_items_and_keys_restore_a_part_and_leave_the_rest_untouched() -> None:
    state = {"a": {"x": torch.ones(1), "y": 1}, "b": [torch.ones(1), 1], "c": 1}
    step = save_step(state)
    live: dict[str, Any] = {"a": {"x": torch.zeros(1), "y": 0}, "b": [torch.zeros(1), 0], "other": 0}
    assert step.restore(live, items=["a"]) == [("a", "x")]
    assert live == {"a": {"x": torch.ones(1), "y": 1}, "b": [torch.zeros(1), 0], "other": 0}
    step.restore(live, keys=["b.1"])
    assert live["b"] == [torch.zeros(1), 1]
    with pytest.raises(InvalidArgumentError, match=r"nothing in the step matches 'nothing\*'"):
        step.restore(live, keys=["b.0", "nothing*"])
    with pytest.raises(InvalidArgumentError, match="no item 'z'"):
        step.restore(live, items=["z"])
    with pytest.raises(InvalidArgumentError, match="nothing in the step matches 'q'"):
        step.restore(live, keys=["q"])
    with pytest.raises(InvalidArgumentError, match="collection"):
        step.restore(live, items="a")
    with pytest.raises(StructureMismatchError, match="c: extra"):
        step.restore(live, items=["c"])


def test_a_part_of_an_object_fills_its_tensors_and_calls_nothing() -> None:
    live = Box({"t": torch.zeros(1), "n": 0, "u": torch.zeros(1)})
    save_step({"b": Box({"t": torch.ones(1), "n": 1, "u": torch.ones(1)})}).restore({"b": live}, keys=["b.[tn]"])
    assert live.state == {"t": torch.ones(1), "n": 0, "u": torch.zeros(1)}
    assert live.loads == 0


def test_a_part_of_a_module_is_restored() -> None:
    source, live = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before = live.bias.clone()
    save_step({"m": source}).restore({"m": live}, keys=["*.weight"])
    assert torch.equal(live.weight, source.weight)
    assert torch.equal(live.bias, before)


# -- objects with a state ----------------------------------------------------------------------------------------------


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2))
        self.calls = 0

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[no-untyped-call]


class Extra(torch.nn.Module):
    def __init__(self, extra: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(2))
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_a_plain_module_is_filled_in_place_without_a_call() -> None:
    source, live = torch.nn.BatchNorm1d(3), torch.nn.BatchNorm1d(3)
    source(torch.rand(4, 3))
    where = live.running_mean
    live.load_state_dict = None  # type: ignore[method-assign,assignment]  # a call would fail
    save_step({"m": source}).restore({"m": live})
    assert live.running_mean is where
    assert torch.equal(live.running_mean, source.running_mean)  # type: ignore[arg-type]
    assert live.num_batches_tracked.item() == 1  # type: ignore[union-attr]


def test_hooks_and_overrides_get_their_call() -> None:
    live = Counting()
    source = Counting()
    save_step({"m": source}).restore({"m": torch.nn.Sequential(live)[0]})
    assert live.calls == 1
    hooked = torch.nn.Linear(1, 1)
    seen = []
    hooked.register_load_state_dict_post_hook(lambda *_: seen.append(1))
    save_step({"m": torch.nn.Linear(1, 1)}).restore({"m": hooked})
    assert seen == [1]


@pytest.mark.parametrize("extra", [{"n": 1, "t": torch.ones(2)}, torch.ones(3), 5, None, (1, [2])], ids=str)
def test_extra_state_is_restored(extra: Any) -> None:
    source = Extra(extra)
    live = Extra(torch.zeros(1) if isinstance(extra, torch.Tensor) else None)
    save_step({"m": source}).restore({"m": live})
    assert torch.equal(live.weight, source.weight)
    assert str(live.extra) == str(extra)


def test_a_state_dict_that_is_a_copy_is_loaded() -> None:
    class Copies(torch.nn.Linear):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            return {name: value.clone() for name, value in super().state_dict(*args, **kwargs).items()}

    source, live = Copies(2, 2), Copies(2, 2)
    save_step({"m": source}).restore({"m": live})
    assert torch.equal(live.weight, source.weight)


def test_a_module_and_its_state_dict_restore_into_each_other() -> None:
    source, live, other = (torch.nn.Linear(2, 2) for _ in range(3))
    save_step({"m": source}).restore({"m": live.state_dict()})
    save_step({"m": live.state_dict()}).restore({"m": other})
    assert torch.equal(other.weight, source.weight)


def test_module_versions_reach_the_loading_hooks() -> None:
    class Versioned(Counting):
        _version = 7
        seen = None

        def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *rest: Any) -> None:
            type(self).seen = metadata.get("version")
            super()._load_from_state_dict(state, prefix, metadata, *rest)

    save_step({"m": Versioned()}).restore({"m": Versioned()})
    assert Versioned.seen == 7


def test_an_object_gets_the_saved_state_whatever_its_own_looks_like() -> None:
    state = {"pos": 3, "color": Color.BLUE, "t": torch.ones(2), "nested": [{"a": (1,)}], "p": Point(1, 2)}
    live = Box({"pos": 0, "color": Color.RED, "t": torch.zeros(5), "p": Point(0, 0)})
    save_step({"b": Box(state)}).restore({"b": live})
    assert live.loads == 1
    assert str(live.state) == str(state)
    wrapped = Box(None)
    save_step({"b": Box([1, 2])}).restore({"b": wrapped})
    assert wrapped.state == [1, 2]


def test_a_class_that_an_object_cannot_give_is_a_mismatch() -> None:
    listed = mismatches({"b": Box({"c": Color.RED, "p": Point(1, 2)})}, {"b": Box({})})
    assert len(listed) == 2
    assert "Color" in listed[0]


def test_an_object_that_refuses_is_named() -> None:
    class Refuses(Box):
        def load_state_dict(self, state: Any) -> None:
            raise KeyError(state)

    with pytest.raises(CheckpointError, match=r"load_state_dict\(\) of the Refuses raised KeyError") as caught:
        save_step({"a": {"b": Box({})}}).restore({"a": {"b": Refuses({})}})
    assert caught.value.leaf == "a.b"


@pytest.mark.parametrize("other", [{"x": 1}, torch.optim.SGD([torch.zeros(1)], lr=1.0), Box({}), torch.Generator()])
def test_objects_of_another_kind_are_a_mismatch(other: Any) -> None:
    assert mismatches({"m": torch.nn.Linear(1, 1)}, {"m": other})


# -- state per process -------------------------------------------------------------------------------------------------


def test_each_process_gets_its_own_back() -> None:
    step = save_step(*({"p": PerProcess(n), "q": PerProcess(Box({"n": n})), "t": torch.ones(1)} for n in range(3)))
    for n in range(3):
        live: dict[str, Any] = {"p": PerProcess(-1), "q": PerProcess(Box({})), "t": torch.zeros(1)}
        marked = live["p"]
        step.restore(live, own=(n, 3))
        assert live["p"] is marked
        assert (marked.value, live["q"].value.state) == (n, {"n": n})


def test_another_number_of_processes_is_refused_with_the_choices_spelled_out() -> None:
    step = save_step({"p": PerProcess(0), "x": 1}, {"p": PerProcess(1), "x": 1})
    with pytest.raises(StructureMismatchError, match=r"Restore with 2, leave it out .*merge=function"):
        step.restore({"p": PerProcess(0), "x": 0}, own=(0, 1))
    live = {"p": PerProcess(7), "x": 0}
    step.restore(live, own=(0, 1), items=["x"])
    assert live["x"] == 1


def test_a_merge_function_gets_the_parts_of_all_processes() -> None:
    states = [{"p": PerProcess({"n": n, "t": torch.full((2,), n)}), "b": PerProcess(Box({"n": n}))} for n in range(3)]
    step = save_step(*states)

    def merge(parts: Any, index: int, count: int) -> Any:
        assert (index, count) == (1, 2)
        return {"n": [part["n"] for part in parts], "t": parts[2]["t"]}

    live = {
        "p": PerProcess({"n": 0, "t": torch.zeros(2, dtype=torch.int64)}, merge=merge),
        "b": PerProcess(Box({}), merge=lambda parts, *_: {"sum": sum(part["n"] for part in parts)}),
    }
    step.restore(live, own=(1, 2))
    assert live["p"].value["n"] == [0, 1, 2]
    assert live["p"].value["t"].tolist() == [2, 2]
    assert live["b"].value.state == {"sum": 3}


def test_marked_and_unmarked_state_do_not_mix() -> None:
    assert mismatches({"p": PerProcess(1)}, {"p": 1})
    assert mismatches({"p": 1}, {"p": PerProcess(1)})
