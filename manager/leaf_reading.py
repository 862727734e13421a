"""Leaves of a step that is looked at, not restored: found by name, read in parts, in bounded memory.

What is read is verified as it passes, as in a restore. Knows nothing of live state.
"""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

import torch

from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.formats.fields import parse_json
from safepoint.formats.manifest import LeafEntry, Manifest, Node, TreePath, display_path
from safepoint.formats.region import Region
from safepoint.manager.adapters import ArraySpec
from safepoint.manager.adapters.tensor import Piece, TensorLeaf
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.fetching import Fetch, fetch_leaves
from safepoint.manager.planner import plan_restore
from safepoint.manager.tree_keys import key_from_json

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from safepoint.manager.step_paths import OpenStep

__all__ = ["Part", "cut", "find_node", "parse_slice", "part_bytes", "read_parts", "whole_spec"]

_MAX_ALIKE = 10_000
"""Among how many names those are looked for that are nearly the one asked for."""

Part = tuple[LeafEntry, Region]
"""A region of a stored leaf."""


def part_bytes(part: Part) -> int:
    """Return its size in bytes."""
    entry, region = part
    return region.num_elements * ITEM_BYTES[entry.dtype]


def whole_spec(entry: LeafEntry) -> ArraySpec:
    """Return the geometry of a leaf that is held as a whole."""
    return ArraySpec(dtype=entry.dtype, shape=entry.shape, regions=(Region.whole(entry.shape),), kind="tensor")


def read_parts(step: OpenStep, parts: Sequence[Part]) -> list[torch.Tensor]:
    """Return a host tensor for each part; each block of a file is read once, however many parts lie in it.

    Raises:
        CorruptDataError: bytes are not those that were committed; names leaf and file.
        IncompleteCoverageError: the step does not hold all of a part.
        UnsupportedValueError: this torch has no such dtype.
    """
    tensors: list[torch.Tensor] = []
    leaves: list[TensorLeaf] = []
    fetches: list[Fetch] = []
    for entry, region in parts:
        # As bytes first: torch warns of tensors of rare dtypes that it makes itself.
        memory = torch.empty(part_bytes((entry, region)), dtype=torch.uint8)
        tensor = memory.view(torch_dtype(entry.dtype)).reshape(region.shape)
        spec = ArraySpec(dtype=entry.dtype, shape=entry.shape, regions=(region,), kind="tensor")
        leaf = TensorLeaf(spec, display_path(entry.path), [Piece(region, tensor)])
        tensors.append(tensor)
        leaves.append(leaf)
        fetches += [
            Fetch(entry=entry, leaf=leaf, target=region, shard=shard, common=common)
            for shard, common in plan_restore(entry, region)
        ]
    fetches.sort(key=lambda fetch: (fetch.shard.file, fetch.shard.offset))
    fetch_leaves(step.storage, step.prefix, step.manifest, fetches)
    for leaf in leaves:
        leaf.finish()
    return tensors


def cut(entry: LeafEntry, max_bytes: int, region: Region | None = None) -> Iterator[Part]:
    """Cut a leaf, or a region of it, into parts of at most so many bytes, in C order; one item is never cut."""
    whole = Region.whole(entry.shape) if region is None else region
    for part in whole.cut(max_bytes // ITEM_BYTES[entry.dtype]):
        yield entry, part


def find_node(manifest: Manifest, name: str) -> tuple[TreePath, Node]:
    """Return the node of this name: its dotted path, or its keys as a JSON list where two have the same dotted path.

    Raises:
        InvalidArgumentError: there is none, or more than one.
    """
    if name.startswith("["):
        keys = parse_json(name.encode(), what="the path", path=name)
        found = [tuple(key_from_json(key) for key in keys)]
        found = [path for path in found if path in manifest.structure]
    else:
        found = [path for path in manifest.structure if display_path(path) == name and path]
    if len(found) == 1:
        return found[0], manifest.structure[found[0]]
    if found:
        raise InvalidArgumentError(
            f"{len(found)} leaves are called {name!r}", hint='Give the keys as a JSON list, such as ["model", 0].'
        )
    hint = "`safepoint show` lists the leaves."
    if near := _near(manifest, name):
        hint = f"Did you mean {', '.join(near)}? {hint}"
    raise InvalidArgumentError(f"there is no leaf {name!r} in step {manifest.step}", step=manifest.step, hint=hint)


def _near(manifest: Manifest, name: str) -> list[str]:
    last = name.rpartition(".")[2]
    shown = [display_path(leaf.path) for leaf in manifest.leaves]
    alike = difflib.get_close_matches(name, shown[:_MAX_ALIKE])
    return alike or [text for text in shown if text.startswith(name) or text.endswith(f".{last}")][:3]


def parse_slice(text: str, shape: Sequence[int]) -> Region:
    """Return the region that a slice such as `0:2, :, -1` picks; a number keeps its dimension, with size 1.

    Args:
        text: parts for the first dimensions, separated by commas; whole ones follow.
        shape: of the leaf.

    Raises:
        InvalidArgumentError: it is no slice of this shape; steps are not supported.
    """
    parts = [part.strip() for part in text.strip().removeprefix("[").removesuffix("]").split(",") if part.strip()]
    if len(parts) > len(shape):
        raise InvalidArgumentError(f"the slice {text!r} has {len(parts)} parts for {len(shape)} dimensions")
    bounds = [_bounds(part, size) for part, size in zip(parts, shape, strict=False)]
    bounds += [(0, size) for size in shape[len(parts) :]]
    return Region(tuple(start for start, _ in bounds), tuple(stop - start for start, stop in bounds))


def _bounds(part: str, size: int) -> tuple[int, int]:
    start, colon, stop = part.partition(":")
    try:
        if not colon:
            index = int(start)
            if not -size <= index < size:
                raise InvalidArgumentError(f"index {index} is outside a dimension of {size}")
            return index % size, index % size + 1
        first, last, _ = slice(int(start) if start else None, int(stop) if stop else None).indices(size)
    except ValueError as error:
        if isinstance(error, InvalidArgumentError):
            raise
        raise InvalidArgumentError(
            f"{part!r} is no part of a slice", hint="Give numbers or start:stop, such as 0:2,:,-1."
        ) from None
    return first, max(first, last)
