from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.formats.fields import canonical_json, parse_json
from safepoint.manager.leaf_table import LeafTable
from safepoint.manager.state import flatten
from safepoint.manager.tree_keys import decode_key, encode_key
from safepoint.manager.values import decode_value, encode_value

from support.round_trip import save_step
from support.strategies import arrays, keys, same_content, same_shape, states, values


def plain(value: Any) -> Any:
    return parse_json(canonical_json(value), what="a value", path="test")


@given(value=values)
def test_every_plain_value_comes_back_exactly(value: Any) -> None:
    assert same_content(decode_value(plain(encode_value(value)), like=value), value)


@given(one=keys, other=keys)
def test_keys_are_injective(one: Any, other: Any) -> None:
    alike = same_content(one, other)
    assert (encode_key(one) == encode_key(other)) is alike
    like = one if hasattr(one, "name") else None
    assert same_content(decode_key(encode_key(one), like=like), one)


@given(state=states())
def test_a_state_comes_back_exactly_into_a_target_of_its_shape(state: dict[str, Any]) -> None:
    before = copy.deepcopy(state)
    step = save_step(state)
    live = same_shape(state)
    step.restore(live)
    assert same_content(live, state)
    assert same_content(state, before)  # saving altered nothing


@given(state=states())
def test_the_table_is_stable_and_comes_back_from_its_bytes(state: dict[str, Any]) -> None:
    table = flatten(state, process_index=0, process_count=1).table()
    data = table.to_bytes()
    assert LeafTable.from_bytes(data) == table
    assert LeafTable.from_bytes(data).to_bytes() == data


@given(state=states())
def test_a_state_comes_back_without_a_target(state: dict[str, Any]) -> None:
    step = save_step(state)
    back = step.without_target()
    assert list(back) == list(state)
    # What came back is a state again, and nothing more is lost the second time.
    again = save_step(back).without_target()
    assert same_content(again, back)


@given(state=states(), data=st.data())
def test_a_restored_part_leaves_the_rest_untouched(state: dict[str, Any], data: st.DataObject) -> None:
    chosen = data.draw(st.sets(st.sampled_from(sorted(state)))) if state else set()
    step = save_step(state)
    live = same_shape(state)
    blank = copy.deepcopy(live)
    if state:
        step.restore(live, items=chosen)
    for name, value in state.items():
        assert same_content(live[name], value if name in chosen else blank[name])


@settings(max_examples=50)
@given(value=arrays())
def test_every_array_comes_back_bit_for_bit(value: Any) -> None:
    live = {"a": same_shape(value)}
    save_step({"a": value}).restore(live)
    assert same_content(live["a"], value)
