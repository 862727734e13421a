"""`docs/format.md` is normative: what it says of fields, dtypes and digests is what the code does."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from safepoint.formats.checksum import BLOCK_BYTES, digest
from safepoint.formats.commit_record import COMMIT_MAX_BYTES, fenced
from safepoint.formats.dtypes import ITEM_BYTES, SAFETENSORS_NAMES
from safepoint.formats.layout import LAYOUT_VERSION, MARKER_VERSION
from safepoint.formats.tombstone import Tombstone

from support.manifests import example_manifest, example_record

DOCUMENT = (Path(__file__).parents[2] / "docs" / "format.md").read_text(encoding="utf-8")
MANIFEST = json.loads(example_manifest().to_bytes())


def fields_after(heading: str) -> set[str]:
    """Return the first column of the first table of fields after a heading."""
    table = DOCUMENT.split(heading, 1)[1].split("| field |", 1)[1].split("\n\n", 1)[0]
    return set(re.findall(r"^\| `([a-z_]+)` \|", table, re.MULTILINE))


@pytest.mark.parametrize(
    ("heading", "value"),
    [
        ("\n## commit.json", json.loads(example_record().to_bytes())),
        ("\n## Tombstones", json.loads(Tombstone(step=1, attempt="a" * 16, state="claimed").to_bytes())),
        ("\n## manifest.json", MANIFEST),
        ("**Files.**", MANIFEST["files"][0]),
        ("**Leaves.**", MANIFEST["leaves"][0]),
        ("**Shards.**", MANIFEST["leaves"][0]["shards"][0]),
    ],
)
def test_the_fields_described_are_the_fields_written(heading: str, value: dict[str, object]) -> None:
    assert fields_after(heading) == set(value)


def test_the_optional_fields_described_are_written_where_they_say_something() -> None:
    manifest = example_manifest()
    file = replace(manifest.files[0], links=3)
    shard = manifest.leaves[0].shards[0]._replace(stored_shape=(3, 3), digest=digest(b""))
    optional = {
        "links": (file.to_json(), manifest.files[0].to_json()),
        "linked_bytes": (
            json.loads(example_record(linked_bytes=5).to_bytes()),
            json.loads(example_record().to_bytes()),
        ),
        "files": (
            json.loads(example_record(files=example_record().attempt).to_bytes()),
            json.loads(example_record().to_bytes()),
        ),
        "fence": (json.loads(example_record(fence="b" * 16).to_bytes()), json.loads(example_record().to_bytes())),
        "fence_nonce": (
            json.loads(fenced(example_record().to_bytes(), "b" * 16, path="commit.json")),
            json.loads(example_record().to_bytes()),
        ),
        "digest": (shard.to_json(), manifest.leaves[0].shards[0].to_json()),
        "stored_shape": (shard.to_json(), manifest.leaves[0].shards[0].to_json()),
    }
    for name, (value, plain) in optional.items():
        assert f"`{name}`" in DOCUMENT
        assert isinstance(value, dict)
        assert isinstance(plain, dict)
        assert name in value
        assert name not in plain


def test_the_version_described_is_the_version_written() -> None:
    assert DOCUMENT.startswith(f"# The on-disk format, versions {LAYOUT_VERSION} and {MARKER_VERSION}\n")


def test_every_dtype_is_described_with_its_size_and_name() -> None:
    rows = re.findall(r"^\| (`.*?) \| ([\d, ]+) \| (.*) \|$", DOCUMENT.split("\n## Dtypes")[1], re.MULTILINE)
    sizes: dict[str, int] = {}
    stored: dict[str, str] = {}
    for names, item_bytes, stored_names in rows:
        dtypes = re.findall(r"`(\w+)`", names)
        if "…" in names:
            dtypes = [f"{kind}{bits}" for kind in ("uint", "int") for bits in range(1, 8)]
        numbers = [int(number) for number in item_bytes.split(",")]
        sizes.update(zip(dtypes, numbers * len(dtypes) if len(numbers) == 1 else numbers, strict=False))
        stored.update(zip(dtypes, re.findall(r"`(\w+)`", stored_names), strict=False))
    assert sizes == dict(ITEM_BYTES)
    assert stored == dict(SAFETENSORS_NAMES)


def test_the_digests_described_are_ours() -> None:
    assert digest(b"") in DOCUMENT
    assert digest(b"a") in DOCUMENT


def test_the_bounds_described_are_ours() -> None:
    assert f"From 1 to {BLOCK_BYTES}:" in DOCUMENT
    assert COMMIT_MAX_BYTES == 1 << 20
