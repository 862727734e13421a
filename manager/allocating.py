"""Host memory for a restore without a target: as much as the step's files back up, and no more.

A manifest is input from anywhere: what it claims of sizes is held against what lies in the files before memory is
taken.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.manifest import LeafEntry, Manifest, display_path
from safepoint.manager.errors import CorruptDataError, IncompleteCoverageError, InvalidArgumentError
from safepoint.manager.host_tensors import fresh_tensors

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from safepoint.formats.manifest import TreePath

__all__ = ["allocate_leaves"]


def allocate_leaves(manifest: Manifest, entries: Sequence[LeafEntry]) -> dict[TreePath, torch.Tensor]:
    """Return fresh host tensors for these leaves of a step whose files were checked to be there at their sizes.

    Raises:
        IncompleteCoverageError: the step does not hold all of a leaf.
        CorruptDataError: the leaves are larger than all files together.
        InvalidArgumentError: this process does not get so much memory.
    """
    for entry in entries:
        held = sum(shard.region.num_elements for shard in entry.shards)
        if held < math.prod(entry.shape):
            raise IncompleteCoverageError(
                f"the step holds {held:,} of the leaf's {math.prod(entry.shape):,} elements",
                leaf=display_path(entry.path),
                step=manifest.step,
                hint="Restore into a target that wants only what is there, or from the roots of all processes.",
            )
    wanted = sum(math.prod(entry.shape) * ITEM_BYTES[entry.dtype] for entry in entries)
    stored = sum(file.num_bytes for file in manifest.files)
    if sum(map(_plain_bytes, entries)) > stored:
        raise CorruptDataError(
            f"the manifest claims leaves of {wanted:,} bytes in files of {stored:,}", step=manifest.step
        )
    try:
        return fresh_tensors(entries)
    except (RuntimeError, MemoryError, OSError) as error:
        raise InvalidArgumentError(
            f"there is no memory for the {wanted:,} bytes of this step",
            step=manifest.step,
            hint="Restore into a target that is sharded over processes, or only some items or keys.",
        ) from error


def _plain_bytes(entry: LeafEntry) -> int:
    """Return the bytes that lie in files as they are; each encoded shard was held against its own file already."""
    shards = (shard for shard in entry.shards if shard.codec is None)
    return sum(shard.region.num_elements for shard in shards) * ITEM_BYTES[entry.dtype]
