"""The fields of shared files in manifest and commit record: written where they say something, read as untrusted."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from safepoint.formats.checksum import digest
from safepoint.formats.commit_record import CommitRecord
from safepoint.formats.errors import CorruptDataError
from safepoint.formats.fields import canonical_json
from safepoint.formats.manifest import Manifest

from support.manifests import example_manifest, example_record, large_manifest

PATH = "root/7/manifest.json"


def with_digests(manifest: Manifest) -> Manifest:
    leaves = tuple(
        leaf._replace(shards=tuple(shard._replace(digest=digest(shard.key.encode())) for shard in leaf.shards))
        for leaf in manifest.leaves
    )
    files = tuple(replace(file, links=number) for number, file in enumerate(manifest.files))
    return replace(manifest, leaves=leaves, files=files)


@pytest.mark.parametrize("manifest", [example_manifest(), large_manifest(3)], ids=["parts", "whole"])
def test_digests_and_links_come_back_and_the_text_is_canonical(manifest: Manifest) -> None:
    marked = with_digests(manifest)
    data = marked.to_bytes()
    assert Manifest.from_bytes(data, path=PATH) == marked
    assert canonical_json(json.loads(data)) == data


@pytest.mark.parametrize("bad", [None, 5, "", "A" * 32, "f" * 31, ["f" * 32]])
@pytest.mark.parametrize("manifest", [example_manifest(), large_manifest(1)], ids=["parts", "whole"])
def test_a_digest_of_a_shard_that_is_none_is_corrupt_data(manifest: Manifest, bad: Any) -> None:
    value = json.loads(with_digests(manifest).to_bytes())
    value["leaves"][0]["shards"][0]["digest"] = bad
    with pytest.raises(CorruptDataError):
        Manifest.from_bytes(canonical_json(value), path=PATH)


@pytest.mark.parametrize("bad", [None, -1, True, 1.0, "1", 2**63])
def test_counts_that_are_none_are_corrupt_data(bad: Any) -> None:
    value = json.loads(with_digests(example_manifest()).to_bytes())
    value["files"][1]["links"] = bad
    with pytest.raises(CorruptDataError):
        Manifest.from_bytes(canonical_json(value), path=PATH)
    record = json.loads(example_record(linked_bytes=7).to_bytes())
    record["linked_bytes"] = bad
    del record["digest"]
    record["digest"] = digest(canonical_json(record))
    with pytest.raises(CorruptDataError):
        CommitRecord.from_bytes(canonical_json(record), path="root/7/commit.json")


def test_a_record_says_how_much_is_shared_and_only_then() -> None:
    record = example_record(linked_bytes=7)
    assert CommitRecord.from_bytes(record.to_bytes(), path="root/7/commit.json") == record
    assert b"linked_bytes" not in example_record().to_bytes()
