"""The format `orbax`: each chunk a file of its own, which real Orbax restores onto any mesh.

A chunk file is the items of a region, padded to the chunk's shape, and their CRC-32C; so our own writer and verified
reader serve it. The primary adds Orbax's JSON files. Two processes never write one chunk (`grid`).
"""

from __future__ import annotations

import json
import math
import struct
from typing import TYPE_CHECKING, Any

from safepoint.formats.base import Content, FileLayout, FilePlan, LeafRef, Piece, Placement, Portion, WriteJob
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.orbax import metadata, names
from safepoint.formats.orbax.crc32c import crc32c
from safepoint.formats.orbax.grid import chunk_grid, chunks_of
from safepoint.formats.orbax.names import Entry, check_item, item_entries, item_json
from safepoint.formats.tree import display_path

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from safepoint.formats.base import LeafParts
    from safepoint.formats.layout import Mode
    from safepoint.formats.tree import JSON, TreePath

__all__ = ["OrbaxFormat"]

_CHECK_BYTES = 4
_MAX_CHUNKS = 100_000  # of a leaf; beyond it the shards have no common grid worth the name
_SUCCESS = b"This file was written by safepoint.\n"


class OrbaxFormat:
    """The format `orbax`."""

    name = "orbax"
    modes: tuple[Mode, ...] = ("consolidated", "sharded")
    allows_private_roots = False
    plans_by_geometry = False

    def arrange(self, leaves: Sequence[LeafParts], outline: Callable[[], Mapping[str, Any]]) -> Mapping[TreePath, JSON]:
        """Return for each leaf its grid, and the directories that hold it: its own and those of its aliases.

        Raises:
            UnsupportedValueError: a name that Orbax would mix up; or shards that have no common grid.
        """
        directories: dict[TreePath, list[str]] = {leaf.path: [] for leaf in leaves}
        for directory, entry in _all_entries(outline()):
            if isinstance(entry.value, LeafRef):
                place = f"{directory}/{entry.name}" if entry.name else directory
                directories[entry.value.path].append(place)
        return {leaf.path: {"grid": _grid_of(leaf), "directories": directories[leaf.path]} for leaf in leaves}

    def plan(self, portions: Sequence[Portion], job: WriteJob) -> list[FilePlan]:
        """Return a file for each chunk, and on the primary those that tell Orbax what they are."""
        plans: list[FilePlan] = []
        for index, portion in enumerate(portions):
            note = job.notes[portion.path]
            for number, directory in enumerate(note["directories"]):
                plans += _chunk_files(directory, index, portion, note["grid"], is_copy=number > 0)
        if job.process_index == 0:
            plans += self._companions(job)
        return plans

    def _companions(self, job: WriteJob) -> Iterator[FilePlan]:
        for leaf in job.leaves:
            note = job.notes[leaf.path]
            for directory in note["directories"]:
                yield _whole_file(f"{directory}/zarr.json", metadata.array_json(leaf.dtype, leaf.shape, note["grid"]))
        handlers: dict[str, str] = {}
        for item, value in job.outline().items():
            directory = check_item(item)
            entries = item_entries(item, value)
            is_tree = any(entry.kind == "array" for entry in entries)
            handlers[directory] = metadata.STANDARD_HANDLER if is_tree else metadata.JSON_HANDLER
            yield from (
                _tree_files(directory, entries) if is_tree else _json_files(directory, "metadata", item_json(value))
            )
        if job.metrics:
            handlers[names.METRICS_ITEM] = metadata.JSON_HANDLER
            yield from _json_files(names.METRICS_ITEM, "metrics", dict(job.metrics))
        step = metadata.step_metadata(handlers, job.metrics, time_nsecs=job.time_nsecs)
        yield _whole_file("_CHECKPOINT_METADATA", step)
        yield _whole_file("commit_success.txt", _SUCCESS)


class _ChunkEnd:
    """Puts a chunk's checksum after it."""

    def check(self, data: memoryview) -> int:
        return crc32c(data)

    def after(self, index: int, checks: Sequence[int]) -> bytes:
        return checks[index].to_bytes(_CHECK_BYTES, "little")


def _all_entries(outline: Mapping[str, Any]) -> Iterator[tuple[str, Entry]]:
    for item, value in outline.items():
        directory = check_item(item)
        for entry in item_entries(item, value):
            yield directory, entry


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


def _chunk_files(
    directory: str, index: int, portion: Portion, grid: Sequence[int], *, is_copy: bool
) -> Iterator[FilePlan]:
    num_bytes = math.prod(grid) * ITEM_BYTES[portion.dtype]
    stored_grid = metadata.stored_form(portion.dtype, grid)[1]
    extra = (0,) * (len(stored_grid) - len(grid))  # the bytes of an item are never cut
    for numbers, region in chunks_of(portion.region, grid, portion.shape):
        key = "/".join(["c", *map(str, (*numbers, *extra))])
        piece = Piece(key=f"{directory}/{key}", dtype=portion.dtype, shape=tuple(grid))
        yield FilePlan(
            path=piece.key,
            layout=FileLayout(
                header=b"",
                placements=(Placement(piece=piece, offset=0, num_bytes=num_bytes),),
                num_bytes=num_bytes + _CHECK_BYTES,
                framing=_ChunkEnd(),
            ),
            contents=(Content(portion=index, region=region, is_copy=is_copy),),
        )


def _tree_files(directory: str, entries: Sequence[Entry]) -> Iterator[FilePlan]:
    for entry in entries:
        if entry.kind == "scalar":
            place = f"{directory}/{entry.name}" if entry.name else directory
            dtype, data = _scalar(entry.value)
            yield _whole_file(f"{place}/zarr.json", metadata.array_json(dtype, (), ()))
            yield _whole_file(f"{place}/c", data + crc32c(data).to_bytes(_CHECK_BYTES, "little"))
    strings = metadata.strings_json(entries)
    if strings is not None:
        yield _whole_file(f"{directory}/_strings.json", strings)
    yield _whole_file(f"{directory}/_METADATA", metadata.item_metadata(entries, use_ocdbt=False))
    yield _whole_file(f"{directory}/commit_success.txt", _SUCCESS)


def _json_files(directory: str, name: str, value: Any) -> Iterator[FilePlan]:
    yield _whole_file(f"{directory}/{name}", json.dumps(value).encode())
    yield _whole_file(f"{directory}/commit_success.txt", _SUCCESS)


def _scalar(value: float) -> tuple[str, bytes]:
    if type(value) is bool:
        return "bool", bytes([value])
    if type(value) is int:
        return "int64", value.to_bytes(8, "little", signed=True)
    return "float64", struct.pack("<d", value)


def _whole_file(path: str, data: bytes) -> FilePlan:
    return FilePlan(path=path, layout=FileLayout(header=data, placements=(), num_bytes=len(data)))
