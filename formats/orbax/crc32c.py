"""CRC-32C (Castagnoli), the checksum that zarr's codec `crc32c` appends to a chunk.

Python has no fast one. TensorStore does, inside its codec: blocks of the data are written to its memory store, and
their checksums, the last bytes of what is stored there, combined. Small data are summed here, byte by byte.
Source of the combination: zlib's `crc32_combine`.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["crc32c"]

_POLYNOMIAL = 0x82F63B78  # reflected
_ONE, _X = 1 << 31, 1 << 30  # the polynomials 1 and x, reflected
_SMALL_BYTES = 256
_BLOCK_BYTES = 256 << 10  # fastest of those tried: larger ones are fresh memory each time
_NUM_BLOCKS = 16


def crc32c(data: Buffer) -> int:
    """Return the checksum of some bytes."""
    view = memoryview(data).cast("B")
    if len(view) <= _SMALL_BYTES:
        return _sum_bytes(view)
    check, position = 0, 0
    stride = _BLOCK_BYTES * _NUM_BLOCKS
    while len(view) - position >= stride:
        for block in _blocks().sums(view[position : position + stride]):
            check = _multiply(_shift(_BLOCK_BYTES), check) ^ block
        position += stride
    while position < len(view):
        rest = view[position : position + _BLOCK_BYTES]
        block = _Blocks(len(rest), 1).sums(rest)[0] if len(rest) > _SMALL_BYTES else _sum_bytes(rest)
        check = _multiply(_shift(len(rest)), check) ^ block
        position += len(rest)
    return check


@functools.cache
def _table() -> tuple[int, ...]:
    table = []
    for byte in range(256):
        value = byte
        for _ in range(8):
            value = value >> 1 ^ (_POLYNOMIAL if value & 1 else 0)
        table.append(value)
    return tuple(table)


def _sum_bytes(data: memoryview) -> int:
    table = _table()
    value = 0xFFFF_FFFF
    for byte in data:
        value = table[(value ^ byte) & 0xFF] ^ value >> 8
    return value ^ 0xFFFF_FFFF


def _multiply(a: int, b: int) -> int:
    """Return the product of two polynomials, modulo that of the checksum."""
    product = 0
    bit = _ONE
    while bit:
        if a & bit:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
        bit >>= 1
    return product


@functools.lru_cache(maxsize=256)
def _shift(num_bytes: int) -> int:
    """Return what moves a checksum past so many bytes: x to the power of their bits."""
    result, square, power = _ONE, _X, 8 * num_bytes
    while power:
        if power & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        power >>= 1
    return result


class _Blocks:
    """An array in memory, chunked so that TensorStore sums each block."""

    def __init__(self, block_bytes: int, num_blocks: int) -> None:
        import tensorstore as ts  # noqa: PLC0415 - only where it is used: it starts threads

        self._num_blocks = num_blocks
        self._store: Any = ts.open(
            {
                "driver": "zarr3",
                "kvstore": {"driver": "memory"},
                "store_data_equal_to_fill_value": True,
                "create": True,
                "metadata": {
                    "shape": [block_bytes * num_blocks],
                    "data_type": "uint8",
                    "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [block_bytes]}},
                    "codecs": [{"name": "bytes"}, {"name": "crc32c"}],
                },
            },
            context=ts.Context(),
        ).result()

    def sums(self, data: memoryview) -> list[int]:
        """Return the checksum of each block."""
        array = np.frombuffer(data, dtype=np.uint8)
        self._store.write(array, can_reference_source_data_indefinitely=True).result()
        stored = [self._store.kvstore.read(f"c/{index}") for index in range(self._num_blocks)]
        return [int.from_bytes(one.result().value[-4:], "little") for one in stored]


_local = threading.local()


def _blocks() -> _Blocks:
    blocks: _Blocks | None = getattr(_local, "blocks", None)
    if blocks is None:
        blocks = _local.blocks = _Blocks(_BLOCK_BYTES, _NUM_BLOCKS)
    return blocks
