"""One step by its manifest: bytes by item and by leaf, and which process wrote what."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.manifest import display_path
from safepoint.manager.report.trusting import as_text

if TYPE_CHECKING:
    from safepoint.formats.manifest import LeafEntry, Manifest

__all__ = ["LeafFacts", "StepFacts", "WriterFacts", "item_bytes", "step_facts"]


@dataclass(frozen=True, kw_only=True)
class LeafFacts:
    """One array."""

    item: str
    path: str
    dtype: str
    shape: str
    num_bytes: int
    num_regions: int


@dataclass(frozen=True, kw_only=True)
class WriterFacts:
    """What one process wrote: its files, with their bytes, and the bytes of each item in them."""

    process_index: int
    files: tuple[tuple[str, int], ...]
    items: tuple[tuple[str, int], ...]

    @property
    def num_bytes(self) -> int:
        """Of all its files."""
        return sum(num_bytes for _, num_bytes in self.files)


@dataclass(frozen=True, kw_only=True)
class StepFacts:
    """One step: leaves from the largest to the smallest, and writers by process."""

    step: int
    leaves: tuple[LeafFacts, ...]
    writers: tuple[WriterFacts, ...]


def item_bytes(manifest: Manifest) -> dict[str, int]:
    """Return the stored bytes by top-level key."""
    found: dict[str, int] = {}
    for leaf in manifest.leaves:
        item = _item(leaf)
        found[item] = found.get(item, 0) + sum(shard.num_bytes for shard in leaf.shards)
    return found


def step_facts(manifest: Manifest) -> StepFacts:
    """Return what a manifest says of its step."""
    leaves = [
        LeafFacts(
            item=_item(leaf),
            path=as_text(display_path(leaf.path)),
            dtype=leaf.dtype,
            shape="×".join(map(str, leaf.shape)) or "scalar",
            num_bytes=math.prod(leaf.shape) * ITEM_BYTES[leaf.dtype],
            num_regions=len(leaf.shards),
        )
        for leaf in manifest.leaves
    ]
    leaves.sort(key=lambda leaf: (-leaf.num_bytes, leaf.path))
    return StepFacts(step=manifest.step, leaves=tuple(leaves), writers=_writers(manifest))


def _writers(manifest: Manifest) -> tuple[WriterFacts, ...]:
    files: dict[int, list[tuple[str, int]]] = {}
    items: dict[int, dict[str, int]] = {}
    for file in manifest.files:
        files.setdefault(file.process_index, []).append((as_text(file.path), file.num_bytes))
        items.setdefault(file.process_index, {})
    for leaf in manifest.leaves:
        for shard in leaf.shards:
            held = items[manifest.files[shard.file].process_index]
            held[_item(leaf)] = held.get(_item(leaf), 0) + shard.num_bytes
    return tuple(
        WriterFacts(
            process_index=process,
            files=tuple(files[process]),
            items=tuple(sorted(items[process].items(), key=lambda pair: (-pair[1], pair[0]))),
        )
        for process in sorted(files)
    )


def _item(leaf: LeafEntry) -> str:
    return as_text(str(leaf.path[0])) if leaf.path else ""
