"""Manifests for tests: one worked by hand, one of any size, and a hypothesis strategy for all others."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import strategies as st

from safepoint.formats.checksum import digest, num_blocks
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.manifest import (
    CommitRecord,
    FileEntry,
    LeafEntry,
    Manifest,
    Node,
    PathKey,
    ShardEntry,
    TaggedKey,
    TreePath,
)
from safepoint.formats.region import Region

BLOCK = 8 << 20


def file_entry(path: str, num_bytes: int, *, process_index: int = 0, block_bytes: int = BLOCK) -> FileEntry:
    """Return the entry of a file of some size, with digests that are made up."""
    digests = tuple(digest(f"{path}/{i}".encode()) for i in range(num_blocks(num_bytes, block_bytes)))
    return FileEntry(
        path=path,
        num_bytes=num_bytes,
        block_bytes=block_bytes,
        digests=digests,
        process_index=process_index,
        attempt="a1",
    )


def example_manifest(**changes: Any) -> Manifest:
    """Return a step saved by two processes: a leaf in two shards, a scalar, an empty leaf, and odd keys."""
    structure = {
        (): Node(kind="dict"),
        ("model",): Node(kind="stateful", data={"b": [1, None], "a": True}),
        ("model", "weight"): Node(kind="array"),
        ("tokens",): Node(kind="value", data=3),
        ("odd",): Node(kind="dict"),
        ("odd", 0): Node(kind="array"),
        ("odd", "0"): Node(kind="array"),
        ("odd", TaggedKey("bool", "True")): Node(kind="value", data="x"),
    }
    leaves = (
        LeafEntry(
            path=("model", "weight"),
            dtype="bfloat16",
            shape=(4, 3),
            shards=(
                ShardEntry(region=Region((0, 0), (3, 3)), file=0, offset=4096, num_bytes=18, key="model.weight@0,0"),
                ShardEntry(region=Region((3, 0), (1, 3)), file=1, offset=4096, num_bytes=6, key="model.weight@3,0"),
            ),
        ),
        LeafEntry(
            path=("odd", 0),
            dtype="int64",
            shape=(),
            shards=(ShardEntry(region=Region((), ()), file=1, offset=4102, num_bytes=8, key="odd.0"),),
        ),
        LeafEntry(path=("odd", "0"), dtype="float32", shape=(0, 7), shards=()),
    )
    files = (
        file_entry("shard-00000-of-00002.safetensors", 4096 + 18),
        file_entry("shard-00001-of-00002.safetensors", 4096 + 14, process_index=1),
    )
    values: dict[str, Any] = {
        "structure": structure,
        "leaves": leaves,
        "files": files,
        "process_count": 2,
        "format": "safetensors",
        "mode": "sharded",
        "step": 1000,
        "attempt": "a1",
    }
    return Manifest(**{**values, **changes})


def large_manifest(num_leaves: int) -> Manifest:
    """Return a manifest of many leaves in one file."""
    structure: dict[TreePath, Node] = {(): Node(kind="dict"), ("model",): Node(kind="dict")}
    leaves = []
    for i in range(num_leaves):
        path: TreePath = ("model", f"layers.{i}.weight")
        structure[path] = Node(kind="array")
        shard = ShardEntry(
            region=Region.whole((2, 2)), file=0, offset=4096 + 16 * i, num_bytes=16, key=f"model.layers.{i}.weight"
        )
        leaves.append(LeafEntry(path=path, dtype="float32", shape=(2, 2), shards=(shard,)))
    return Manifest(
        structure=structure,
        leaves=tuple(leaves),
        files=(file_entry("model/model.safetensors", 4096 + 16 * num_leaves),),
        process_count=1,
        format="safetensors",
        mode="consolidated",
        step=0,
        attempt="a1",
    )


def example_record(**changes: Any) -> CommitRecord:
    """Return the commit record of `example_manifest`."""
    manifest = example_manifest().to_bytes()
    values: dict[str, Any] = {
        "step": 1000,
        "sequence": 7,
        "attempt": "a1",
        "run": "r1",
        "parent": "a0",
        "mode": "sharded",
        "format": "safetensors",
        "metrics": {"loss": 0.1},
        "num_bytes": 32,
        "num_leaves": 3,
        "process_count": 2,
        "manifest_bytes": len(manifest),
        "manifest_digest": digest(manifest),
        "timings": {"write": 0.5},
        "extra": {"note": ["x", None]},
        "created": "2025-01-01T00:00:00+00:00",
    }
    return CommitRecord(**{**values, **changes})


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
PATH_KEYS: st.SearchStrategy[PathKey] = (
    st.text(max_size=4) | st.integers() | st.builds(TaggedKey, st.sampled_from(["bool", "float"]), st.text(max_size=3))
)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    """Draw a valid manifest: any tree, leaves of any dtype cut along their first dimension, up to three files."""
    paths: list[TreePath] = [()]
    for _ in range(draw(st.integers(0, 8))):
        path = (*draw(st.sampled_from(paths)), draw(PATH_KEYS))
        if path not in paths:
            paths.append(path)
    kinds = st.sampled_from(["dict", "list", "array", "value"])
    structure = {path: Node(kind=draw(kinds), data=draw(JSON_VALUES)) for path in paths}
    ends = [draw(st.integers(0, 50)) for _ in range(draw(st.integers(1, 3)))]
    leaves = [draw(_leaves(path, ends)) for path in draw(st.permutations(paths))[: draw(st.integers(0, 5))]]
    process_count = draw(st.integers(1, 4))
    files = tuple(
        file_entry(
            f"folder/file-{i}",
            end + draw(st.integers(0, 3)),
            process_index=draw(st.integers(0, process_count - 1)),
            block_bytes=draw(st.integers(8, 64) | st.just(BLOCK)),
        )
        for i, end in enumerate(ends)
    )
    return Manifest(
        structure=structure,
        leaves=tuple(leaves),
        files=files,
        process_count=process_count,
        format="safetensors",
        mode=draw(st.sampled_from(["consolidated", "sharded"])),
        step=draw(st.integers(0, 2**63 - 1)),
        attempt="a1",
        partial=draw(st.booleans()),
    )


@st.composite
def _leaves(draw: st.DrawFn, path: TreePath, ends: list[int]) -> LeafEntry:
    """Draw a leaf whose shards are appended to files that end at `ends`."""
    dtype = draw(st.sampled_from(sorted(ITEM_BYTES)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    regions = [Region.whole(shape)]
    if shape:
        cut = draw(st.integers(0, shape[0]))
        regions = [
            Region((0,) * len(shape), (cut, *shape[1:])),
            Region((cut, *(0,) * (len(shape) - 1)), (shape[0] - cut, *shape[1:])),
        ]
    shards: list[ShardEntry] = []
    for region in regions:
        file = draw(st.integers(0, len(ends) - 1))
        stored = draw(st.none() | st.just(tuple(size + draw(st.integers(0, 2)) for size in region.shape)))
        num_bytes = math.prod(region.shape if stored is None else stored) * ITEM_BYTES[dtype]
        codec = draw(st.sampled_from([None, None, "zstd"])) if num_bytes else None
        shard = ShardEntry(
            region=region,
            file=file,
            offset=ends[file],
            num_bytes=num_bytes if codec is None else draw(st.integers(1, 9)),
            key=f"key-{file}-{ends[file]}-{path!r}-{len(shards)}",
            stored_shape=stored,
            digest=draw(st.none() | st.just(digest(b"a"))),
            codec=codec,
        )
        shards.append(shard)
        ends[file] += shard.num_bytes
    return LeafEntry(path=path, dtype=dtype, shape=shape, shards=tuple(shards))
