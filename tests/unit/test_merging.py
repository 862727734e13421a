from __future__ import annotations

from typing import Any

import pytest
import torch

from safepoint.formats.region import Region
from safepoint.manager.adapters import ArraySpec
from safepoint.manager.errors import DisagreementError
from safepoint.manager.leaf_table import LeafTable
from safepoint.manager.merging import merge_tables
from safepoint.manager.per_process import PerProcess
from safepoint.manager.state import flatten


def tables(*states: dict[str, Any]) -> list[LeafTable]:
    return [
        flatten(state, process_index=index, process_count=len(states)).table() for index, state in enumerate(states)
    ]


def test_equal_tables_merge_to_themselves() -> None:
    one = tables({"a": torch.zeros(2), "b": 1})[0]
    assert merge_tables([one, one, one]) is one
    other = LeafTable.from_bytes(one.to_bytes())
    assert merge_tables([one, other]) == one


def test_processes_may_hold_different_leaves() -> None:
    merged = merge_tables(
        tables({"m": {"first": torch.zeros(1), "x": 1}}, {"m": {"second": torch.zeros(2), "x": 1}, "only": [None]})
    )
    assert list(merged.nodes) == [(), ("m",), ("m", "first"), ("m", "x"), ("m", "second"), ("only",), ("only", 0)]
    assert merged.arrays["m", "second"].shape == (2,)


def test_regions_are_joined() -> None:
    def table(start: int) -> LeafTable:
        base = tables({"w": torch.zeros(4)})[0]
        spec = ArraySpec(dtype="float32", shape=(4,), regions=(Region((start,), (2,)), Region((0,), (1,))), kind="x")
        return LeafTable(nodes=base.nodes, arrays={("w",): spec})

    merged = merge_tables([table(0), table(2)])
    assert merged.arrays["w",].regions == (Region((0,), (2,)), Region((0,), (1,)), Region((2,), (2,)))


def test_each_process_keeps_what_is_marked() -> None:
    merged = merge_tables(tables({"p": PerProcess(1)}, {"p": PerProcess({"x": torch.zeros(1)})}))
    assert [path for path in merged.nodes if path[:1] == ("p",)] == [("p",), ("p", 0), ("p", 1), ("p", 1, "x")]


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ({"s": 1}, {"s": 2}, "1 on processes 0, 2; 2 on process 1"),
        ({"s": 1}, {"s": True}, "true on process 1"),
        ({"s": 0.0}, {"s": -0.0}, "-0.0 on process 1"),
        ({"s": [1]}, {"s": [1, 2]}, "list of length 2 on process 1"),
        ({"s": [1]}, {"s": (1,)}, "tuple of length 1 on process 1"),
        ({"s": {}}, {"s": None}, "null on process 1"),
        ({"s": torch.zeros(1)}, {"s": torch.zeros(2)}, r"tensor float32 \[2\] on process 1"),
        ({"s": torch.zeros(1)}, {"s": torch.zeros(1, dtype=torch.int8)}, r"tensor int8 \[1\] on process 1"),
        ({"s": 1}, {"s": PerProcess(1)}, "per_process on process 1"),
    ],
    ids=str,
)
def test_a_disagreement_names_the_leaf_and_who_brought_what(one: Any, other: Any, told: str) -> None:
    with pytest.raises(DisagreementError, match=told) as caught:
        merge_tables(tables(one, other, one))
    assert caught.value.leaf == "s"
    assert caught.value.hint is not None
    assert "PerProcess" in caught.value.hint
    assert caught.value.brought is not None
    assert [processes for _, processes in caught.value.brought] == [(0, 2), (1,)]


def test_all_disagreements_are_counted() -> None:
    one, other = ({"d": {str(i): i + add for i in range(10)}} for add in (0, 1))
    with pytest.raises(DisagreementError, match=r"'d\.0'.*'d\.1', 'd\.2' and 7 more"):
        merge_tables(tables(one, other))


def test_stages_of_one_model_merge_with_their_module_versions() -> None:
    stages = [torch.nn.ModuleDict({name: torch.nn.BatchNorm1d(2)}) for name in ("first", "second")]
    merged = merge_tables(tables(*({"model": stage} for stage in stages)))
    assert {"first", "second"} <= set(merged.nodes["model",].data["metadata"])
