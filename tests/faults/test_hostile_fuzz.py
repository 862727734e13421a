"""Whatever is changed in a step whose digests fit: a restore, or a typed error, within seconds. See also `fuzz.py`."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from support.hostile_steps import HostileStep, restore_in_every_way

if TYPE_CHECKING:
    from collections.abc import Iterator

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "dict", "list", "array", "alias", "float32", "int64", "..", "/", "0", "class", "\0", "é"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abclength"), inner, max_size=3),
    max_leaves=8,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=150)
@given(data=st.data())
def test_any_change_of_a_manifest_ends_in_a_restore_or_a_typed_error(step: HostileStep, data: st.DataObject) -> None:
    manifest = copy.deepcopy(step.manifest)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(places(manifest))))
        place = manifest
        for key in path[:-1]:
            place = place[key]
        action = data.draw(st.sampled_from(["replace", "remove", "repeat", "swap"]))
        if action == "remove":
            del place[path[-1]]
        elif action == "repeat" and isinstance(place, list):
            place.append(copy.deepcopy(place[path[-1]]))
        elif action == "swap":
            other = data.draw(st.sampled_from(list(places(step.manifest))))
            place[path[-1]] = put_back(step.manifest, other)
        else:
            place[path[-1]] = data.draw(JSON_VALUES)
    step.rewrite(manifest)
    restore_in_every_way(step.root)


def put_back(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return copy.deepcopy(value)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=60)
@given(data=st.binary(max_size=300), at=st.integers(0, 5000), index=st.integers(0, 3))
def test_any_bytes_in_a_data_file_end_in_a_restore_or_a_typed_error(
    step: HostileStep, data: bytes, at: int, index: int
) -> None:
    entry = step.manifest["files"][index % len(step.manifest["files"])]
    original = (step.folder / entry["path"]).read_bytes()
    changed = (original[:at] + data + original[at + len(data) :])[: len(original)]
    step.rewrite(step.rewrite_file(index % len(step.manifest["files"]), changed))
    restore_in_every_way(step.root)
    (step.folder / entry["path"]).write_bytes(original)
