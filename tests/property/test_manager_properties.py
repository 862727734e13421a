"""Whole states through the real manager, on a real file system, in every mode; and what a damaged structure does."""

from __future__ import annotations

import copy
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safepoint.formats.errors import CheckpointError, InvalidArgumentError
from safepoint.formats.fields import canonical_json, parse_json
from safepoint.formats.manifest import Manifest
from safepoint.formats.tree import structure_from_rows, structure_to_rows
from safepoint.manager import CheckpointManager

from support.round_trip import Step, save_step
from support.strategies import same_content, same_shape, states

WAYS: dict[str, dict[str, Any]] = {
    "consolidated": {"mode": "consolidated"},
    "sharded": {"mode": "sharded"},
    "behind the loop": {"mode": "auto", "blocking": False},
    "private root": {"mode": "sharded", "root_scope": "per_process"},
}


def save(root: str, state: dict[str, Any], *, blocking: bool = True, **options: Any) -> CheckpointManager:
    manager = CheckpointManager(root, **options)
    manager.save(1, state, blocking=blocking)
    if not blocking:
        for leaf in arrays_of(state):  # the caller may change anything once `save` has returned
            leaf.view(torch.uint8).reshape(-1).bitwise_not_() if leaf.is_contiguous() and leaf.ndim else None
    manager.wait()
    return manager


def arrays_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value] if value.dtype is torch.float32 else []
    if isinstance(value, dict):
        return [leaf for child in value.values() for leaf in arrays_of(child)]
    return []


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40)
@given(state=states())
def test_a_whole_state_comes_back_exactly(way: str, state: dict[str, Any]) -> None:
    before = copy.deepcopy(state)
    with tempfile.TemporaryDirectory() as root, save(root, state, **WAYS[way]) as manager:
        live = same_shape(before)
        assert manager.restore_latest(live) is not None
        assert same_content(live, before)
        host = manager.restore(1).state
        assert host is not None
        assert list(host) == list(before)
        data = (Path(root) / "1" / "manifest.json").read_bytes()
        assert Manifest.from_bytes(data, path="manifest.json").to_bytes() == data  # byte-stable
        # What came without a target is a state too, and nothing more is lost the second time.
        manager.save(2, host)
        again = manager.restore(2).state
        assert same_content(again, host)


KEYS: list[Any] = [
    "a.b",
    "a",
    "a/b",
    "/",
    "..",
    ".",
    "",
    " ",
    "a b ",
    "\u00e9\u5b9e\u9a8c\U0001f600",
    "e\u0301",
    "\x00\n\t",
    "\ud800",
    "%",
    "%41",
    "@0,0",
    "__metadata__",
    "k" * 400,
    "commit.json",
    1,
    "1",
    True,
    1.5,
    float("inf"),
    None,
    b"1",
    (1, "1"),
    (),
    -1,
    2**70,
    frozenset({1}),
    torch.float32,
]


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
def test_every_key_that_a_dict_may_have_comes_back(tmp_path: Path, mode: Any) -> None:
    inner = {key: torch.full((2,), float(index)) for index, key in enumerate(KEYS)}
    names = [key for key in KEYS if isinstance(key, str) and key and key.isprintable()]
    state: dict[str, Any] = {name: torch.full((3,), float(index)) for index, name in enumerate(names)}
    state["inner"] = {"deep": [inner], "a": {"b": torch.ones(1)}, "a.b": torch.zeros(1)}
    with CheckpointManager(tmp_path, mode=mode) as manager:
        manager.save(1, state)
        live = same_shape(state)
        manager.restore(1, live)
        assert same_content(live, state)
        assert same_content(manager.restore(1).state, state)
    assert all(path.resolve().is_relative_to(tmp_path.resolve()) for path in tmp_path.rglob("*"))


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
def test_one_and_the_text_one_and_true_stay_three_keys(tmp_path: Path, mode: Any) -> None:
    state = {"a": {1: torch.zeros(1), "1": torch.ones(1)}, "b": {True: torch.ones(2), "1": 3, "True": 4}}
    with CheckpointManager(tmp_path, mode=mode) as manager:
        manager.save(1, state)
        assert same_content(manager.restore(1).state, state)


# -- many leaves -------------------------------------------------------------------------------------------------------


def many(count: int) -> dict[str, Any]:
    flat = torch.arange(8 * count, dtype=torch.float32)
    return {"layers": {f"layer.{i}.weight": flat[8 * i : 8 * i + 8].clone() for i in range(count)}}


def secs_for(root: Path, count: int) -> float:
    state = many(count)
    live = {"layers": {key: torch.zeros(8) for key in state["layers"]}}
    with CheckpointManager(root) as manager:
        started = time.process_time()
        manager.save(count, state)
        manager.restore(count, live)
        spent = time.process_time() - started
    assert same_content(live["layers"][f"layer.{count - 1}.weight"], state["layers"][f"layer.{count - 1}.weight"])
    return spent


def test_thirty_thousand_small_leaves_take_time_in_proportion(tmp_path: Path) -> None:
    secs_for(tmp_path, 100)  # what is done once is done
    small, large = secs_for(tmp_path, 3000), secs_for(tmp_path, 30000)
    assert large < 10 * small * 1.7 + 1
    assert large < 30_000 * 1e-3  # a millisecond a leaf, for both ways, is far more than it takes


# -- structures that anybody may have written --------------------------------------------------------------------------


def base_state() -> dict[str, Any]:
    x = torch.arange(6.0)
    return {
        "x": {"all": x, "tie": x, "part": x[2:4]},
        "pool": [torch.arange(8.0)[:6], 3],
        "np": np.array(["2020-01-01"], "M8[D]"),
        "optimizer": torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], momentum=0.9),
        "plain": {"n": 2**80, "set": {1, 2}, "t": (1, None), "od": {1: 2}},
    }


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 3)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
KINDS = ["dict", "list", "tuple", "deque", "namedtuple", "dataclass", "array", "alias", "view", "value", "stateful"]
KINDS += ["per_process", "unknown"]
DATA_KEYS = [
    "type",
    "class",
    "length",
    "maxlen",
    "path",
    "window",
    "base",
    "kind",
    "dtype",
    "form",
    "wrapped",
    "fields",
]
DATA_KEYS += ["metadata", "process_count", "factory", "enum", "numpy", "int", "start", "shape", "strides"]


@st.composite
def damaged(draw: st.DrawFn) -> Step:
    """Return the step of a state with some nodes of its structure changed, as its manifest would be read."""
    step = save_step(base_state())
    rows, numbers = structure_to_rows(step.structure)
    for _ in range(draw(st.integers(1, 3))):
        row = rows[draw(st.integers(0, len(rows) - 1))]
        what = draw(st.sampled_from(["kind", "data", "entry", "key"]))
        if what == "kind":
            row[2] = draw(st.sampled_from(KINDS))
        elif what == "data":
            row[3] = draw(json_values)
        elif what == "entry":
            data = dict(row[3]) if isinstance(row[3], dict) else {}
            data[draw(st.sampled_from(DATA_KEYS))] = draw(json_values)
            row[3] = data
        elif row[0] is not None:
            row[1] = draw(st.text(max_size=3) | st.integers(0, 3) | st.just({"enum": "[1]"}) | st.just({"tuple": "3"}))
    try:
        structure, paths = structure_from_rows(parse_json(canonical_json(rows), what="rows", path="test"), path="test")
    except CheckpointError:
        return step
    now = {path: paths[number] for path, number in numbers.items()}  # a leaf names the row of its node
    return Step(
        structure=structure,
        entries=[entry._replace(path=now[entry.path]) for entry in step.entries],
        data={now[path]: data for path, data in step.data.items()},
    )


@settings(max_examples=400)
@given(step=damaged())
def test_a_malformed_structure_restores_or_raises_a_typed_error(step: Step) -> None:
    for restore in (step.without_target, lambda: step.restore(base_state())):
        try:
            restore()
        except CheckpointError as error:
            told = str(error)
            if isinstance(error, InvalidArgumentError) and "item" not in told:
                pytest.fail(told)
