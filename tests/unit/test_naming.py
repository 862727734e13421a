"""Names of files and tensors: promises of safepoint.formats.naming."""

from __future__ import annotations

import itertools

import pytest

from safepoint.formats.fields import check_relative_path
from safepoint.formats.manifest import TaggedKey, TreePath
from safepoint.formats.naming import file_keys, item_file, item_name, shard_file
from safepoint.formats.region import Region


def keys(*paths: TreePath, mode: str = "consolidated") -> list[str]:
    shapes = dict.fromkeys(paths, (2,))
    return file_keys([(path, Region.whole((2,))) for path in paths], shapes, mode=mode)  # type: ignore[arg-type]


def test_shard_files_are_numbered_in_a_fixed_width() -> None:
    assert shard_file(3, 12, ".safetensors") == "shard-00003-of-00012.safetensors"


def test_an_item_is_a_directory_with_a_file_of_its_name() -> None:
    assert item_file(("model", "layers.0.weight"), ".safetensors") == "model/model.safetensors"


@pytest.mark.parametrize(
    ("item", "name"),
    [
        ("optimizer-2_b.c", "optimizer-2_b.c"),
        ("a/b", "a%2Fb"),
        ("a%2Fb", "a%252Fb"),
        ("..", "%2E."),
        (".hidden", "%2Ehidden"),
        ("", "%s"),
        ("é", "%C3%A9"),
        ("commit.json", "%63ommit.json"),
        ("Manifest.json", "%4Danifest.json"),
        ("shard-00000-of-00001.safetensors", "%73hard-00000-of-00001.safetensors"),
        ("\ud800", "%ED%A0%80"),
        ("a\0\n", "a%00%0A"),
    ],
)
def test_item_names_are_plain_file_names(item: str, name: str) -> None:
    assert item_name(item) == name
    check_relative_path(item_file((item, "x"), ".safetensors"), what="item")


def test_long_item_names_fit_a_directory_and_stay_distinct() -> None:
    names = {item_name("x" * 300 + tail) for tail in ("", "a", "b")} | {item_name("实" * 200), item_name("x" * 160)}
    assert len(names) == 5
    assert all(len(name) <= 160 for name in names)


def test_keys_of_a_consolidated_file_are_plain_state_dict_keys() -> None:
    assert keys(("model", "layers.0.weight"), ("model", "head", "bias"), ("model", "list", 0)) == [
        "layers.0.weight",
        "head.bias",
        "list.0",
    ]


def test_an_item_that_is_a_leaf_has_its_own_name() -> None:
    assert keys(("tokens",)) == ["tokens"]


def test_keys_of_a_sharded_file_begin_with_the_item() -> None:
    assert keys(("model", "w"), ("optimizer", "w"), mode="sharded") == ["model.w", "optimizer.w"]


def test_paths_that_would_look_the_same_are_encoded() -> None:
    assert keys(("m", "a.b"), ("m", "a", "b")) == ["a%2Eb", "a.b"]
    assert keys(("m", 0), ("m", "0")) == ["%i0", "0"]
    assert keys(("m", "__metadata__")) == ["%5F_metadata__"]
    assert keys(("m", TaggedKey("none", "None"))) == ["%knone:None"]
    assert keys(("m", "")) == ["%s"]


def test_no_two_leaves_of_a_file_ever_share_a_key() -> None:
    parts: list[str | int | TaggedKey] = [
        "a",
        "a.b",
        "b",
        "a%2Eb",
        "%i0",
        "0",
        0,
        -1,
        "",
        "%s",
        "@0",
        "a@0",
        "\n",
        "%",
        ".",
    ]
    parts += [
        "__metadata__",
        TaggedKey("bool", "True"),
        TaggedKey("k:", "x"),
        TaggedKey("k", ":x"),
        "%kk::x",
        "é",
        "e\u0301",
    ]
    paths: list[TreePath] = [("m", *path) for n in (1, 2) for path in itertools.product(parts, repeat=n)]
    found = keys(*paths)
    assert len(set(found)) == len(paths)
    assert "__metadata__" not in found
    assert all(text and text.isprintable() for text in found)


def test_several_regions_of_a_leaf_in_one_file_are_told_apart_by_their_offsets() -> None:
    path = ("model", "w")
    shapes = {path: (4, 4)}
    top, bottom = Region((0, 0), (2, 4)), Region((2, 0), (2, 4))
    assert file_keys([(path, top), (path, bottom)], shapes, mode="sharded") == ["model.w@0,0", "model.w@2,0"]
    assert file_keys([(path, bottom)], shapes, mode="sharded") == ["model.w"]
