"""A checkpoint of any kind, ours or others', opened as a tree with arrays that are read when they are wanted.

For conversion: what is opened can be saved again, leaf by leaf. Owns the reading of our own steps as if they were
foreign; knows nothing of what is written.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import torch_dtype
from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint
from safepoint.formats.foreign.opening import open_foreign
from safepoint.formats.layout import COMMIT_NAME
from safepoint.formats.region import Region
from safepoint.formats.storage import LocalStorage
from safepoint.formats.tree import display_path
from safepoint.manager.adapters import ArrayLeaf, ArraySpec
from safepoint.manager.errors import InvalidArgumentError, StepNotFoundError, UnsupportedValueError
from safepoint.manager.fetching import Fetch, fetch_leaves
from safepoint.manager.outline import outline_state
from safepoint.manager.planner import plan_restore
from safepoint.manager.sources import byte_view
from safepoint.manager.state import FlatState, flatten
from safepoint.manager.step_reading import StepReader

if TYPE_CHECKING:
    from collections.abc import Mapping

    from safepoint.formats.manifest import LeafEntry, Manifest
    from safepoint.formats.storage import Storage

__all__ = ["Opened", "open_checkpoint"]

OWN_KIND = "safepoint"


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An opened checkpoint.

    Attributes:
        checkpoint: tree and arrays.
        state: what can be saved again: of a step of ours exactly what was saved, of others their tree.
        step: its number, where it is a step of ours, or Orbax's.
        metrics: of the step.
    """

    checkpoint: ForeignCheckpoint
    state: FlatState
    step: int | None
    metrics: Mapping[str, float]

    def check_whole_arrays(self) -> None:
        """Check that every array is stored as itself, as other tools need it.

        Raises:
            UnsupportedValueError: one is kept as a view of memory that it shares with others.
        """
        for at, node in self.state.nodes.items():
            if node.kind == "view":
                raise UnsupportedValueError(
                    "this array is stored as a view of memory that it shares with others, which only the format "
                    "safetensors of safepoint keeps",
                    leaf=display_path(at),
                    hint="Restore the step and save the state in the other format.",
                )


def open_checkpoint(path: str | os.PathLike[str], *, step: int | None = None) -> Opened:
    """Open a step of ours (its directory; or a root, and the latest step or `step`), or what others wrote.

    Raises:
        StepNotFoundError: the root has no such step.
        InvalidArgumentError: it is no checkpoint of any kind.
        CorruptDataError: it is damaged.
        StorageError: it cannot be read.
    """
    location = os.path.abspath(os.fspath(path))
    if os.path.isfile(os.path.join(location, COMMIT_NAME)) and os.path.basename(location).isdecimal():
        return _open_step(os.path.dirname(location), int(os.path.basename(location)))
    if os.path.isdir(location) and StepReader(LocalStorage(location)).list_steps():
        return _open_step(location, step)
    if step is not None:
        raise InvalidArgumentError("only a root of safepoint has steps by number", path=location)
    checkpoint = open_foreign(location)
    name = os.path.basename(location)
    metrics = checkpoint.metadata.get("metrics")
    return Opened(
        checkpoint=checkpoint,
        state=flatten(_items(_with_leaves(checkpoint.tree, checkpoint)), process_index=0, process_count=1),
        step=int(name) if checkpoint.kind == "orbax" and name.isdecimal() else None,
        metrics=metrics if isinstance(metrics, dict) else {},
    )


def _open_step(root: str, step: int | None) -> Opened:
    storage = LocalStorage(root)
    reader = StepReader(storage)
    steps = reader.list_steps()
    chosen = [found for found in steps if step is None or found.record.step == step]
    if not chosen:
        available = tuple(sorted(found.record.step for found in steps))
        raise StepNotFoundError(f"step {step} is not committed here", step=step, path=root, available=available)
    found = chosen[-1]
    manifest = reader.load_manifest(found)
    reader.check_files(found, manifest)
    arrays = {entry.path: _StepArray(storage, found.files_prefix, manifest, entry) for entry in manifest.leaves}
    has_views = any(node.kind == "view" for node in manifest.structure.values())
    checkpoint = ForeignCheckpoint(
        kind=OWN_KIND,
        location=f"{root}/{found.prefix}",
        tree={} if has_views else outline_state(manifest.structure),  # a view is no array of its own
        arrays=dict(arrays),
    )
    leaves: dict[Any, ArrayLeaf] = {at: _SourceLeaf(array, ".".join(map(str, at))) for at, array in arrays.items()}
    return Opened(
        checkpoint=checkpoint,
        state=FlatState(nodes=dict(manifest.structure), arrays=leaves),
        step=found.record.step,
        metrics=found.record.metrics,
    )


def _items(tree: Any) -> dict[str, Any]:
    """Return the tree as items: texts for names, and one item where it is no mapping."""
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {"state": tree}


def _with_leaves(value: Any, checkpoint: ForeignCheckpoint) -> Any:
    if isinstance(value, LeafRef):
        return _SourceLeaf(checkpoint.arrays[value.path], ".".join(map(str, value.path)))
    if isinstance(value, dict):
        return {key: _with_leaves(child, checkpoint) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_leaves(child, checkpoint) for child in value)
    return value


class _SourceLeaf(ArrayLeaf):
    """An array that is read from its file whenever a part of it is wanted."""

    __slots__ = ("_array",)

    def __init__(self, array: ForeignArray, name: str) -> None:
        whole = Region.whole(array.shape)
        super().__init__(ArraySpec(dtype=array.dtype, shape=array.shape, regions=(whole,), kind="file"), name)
        self._array = array

    def read(self, region: Region) -> torch.Tensor:
        """Read a region into new memory."""
        data = torch.empty(region.shape, dtype=torch_dtype(self.spec.dtype))
        if data.numel():
            self._array.read_into(region, byte_view(data))
        return data

    def write(self, region: Region, data: torch.Tensor) -> None:
        """Refuse: a file is not written through this."""
        del region, data
        raise InvalidArgumentError("an array in a file is no target", leaf=self.name)


class _StepArray(ForeignArray):
    """A leaf of a step of ours, verified as it is read."""

    def __init__(self, storage: Storage, prefix: str, manifest: Manifest, entry: LeafEntry) -> None:
        self._storage = storage
        self._prefix = prefix
        self._manifest = manifest
        self._entry = entry
        self.dtype = entry.dtype
        self.shape = entry.shape

    def read_into(self, region: Region, out: memoryview) -> None:
        leaf = _MemoryLeaf(self._entry, region, out)
        fetches = [
            Fetch(entry=self._entry, leaf=leaf, target=region, shard=shard, common=common)
            for shard, common in plan_restore(self._entry, region)
        ]
        fetch_leaves(self._storage, self._prefix, self._manifest, fetches)


class _MemoryLeaf(ArrayLeaf):
    """Memory of somebody's, as a target."""

    __slots__ = ("_memory", "_region")

    def __init__(self, entry: LeafEntry, region: Region, memory: memoryview) -> None:
        spec = ArraySpec(dtype=entry.dtype, shape=entry.shape, regions=(region,), kind="memory")
        super().__init__(spec, ".".join(map(str, entry.path)))
        self._region = region
        self._memory = memory

    def read(self, region: Region) -> torch.Tensor:
        """Return the part of the memory."""
        whole = torch.frombuffer(self._memory, dtype=torch_dtype(self.spec.dtype)).reshape(self._region.shape)
        return whole[region.slices_in(self._region)].contiguous()

    def target_buffer(self, region: Region) -> memoryview | None:
        """Return the memory."""
        return self._memory if region == self._region else None

    def write(self, region: Region, data: torch.Tensor) -> None:
        """Copy a part, bit for bit."""
        item_bytes = data.element_size()
        whole = torch.frombuffer(self._memory, dtype=torch.uint8).reshape(*self._region.shape, item_bytes)
        whole[region.slices_in(self._region)] = data.reshape(-1).view(torch.uint8).reshape(*region.shape, item_bytes)
