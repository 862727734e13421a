"""What every storage promises of large files: their writers and readers. `storage_contract` has the rest."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import numpy as np
import pytest

from safepoint.formats.checksum import BLOCK_BYTES, digest
from safepoint.formats.errors import CorruptDataError, InvalidArgumentError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable

    from safepoint.formats.storage import Storage

__all__ = ["FileContract", "failed_with"]


def failed_with(number: int, call: Callable[[], object]) -> StorageError:
    with pytest.raises(StorageError) as caught:
        call()
    assert caught.value.errno == number, caught.value
    assert caught.value.path
    return caught.value


class FileContract:
    """Part of `StorageContract`, whose fixture `storage` it uses."""

    @pytest.mark.parametrize("block_bytes", [1, 7, 4096, 1 << 16, BLOCK_BYTES])
    @pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 20_000])
    def test_a_written_file_reads_back_with_a_digest_a_block(
        self, storage: Storage, num_bytes: int, block_bytes: int
    ) -> None:
        data = np.random.default_rng(num_bytes).bytes(num_bytes)
        with storage.open_writer("f", num_bytes=num_bytes, block_bytes=block_bytes) as writer:
            for start in range(0, num_bytes, 999):
                writer.append(data[start : start + 999])
            written = writer.finish()
        assert written.num_bytes == num_bytes
        assert written.block_bytes == block_bytes
        expected = tuple(digest(data[start : start + block_bytes]) for start in range(0, num_bytes, block_bytes))
        assert written.digests == expected
        assert storage.size("f") == num_bytes
        assert storage.get("f", max_bytes=num_bytes) == data

    def test_what_a_writer_reports_adds_up_to_the_file_or_is_nothing(self, storage: Storage) -> None:
        told: list[int] = []
        with storage.open_writer("f", num_bytes=20_001, block_bytes=4096) as writer:
            writer.report_to(told.append)
            writer.append(bytes(12_000))
            writer.append(bytes(8_001))
            writer.finish()
        assert sum(told) in (0, 20_001)
        assert all(num_bytes > 0 for num_bytes in told)

    def test_a_file_of_several_blocks_of_the_default_size(self, storage: Storage) -> None:
        data = np.random.default_rng(0).integers(0, 256, 2 * BLOCK_BYTES + 12_345, dtype=np.uint8)
        with storage.open_writer("f", num_bytes=data.nbytes) as writer:
            writer.append(b"")
            writer.append(data[:1].data)
            writer.append(data[1:100_001].view(np.uint16).data)
            writer.append(data[100_001:].reshape(1, -1).data)
            written = writer.finish()
        starts = range(0, data.nbytes, BLOCK_BYTES)
        assert written.digests == tuple(digest(data[start : start + BLOCK_BYTES].data) for start in starts)
        assert storage.get("f", max_bytes=data.nbytes) == data.tobytes()

    def test_what_was_appended_may_be_changed_afterwards(self, storage: Storage) -> None:
        scratch = np.zeros(1 << 20, dtype=np.uint8)
        with storage.open_writer("f", num_bytes=8 << 20, block_bytes=1 << 18) as writer:
            for number in range(8):
                scratch[:] = number
                writer.append(scratch.data)
                scratch[:] = 255
            writer.finish()
        read = np.frombuffer(storage.get("f", max_bytes=8 << 20), dtype=np.uint8)
        assert (read.reshape(8, -1) == np.arange(8, dtype=np.uint8)[:, None]).all()

    def test_open_writer_is_exclusive(self, storage: Storage) -> None:
        storage.put("f", b"1")

        def write() -> None:
            with storage.open_writer("f", num_bytes=1) as writer:
                writer.append(b"2")
                writer.finish()

        failed_with(errno.EEXIST, write)
        assert storage.get("f", max_bytes=1) == b"1"

    def test_a_writer_that_is_left_before_its_end_leaves_no_file(self, storage: Storage) -> None:
        with storage.open_writer("f", num_bytes=10) as writer:
            writer.append(b"12345")
        assert storage.list("") == []

        def fail() -> None:
            with storage.open_writer("f", num_bytes=10, block_bytes=2) as writer:
                writer.append(b"12345")
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            fail()
        assert storage.list("") == []

    def test_abort_twice_and_after_finish_does_nothing(self, storage: Storage) -> None:
        writer = storage.open_writer("f", num_bytes=1)
        writer.abort()
        writer.abort()
        assert storage.list("") == []
        with storage.open_writer("f", num_bytes=1) as writer:
            writer.append(b"1")
            writer.finish()
            writer.abort()
        assert storage.get("f", max_bytes=1) == b"1"
        for call in (writer.finish, lambda: writer.append(b"")):
            with pytest.raises(InvalidArgumentError):
                call()

    def test_a_writer_holds_the_caller_to_the_announced_size(self, storage: Storage) -> None:
        with storage.open_writer("f", num_bytes=3) as writer, pytest.raises(InvalidArgumentError, match="announced"):
            writer.append(b"1234")
        with storage.open_writer("f", num_bytes=3) as writer:
            writer.append(b"12")
            with pytest.raises(InvalidArgumentError, match="announced"):
                writer.finish()
        assert storage.list("") == []
        with pytest.raises(InvalidArgumentError):
            storage.open_writer("f", num_bytes=-1)
        with pytest.raises(InvalidArgumentError):
            storage.open_writer("f", num_bytes=1, block_bytes=0)

    def test_a_writer_takes_contiguous_memory_only(self, storage: Storage) -> None:
        with storage.open_writer("f", num_bytes=4) as writer, pytest.raises(InvalidArgumentError):
            writer.append(np.zeros(8, dtype=np.uint8)[::2].data)

    def test_a_reader_fills_several_buffers_one_after_the_other(self, storage: Storage) -> None:
        storage.put("f", bytes(range(100)))
        buffers = [bytearray(length) for length in (3, 0, 60, 1)]
        with storage.open_reader("f", num_bytes=100) as reader:
            reader.read_parts_into(5, [memoryview(buffer) for buffer in buffers])
            reader.read_parts_into(5, [])
            assert b"".join(buffers) == bytes(range(5, 69))
            with pytest.raises(CorruptDataError):
                reader.read_parts_into(50, [memoryview(bytearray(50)), memoryview(bytearray(1))])

    @pytest.mark.parametrize("num_bytes", [0, 1, 5, 4096])
    @pytest.mark.parametrize("guess", [None, 0, 1, 5, 4096, 10_000])
    def test_a_size_is_right_whatever_was_expected(self, storage: Storage, num_bytes: int, guess: int | None) -> None:
        storage.put("f", bytes(num_bytes))
        assert storage.size("f", expected=guess) == num_bytes
        assert storage.size("gone", expected=guess) is None
        with storage.open_reader("f", num_bytes=guess) as reader:
            assert reader.num_bytes == num_bytes

    def test_a_reader_reads_any_range_and_refuses_what_is_beyond(self, storage: Storage) -> None:
        storage.put("f", bytes(range(100)))
        with storage.open_reader("f") as reader:
            assert reader.num_bytes == 100
            for offset, length in ((0, 100), (0, 0), (100, 0), (99, 1), (17, 40)):
                buffer = bytearray(length)
                reader.read_into(offset, memoryview(buffer))
                assert buffer == bytes(range(offset, offset + length))
            with pytest.raises(CorruptDataError) as caught:
                reader.read_into(90, memoryview(bytearray(11)))
            assert caught.value.path == storage.describe("f")
        reader.close()

    def test_open_reader_of_what_is_missing(self, storage: Storage) -> None:
        error = failed_with(errno.ENOENT, lambda: storage.open_reader("gone"))
        assert error.path == storage.describe("gone")
        assert error.hint
