"""Clients of object stores, each used the way its documentation shows: parts of a state go up, and come down again."""

from __future__ import annotations

import importlib.util
import os
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["CLIENTS", "Client", "missing"]

_NUM_STREAMS = 8
Part = np.ndarray[Any, np.dtype[np.uint8]]


class Client(ABC):
    """Moves parts between host memory and a prefix of a bucket."""

    needs: str
    schemes: tuple[str, ...] = ("s3", "gs")
    keeps: str = "objects are stored"

    def __init__(self, url: str) -> None:
        self.url = url

    @abstractmethod
    def put(self, parts: Sequence[Part]) -> None:
        """Store each part as an object."""

    @abstractmethod
    def get(self, parts: Sequence[Part]) -> None:
        """Fill the parts from their objects."""


class Safepoint(Client):
    """Our storage, as the manager uses it."""

    needs = "tensorstore"
    keeps = "objects are stored, if their names were free; digests of blocks"

    def __init__(self, url: str) -> None:
        from safepoint.formats.storage import open_storage

        super().__init__(url)
        self._storage = open_storage(url)

    @override
    def put(self, parts: Sequence[Part]) -> None:
        def write(number: int) -> None:
            with self._storage.open_writer(str(number), num_bytes=parts[number].nbytes) as writer:
                writer.append(parts[number].data)
                writer.finish()

        _in_threads(write, len(parts))

    @override
    def get(self, parts: Sequence[Part]) -> None:
        block_bytes = 16 << 20
        blocks = [(number, start) for number, part in enumerate(parts) for start in range(0, part.nbytes, block_bytes)]
        readers = [self._storage.open_reader(str(number), num_bytes=part.nbytes) for number, part in enumerate(parts)]

        def read(index: int) -> None:
            number, start = blocks[index]
            readers[number].read_into(start, parts[number][start : start + block_bytes].data)

        _in_threads(read, len(blocks))


class Obstore(Client):
    """The Rust object_store, in its defaults."""

    needs = "obstore"
    schemes = ("s3",)  # its client of Google's takes no server without TLS and tokens

    def __init__(self, url: str) -> None:
        import obstore

        super().__init__(url)
        self._module = obstore
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        self._store = obstore.store.S3Store(
            bucket, prefix=prefix, endpoint=endpoint, client_options={"allow_http": True}
        )

    @override
    def put(self, parts: Sequence[Part]) -> None:
        _in_threads(lambda number: self._module.put(self._store, str(number), parts[number].data), len(parts))

    @override
    def get(self, parts: Sequence[Part]) -> None:
        def read(number: int) -> None:
            position = 0
            for piece in self._module.get(self._store, str(number)):
                parts[number][position : position + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
                position += len(piece)

        _in_threads(read, len(parts))


class Fsspec(Client):
    """fsspec's file systems for both, in their defaults."""

    needs = "fsspec"
    protocol: str

    def __init__(self, url: str) -> None:
        import fsspec

        super().__init__(url)
        self._files = fsspec.filesystem(self.protocol)

    @override
    def put(self, parts: Sequence[Part]) -> None:
        self._files.pipe({f"{self.url}/{number}": part.tobytes() for number, part in enumerate(parts)})

    @override
    def get(self, parts: Sequence[Part]) -> None:
        found = self._files.cat([f"{self.url}/{number}" for number in range(len(parts))])
        for name, data in found.items():
            parts[int(name.rpartition("/")[2])][:] = np.frombuffer(data, dtype=np.uint8)


class S3fs(Fsspec):
    """fsspec for S3."""

    needs = "s3fs"
    protocol = "s3"
    schemes = ("s3",)


class Gcsfs(Fsspec):
    """fsspec for Google's."""

    needs = "gcsfs"
    protocol = "gs"
    schemes = ("gs",)


CLIENTS: dict[str, type[Client]] = {"safepoint storage": Safepoint, "obstore": Obstore, "s3fs": S3fs, "gcsfs": Gcsfs}


def missing(needs: str) -> bool:
    """Say whether a module is not installed."""
    return importlib.util.find_spec(needs) is None


def _in_threads(work: Any, count: int) -> None:
    with ThreadPoolExecutor(_NUM_STREAMS) as pool:
        list(pool.map(work, range(count)))
