"""The format `torch`: what torch.load(weights_only=True) makes of our files, and what our own restore does."""

from __future__ import annotations

import collections
import datetime
import io
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.pickle_writer import TensorRecord, write_pickle
from safepoint.formats.zip_layout import ZipLayout
from safepoint.manager import CheckpointManager
from safepoint.manager.errors import CorruptDataError, InvalidArgumentError

DTYPES = [name for name in ITEM_BYTES if hasattr(torch, name)]


def save(root: Path, state: dict[str, Any], **options: Any) -> CheckpointManager:
    manager = CheckpointManager(root, format="torch", **options)
    manager.save(1, state)
    return manager


def load(root: Path, item: str, **options: Any) -> Any:
    return torch.load(root / "1" / item / f"{item}.pt", weights_only=True, **options)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(2, 3), (), (0,), (0, 3)])
def test_torch_loads_every_dtype_bit_for_bit(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    num_bytes = int(np.prod(shape)) * ITEM_BYTES[dtype]
    raw = torch.arange(num_bytes, dtype=torch.uint8) & (1 if dtype == "bool" else 255)
    tensor = raw.view(getattr(torch, dtype)).reshape(shape)
    save(tmp_path, {"x": {"leaf": tensor}}).close()
    for options in ({}, {"mmap": True}):
        found = load(tmp_path, "x", **options)["leaf"]
        assert (found.dtype, tuple(found.shape)) == (tensor.dtype, shape)
        assert bits(found) == bits(tensor)


def test_a_model_and_its_optimizer_take_what_torch_loads(tmp_path: Path) -> None:
    def make() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
        return model, torch.optim.AdamW(model.parameters())

    model, optimizer = make()
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    save(tmp_path, {"model": model, "optimizer": optimizer, "tokens": 7}).close()
    other, other_optimizer = make()
    state = load(tmp_path, "model")
    assert state._metadata == model.state_dict()._metadata
    other.load_state_dict(state)
    other_optimizer.load_state_dict(load(tmp_path, "optimizer"))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    assert str(other_optimizer.state_dict()) == str(optimizer.state_dict())
    assert load(tmp_path, "tokens") == 7


PLAIN = [
    1,
    -1,
    2**31,
    -(2**40),
    2**100,
    2.5,
    float("inf"),
    True,
    False,
    None,
    "text 实验",
    "",
    b"by\xff",
    1 + 2j,
    (),
    (1,),
    (1, 2, 3, 4),
    [],
    {"a": {"b": []}},
    {1: 2, None: 3, (1, "x"): 4, 2.5: 5},
    {1, 2},
    torch.float32,
    torch.device("cpu"),
    torch.Size([1, 2]),
    collections.OrderedDict(a=1),
]


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_are_loaded_as_they_are(tmp_path: Path, value: Any) -> None:
    save(tmp_path, {"x": [value]}).close()
    (found,) = load(tmp_path, "x")
    assert found == value
    assert type(found) is type(value)


def test_what_torch_does_not_know_comes_as_its_text_there_and_as_itself_here(tmp_path: Path) -> None:
    when = datetime.datetime(2024, 5, 6, tzinfo=datetime.UTC)
    state = {"x": {"when": when, "path": Path("a/b"), "large": 2**3000}, "n": np.arange(3)}
    with save(tmp_path, state) as manager:
        assert load(tmp_path, "x") == {"when": str(when), "path": "a/b", "large": hex(2**3000)}
        assert torch.equal(load(tmp_path, "n"), torch.arange(3))
        back = manager.restore(1).state
    assert back is not None
    assert back["x"] == state["x"]


def test_tied_tensors_share_their_storage_also_across_items(tmp_path: Path) -> None:
    tied = torch.randn(100)
    with save(tmp_path, {"a": {"x": tied, "y": tied}, "b": [tied]}) as manager:
        found = load(tmp_path, "a")
        assert found["x"].data_ptr() == found["y"].data_ptr()
        assert torch.equal(load(tmp_path, "b")[0], tied)
        back = manager.restore(1).state
    assert back is not None
    assert back["b"][0].data_ptr() == back["a"]["x"].data_ptr()


def test_a_flipped_byte_of_a_tensor_is_found_by_our_restore(tmp_path: Path) -> None:
    with save(tmp_path, {"x": torch.zeros(1000)}) as manager:
        path = tmp_path / "1" / "x" / "x.pt"
        data = bytearray(path.read_bytes())
        data[data.index(bytes(4000)) + 5] ^= 1
        path.write_bytes(data)
        with pytest.raises(CorruptDataError, match="digest"):
            manager.restore(1)


@pytest.mark.parametrize("options", [{"mode": "sharded"}, {"root_scope": "per_process"}])
def test_what_the_format_cannot_do_is_refused_when_the_manager_is_opened(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError, match="format torch"):
        CheckpointManager(tmp_path, format="torch", **options)


def test_an_async_save_writes_the_same_file(tmp_path: Path) -> None:
    state = {"x": {"w": torch.arange(10.0), "tied": torch.ones(3)}, "n": 3}
    for name, blocking in (("a", True), ("b", False)):
        with CheckpointManager(tmp_path / name, format="torch") as manager:
            manager.save(1, state, blocking=blocking)
    assert (tmp_path / "a/1/x/x.pt").read_bytes() == (tmp_path / "b/1/x/x.pt").read_bytes()


# -- the archive ----------------------------------------------------------------------------------------------------


def archive(small: dict[str, bytes], large: dict[str, bytes], limit: int) -> bytes:
    layout = ZipLayout(small, {name: len(data) for name, data in large.items()}, limit=limit)
    written = bytearray(layout.header)
    checks: list[int] = []
    for index, data in enumerate(large.values()):
        assert len(written) == layout.offsets[index]
        assert len(written) % 64 == 0
        checks.append(layout.check(memoryview(data)))
        written += data + layout.after(index, checks)
    assert len(written) == layout.num_bytes
    return bytes(written)


@pytest.mark.parametrize("limit", [100, 2000, 0xFFFFFFFF])
@pytest.mark.parametrize("sizes", [(), (0,), (1, 50, 5000), (3000, 0, 3000)])
def test_any_archive_is_a_sound_zip_with_and_without_wide_fields(limit: int, sizes: tuple[int, ...]) -> None:
    large = {f"a/data/{i}": bytes([i + 1]) * size for i, size in enumerate(sizes)}
    data = archive({"a/x": b"first", "a/y": b""}, large, limit)
    with zipfile.ZipFile(io.BytesIO(data)) as found:
        assert found.testzip() is None
        assert {name: found.read(name) for name in found.namelist()} == {"a/x": b"first", "a/y": b"", **large}


def test_more_than_65535_entries_are_found_again() -> None:
    large = {f"a/data/{i}": b"" for i in range(66_000)}
    with zipfile.ZipFile(io.BytesIO(archive({"a/x": b"1"}, large, 0xFFFFFFFF))) as found:
        assert len(found.namelist()) == 66_001


def test_torch_reads_an_archive_with_wide_fields() -> None:
    data = bytes(range(200)) * 4
    record = TensorRecord(key="0", dtype="float32", shape=(200,), num_bytes=800)
    small = {"archive/data.pkl": write_pickle(LeafRef(("x",)), lambda _: record), "archive/version": b"3\n"}
    found = torch.load(io.BytesIO(archive(small, {"archive/data/0": data}, 100)), weights_only=True)
    assert bits(found) == data
    assert zlib.crc32(data) == zlib.crc32(bits(found))
