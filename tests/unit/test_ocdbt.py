"""TensorStore reads, and goes on with, the databases that we write."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import pytest
import tensorstore as ts
from hypothesis import given
from hypothesis import strategies as st

from safepoint.formats.orbax import ocdbt
from safepoint.formats.orbax.ocdbt import MANIFEST_FILE, Location, build_database

if TYPE_CHECKING:
    from collections.abc import Mapping

IDENTITY = bytes(range(16))


def stored(entries: Mapping[str, bytes | Location], files: Mapping[str, bytes]) -> Any:
    """Return the database over a store in memory, as TensorStore opens it."""
    manifest, nodes = build_database(entries, node_file="d/nodes", identity=IDENTITY, time_nsecs=1_700_000_000 * 10**9)
    context = ts.Context()
    base = ts.KvStore.open({"driver": "memory"}, context=context).result()
    for name, data in {**files, MANIFEST_FILE: manifest, "d/nodes": nodes}.items():
        base.write(name, data).result()
    return ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "memory"}}, context=context).result()


def values_in_files(values: Mapping[str, bytes]) -> tuple[dict[str, bytes | Location], dict[str, bytes]]:
    """Put values by turns into the database itself and into the files of two processes."""
    entries: dict[str, bytes | Location] = {}
    files = {f"ocdbt.process_{process}/d/{process}": b"" for process in range(2)}
    for index, (key, value) in enumerate(values.items()):
        file = f"ocdbt.process_{index % 2}/d/{index % 2}"
        if index % 3 == 0 or not value:
            entries[key] = value
            continue
        entries[key] = Location(file=file, offset=len(files[file]), num_bytes=len(value))
        files[file] += value
    return entries, files


@given(
    values=st.dictionaries(
        st.text(st.characters(blacklist_categories=["Cs"]), max_size=9), st.binary(max_size=40), min_size=1
    ),
    node_bytes=st.sampled_from([1, 100, 1 << 20]),
)
def test_every_value_is_found_whatever_the_keys_and_however_deep_the_tree(
    values: dict[str, bytes], node_bytes: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ocdbt, "NODE_BYTES", node_bytes)
        found = stored(*values_in_files(values))
    assert sorted(found.list().result()) == sorted(key.encode() for key in values)
    for key, value in values.items():
        assert found.read(key).result().value == value
    assert found.read("\N{CYRILLIC SMALL LETTER YA}" * 10).result().state == "missing"


def test_tensorstore_goes_on_with_a_database_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocdbt, "NODE_BYTES", 200)
    values = {f"layer.{index}.weight/c/0/{index % 3}": hashlib.sha256(bytes([index])).digest() for index in range(256)}
    found = stored(*values_in_files(values))
    found.write("zz", b"z" * 5000).result()
    found.write("layer.7.weight/c/0/1", b"other").result()
    found.delete_range(ts.KvStore.KeyRange("layer.2", "layer.3")).result()
    kept = {key: value for key, value in values.items() if not key.startswith("layer.2")}
    kept |= {"layer.7.weight/c/0/1": b"other", "zz": b"z" * 5000}
    assert {key.decode(): found.read(key).result().value for key in found.list().result()} == kept


@pytest.mark.parametrize("position", [3, 20, -1])
@pytest.mark.parametrize("name", [MANIFEST_FILE, "d/nodes"])
def test_a_flipped_bit_of_a_database_is_found_by_tensorstore(name: str, position: int) -> None:
    manifest, nodes = build_database({"a": b"b"}, node_file="d/nodes", identity=IDENTITY, time_nsecs=1)
    files = {MANIFEST_FILE: bytearray(manifest), "d/nodes": bytearray(nodes)}
    files[name][position] ^= 4
    context = ts.Context()
    base = ts.KvStore.open({"driver": "memory"}, context=context).result()
    for path, data in files.items():
        base.write(path, bytes(data)).result()
    found = ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "memory"}}, context=context).result()
    with pytest.raises(ValueError, match=r"DATA_LOSS|NOT_FOUND|FAILED_PRECONDITION"):
        found.read("a").result()
