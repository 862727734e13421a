"""The digest of a block of bytes: XXH3-128, as 32 hexadecimal digits.

It finds accidents (a flipped bit, a torn write, swapped files), at memory speed and without holding the GIL; it is no
protection against somebody who forges a file. Knows nothing of files.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import xxhash

if TYPE_CHECKING:
    from collections.abc import Iterable

    from typing_extensions import Buffer

__all__ = ["ALGORITHM", "BLOCK_BYTES", "digest", "digest_of_parts", "is_digest", "num_blocks"]

ALGORITHM = "xxh3-128"
BLOCK_BYTES = 8 << 20
"""The largest block that one digest covers, and the size that is written."""

_DIGEST = re.compile(r"[0-9a-f]{32}")


def digest(data: Buffer) -> str:
    """Return the digest of contiguous bytes: canonical (big-endian) XXH3-128 with seed 0, in lower-case hex."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_of_parts(parts: Iterable[Buffer]) -> str:
    """Return the digest of bytes that lie in several places, as if they were in one."""
    state = xxhash.xxh3_128()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def is_digest(value: object) -> bool:
    """Say whether `value` is written as `digest` writes it."""
    return type(value) is str and _DIGEST.fullmatch(value) is not None


def num_blocks(num_bytes: int, block_bytes: int) -> int:
    """Return how many blocks, the last one perhaps short, a file of `num_bytes` has."""
    return -(-num_bytes // block_bytes)
