"""What the bytes of a shard may be encoded with: by name, as manifests and formats know it.

Owns the names, and what can be said of sizes without decoding. Knows no formats and no files.
"""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from safepoint.formats.errors import CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["CODECS", "ZSTD", "Codec"]


class Codec(Protocol):
    """Makes bytes fewer, and gives them back."""

    @property
    def name(self) -> str:
        """Its name in manifests."""
        ...

    @property
    def max_ratio(self) -> int:
        """How many bytes one encoded byte can stand for at most: no file of few bytes may claim a lot of memory."""
        ...

    @property
    def configuration(self) -> Mapping[str, int]:
        """How a zarr codec of this name is configured."""
        ...

    def encode(self, data: memoryview) -> Callable[[], bytes]:
        """Begin to encode bytes, of which there is at least one, and return what waits for the encoded ones.

        They must not change until then. Several may be under way at once.
        """
        ...

    def decode(self, data: memoryview, out: memoryview) -> Callable[[], None]:
        """Begin to fill `out`, which is writable, with what `data` stand for, and return what waits for it.

        The latter raises CorruptDataError where they stand for something else than as many bytes.
        """
        ...


class _Zstd:
    """Zstandard, one frame; by TensorStore, since Python has it only from 3.14 on."""

    name = "zstd"
    configuration: Mapping[str, int] = MappingProxyType({"level": 1})
    max_ratio = 32_768  # a block of the frame is at most 128 KiB, and takes four bytes at least

    def encode(self, data: memoryview) -> Callable[[], bytes]:
        store = self._array(len(data))
        written = store.write(np.frombuffer(data, dtype=np.uint8), can_reference_source_data_indefinitely=True)

        def wait() -> bytes:
            written.result()
            encoded: bytes = store.kvstore.read("c/0").result().value
            return encoded

        return wait

    def decode(self, data: memoryview, out: memoryview) -> Callable[[], None]:
        store = self._array(len(out))
        store.kvstore.write("c/0", bytes(data)).result()
        filled = _tensorstore().array(np.frombuffer(out, dtype=np.uint8), copy=False).write(store)

        def wait() -> None:
            try:
                filled.result()
            except ValueError as error:
                raise CorruptDataError(f"the bytes cannot be decoded as {self.name}: {error}") from None

        return wait

    def _array(self, num_bytes: int) -> Any:
        """Return an array of one chunk, in memory, which TensorStore encodes."""
        ts = _tensorstore()
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "memory"},
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
            "create": True,
            "metadata": {
                "shape": [num_bytes],
                "data_type": "uint8",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [num_bytes]}},
                "codecs": [{"name": "bytes"}, {"name": self.name, "configuration": dict(self.configuration)}],
            },
        }
        return ts.open(spec, context=ts.Context()).result()  # its own context has a memory store of its own


@functools.cache
def _tensorstore() -> Any:
    import tensorstore as ts  # noqa: PLC0415 - only where it is used: it starts threads

    return ts


ZSTD: Codec = _Zstd()

CODECS: Mapping[str, Codec] = {ZSTD.name: ZSTD}
"""By name."""
