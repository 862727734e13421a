"""Arrays that show one memory are stored once, and come back showing one memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from safepoint.formats.errors import CorruptDataError, UnsupportedValueError
from safepoint.formats.manifest import Node
from safepoint.manager import CheckpointManager
from safepoint.manager.errors import StructureMismatchError
from safepoint.manager.windows import Window

from support.round_trip import save_step
from support.strategies import same_content

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

State = dict[str, Any]


def line() -> torch.Tensor:
    return torch.arange(20.0)


def grid() -> torch.Tensor:
    return torch.arange(60.0).reshape(6, 10)


def numbers() -> torch.Tensor:
    return torch.complex(line(), line() + 100)


# name → (the state of a memory, how many bytes of it are stored)
TORCH: dict[str, tuple[Callable[[], torch.Tensor], Callable[[Any], State], int]] = {
    "the same": (line, lambda x: {"a": x, "b": x, "c": x.detach()}, 80),
    "a part": (line, lambda x: {"a": x, "b": x[3:9], "c": x[4]}, 80),
    "the part first": (line, lambda x: {"b": x[3:9], "a": x}, 80),
    "parts of a part": (line, lambda x: {"a": x[2:12], "b": x[3:9], "c": x[4:6]}, 40),
    "another shape": (line, lambda x: {"a": x, "b": x.view(4, 5), "c": x.view(4, 5).t(), "d": x[None]}, 80),
    "every other": (line, lambda x: {"a": x, "b": x[::2], "c": x[1::2]}, 80),
    "windows": (line, lambda x: {"a": x, "b": x.unfold(0, 4, 2)}, 80),
    "another dtype": (line, lambda x: {"a": x, "b": x.view(torch.int32), "c": x.view(torch.uint8)[5:9]}, 80),
    "complex and real": (numbers, lambda x: {"a": x, "b": torch.view_as_real(x), "c": x.real, "d": x.imag}, 160),
    "conjugate": (numbers, lambda x: {"a": x, "b": x.conj(), "c": x.conj().imag, "d": x[2:5].conj()}, 160),
    "conjugate first": (numbers, lambda x: {"a": x.conj(), "b": x[:4]}, 160),
    "transposed": (grid, lambda x: {"a": x.t(), "b": x[1:3, 2:5]}, 240),
    "columns of a part": (grid, lambda x: {"a": x[:, 2:8], "b": x[1, 3:6], "c": x[:, 4]}, 144),
    "ends overlap": (line, lambda x: {"a": x[:12], "b": x[8:]}, 80),
    "a chain": (line, lambda x: {"a": x[:6], "b": x[5:12], "c": x[11:15], "d": x[13:14]}, 60),
    "columns overlap": (grid, lambda x: {"a": x[:, 0:4], "b": x[:, 3:6]}, 144),
    "a row through columns": (grid, lambda x: {"a": x[:, 0:4], "b": x[:, 3:6], "c": x[2]}, 240),
    "two conjugates overlap": (numbers, lambda x: {"a": x[:12].conj(), "b": x[8:].conj()}, 160),
    "two dtypes overlap": (line, lambda x: {"a": x[:12], "b": x[8:].view(torch.int32)}, 80),
    "irregular": (line, lambda x: {"a": x[0:10:2], "b": x[0:10:3]}, 40),
    "strides without a common measure": (lambda: torch.arange(400.0), lambda x: {"a": x[::7], "b": x[::11]}, 380),
    "strides of their own": (lambda: torch.arange(400.0), lambda x: {"a": x[::14], "b": x[1::21]}, 192),
    "a row and a column": (
        lambda: torch.arange(2500.0).reshape(50, 50),
        lambda x: {"a": x[3], "b": x[:, 4], "c": x[3, :5], "d": x[:, 4].view(torch.int32)},
        620,
    ),
    "expanded": (lambda: torch.ones(1), lambda x: {"a": x.expand(4), "b": x}, 16),
    "columns of their own": (grid, lambda x: {"q": x[:, :5], "k": x[:, 5:]}, 240),
    "rows of their own": (grid, lambda x: {"q": x[:3], "k": x[3:]}, 240),
}


def stored_bytes(state: State) -> int:
    return sum(leaf.numel() * leaf.element_size() for leaf in save_step(state).data.values())


def sharing(state: State) -> list[tuple[int, int]]:
    """Return where each array lies, from the first of all."""
    start = min(value.data_ptr() for value in state.values())
    return [(value.data_ptr() - start, value.stride()) for value in state.values()]


@pytest.mark.parametrize("name", TORCH)
def test_shared_memory_is_stored_once(name: str) -> None:
    memory, views, num_bytes = TORCH[name]
    assert stored_bytes(views(memory())) == num_bytes


@pytest.mark.parametrize("name", TORCH)
def test_shared_memory_comes_back_shared_without_a_target(name: str) -> None:
    memory, views, _ = TORCH[name]
    state = views(memory())
    back = save_step(state).without_target()
    assert same_content(back, state)
    if "of their own" in name or name == "expanded":
        return
    assert len({value.untyped_storage().data_ptr() for value in back.values()}) == 1
    assert [value.is_conj() for value in back.values()] == [value.is_conj() for value in state.values()]
    for one, other in zip(state.values(), back.values(), strict=True):  # a change through one shows in the others
        one.fill_(7)
        other.fill_(7)
    assert same_content(back, state)


@pytest.mark.parametrize("name", TORCH)
def test_shared_memory_fills_a_target_that_shares_it(name: str) -> None:
    memory, views, _ = TORCH[name]
    state, target_memory = views(memory()), torch.zeros_like(memory())
    live = views(target_memory)
    before = dict(live)
    save_step(state).restore(live)
    assert same_content(live, state)
    assert all(live[key] is before[key] for key in live)


@pytest.mark.parametrize("name", [name for name in TORCH if name != "expanded"])
def test_shared_memory_fills_a_target_that_does_not(name: str) -> None:
    memory, views, _ = TORCH[name]
    state = views(memory())
    live = {key: torch.zeros_like(value, memory_format=torch.contiguous_format) for key, value in state.items()}
    save_step(state).restore(live)
    assert same_content(live, state)


@pytest.mark.parametrize("name", TORCH)
def test_one_view_restores_alone(name: str) -> None:
    memory, views, _ = TORCH[name]
    state = views(memory())
    step = save_step(state)
    for key in state:
        assert same_content(step.without_target(items=[key])[key], state[key])
        live = {**views(memory()), key: torch.zeros_like(state[key], memory_format=torch.contiguous_format)}
        step.restore(live, items=[key])
        assert same_content(live[key], state[key])


NUMPY: dict[str, Callable[[np.ndarray[Any, Any]], State]] = {
    "a part": lambda x: {"a": x, "b": x[3:9], "c": x[::-1], "d": x[8:2:-2]},
    "ends overlap": lambda x: {"a": x[:12], "b": x[8:], "c": x[11:9:-1]},
    "backwards first": lambda x: {"a": x[::-1], "b": x[:4]},
}


@pytest.mark.parametrize("dtype", ["f8", "M8[s]", "U3", [("a", "i4"), ("b", "U2")], "u1"])
@pytest.mark.parametrize("name", NUMPY)
def test_numpy_arrays_share_their_memory_too(name: str, dtype: Any) -> None:
    memory = np.arange(20).astype("f8") if dtype == "f8" else np.zeros(20, dtype)
    memory.view(np.uint8)[:] = np.arange(memory.nbytes) % 100 if dtype != "U3" else 0
    state = NUMPY[name](memory)
    step = save_step(state)
    assert sum(leaf.numel() * leaf.element_size() for leaf in step.data.values()) == memory.nbytes
    back = step.without_target()
    assert same_content(back, state)
    assert all(np.shares_memory(back["a"], back[key]) for key in back)
    live = NUMPY[name](np.zeros_like(memory))
    step.restore(live)
    assert same_content(live, state)
    apart = {key: np.zeros_like(value) for key, value in state.items()}
    step.restore(apart)
    assert same_content(apart, state)


def test_views_share_across_items_and_inside_objects() -> None:
    module = torch.nn.Linear(4, 3)
    state = {"model": module, "first_row": module.weight.detach()[0], "tied": [module.weight.detach().t()]}
    step = save_step(state)
    assert sum(leaf.numel() for leaf in step.data.values()) == 15
    live_module = torch.nn.Linear(4, 3)
    live = {
        "model": live_module,
        "first_row": live_module.weight.detach()[0],
        "tied": [live_module.weight.detach().t()],
    }
    step.restore(live)
    assert torch.equal(live_module.weight, module.weight)
    assert torch.equal(live["first_row"], module.weight[0])
    assert isinstance(live_module.weight, torch.nn.Parameter)


def test_a_thousand_views_of_one_buffer_cost_one_buffer() -> None:
    buffer = torch.arange(8000.0)
    parts = {f"p{i}": buffer[8 * i : 8 * i + 8].view(2, 4) for i in range(1000)}
    step = save_step({"parts": parts, "buffer": buffer})
    assert list(step.data) == [("buffer",)]
    back = step.without_target()
    assert same_content(back["parts"], parts)


def test_a_few_rows_of_a_large_tensor_cost_a_few_rows() -> None:
    large = torch.zeros(1000, 1000)
    for view in (large[:10], large[:10].t(), large[::100], large[:, 0], large[0].expand(10, 1000)):
        assert stored_bytes({"a": view}) == view.numel() * 4


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
def test_both_modes_store_shared_memory_once(tmp_path: Path, mode: Any) -> None:
    memory = torch.randn(1 << 16)
    state = {"a": memory[: 1 << 15], "b": memory[1 << 14 :], "tied": memory[:7], "again": memory[: 1 << 15]}
    with CheckpointManager(tmp_path, mode=mode) as manager:
        manager.save(1, state)
        manager.save(2, state, blocking=False)
        manager.wait()
        for step in (1, 2):
            assert sum(file.stat().st_size for file in (tmp_path / str(step)).rglob("*.safetensors")) < (1 << 18) + 9000
            back = manager.restore(step).state
            assert back is not None
            assert same_content(back, state)
            assert len({value.untyped_storage().data_ptr() for value in back.values()}) == 1
            other = torch.zeros(1 << 16)
            live = {"a": other[: 1 << 15], "b": other[1 << 14 :], "tied": other[:7], "again": other[: 1 << 15]}
            manager.restore(step, live)
            assert torch.equal(other, memory)


@pytest.mark.parametrize(("name", "mode"), [("torch", "consolidated"), ("orbax", "consolidated"), ("orbax", "sharded")])
def test_formats_that_other_tools_read_hold_every_array_whole(tmp_path: Path, name: str, mode: Any) -> None:
    def make(memory: torch.Tensor, dates: Any) -> State:
        return {"a": memory[:10], "b": memory[6:], "c": {"x": memory[7:9], "dates": dates, "same": memory[:10]}}

    dates = np.array(["2020-01-01"], "M8[D]")
    state = make(torch.arange(16.0), dates)
    with CheckpointManager(tmp_path, format=name, mode=mode) as manager:
        manager.save(1, state)
        back = manager.restore(1).state
        assert back is not None
        assert same_content(back, state)
        back["a"][7:].fill_(-1)  # each was stored by itself, and shows the memory that it showed
        assert [back["b"][:4].tolist(), back["c"]["x"].tolist()] == [[6, -1, -1, -1], [-1, -1]]
        assert back["c"]["same"] is back["a"]
        live = make(torch.zeros(16), np.zeros_like(dates))
        manager.restore(1, live)
    assert same_content(live, state)


def test_numpy_arrays_that_are_stored_one_by_one_share_their_memory_again() -> None:
    memory = np.arange(400).reshape(20, 20)
    dates = memory.astype("M8[s]")
    state = {"row": memory[3, ::-1], "column": memory[:, 4], "dates": dates[3], "other": dates[::-1, 4]}
    back = save_step(state).without_target()
    assert same_content(back, state)
    back["column"][3] = -1
    back["other"][-4] = dates[0, 0]
    assert back["row"][-5] == -1
    assert back["dates"][4] == dates[0, 0]
    assert back["row"].strides == state["row"].strides


def test_arrays_that_share_a_little_of_a_memory_far_larger_than_they_are_are_refused_by_name() -> None:
    memory = torch.zeros(4_000_000)
    state = {"a": {"x": memory[::1_999_999]}, "b": memory[::1_999_998]}
    with pytest.raises(UnsupportedValueError, match=r"shares elements with b .* 24 bytes show \d+ bytes") as caught:
        save_step(state)
    assert caught.value.leaf == "a.x"
    assert "clone()" in str(caught.value)
    save_step({**state, "b": state["b"].clone()})


def test_of_arrays_that_show_one_memory_a_part_comes_back_without_the_rest_of_it() -> None:
    grid_ = torch.arange(2500.0).reshape(50, 50)
    step = save_step({"a": grid_[3], "b": grid_[:, 4], "c": grid_[3]})
    back = step.without_target(items=["b"])
    assert back["b"].untyped_storage().nbytes() == 200
    back = step.without_target(items=["b", "c"])
    back["b"][3] = -1
    assert back["c"][4] == -1


@pytest.mark.parametrize(
    "changes",
    [
        {"first": None},
        {"first": [{"nonsense": 1}]},
        {"num_bytes": 8},
        {"num_bytes": "8"},
        {"num_bytes": True},
        {"window": None},
        {"window": {"start": 0, "shape": [50], "strides": [4], "dtype": "int32"}},
        {"window": {"start": 0, "shape": [49], "strides": [4], "dtype": "float32"}},
        {"window": {"start": 0, "shape": [50], "strides": [-4], "dtype": "float32"}},
    ],
    ids=str,
)
def test_a_memory_from_a_file_is_one_that_a_save_could_have_written(changes: dict[str, Any]) -> None:
    memory = torch.arange(2500.0).reshape(50, 50)
    step = save_step({"a": memory[3], "b": memory[:, 4]})
    for path in [("a",), ("b",)]:
        data: Any = step.structure[path].data
        step.structure[path] = Node(kind="array", data={"memory": {**data["memory"], **changes}})
    with pytest.raises(CorruptDataError) as caught:
        step.without_target()
    assert "memory" in caught.value.message or "view" in caught.value.message or "key" in caught.value.message


def test_a_memory_from_a_file_that_is_far_larger_than_its_arrays_is_not_made() -> None:
    memory = torch.arange(2500.0).reshape(50, 50)
    step = save_step({"a": memory[3], "b": memory[:, 4]})
    for path in [("a",), ("b",)]:
        data: Any = step.structure[path].data
        step.structure[path] = Node(kind="array", data={"memory": {**data["memory"], "num_bytes": 1 << 60}})
    back = step.without_target()
    assert [value.untyped_storage().nbytes() for value in back.values()] == [200, 200]


# -- targets that share what the step has apart ------------------------------------------------------------------------


def test_a_target_that_shares_more_takes_equal_data_only() -> None:
    apart = save_step({"a": torch.ones(6), "b": torch.ones(6)})
    memory = torch.zeros(10)
    apart.restore({"a": memory[:6], "b": memory[4:]})
    assert torch.equal(memory, torch.ones(10))


@pytest.mark.parametrize("tied", [False, True])
def test_a_target_that_cannot_hold_both_is_refused_before_it_is_changed(tmp_path: Path, *, tied: bool) -> None:
    memory = torch.zeros(10)
    live = {"a": memory[:6], "b": memory[:6] if tied else memory[4:], "c": torch.zeros(2)}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": torch.ones(6), "b": torch.full((6,), 2.0), "c": torch.ones(2)})
        with pytest.raises(StructureMismatchError, match=r"ties what the step holds apart: [ab]: ") as caught:
            manager.restore(1, live)
        assert "Nothing was changed" in str(caught.value)
        assert not memory.any()
        assert not live["c"].any()
        manager.save(2, {"a": torch.ones(6), "b": torch.ones(6), "c": torch.ones(2)})
        manager.restore(2, live)
    assert torch.equal(memory[:6], torch.ones(6))


def test_a_target_that_shares_in_another_way_is_refused() -> None:
    memory = torch.arange(10.0)
    step = save_step({"a": memory[:6], "b": memory[4:]})
    live = torch.zeros(12)
    with pytest.raises(StructureMismatchError, match="shares memory"):
        step.restore({"a": live[:6], "b": live[3:9]})
    assert not live.any()


@pytest.mark.parametrize(
    "changes",
    [
        {"start": -4},
        {"start": 44},
        {"start": 2},
        {"start": "0"},
        {"start": True},
        {"shape": [3, 3]},
        {"shape": [0]},
        {"shape": [1 << 62]},
        {"strides": [-4]},
        {"strides": [1 << 62]},
        {"strides": [3]},
        {"strides": None},
        {"dtype": "object"},
        {"dtype": ["float32"]},
    ],
    ids=str,
)
def test_a_window_from_a_file_stays_inside_its_leaf(changes: dict[str, Any]) -> None:
    good = {"start": 8, "shape": [9], "strides": [4], "dtype": "float32"}
    assert Window.from_json(good, num_bytes=44).shape == (9,)
    with pytest.raises(CorruptDataError):
        Window.from_json({**good, **changes}, num_bytes=44)
