"""Reads of local files that leave the page cache alone: every byte of them comes, wherever a file ends."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING, Any

import pytest

from safepoint.formats.entries import FileEntry
from safepoint.formats.errors import StorageError
from safepoint.formats.reading import read_blocks, read_segments
from safepoint.formats.segments import ReadSegment
from safepoint.formats.storage import LocalStorage
from safepoint.formats.storage.system import SystemCalls

if TYPE_CHECKING:
    from pathlib import Path


def written(storage: LocalStorage, num_bytes: int, block_bytes: int) -> tuple[bytes, FileEntry]:
    data = bytes(number * number % 251 for number in range(num_bytes))
    with storage.open_writer("f", num_bytes=num_bytes, block_bytes=block_bytes) as writer:
        writer.append(data)
        digests = writer.finish().digests
    entry = FileEntry(
        path="f", num_bytes=num_bytes, block_bytes=block_bytes, digests=digests, process_index=0, attempt="a"
    )
    return data, entry


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 8192, 20_001, 1 << 20])
@pytest.mark.parametrize("block_bytes", [4096, 5000, 1 << 16])
def test_a_file_reads_the_same_past_the_cache(tmp_path: Path, num_bytes: int, block_bytes: int) -> None:
    storage = LocalStorage(tmp_path)
    data, entry = written(storage, num_bytes, block_bytes)
    assert b"".join(map(bytes, read_blocks(storage, "", entry, cache="bypass"))) == data
    with storage.open_reader("f") as reader:
        reader.bypass_cache()
        for offset, length in ((num_bytes // 3, num_bytes // 2), (0, num_bytes)):
            part = bytearray(length)
            reader.read_into(offset, memoryview(part))
            assert part == data[offset : offset + length]


def test_the_system_is_told_of_files_that_are_read_from_end_to_end_and_of_no_others(tmp_path: Path) -> None:
    told: list[int] = []
    storage = LocalStorage(tmp_path, calls=SystemCalls(expect_in_order=told.append))
    data, entry = written(storage, 40_000, 4096)

    def read(num_bytes: int) -> bytes:
        target = bytearray(num_bytes)
        segment = ReadSegment(file=0, offset=4096, target=memoryview(target), leaf="x")
        read_segments(storage, "", [entry], [segment])
        return bytes(target)

    assert read(19_000) == data[4096 : 4096 + 19_000]
    assert told == []
    assert read(21_000) == data[4096 : 4096 + 21_000]
    assert len(told) == 1
    assert b"".join(map(bytes, read_blocks(storage, "", entry))) == data
    assert len(told) == 2
    assert b"".join(map(bytes, read_blocks(storage, "", entry, cache="bypass"))) == data
    assert len(told) == 2


def test_a_file_system_that_refuses_direct_reads_is_read_as_ever_and_errors_stay_errors(tmp_path: Path) -> None:
    refusals: list[int] = []

    def preadv(descriptor: int, buffers: Any, offset: int) -> int:
        if refusals:
            number = refusals.pop()
            raise OSError(number, os.strerror(number))
        return os.preadv(descriptor, buffers, offset)

    storage = LocalStorage(tmp_path, calls=SystemCalls(preadv=preadv))
    data, _ = written(storage, 10_000, 4096)
    with storage.open_reader("f") as reader:
        part = bytearray(4096)
        reader.bypass_cache()
        refusals.append(errno.EINVAL)
        reader.read_into(4096, memoryview(part))
        assert part == data[4096:8192]
        refusals.append(errno.EINVAL)  # no longer direct: now it means what it says
        with pytest.raises(StorageError):
            reader.read_into(0, memoryview(part))
