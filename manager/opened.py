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
from safepoint.formats.checksum import digest
from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint
from safepoint.formats.foreign.opening import open_foreign
from safepoint.formats.layout import COMMIT_NAME
from safepoint.formats.region import Region, check_tiling
from safepoint.formats.storage import LocalStorage, open_storage
from safepoint.formats.storage.opening import is_url
from safepoint.formats.tree import display_path
from safepoint.manager.adapters import ArrayLeaf, ArraySpec
from safepoint.manager.errors import (
    CheckpointError,
    IncompleteCoverageError,
    InvalidArgumentError,
    StepNotFoundError,
    UnsupportedValueError,
)
from safepoint.manager.leaf_reading import read_parts
from safepoint.manager.outline import outline_state
from safepoint.manager.sources import byte_view, flat_bytes
from safepoint.manager.state import FlatState, flatten
from safepoint.manager.step_listing import parse_step
from safepoint.manager.step_paths import OpenStep, open_root, parse_step_path
from safepoint.manager.step_reading import StepReader

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.formats.manifest import LeafEntry, TreePath

__all__ = ["Opened", "list_checkpoints", "open_checkpoint", "opened_step"]

OWN_KIND = "safepoint"
_CACHED_BYTES = 32 << 20
"""How much of the small leaves of a step is read ahead, since many of them share a verified block."""


@dataclass(frozen=True, kw_only=True)
class Opened:
    """An opened checkpoint.

    Attributes:
        checkpoint: tree and arrays.
        state: what can be saved again: of a step of ours exactly what was saved, of others their tree.
        step: its number, where it is a step of ours, or has one by its directory.
        metrics: of the step.
        own: the step, where it is ours.
        identity: a digest that another content would not have.
    """

    checkpoint: ForeignCheckpoint
    state: FlatState
    step: int | None
    metrics: Mapping[str, float]
    own: OpenStep | None
    identity: str

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

    def check_complete(self) -> None:
        """Check that all of every leaf is here: a root of one process's own may hold its part only.

        Raises:
            IncompleteCoverageError: it is a part.
        """
        if self.own is None or not self.own.manifest.partial:
            return
        for entry in self.own.manifest.leaves:
            try:
                check_tiling(entry.shape, (shard.region for shard in entry.shards), leaf=display_path(entry.path))
            except IncompleteCoverageError as error:
                error.hint = (
                    "Each process saved to a root of its own, and this is one of them: restore from all of them."
                )
                raise error.with_context(step=self.step) from None

    def read(self, parts: Sequence[tuple[TreePath, Region]]) -> list[torch.Tensor]:
        """Return regions of leaves as contiguous host tensors, verified where the step is ours.

        Raises:
            CorruptDataError: the checkpoint is damaged.
            StorageError: it cannot be read.
        """
        if self.own is not None:
            entries = {entry.path: entry for entry in self.own.manifest.leaves}
            return read_parts(self.own, [(entries[path], region) for path, region in parts])
        return [self.state.arrays[path].read(region) for path, region in parts]


def open_checkpoint(path: str | os.PathLike[str], *, step: int | None = None) -> Opened:
    """Open a step of ours (its directory; or a root, and the latest step or `step`), or what others wrote.

    A directory of others' checkpoints by step number (Orbax's manager, torch_xla's) is opened at `step`, or at the
    highest.

    Raises:
        StepNotFoundError: the root has no such step.
        InvalidArgumentError: it is no checkpoint of any kind.
        CorruptDataError: it is damaged.
        StorageError: it cannot be read.
    """
    if is_url(os.fspath(path)):
        named = parse_step_path(path)
        return _open_step(named.root, step if named.step is None else named.step)
    location = os.path.abspath(os.fspath(path))
    parent, name = os.path.split(location)
    if step is None and parse_step(name) is not None and os.path.isfile(os.path.join(location, COMMIT_NAME)):
        return _open_step(parent, int(name))
    if os.path.isdir(location) and StepReader(LocalStorage(location)).list_steps():
        return _open_step(location, step)
    steps = _foreign_steps(location)
    if step is None and not steps:
        return _open_others(location)
    if step not in (None, *steps):
        raise StepNotFoundError(f"there is no step {step}", step=step, path=location, available=tuple(sorted(steps)))
    return _open_others(os.path.join(location, str(max(steps) if step is None else step)))


def list_checkpoints(path: str | os.PathLike[str]) -> list[int]:
    """Return the steps of a root, ours or of others, in the order of their commits, or of their numbers.

    Raises:
        InvalidArgumentError: it is no root.
    """
    if is_url(os.fspath(path)):
        return [known.record.step for known in StepReader(open_root(path)).list_steps()]
    location = os.path.abspath(os.fspath(path))
    if os.path.isdir(location) and not os.path.isfile(os.path.join(location, COMMIT_NAME)):
        found = [known.record.step for known in StepReader(LocalStorage(location)).list_steps()]
        found = found or sorted(_foreign_steps(location))
        if found:
            return found
    raise InvalidArgumentError("this is no root with steps", path=location)


def _foreign_steps(location: str) -> list[int]:
    """Return the directories that are named by a number and hold a checkpoint, where the directory itself is none."""
    try:
        names = [name for name in os.listdir(location) if parse_step(name) is not None]
        if not names:
            return []
        open_foreign(location)
    except InvalidArgumentError:
        return [int(name) for name in names if _is_checkpoint(os.path.join(location, name))]
    except (CheckpointError, OSError):
        return []
    return []


def _is_checkpoint(path: str) -> bool:
    try:
        open_foreign(path)
    except InvalidArgumentError:
        return False
    except CheckpointError:
        return True  # a damaged one: whoever opens it learns of it
    return True


def _open_others(location: str) -> Opened:
    checkpoint = open_foreign(location)
    checkpoint.check_nothing_lost()
    number = parse_step(os.path.basename(location))
    metrics = checkpoint.metadata.get("metrics")
    return Opened(
        checkpoint=checkpoint,
        state=flatten(_items(_with_leaves(checkpoint.tree, checkpoint)), process_index=0, process_count=1),
        step=number if os.path.isdir(location) else None,
        metrics=metrics if isinstance(metrics, dict) else {},
        own=None,
        identity=_identity_of(location),
    )


def _identity_of(location: str) -> str:
    """Return a digest of the names, sizes and times of all files."""
    found = []
    for directory, _, names in os.walk(location) if os.path.isdir(location) else [(os.path.dirname(location), (), ())]:
        for name in names or ([] if os.path.isdir(location) else [os.path.basename(location)]):
            path = os.path.join(directory, name)
            status = os.stat(path)
            found.append((os.path.relpath(path, location), status.st_size, status.st_mtime_ns))
    return digest(repr(sorted(found)).encode())


def _open_step(root: str, step: int | None) -> Opened:
    storage = open_storage(root)
    reader = StepReader(storage)
    steps = reader.list_steps()
    chosen = [found for found in steps if step is None or found.record.step == step]
    if not chosen:
        available = tuple(sorted(found.record.step for found in steps))
        raise StepNotFoundError(f"step {step} is not committed here", step=step, path=root, available=available)
    found = chosen[-1]
    manifest = reader.load_manifest(found)
    reader.check_files(found, manifest)
    return opened_step(OpenStep(storage=storage, committed=found, manifest=manifest))


def opened_step(own: OpenStep) -> Opened:
    """Return a step of ours as a checkpoint like any other."""
    manifest, record = own.manifest, own.committed.record
    small = _SmallLeaves(own)
    arrays = {entry.path: _StepArray(own, entry, small) for entry in manifest.leaves}
    has_views = any(node.kind == "view" for node in manifest.structure.values())
    checkpoint = ForeignCheckpoint(
        kind=OWN_KIND,
        location=own.storage.describe(own.prefix),
        tree={} if has_views else outline_state(manifest.structure),  # a view is no array of its own
        arrays=dict(arrays),
    )
    leaves: dict[Any, ArrayLeaf] = {at: _SourceLeaf(array, display_path(at)) for at, array in arrays.items()}
    return Opened(
        checkpoint=checkpoint,
        state=FlatState(nodes=dict(manifest.structure), arrays=leaves),
        step=record.step,
        metrics=record.metrics,
        own=own,
        identity=f"{record.attempt}/{record.manifest_digest}",
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

    def __init__(self, own: OpenStep, entry: LeafEntry, small: _SmallLeaves) -> None:
        self._own = own
        self._entry = entry
        self._small = small
        self.dtype = entry.dtype
        self.shape = entry.shape

    def read_into(self, region: Region, out: memoryview) -> None:
        data = self._small.get(self._entry) if region == Region.whole(self.shape) else None
        if data is None:
            (data,) = read_parts(self._own, [(self._entry, region)])
        if data.numel():
            torch.frombuffer(out, dtype=torch.uint8).copy_(flat_bytes(data))


class _SmallLeaves:
    """Reads whole leaves ahead, in the order of the files, as many as may be kept: they are asked for in that order."""

    def __init__(self, own: OpenStep) -> None:
        self._own = own
        self._kept: dict[TreePath, torch.Tensor] = {}
        small = [entry for entry in own.manifest.leaves if _whole_bytes(entry) <= _CACHED_BYTES // 4]
        self._ordered = sorted(small, key=_place)
        self._index = {entry.path: index for index, entry in enumerate(self._ordered)}

    def get(self, entry: LeafEntry) -> torch.Tensor | None:
        """Return a leaf, or None where it is no small one."""
        start = self._index.get(entry.path)
        if start is None:
            return None
        if entry.path not in self._kept:
            chosen: list[LeafEntry] = []
            room = _CACHED_BYTES
            for other in self._ordered[start:]:
                room -= _whole_bytes(other)
                if room < 0:
                    break
                chosen.append(other)
            tensors = read_parts(self._own, [(other, Region.whole(other.shape)) for other in chosen])
            self._kept = {other.path: tensor for other, tensor in zip(chosen, tensors, strict=True)}
        return self._kept[entry.path]


def _whole_bytes(entry: LeafEntry) -> int:
    return Region.whole(entry.shape).num_elements * ITEM_BYTES[entry.dtype]


def _place(entry: LeafEntry) -> tuple[int, int]:
    return min(((shard.file, shard.offset) for shard in entry.shards), default=(0, 0))
