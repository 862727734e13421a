"""The canonical text of leaves: written as canonical JSON, and read by its pattern as any JSON of the same value is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from safepoint.formats.checksum import digest
from safepoint.formats.errors import CorruptDataError, UnsupportedVersionError
from safepoint.formats.fields import canonical_json
from safepoint.formats.leaf_text import cut_leaves, leaf_text, read_leaf_texts
from safepoint.formats.manifest import LeafEntry, Manifest, Node, ShardEntry
from safepoint.formats.region import Region

from support.manifests import example_manifest, file_entry, large_manifest

PATH = "runs/gpt/1000/manifest.json"


@pytest.mark.parametrize("stored", [None, (3, 4)])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_the_text_of_a_leaf_is_its_canonical_json(shape: tuple[int, ...], stored: tuple[int, ...] | None) -> None:
    shard = ShardEntry(
        region=Region.whole(shape), file=0, offset=4096, num_bytes=24, key='a".\\é\n', stored_shape=stored
    )
    leaf = LeafEntry(path=("a",), dtype="float32", shape=shape, shards=(shard,))
    assert leaf_text(leaf, 7).encode() == canonical_json(leaf.to_json(7))


def full_manifest() -> Manifest:
    """Return a manifest that has all that a writer says of a shard, and a leaf in two of them."""
    whole = Region.whole((4, 3))
    halves = (Region((0, 0), (2, 3)), Region((2, 0), (2, 3)))
    stored = {
        "plain": [ShardEntry(region=whole, file=0, offset=0, num_bytes=48, key="plain", digest=digest(b"plain"))],
        "halves": [
            ShardEntry(region=half, file=0, offset=48 + 24 * number, num_bytes=24, key=f"halves@{number}")
            for number, half in enumerate(halves)
        ],
        "padded": [ShardEntry(region=whole, file=0, offset=96, num_bytes=80, key="pad", stored_shape=(4, 5))],
        "coded": [ShardEntry(region=whole, file=0, offset=176, num_bytes=9, key='"\\é\n', codec="zstd")],
        "empty": [ShardEntry(region=Region((0, 0), (0, 3)), file=0, offset=200, num_bytes=0, key="empty")],
    }
    structure = {(): Node(kind="dict"), **{(name,): Node(kind="array") for name in stored}}
    leaves = tuple(
        LeafEntry(path=(name,), dtype="float32", shape=(0, 3) if name == "empty" else (4, 3), shards=tuple(shards))
        for name, shards in stored.items()
    )
    return example_manifest(structure=structure, leaves=leaves, files=(file_entry("model/model.bin", 200),))


def outcome(data: bytes) -> object:
    """Return the manifest, or what is said against it."""
    try:
        return Manifest.from_bytes(data, path=PATH)
    except (CorruptDataError, UnsupportedVersionError) as error:
        return str(error)


def in_both_styles(value: Any) -> tuple[bytes, bytes]:
    """Return a value in the canonical text, which is read by its pattern, and in another, which is not."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode(), json.dumps(value, indent=1).encode()


@pytest.mark.parametrize("manifest", [full_manifest(), large_manifest(100)], ids=["full", "large"])
def test_all_that_is_written_of_leaves_is_read_by_its_pattern(manifest: Manifest) -> None:
    cut = cut_leaves(manifest.to_bytes())
    assert cut is not None
    members, text = cut
    assert members == {key: value for key, value in json.loads(manifest.to_bytes()).items() if key != "leaves"}
    assert read_leaf_texts(text, paths=list(manifest.structure), files=manifest.files) == manifest.leaves


@pytest.mark.parametrize(
    "changes",
    [
        {"region": [[0, 0], [4, 4]]},
        {"region": [[0], [4]]},
        {"region": [[1, 0], [4, 3]]},
        {"region": [[0, 0], [4, 3], []]},
        {"region": [[0, 0], [True, 3]]},
        {"file": 1},
        {"file": -1},
        {"offset": 153},
        {"offset": 2**63 - 1},
        {"offset": 10**19},
        {"offset": "0"},
        {"num_bytes": 44},
        {"num_bytes": 48.0},
        {"key": None},
        {"key": 3},
        {"key": "pad"},
        {"digest": None},
        {"digest": "0"},
        {"digest": digest(b"a").upper()},
        {"codec": "gzip"},
        {"codec": None},
        {"stored_shape": [4, 2]},
        {"stored_shape": [4, 3, 1]},
        {"stored_shape": None},
        {"stored_shape": [4, 2**63]},
        {"later": [1, {"a": None}]},
    ],
    ids=repr,
)
def test_a_shard_that_is_odd_in_the_canonical_text_is_told_as_in_any_other(changes: dict[str, Any]) -> None:
    value = json.loads(full_manifest().to_bytes())
    value["leaves"][0]["shards"][0].update(changes)
    one, other = map(outcome, in_both_styles(value))
    assert one == other
    assert isinstance(one, Manifest) is ("later" in changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"node": 6},
        {"node": 2},
        {"node": 10**19},
        {"dtype": "float24"},
        {"dtype": None},
        {"shape": [4, 3, 1]},
        {"shape": [1] * 65},
        {"shape": [2**40, 2**40]},
        {"shape": [4, 2**63]},
        {"shape": []},
        {"shards": []},
        {"shards": [None]},
        {"later": {"shards": []}},
    ],
    ids=repr,
)
def test_a_leaf_that_is_odd_in_the_canonical_text_is_told_as_in_any_other(changes: dict[str, Any]) -> None:
    value = json.loads(full_manifest().to_bytes())
    value["leaves"][0].update(changes)
    one, other = map(outcome, in_both_styles(value))
    assert one == other
    assert isinstance(one, Manifest) is ("later" in changes)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"shards":[{', '"shards":[{{'),
        ("}]},{", "}]}{"),
        ("}]},{", "}]},,{"),
        ("}]},{", "}},{"),
        ('}],"mode"', '},],"mode"'),
        ('}]}],"mode"', '}],"mode"'),
        ('"offset":0,', '"offset":00,'),
        ('"shape":[4,3]', '"shape":[4,03]'),
        ('"shape":[4,3]', '"shape":[4,,3]'),
        ('"shape":[4,3]', '"shape":[4,3,]'),
        ('"key":"plain"', '"key":"pl\\ain"'),
        ('"key":"plain"', '"key":"pl\nain"'),
        ('"key":"plain"', '"key":"plain","key":"plain"'),
        ('"leaves":', '"leaves":[],"leaves":'),
        ('"mode":', '"leaves":[],"mode":'),
        ('"mode":', '"kind":"safepoint-manifest","mode":'),
        ('"attempt":"a1",', '"attempt":"a1"]'),
    ],
)
def test_leaves_that_are_no_json_are_refused_in_the_canonical_text(old: str, new: str) -> None:
    text = full_manifest().to_bytes().decode()
    assert old in text
    said = outcome(text.replace(old, new, 1).encode())
    assert "not valid JSON" in str(said)


def test_leaves_of_another_object_are_not_taken_for_those_of_the_manifest() -> None:
    value = json.loads(full_manifest().to_bytes())
    leaves, value["leaves"] = value["leaves"], None
    value["files"][0].update(leaves=leaves, kind="", mode="")
    assert b',"leaves":[{"dtype":' in in_both_styles(value)[0]
    said = outcome(in_both_styles(value)[0])
    assert "'leaves'" in str(said)
    value["leaves"] = leaves[:2]
    assert outcome(in_both_styles(value)[0]) == outcome(in_both_styles(value)[1])


@pytest.mark.parametrize("before", [0, 1])
def test_a_shard_that_stands_for_a_leaf_is_refused(before: int) -> None:
    value = json.loads(full_manifest().to_bytes())
    value["leaves"].insert(before, value["leaves"][0]["shards"][0])
    assert f"leaf {before} has no field 'node'" in str(outcome(in_both_styles(value)[0]))
