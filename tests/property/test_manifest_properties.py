"""Manifests and commit records: exact round trips, and nothing but typed errors whatever the bytes are."""

from __future__ import annotations

import json
import math
import time
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from safepoint.formats.errors import CorruptDataError, UnsupportedVersionError
from safepoint.formats.fields import canonical_json, parse_json
from safepoint.formats.manifest import CommitRecord, Manifest

from support.manifests import JSON_VALUES, example_manifest, example_record, manifests

MANIFEST = example_manifest().to_bytes()
RECORD = example_record(metrics={"loss": 0.5, "bad": math.inf}).to_bytes()
MUTATIONS = st.lists(
    st.tuples(st.sampled_from(["flip", "insert", "delete", "repeat"]), st.integers(0, 10**6), st.binary(max_size=6)),
    min_size=1,
    max_size=4,
)
HOSTILE: st.SearchStrategy[Any] = JSON_VALUES | st.sampled_from(
    [2**63, -(2**63), 10**4000, -1, 0, True, None, "", "..", [], {}, [[]], 1e308]
)


def mutate(data: bytes, mutations: list[tuple[str, int, bytes]]) -> bytes:
    """Return `data` after a few accidents."""
    for kind, at, piece in mutations:
        i = at % (len(data) + 1)
        if kind == "flip" and i < len(data):
            data = data[:i] + bytes([data[i] ^ (1 << (len(piece) % 8))]) + data[i + 1 :]
        elif kind == "insert":
            data = data[:i] + piece + data[i:]
        elif kind == "delete":
            data = data[:i] + data[i + len(piece) :]
        else:
            data = data[:i] + data[max(0, i - 20) :]
    return data


def places(value: Any, prefix: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the path of every part of a JSON value."""
    found = [prefix]
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        found += places(child, (*prefix, key))
    return found


def replaced(data: bytes, place: tuple[Any, ...], new: Any) -> bytes:
    """Return the JSON text with another value at one place."""
    value = json.loads(data)
    if not place:
        return json.dumps(new).encode()
    part = value
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = new
    return json.dumps(value).encode()


def check_manifest(data: bytes) -> None:
    """Check that `data` is refused with a typed error that names the file, or is a manifest through and through."""
    start = time.thread_time()  # not that of a busy machine
    try:
        manifest = Manifest.from_bytes(data, path="1/manifest.json")
    except (CorruptDataError, UnsupportedVersionError) as error:
        assert error.path == "1/manifest.json"  # noqa: PT017  # both outcomes are fine
    else:
        again = Manifest.from_bytes(manifest.to_bytes(), path="again")
        assert again == manifest
        assert list(again.structure) == list(manifest.structure)
    assert time.thread_time() - start < 5


def outcome(data: bytes) -> object:
    """Return the manifest, or what is said against it."""
    try:
        return Manifest.from_bytes(data, path="1/manifest.json")
    except (CorruptDataError, UnsupportedVersionError) as error:
        return str(error)


def check_record(data: bytes) -> None:
    """Check that `data` is refused with a typed error that names the file, or says exactly what was written."""
    try:
        record = CommitRecord.from_bytes(data, path="1/commit.json")
    except (CorruptDataError, UnsupportedVersionError) as error:
        assert error.path == "1/commit.json"  # noqa: PT017  # both outcomes are fine
    else:
        assert record.to_bytes() == RECORD  # no accident changes a record unnoticed


@given(manifests())
def test_a_manifest_round_trips_and_its_bytes_are_stable(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    read = Manifest.from_bytes(data, path="x")
    assert read == manifest
    assert list(read.structure) == list(manifest.structure)
    assert [[type(key) for key in path] for path in read.structure] == [
        [type(key) for key in path] for path in manifest.structure
    ]
    assert read.to_bytes() == data


@given(st.floats(), st.text(), st.dictionaries(st.text(max_size=4), JSON_VALUES, max_size=3))
def test_a_record_round_trips_and_its_bytes_are_stable(metric: float, name: str, extra: dict[str, Any]) -> None:
    data = example_record(metrics={name: metric}, extra=extra).to_bytes()
    read = CommitRecord.from_bytes(data, path="x")
    assert read.to_bytes() == data
    assert read.extra == extra
    assert read.metrics[name] == metric or math.isnan(read.metrics[name]) is math.isnan(metric) is True
    assert math.copysign(1, read.metrics[name]) == math.copysign(1, metric) or math.isnan(metric)


@given(MUTATIONS)
@example([("delete", 0, b"")])
def test_mutated_manifests_end_in_typed_errors(mutations: list[tuple[str, int, bytes]]) -> None:
    check_manifest(mutate(MANIFEST, mutations))


@given(manifests(), MUTATIONS)
def test_other_mutated_manifests_end_in_typed_errors(
    manifest: Manifest, mutations: list[tuple[str, int, bytes]]
) -> None:
    check_manifest(mutate(manifest.to_bytes(), mutations))


@given(st.data(), HOSTILE)
def test_any_part_of_a_manifest_may_be_anything(data: st.DataObject, new: Any) -> None:
    place = data.draw(st.sampled_from(places(json.loads(MANIFEST))))
    check_manifest(replaced(MANIFEST, place, new))


@given(manifests(), st.data(), HOSTILE)
def test_a_manifest_means_the_same_in_the_canonical_text_and_in_any_other(
    manifest: Manifest, data: st.DataObject, new: Any
) -> None:
    text = manifest.to_bytes()
    value = json.loads(replaced(text, data.draw(st.sampled_from(places(json.loads(text)))), new))
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":")).encode()
    assert outcome(canonical) == outcome(json.dumps(value, indent=1).encode())


@given(manifests(), MUTATIONS)
def test_what_is_read_of_a_mutated_text_is_what_its_json_says(
    manifest: Manifest, mutations: list[tuple[str, int, bytes]]
) -> None:
    data = mutate(manifest.to_bytes(), mutations)
    found = outcome(data)
    if isinstance(found, Manifest):
        assert found == outcome(json.dumps(json.loads(data), indent=1).encode())


@given(MUTATIONS)
def test_mutated_records_are_refused(mutations: list[tuple[str, int, bytes]]) -> None:
    check_record(mutate(RECORD, mutations))


@given(st.data(), HOSTILE)
def test_any_part_of_a_record_may_be_anything(data: st.DataObject, new: Any) -> None:
    place = data.draw(st.sampled_from(places(json.loads(RECORD))))
    check_record(replaced(RECORD, place, new))


@given(st.binary(max_size=200) | st.text(alphabet='{}[]",:0123456789eE.-+NaInfity\\u', max_size=60).map(str.encode))
def test_any_bytes_end_in_typed_errors(data: bytes) -> None:
    check_manifest(data)
    check_record(data)


@given(JSON_VALUES)
def test_canonical_json_reads_back(value: Any) -> None:
    data = canonical_json(value)
    assert parse_json(data, what="this", path="x") == value
    assert canonical_json(parse_json(data, what="this", path="x")) == data
    assert data.isascii()
