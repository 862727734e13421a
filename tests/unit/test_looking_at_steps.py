from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.entries import LeafEntry
from safepoint.formats.region import Region, check_tiling
from safepoint.manager import CheckpointManager, comparing
from safepoint.manager.comparing import compare_steps
from safepoint.manager.consolidating import consolidate_step
from safepoint.manager.errors import CheckpointError, IncompleteCoverageError, InvalidArgumentError
from safepoint.manager.leaf_reading import cut, parse_slice, part_bytes, read_parts
from safepoint.manager.step_paths import open_step, parse_step_path

from support.command import commit_sharded, example_state

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = st.lists(st.integers(0, 6), max_size=4).map(tuple)


@given(SHAPES, st.integers(1, 64))
def test_the_parts_of_a_leaf_tile_it_in_order_and_are_no_larger_than_asked(
    shape: tuple[int, ...], max_bytes: int
) -> None:
    entry = LeafEntry(path=("x",), dtype="float32", shape=shape, shards=())

    parts = list(cut(entry, max_bytes))

    check_tiling(shape, (region for _, region in parts), leaf="x")
    assert [region for _, region in parts] == sorted(region for _, region in parts)
    assert all(part_bytes(part) <= max(max_bytes, 4) for part in parts)


@given(SHAPES.filter(len), st.data())
def test_a_slice_picks_what_numpy_picks(shape: tuple[int, ...], data: st.DataObject) -> None:
    bound = st.none() | st.integers(-8, 8)
    bounds = data.draw(st.lists(st.tuples(bound, bound), max_size=len(shape)))
    text = ", ".join(f"{'' if a is None else a}:{'' if b is None else b}" for a, b in bounds)
    array = torch.arange(math.prod(shape)).reshape(shape)

    region = parse_slice(text, shape)

    picked = array[region.slices_in(Region.whole(shape))]
    assert torch.equal(picked, array[tuple(slice(a, b) for a, b in bounds)])


@pytest.mark.parametrize("text", ["1::2", "1.5", "x", "0,0,0"])
def test_slices_with_steps_or_words_are_refused(text: str) -> None:
    with pytest.raises(InvalidArgumentError):
        parse_slice(text, (3, 3))


def test_parts_are_read_from_all_the_shards_that_hold_them(tmp_path: Path) -> None:
    state = {"x": torch.arange(70, dtype=torch.int16).reshape(7, 10)}
    commit_sharded(tmp_path, 1, state, process_count=3)
    step = open_step(tmp_path)
    (entry,) = step.manifest.leaves
    regions = [Region((1, 2), (4, 5)), Region((0, 0), (7, 10)), Region((6, 9), (1, 1)), Region((3, 3), (0, 2))]

    tensors = read_parts(step, [(entry, region) for region in regions])

    for region, tensor in zip(regions, tensors, strict=True):
        assert torch.equal(tensor, state["x"][region.slices_in(Region.whole((7, 10)))])


def of_every_dtype(byte: int) -> dict[str, torch.Tensor]:
    raw = torch.arange(64, dtype=torch.uint8).reshape(2, 32)
    raw[1, 5] = byte
    narrow = {f"{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8)}
    names = (name for name in ITEM_BYTES if hasattr(torch, name) and name not in narrow | {"bool"})
    return {name: raw.clone().view(getattr(torch, name)) for name in names} | {"bool": (raw & 1).bool()}


def test_values_of_every_dtype_are_compared_by_their_bits(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step, byte in ((1, 37), (2, 38), (3, 37)):
            manager.save(step, {"x": of_every_dtype(byte)})

    found = compare_steps(open_step(tmp_path / "1"), open_step(tmp_path / "2"))
    same = compare_steps(open_step(tmp_path / "1"), open_step(tmp_path / "3"))

    changed = {one.path.removeprefix("x."): one.num_changed for one in found.leaves}
    assert set(changed) == set(of_every_dtype(37))
    assert set(changed.values()) == {1}
    assert same.is_equal


def test_a_leaf_larger_than_memory_is_compared_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "PART_BYTES", 64)
    left, right = torch.arange(1000.0).reshape(10, 100), torch.arange(1000.0).reshape(10, 100)
    right[7, 3] += 2
    right[0, 0] -= 1
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": left, "y": left})
        manager.save(2, {"x": right, "y": right})

    found = compare_steps(open_step(tmp_path / "1"), open_step(tmp_path / "2"))

    assert [(one.num_changed, one.num_elements, one.max_difference) for one in found.leaves] == [(2, 1000, 2.0)]


def test_trees_dtypes_shapes_and_values_are_compared(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": torch.zeros(2), "b": torch.zeros(3), "c": [1, 2], "d": {"x": {"y": 1}}})
        manager.save(2, {"a": torch.zeros(2).half(), "b": torch.zeros(4), "c": [1, 3], "e": None})

    found = compare_steps(open_step(tmp_path / "1"), open_step(tmp_path / "2"))

    kinds = {one.path: (one.kind, one.a, one.b) for one in found.structure}
    assert kinds["a"] == ("dtype", "float32", "float16")
    assert kinds["b"] == ("shape", [3], [4])
    assert kinds["c.1"] == ("value", 2, 3)
    assert kinds["d"][0] == "only_a"
    assert kinds["e"][0] == "only_b"
    assert "d.x" not in kinds


def test_a_part_of_a_step_cannot_be_consolidated(tmp_path: Path) -> None:
    commit_sharded(tmp_path / "run", 1, example_state(1))
    step = open_step(tmp_path / "run")
    leaves = tuple(leaf._replace(shards=leaf.shards[:1]) for leaf in step.manifest.leaves)
    part = replace(step, manifest=replace(step.manifest, leaves=leaves, partial=True))

    with pytest.raises(IncompleteCoverageError, match="held") as caught:
        consolidate_step(part, tmp_path / "export")

    assert "root of its own" in str(caught.value)
    assert not (tmp_path / "export").exists()


@pytest.mark.parametrize(
    ("path", "step"), [("runs/7", 7), ("runs/007", None), ("runs/gpt", None), ("runs/7/", 7), ("-1", None)]
)
def test_a_path_that_ends_in_a_number_is_a_step(path: str, step: int | None, tmp_path: Path) -> None:
    assert parse_step_path(tmp_path / path).step == step


@pytest.mark.parametrize("path", ["", "ftp://bucket/run", "a\0b"])
def test_what_is_no_path_is_refused(path: str) -> None:
    with pytest.raises(CheckpointError):
        parse_step_path(path)
