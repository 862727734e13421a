"""Manifest and commit record: what they say, how they are written, and everything that a reader must refuse."""

from __future__ import annotations

import json
import math
import time
import tracemalloc
from typing import TYPE_CHECKING, Any

import pytest

from safepoint.formats.checksum import ALGORITHM, BLOCK_BYTES, digest, is_digest, num_blocks
from safepoint.formats.errors import (
    CorruptDataError,
    InvalidArgumentError,
    UnsupportedValueError,
    UnsupportedVersionError,
)
from safepoint.formats.fields import Fields, canonical_json, check_relative_path, parse_json
from safepoint.formats.manifest import (
    COMMIT_NAME,
    LAYOUT_VERSION,
    MANIFEST_NAME,
    CommitRecord,
    LeafEntry,
    Manifest,
    Node,
    ShardEntry,
    TaggedKey,
    display_path,
)
from safepoint.formats.region import Region
from safepoint.manager.collecting import paused_collection

from support.manifests import example_manifest, example_record, large_manifest

if TYPE_CHECKING:
    from collections.abc import Callable

    from safepoint.formats.manifest import PathKey, TreePath

PATH = "runs/gpt/1000/manifest.json"


def edited(edit: Callable[[dict[str, Any]], object]) -> bytes:
    """Return the example manifest after an edit of its JSON."""
    value = json.loads(example_manifest().to_bytes())
    edit(value)
    return json.dumps(value).encode()


def refuse(data: bytes, match: str) -> CorruptDataError:
    """Check that `data` is refused as a manifest, and return the error."""
    with pytest.raises(CorruptDataError, match=match) as caught:
        Manifest.from_bytes(data, path=PATH)
    assert caught.value.path == PATH
    assert len(str(caught.value)) < 1000
    return caught.value


# ---- the manifest ----


def test_the_names_and_the_version_are_what_format_md_says() -> None:
    assert (COMMIT_NAME, MANIFEST_NAME, LAYOUT_VERSION) == ("commit.json", "manifest.json", 1)


def test_a_manifest_is_read_as_it_was_written() -> None:
    manifest = example_manifest()
    assert Manifest.from_bytes(manifest.to_bytes(), path=PATH) == manifest


def test_the_bytes_of_a_manifest_do_not_change() -> None:
    # Changing them means a new layout version and a new golden checkpoint.
    assert digest(example_manifest().to_bytes()) == "bfaf160fa8cae6128689be978aefd864"
    assert digest(example_record().to_bytes()) == "92073edd41872c82a3a59101dde69dd5"


def test_structure_keeps_the_order_of_the_state() -> None:
    names = ["z", "a", "m", "10", "9"]
    structure: dict[TreePath, Node] = {(): Node(kind="dict"), **{(name,): Node(kind="value") for name in names}}
    manifest = example_manifest(structure=structure, leaves=())
    assert [path[0] for path in list(Manifest.from_bytes(manifest.to_bytes(), path=PATH).structure)[1:]] == names


def test_keys_keep_their_types() -> None:
    keys: list[PathKey] = [
        "1",
        1,
        TaggedKey("bool", "True"),
        TaggedKey("float", "1.0"),
        "",
        -5,
        2**100,
        "a.b",
        "\ud800",
        "实验",
    ]
    structure: dict[TreePath, Node] = {(): Node(kind="dict"), **{(key,): Node(kind="value") for key in keys}}
    manifest = example_manifest(structure=structure, leaves=())
    read = Manifest.from_bytes(manifest.to_bytes(), path=PATH)
    assert [path[0] for path in list(read.structure)[1:]] == keys


def test_display_paths_are_dotted() -> None:
    assert display_path(()) == ""
    assert display_path(("model", 3, TaggedKey("bool", "True"))) == "model.3.True"
    display_path(("\ud800",)).encode()


@pytest.mark.parametrize("key", [True, 1.5, None, b"x", ("a",)])
def test_keys_of_other_types_are_refused_when_written(key: Any) -> None:
    structure = {(): Node(kind="dict"), (key,): Node(kind="value")}
    with pytest.raises(InvalidArgumentError, match="TaggedKey"):
        example_manifest(structure=structure, leaves=()).to_bytes()


@pytest.mark.parametrize(
    "structure",
    [
        {},
        {("a",): Node(kind="value")},
        {("a",): Node(kind="value"), (): Node(kind="dict")},
        {(): Node(kind="dict"), ("a", "b"): Node(kind="value"), ("a",): Node(kind="dict")},
        {("a",) * n: Node(kind="dict") for n in range(200)},
    ],
)
def test_a_structure_that_is_no_tree_is_refused_when_written(structure: dict[Any, Node]) -> None:
    with pytest.raises(InvalidArgumentError):
        example_manifest(structure=structure, leaves=()).to_bytes()


def test_a_leaf_without_a_node_is_refused_when_written() -> None:
    with pytest.raises(InvalidArgumentError, match="nowhere"):
        example_manifest(leaves=(LeafEntry(path=("nowhere",), dtype="int8", shape=(0,), shards=()),)).to_bytes()


@pytest.mark.parametrize("data", [math.nan, math.inf, {1: 2}, {None: 1, "a": 2}, {"a"}, b"x", object()])
def test_node_data_that_is_no_json_is_refused_when_written(data: Any) -> None:
    with pytest.raises(UnsupportedValueError):
        example_manifest(structure={(): Node(kind="dict", data=data)}, leaves=()).to_bytes()


def test_a_newer_version_is_refused_as_such_whatever_else_it_holds() -> None:
    data = b'{"kind": "safepoint-manifest", "version": 2, "structure": "packed"}'
    with pytest.raises(UnsupportedVersionError, match="version 2") as caught:
        Manifest.from_bytes(data, path=PATH)
    assert caught.value.path == PATH
    assert "newer safepoint" in str(caught.value.hint)


@pytest.mark.parametrize("version", [0, -1, True, 1.0, "1", None, 2**64])
def test_a_version_that_is_none_is_refused(version: Any) -> None:
    refuse(edited(lambda v: v.update(version=version)), "version")


def test_another_kind_of_file_is_refused() -> None:
    refuse(example_record().to_bytes(), "kind")
    with pytest.raises(CorruptDataError, match="kind"):
        CommitRecord.from_bytes(example_manifest().to_bytes(), path="commit.json")


def test_fields_of_a_later_release_are_let_be() -> None:
    def add(value: dict[str, Any]) -> None:
        for part in (value, value["leaves"][0], value["leaves"][0]["shards"][0], value["files"][0]):
            part["later"] = {"x": 1}

    assert Manifest.from_bytes(edited(add), path=PATH) == example_manifest()


@pytest.mark.parametrize(
    "name",
    [
        "kind",
        "version",
        "step",
        "attempt",
        "process_count",
        "format",
        "mode",
        "partial",
        "structure",
        "files",
        "leaves",
    ],
)
@pytest.mark.parametrize("wrong", [None, -1, 2**63, 1.5, "", [1], {"x": 1}, [None]])
def test_every_field_is_needed_and_typed(name: str, wrong: Any) -> None:
    refuse(edited(lambda v: v.pop(name)), name)
    refuse(edited(lambda v: v.update({name: wrong})), "manifest|node|file|leaf|structure")


BAD_JSON = {
    "empty": b"",
    "blank": b"  ",
    "cut short": example_manifest().to_bytes()[:-1],
    "trailing": example_manifest().to_bytes() + b"{}",
    "no object": b"[]",
    "no UTF-8": b'{"kind": "\xff"}',
    "UTF-16": '{"kind": 1}'.encode("utf-16"),
    "BOM": b"\xef\xbb\xbf{}",
    "a key twice": b'{"kind": 1, "kind": "safepoint-manifest"}',
    "a key twice, deep": b'{"kind": [{"a": 1, "a": 1}]}',
    "NaN": b'{"kind": NaN}',
    "infinity": b'{"kind": -Infinity}',
    "beyond a double": b'{"kind": 1e999}',
    "huge integer": b'{"kind": ' + b"9" * 1_000_000 + b"}",
    "deep arrays": b"[" * 1_000_000,
    "deep objects": b'{"a":' * 200_000,
    "deep and closed": b"[" * 100 + b"]" * 100,
}


@pytest.mark.parametrize("name", BAD_JSON)
def test_what_is_no_strict_json_is_refused(name: str) -> None:
    refuse(BAD_JSON[name], "the manifest")


@pytest.mark.parametrize(
    "row",
    [
        None,
        [],
        [0, "a", "dict"],
        [0, "a", "dict", None, None],
        [0, "a", 1, None],
        [0, "a", "", None],
        [0, "a", "k" * 100, None],
        [8, "a", "dict", None],
        [-1, "a", "dict", None],
        [True, "a", "dict", None],
        [0.0, "a", "dict", None],
        ["0", "a", "dict", None],
        [None, None, "dict", None],
        [0, None, "dict", None],
        [0, True, "dict", None],
        [0, 1.5, "dict", None],
        [0, ["a"], "dict", None],
        [0, {}, "dict", None],
        [0, {"bool": "True", "int": "1"}, "dict", None],
        [0, {"bool": True}, "dict", None],
        [0, {"": "x"}, "dict", None],
    ],
)
def test_a_row_that_is_no_node_is_refused(row: Any) -> None:
    refuse(edited(lambda v: v["structure"].append(row)), "node 8")


def test_a_node_twice_is_refused_by_name() -> None:
    assert refuse(edited(lambda v: v["structure"].append([1, "weight", "array", None])), "twice").leaf == "model.weight"


def test_a_root_with_a_parent_is_refused() -> None:
    refuse(edited(lambda v: v["structure"].__setitem__(0, [0, None, "dict", None])), "node 0")
    refuse(edited(lambda v: v["structure"].clear()), "no root")


def test_a_deep_chain_of_nodes_takes_no_quadratic_memory() -> None:
    rows = [[None, None, "d", None], *([i, "a", "d", None] for i in range(50_000))]
    data = edited(lambda v: v.update(structure=rows, leaves=[]))
    tracemalloc.start()
    refuse(data, "deeper")
    assert tracemalloc.get_traced_memory()[1] < 200_000_000
    tracemalloc.stop()


BAD_PATHS = [
    "",
    "/etc/passwd",
    "..",
    "../x",
    "a/../../x",
    "a//b",
    "a/",
    "./a",
    "a/.",
    "a\\b",
    "C:/x",
    "c:x",
    "a\x00b",
    "a\nb",
    "a\x7f",
    "\ud800",
    "a" * 5000,
]


@pytest.mark.parametrize("path", BAD_PATHS)
def test_a_path_that_leaves_the_step_is_refused(path: str) -> None:
    with pytest.raises(CorruptDataError):
        check_relative_path(path, what="file 0")
    refuse(edited(lambda v: v["files"][0].update(path=path)), "file 0")


@pytest.mark.parametrize("path", ["a", "a/b.safetensors", "实验 1/x", "..a", "a..", "...", "a b"])
def test_other_paths_are_fine(path: str) -> None:
    assert check_relative_path(path, what="file") == path
    assert Manifest.from_bytes(edited(lambda v: v["files"][0].update(path=path)), path=PATH).files[0].path == path


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"path": "commit.json"}, "no data file"),
        ({"path": "manifest.json"}, "no data file"),
        ({"path": 3}, "path"),
        ({"num_bytes": -1}, "num_bytes"),
        ({"num_bytes": 2**63}, "num_bytes"),
        ({"num_bytes": 2**60}, "blocks"),
        ({"num_bytes": BLOCK_BYTES + 1}, "1 digests for 2 blocks"),
        ({"num_bytes": 0}, "1 digests for 0 blocks"),
        ({"num_bytes": 4096}, "outside its file"),
        ({"block_bytes": 0}, "block_bytes"),
        ({"block_bytes": BLOCK_BYTES + 1}, "block_bytes"),
        ({"block_bytes": 4096}, "blocks"),
        ({"digests": []}, "0 digests"),
        ({"digests": ["0" * 32] * 2}, "2 digests"),
        ({"digests": ["0" * 31]}, "digest"),
        ({"digests": ["G" * 32]}, "digest"),
        ({"digests": ["A" * 32]}, "digest"),
        ({"digests": [0]}, "digest"),
        ({"digests": {"0": "0" * 32}}, "digests"),
        ({"digests": "0" * 32}, "digests"),
        ({"process_index": 2}, "process_index"),
        ({"process_index": -1}, "process_index"),
        ({"attempt": "../a"}, "attempt"),
        ({"attempt": ""}, "attempt"),
        ({"attempt": "a" * 200}, "attempt"),
        ({"path": "shard-00001-of-00002.safetensors"}, "twice"),
    ],
)
def test_a_file_entry_that_is_wrong_is_refused(changes: dict[str, Any], match: str) -> None:
    refuse(edited(lambda v: v["files"][0].update(changes)), match)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"node": 8}, "node"),
        ({"node": -1}, "node"),
        ({"node": True}, "node"),
        ({"dtype": "float24"}, "dtype"),
        ({"dtype": "x" * 100_000}, "dtype"),
        ({"dtype": 3}, "dtype"),
        ({"dtype": "float32"}, "bytes"),
        ({"shape": 4}, "shape"),
        ({"shape": [4, -3]}, "shape"),
        ({"shape": [4, 3.0]}, "shape"),
        ({"shape": [4, True]}, "shape"),
        ({"shape": [4, 2**63]}, "shape"),
        ({"shape": [1] * 65}, "shape"),
        ({"shape": [2**40, 2**40]}, "impossible shape"),
        ({"shape": [0, 2**40, 2**40]}, "impossible shape"),
        ({"shape": [2**62]}, "impossible shape"),
        ({"shape": [4, 2**50]}, "tile"),
        ({"shape": [4]}, "dimensions"),
        ({"shape": [3, 3]}, "outside the shape"),
        ({"shards": []}, "0 of 12"),
        ({"shards": None}, "shards"),
        ({"shards": [None]}, "object"),
    ],
)
def test_a_leaf_entry_that_is_wrong_is_refused(changes: dict[str, Any], match: str) -> None:
    error = refuse(edited(lambda v: v["leaves"][0].update(changes)), match)
    assert error.leaf == (None if "node" in changes else "model.weight")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"region": None}, "region"),
        ({"region": []}, "region"),
        ({"region": [[0, 0]]}, "region"),
        ({"region": [[0, 0], [3, 3], []]}, "region"),
        ({"region": [[0], [3, 3]]}, "dimensions"),
        ({"region": [[0, 0, 0], [3, 3, 1]]}, "dimensions"),
        ({"region": [[0, -1], [3, 3]]}, "region"),
        ({"region": [[0, 1], [3, 3]]}, "outside the shape"),
        ({"region": [[0, 0], [3, 2**63 - 1]]}, "outside the shape"),
        ({"region": [[1, 0], [3, 3]]}, "overlap"),
        ({"region": [[0, 0], [2, 3]]}, "bytes where its region"),
        ({"region": [[0, 0], [2, 3]], "num_bytes": 12}, "9 of 12"),
        ({"file": 2}, "file"),
        ({"file": -1}, "file"),
        ({"offset": -1}, "offset"),
        ({"offset": 4097}, "outside its file"),
        ({"offset": 2**63 - 1}, "outside its file"),
        ({"num_bytes": 17}, "bytes"),
        ({"key": None}, "key"),
        ({"file": 1, "offset": 4090}, "shares bytes"),
        ({"file": 1, "offset": 0, "key": "odd.0"}, "key of another"),
    ],
)
def test_a_shard_entry_that_is_wrong_is_refused(changes: dict[str, Any], match: str) -> None:
    error = refuse(edited(lambda v: v["leaves"][0]["shards"][0].update(changes)), match)
    assert error.leaf in ("model.weight", "odd.0")


def test_a_leaf_twice_is_refused() -> None:
    refuse(edited(lambda v: v["leaves"][2].update(node=v["leaves"][1]["node"])), "leaf twice")


def test_a_partial_manifest_need_not_tile_but_must_be_sound_otherwise() -> None:
    def keep_one_shard(value: dict[str, Any]) -> None:
        value["leaves"][0]["shards"].pop()
        value["partial"] = True

    manifest = Manifest.from_bytes(edited(keep_one_shard), path=PATH)
    assert manifest.partial
    assert len(manifest.leaves[0].shards) == 1

    def outside(value: dict[str, Any]) -> None:
        keep_one_shard(value)
        value["leaves"][0]["shards"][0]["offset"] = 2**40

    refuse(edited(outside), "outside its file")


def test_petabytes_are_only_claimed_never_allocated() -> None:
    def claim(value: dict[str, Any]) -> None:
        value["partial"] = True
        value["leaves"][0].update(shape=[2**40, 2**20], shards=[])

    tracemalloc.start()
    assert Manifest.from_bytes(edited(claim), path=PATH).leaves[0].shape == (2**40, 2**20)
    assert tracemalloc.get_traced_memory()[1] < 10_000_000
    tracemalloc.stop()


def test_a_shard_may_be_empty_and_lie_at_the_end_of_its_file() -> None:
    shard = ShardEntry(region=Region((0, 0), (0, 7)), file=1, offset=4096 + 14, num_bytes=0, key="empty")
    leaf = LeafEntry(path=("odd", "0"), dtype="float32", shape=(0, 7), shards=(shard,))
    manifest = example_manifest(leaves=(*example_manifest().leaves[:2], leaf))
    assert Manifest.from_bytes(manifest.to_bytes(), path=PATH) == manifest


def test_a_hundred_thousand_leaves_are_written_and_read_in_linear_time() -> None:
    def measure(num_leaves: int) -> float:
        manifest = large_manifest(num_leaves)
        with paused_collection():  # as whoever reads or writes one does
            start = time.process_time()
            assert Manifest.from_bytes(manifest.to_bytes(), path=PATH) == manifest
            return time.process_time() - start

    small, large = measure(10_000), measure(100_000)
    assert large < 30 * small
    assert large < 30


def test_a_leaf_of_very_many_shards_is_read_in_linear_time() -> None:
    side = 150
    entry = json.loads(large_manifest(side * side).to_bytes())
    shards = [
        {"file": 0, "key": str(i), "num_bytes": 1, "offset": i, "region": [[i // side, i % side], [1, 1]]}
        for i in range(side * side)
    ]
    entry["leaves"] = [{"node": 2, "dtype": "int8", "shape": [side, side], "shards": shards}]
    start = time.process_time()
    assert len(Manifest.from_bytes(json.dumps(entry).encode(), path=PATH).leaves[0].shards) == side * side
    assert time.process_time() - start < 10


# ---- the commit record ----


def test_a_record_is_read_as_it_was_written_and_is_small() -> None:
    for record in (
        example_record(),
        example_record(parent=None, metrics={}, timings={}, extra={}),
        example_record(scope="per_process", process_index=1),
        example_record(step=0, sequence=0, num_bytes=0, num_leaves=0),
    ):
        data = record.to_bytes()
        assert CommitRecord.from_bytes(data, path="commit.json") == record
        assert len(data) < 4096


def test_metrics_may_be_anything_that_a_double_holds() -> None:
    metrics = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf, "zero": -0.0, "int": 3, "tiny": 5e-324, "": 1.0}
    read = CommitRecord.from_bytes(example_record(metrics=metrics).to_bytes(), path="c").metrics
    assert repr(dict(read)) == repr({name: float(metrics[name]) for name in sorted(metrics)})
    assert all(type(value) is float for value in read.values())


@pytest.mark.parametrize("metric", ["high", None, [1], 10**400, 1j])
def test_metrics_that_are_no_numbers_are_refused_when_written(metric: Any) -> None:
    with pytest.raises(UnsupportedValueError, match="loss"):
        example_record(metrics={"loss": metric}).to_bytes()


def record_with(digested: bool = True, **changes: Any) -> bytes:  # noqa: FBT001, FBT002  # a test helper
    """Return the example record with other fields, and a digest that fits."""
    value = {**json.loads(example_record().to_bytes()), **changes}
    value.pop("digest")
    own = digest(canonical_json(value)) if digested else "0" * 32
    return canonical_json({**value, "digest": own})


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1},
        {"step": True},
        {"sequence": 1.0},
        {"attempt": "a/b"},
        {"attempt": ".a"},
        {"run": None},
        {"parent": 3},
        {"parent": ""},
        {"mode": "both"},
        {"mode": None},
        {"format": "../x"},
        {"metrics": []},
        {"metrics": {"loss": "high"}},
        {"metrics": {"loss": None}},
        {"metrics": {"loss": True}},
        {"metrics": {"loss": 10**400}},
        {"num_bytes": -1},
        {"num_leaves": None},
        {"process_count": 0},
        {"scope": "private"},
        {"scope": "per_process", "process_index": None},
        {"scope": "per_process", "process_index": 2},
        {"process_index": "0"},
        {"manifest_bytes": 0},
        {"manifest_digest": "0" * 31},
        {"manifest_digest": None},
        {"timings": None},
        {"extra": []},
        {"created": 12},
    ],
)
def test_a_record_that_is_wrong_is_refused_although_its_digest_fits(changes: dict[str, Any]) -> None:
    with pytest.raises(CorruptDataError, match=next(iter(reversed(changes))).removesuffix("s")) as caught:
        CommitRecord.from_bytes(record_with(**changes), path="1/commit.json")
    assert caught.value.path == "1/commit.json"


def test_a_record_changed_by_accident_does_not_match_its_digest() -> None:
    assert CommitRecord.from_bytes(record_with(), path="c") == example_record()
    with pytest.raises(CorruptDataError, match="own digest"):
        CommitRecord.from_bytes(record_with(digested=False), path="c")
    data = example_record().to_bytes()
    with pytest.raises(CorruptDataError, match="own digest"):
        CommitRecord.from_bytes(data.replace(b'"step":1000', b'"step":1001'), path="c")


def test_a_record_in_another_json_style_is_the_same_record() -> None:
    data = json.dumps(json.loads(example_record().to_bytes()), indent=2).encode()
    assert CommitRecord.from_bytes(data, path="c") == example_record()


def test_fields_of_a_later_record_are_let_be_and_digested() -> None:
    assert CommitRecord.from_bytes(record_with(later=1), path="c") == example_record()


def test_a_newer_record_is_refused_as_such() -> None:
    with pytest.raises(UnsupportedVersionError) as caught:
        CommitRecord.from_bytes(record_with(version=3, mode="woven"), path="1/commit.json")
    assert caught.value.path == "1/commit.json"


# ---- fields and digests ----


def test_canonical_json_is_sorted_compact_and_ascii() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": "é"}) == b'{"a":"\\u00e9","b":[1,2.5,null]}'


def test_what_is_nested_too_deep_is_neither_written_nor_read() -> None:
    def nested(depth: int) -> Any:
        value: Any = []
        for _ in range(depth - 1):
            value = [value]
        return value

    assert parse_json(canonical_json(nested(64)), what="this", path="x") == nested(64)
    for depth in (65, 100_000):
        with pytest.raises(UnsupportedValueError):
            canonical_json(nested(depth))
    with pytest.raises(CorruptDataError, match="deeper than 3"):
        parse_json(canonical_json(nested(4)), what="this", path="x", max_depth=3)


@pytest.mark.parametrize("text", ["[[", "]]]", '"', "\\", '\\"[{', "é[", "{}"])
def test_the_depth_of_a_long_text_is_that_of_its_values_not_of_its_strings(text: str) -> None:
    value = [[{"a": text, text: [text, *range(6000)]}, text]]
    data = canonical_json(value)
    assert len(data) > 16 << 10
    assert parse_json(data, what="this", path="x", max_depth=4) == value
    with pytest.raises(CorruptDataError, match="deeper than 3"):
        parse_json(data, what="this", path="x", max_depth=3)


def test_a_cycle_is_refused_when_written() -> None:
    cycle: list[Any] = []
    cycle += [cycle, cycle]
    with pytest.raises(UnsupportedValueError):
        canonical_json(cycle)


def test_messages_stay_short_however_long_the_value_is() -> None:
    fields = Fields({"x": "y" * 10**6}, what="this", path="p")
    with pytest.raises(CorruptDataError) as caught:
        fields.integer("x")
    assert len(str(caught.value)) < 300


def test_digests_are_canonical_xxh3_128() -> None:
    # The reference values of XXH3-128 with seed 0, high half first.
    assert ALGORITHM == "xxh3-128"
    assert digest(b"") == "99aa06d3014798d86001c324468d497f"
    assert digest(b"a") == "a96faf705af16834e6c632b61e964e1f"
    assert digest(memoryview(bytearray(b"a"))) == digest(b"a")


def test_digests_are_told_from_other_things() -> None:
    assert is_digest(digest(b"x"))
    assert not any(
        map(is_digest, ["", "0" * 31, "0" * 33, "0" * 31 + "\n", "0" * 32 + "\n", "F" * 32, b"0" * 32, None])
    )


def test_blocks_are_counted_with_the_short_one() -> None:
    assert [num_blocks(n, 8) for n in (0, 1, 8, 9, 16)] == [0, 1, 1, 2, 2]


@pytest.mark.parametrize("size", [True, 1.0])
def test_a_shape_of_other_numbers_is_refused_and_spoils_nothing_for_later(size: object) -> None:
    manifest = json.loads(example_manifest().to_bytes())
    leaf = next(leaf for leaf in manifest["leaves"] if len(leaf["shards"]) == 1)
    leaf["shape"] = [size, 67]
    leaf["shards"][0]["region"] = [[0, 0], [size, 67]]
    with pytest.raises(CorruptDataError):
        Manifest.from_bytes(json.dumps(manifest).encode(), path="manifest.json")
    assert [type(found) for found in Region.whole((1, 67)).shape] == [int, int]
