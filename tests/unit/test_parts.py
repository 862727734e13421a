"""Data files cut into parts, for stores that take a file as one piece of memory."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load

from safepoint.formats.storage import MemoryObjects
from safepoint.manager import CheckpointManager, session

from support.strategies import same_content

if TYPE_CHECKING:
    from safepoint.formats.storage import Storage

PART_BYTES = 64 << 10


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch) -> Storage:
    storage = MemoryObjects("memory://parts", part_bytes=PART_BYTES)
    monkeypatch.setattr(session, "open_storage", lambda *_: storage)
    return storage


def make_state() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "model": {
            "large": torch.randn(300, 200, generator=generator),
            "long": torch.randint(0, 9, (100_003,), generator=generator, dtype=torch.int16),
            "row": torch.randn(1, 30_000, generator=generator).to(torch.bfloat16),
            **{f"layer {number}.weight": torch.full((1000,), float(number)) for number in range(40)},
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(7),
        },
        "small": {"w": torch.ones(3)},
        "step": 5,
    }


def files_of(storage: Storage, below: str) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for entry in storage.list(below):
        path = f"{below}/{entry.name}"
        found |= files_of(storage, path) if entry.is_dir else {path: storage.get(path, max_bytes=1 << 24)}
    return found


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
def test_every_part_is_small_and_a_file_of_its_own_and_all_come_back_exactly(
    objects: Storage, mode: Any, *, blocking: bool
) -> None:
    with CheckpointManager("memory://parts", mode=mode) as manager:
        manager.save(5, make_state(), blocking=blocking)
        manager.wait()
        assert manager.verify() == []
        assert same_content(dict(manager.restore(5).state or {}), make_state())
        part = manager.restore(5, keys=["model.large"]).state
        assert part is not None
        assert torch.equal(part["model"]["large"], make_state()["model"]["large"])
    data = {path: file for path, file in files_of(objects, "5").items() if path.endswith(".safetensors")}
    assert len(data) > 10
    assert max(map(len, data.values())) <= PART_BYTES
    keys = [key for file in data.values() for key in load(file)]
    assert len(keys) == len(set(keys))


def test_parts_are_named_and_indexed_as_hugging_face_does(objects: Storage) -> None:
    with CheckpointManager("memory://parts") as manager:
        manager.save(5, make_state())
    files = {path.split("/", 2)[2]: data for path, data in files_of(objects, "5").items() if path.count("/") > 2}
    index = json.loads(files["model/model.safetensors.index.json"])
    names = sorted(set(index["weight_map"].values()))
    assert names == [f"model-{number:05d}-of-{len(names):05d}.safetensors" for number in range(1, len(names) + 1)]
    assert {"small/small.safetensors", *(f"model/{name}" for name in names)} < set(files)
    for key, name in index["weight_map"].items():
        assert key in load(files[f"model/{name}"])
    assert torch.equal(
        load(files[f"model/{index['weight_map']['layer 7.weight']}"])["layer 7.weight"], torch.full((1000,), 7.0)
    )


def test_equal_states_are_cut_alike_and_a_state_that_fits_is_not_cut(objects: Storage) -> None:
    with CheckpointManager("memory://parts") as manager:
        manager.save(1, {"model": {"w": torch.ones(10)}})
        for step in (2, 3):
            manager.save(step, make_state())
    first = [path.split("/", 2)[2] for path in files_of(objects, "1") if "model" in path]
    assert first == ["model/model.safetensors"]
    second, third = ({path.split("/", 2)[2] for path in files_of(objects, step) if "model" in path} for step in "23")
    assert second == third
