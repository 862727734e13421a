"""The format `orbax`: what real Orbax restores onto any mesh, in files that our own writer and verified reader serve.

A chunk is the items of a region, padded to the chunk's shape, and their CRC-32C: in a file of its own (`files`), or
after others in the data file of its process (`database`). The primary adds Orbax's JSON files. Two processes never
write one chunk (`grid`).
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from safepoint.formats.base import FilePlan, LeafRef, Portion, WriteJob
from safepoint.formats.codecs import ZSTD
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.orbax import metadata, names
from safepoint.formats.orbax.database import Held, data_file, database_files, parts_by_item
from safepoint.formats.orbax.files import chunk_files, scalar_entries, whole_file
from safepoint.formats.orbax.grid import chunk_grid
from safepoint.formats.orbax.names import Entry, check_item, item_entries, item_json
from safepoint.formats.tree import display_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from safepoint.formats.base import LeafParts, WrittenPart
    from safepoint.formats.codecs import Codec
    from safepoint.formats.layout import Mode
    from safepoint.formats.tree import JSON, TreePath

__all__ = ["FILES_MAX_ARRAYS", "ORBAX", "ORBAX_ZSTD", "OrbaxFormat", "OrbaxItem"]

FILES_MAX_ARRAYS = 16
"""An item of more arrays and numbers becomes a database: as files, they would be twice as many, each made durable."""

_MAX_CHUNKS = 100_000  # of a leaf; beyond it the shards have no common grid worth the name
_SUCCESS = b"This file was written by safepoint.\n"

Layout = Literal["files", "ocdbt", "json"]


@dataclass(frozen=True, kw_only=True)
class OrbaxItem:
    """One item, as it lies in its directory.

    Attributes:
        directory: its name, also in Orbax.
        value: as other tools know it, with a LeafRef for each array.
        entries: its leaves in Orbax.
        layout: how it is laid out when it is written now.
    """

    directory: str
    value: Any
    entries: Sequence[Entry]
    layout: Layout


@dataclass(frozen=True, kw_only=True)
class OrbaxFormat:
    """The format `orbax`, or `orbax_zstd` where chunks are encoded.

    Attributes:
        name: of the format.
        codec: of the chunks.
    """

    name: str = "orbax"
    codec: Codec | None = None
    modes: tuple[Mode, ...] = ("consolidated", "sharded")
    allows_private_roots: bool = False
    allows_parts: bool = False
    plans_by_geometry: bool = False

    def arrange(self, leaves: Sequence[LeafParts], outline: Callable[[], Mapping[str, Any]]) -> Mapping[TreePath, JSON]:
        """Return for each leaf its grid, and the places that hold it: its own and those of its aliases.

        Raises:
            UnsupportedValueError: a name that Orbax would mix up; or shards that have no common grid.
        """
        places: dict[TreePath, dict[str, Any]] = {leaf.path: {} for leaf in leaves}
        for item in self.items(outline):
            for entry in item.entries:
                if isinstance(entry.value, LeafRef):
                    held = places[entry.value.path]
                    fresh = {"item": item.directory, "layout": item.layout, "names": []}
                    held.setdefault(item.directory, fresh)["names"].append(entry.name)
        return {leaf.path: {"grid": _grid_of(leaf), "places": list(places[leaf.path].values())} for leaf in leaves}

    def plan(self, portions: Sequence[Portion], job: WriteJob) -> list[FilePlan]:
        """Return the files with the chunks, and on the primary those that tell Orbax what they are."""
        plans: list[FilePlan] = []
        databases: dict[str, list[Held]] = defaultdict(list)
        for index, portion in enumerate(portions):
            note = job.notes[portion.path]
            is_copy = False
            for place in note["places"]:
                if place["layout"] == "ocdbt":  # its aliases there point to the same chunks
                    held = (index, portion, place["names"][0], note["grid"], is_copy)
                    databases[place["item"]].append(held)
                    is_copy = True
                    continue
                for name in place["names"]:
                    directory = f"{place['item']}/{name}" if name else place["item"]
                    plans += chunk_files(directory, index, portion, note["grid"], is_copy=is_copy)
                    is_copy = True
        plans += (
            data_file(item, held, process_index=job.process_index, codec=self.codec) for item, held in databases.items()
        )
        if job.process_index == 0:
            plans += self._companions(job)
        return plans

    def conclude(self, parts: Iterable[WrittenPart], job: WriteJob) -> list[FilePlan]:
        """Return the database of each item that is one."""
        items = [item for item in self.items(job.outline) if item.layout == "ocdbt"]
        written = parts_by_item(parts) if items else {}
        plans = []
        for item in items:
            leaves = [
                (leaf, job.notes[leaf.path]["grid"], place["names"])
                for leaf in job.leaves
                for place in job.notes[leaf.path]["places"]
                if place["item"] == item.directory
            ]
            plans += database_files(
                item.directory,
                item.entries,
                leaves,
                written.get(item.directory, ()),
                codec=self.codec,
                time_nsecs=job.time_nsecs,
            )
        return plans

    def items(self, outline: Callable[[], Mapping[str, Any]]) -> Iterator[OrbaxItem]:
        """Yield the items of a state.

        Raises:
            UnsupportedValueError: a name that Orbax would mix up, or keeps for itself.
        """
        for name, value in outline().items():
            directory = check_item(name)
            entries = item_entries(name, value)
            yield OrbaxItem(directory=directory, value=value, entries=entries, layout=self._layout(entries))

    def _layout(self, entries: Sequence[Entry]) -> Layout:
        if not any(entry.kind == "array" for entry in entries):
            return "json"
        if self.codec is not None:
            return "ocdbt"
        return "files" if sum(entry.kind in ("array", "scalar") for entry in entries) <= FILES_MAX_ARRAYS else "ocdbt"

    def _companions(self, job: WriteJob) -> Iterator[FilePlan]:
        for leaf in job.leaves:
            note = job.notes[leaf.path]
            for place in note["places"]:
                for name in place["names"] if place["layout"] == "files" else ():
                    directory = f"{place['item']}/{name}" if name else place["item"]
                    described = metadata.array_json(leaf.dtype, leaf.shape, note["grid"])
                    yield whole_file(f"{directory}/zarr.json", described)
        handlers: dict[str, str] = {}
        for item in self.items(job.outline):
            is_json = item.layout == "json"
            handlers[item.directory] = metadata.JSON_HANDLER if is_json else metadata.STANDARD_HANDLER
            yield from (
                _json_files(item.directory, "metadata", item_json(item.value)) if is_json else _tree_files(item)
            )
        if job.metrics:
            handlers[names.METRICS_ITEM] = metadata.JSON_HANDLER
            yield from _json_files(names.METRICS_ITEM, "metrics", dict(job.metrics))
        step = metadata.step_metadata(handlers, job.metrics, time_nsecs=job.time_nsecs)
        yield whole_file("_CHECKPOINT_METADATA", step)
        yield whole_file("commit_success.txt", _SUCCESS)


def _grid_of(leaf: LeafParts) -> list[int]:
    grid = chunk_grid(leaf.shape, leaf.regions, item_bytes=ITEM_BYTES[leaf.dtype])
    num_chunks = math.prod(-(-size // chunk) for size, chunk in zip(leaf.shape, grid, strict=True))
    if num_chunks > _MAX_CHUNKS:
        raise UnsupportedValueError(
            f"the shards have no common grid of less than {num_chunks:,} chunks",
            leaf=display_path(leaf.path),
            hint='Shard the leaf evenly, or use the format "safetensors".',
        )
    return list(grid)


def _tree_files(item: OrbaxItem) -> Iterator[FilePlan]:
    if item.layout == "files":
        for key, value in scalar_entries(item.entries):
            yield whole_file(f"{item.directory}/{key}", value)
    strings = metadata.strings_json(item.entries)
    if strings is not None:
        yield whole_file(f"{item.directory}/_strings.json", strings)
    described = metadata.item_metadata(item.entries, use_ocdbt=item.layout == "ocdbt")
    yield whole_file(f"{item.directory}/_METADATA", described)
    yield whole_file(f"{item.directory}/commit_success.txt", _SUCCESS)


def _json_files(directory: str, name: str, value: Any) -> Iterator[FilePlan]:
    yield whole_file(f"{directory}/{name}", json.dumps(value).encode())
    yield whole_file(f"{directory}/commit_success.txt", _SUCCESS)


ORBAX = OrbaxFormat()
ORBAX_ZSTD = OrbaxFormat(name="orbax_zstd", codec=ZSTD)
