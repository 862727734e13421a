"""Small leaves are read many at once, and only verified bytes reach them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import CorruptDataError
from safepoint.formats.reading import read_segments
from safepoint.formats.segments import ReadSegment
from safepoint.formats.storage import MemoryStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.adapters import ArrayLeaf, wrap_array
from safepoint.manager.unpacking import SMALL_BYTES, Unpacker

from support.faulty_storage import FaultyStorage
from support.stored_files import STEP, add_file, content

if TYPE_CHECKING:
    from pathlib import Path

SIZES = [1, 30, 99, 250, 3, 7, 100, 200, 1, 64]


def targets(sizes: list[int]) -> list[torch.Tensor]:
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


def unpacker(tensors: list[torch.Tensor]) -> Unpacker:
    leaves = [wrap_array(tensor, "w") for tensor in tensors]
    addresses = [leaf.address(leaf.spec.regions[0]) for leaf in leaves if isinstance(leaf, ArrayLeaf)]
    assert None not in addresses
    return Unpacker(
        [leaf for leaf in leaves if leaf], [address or 0 for address in addresses], [t.nbytes for t in tensors]
    )


def joined(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(tensor.numpy().tobytes() for tensor in tensors)


def test_bytes_reach_the_leaves_that_they_belong_to_however_they_are_cut() -> None:
    data = content(1, sum(SIZES))
    for step in range(1, len(data) + 1, 11):
        tensors = targets(SIZES)
        target = unpacker(tensors)
        assert len(target) == len(data)
        for start in reversed(range(0, len(data), step)):
            target.put(start, memoryview(bytearray(data[start : start + step])))
        assert joined(tensors) == data


@pytest.mark.parametrize("block_bytes", [100, 4096, 1 << 20])
def test_leaves_read_at_once_and_memory_read_into_share_blocks(block_bytes: int) -> None:
    storage = FaultyStorage(MemoryStorage())
    storage.make_dir("")
    storage.make_dir(STEP)
    data = content(2, 2_000_000)
    file = add_file(storage, "f", data, block_bytes)
    small, more = targets(SIZES), targets(SIZES[::-1])
    large = bytearray(1_500_000)
    begin = 600_000 + sum(SIZES)
    segments = [
        ReadSegment(file=0, offset=600_000, target=unpacker(small), leaf="small"),
        ReadSegment(file=0, offset=50, target=memoryview(bytearray(500_000)), leaf="before"),
        ReadSegment(file=0, offset=begin, target=memoryview(large)[: 2_000_000 - begin], leaf="large"),
        ReadSegment(file=0, offset=begin + 77, target=unpacker(more), leaf="within"),
    ]
    read_segments(storage, STEP, [file], segments)
    assert joined(small) == data[600_000:begin]
    assert joined(more) == data[begin + 77 : begin + 77 + sum(SIZES)]
    assert large[: 2_000_000 - begin] == data[begin:]
    assert segments[1].target == data[50:500_050]


def test_a_wrong_digest_leaves_all_small_leaves_of_the_block_as_they_were() -> None:
    storage = MemoryStorage()
    storage.make_dir("")
    storage.make_dir(STEP)
    file = add_file(storage, "f", content(3, sum(SIZES)), 1000)
    storage.replace(f"{STEP}/f", content(4, sum(SIZES)))
    tensors = targets(SIZES)
    with pytest.raises(CorruptDataError, match="digest"):
        read_segments(storage, STEP, [file], [ReadSegment(file=0, offset=0, target=unpacker(tensors), leaf="w")])
    assert joined(tensors) == bytes(sum(SIZES))


def test_small_and_large_leaves_of_every_dtype_come_back_bit_for_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    state = {}
    for name in ITEM_BYTES:
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype) or dtype == torch.bool:
            continue
        for count in (1, 100, SMALL_BYTES, 0):
            raw = torch.randint(0, 256, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            state[f"{name} {count}"] = raw.view(dtype)
        state[f"{name} scalar"] = torch.ones(dtype.itemsize, dtype=torch.uint8).view(dtype).reshape(())
    state["matrix"] = torch.randn(3, 5)
    state["transposed"] = torch.randn(3, 5).t()
    target = {
        name: torch.zeros(tensor.nbytes, dtype=torch.uint8).view(tensor.dtype).reshape(tensor.shape)
        for name, tensor in state.items()
    }
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"m": state})
        manager.restore(1, {"m": target})
    for name, tensor in state.items():
        wanted, found = (t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, target[name]))
        assert torch.equal(wanted, found), name


def test_a_graph_notices_that_a_small_tensor_of_it_was_restored(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"m": {"w": weight}})
        loss = (weight * weight).sum()
        manager.restore(1, {"m": {"w": weight}})
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
