"""Files of a step, written to a storage, and their entries."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from safepoint.formats.entries import FileEntry

if TYPE_CHECKING:
    from safepoint.formats.storage import Storage

STEP = "7"


def content(index: int, num_bytes: int) -> bytes:
    return np.random.default_rng(index).bytes(num_bytes)


def add_file(storage: Storage, path: str, data: bytes, block_bytes: int) -> FileEntry:
    with storage.open_writer(f"{STEP}/{path}", num_bytes=len(data), block_bytes=block_bytes) as writer:
        writer.append(data)
        written = writer.finish()
    return FileEntry(
        path=path,
        num_bytes=written.num_bytes,
        block_bytes=written.block_bytes,
        digests=written.digests,
        process_index=0,
        attempt="a",
    )
