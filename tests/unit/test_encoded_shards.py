"""Shards that are encoded: what the manifest says of them, what is refused, and how they are read."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.manifest import LeafEntry, Manifest, ShardEntry
from safepoint.formats.region import Region
from safepoint.manager import CheckpointManager
from safepoint.manager.errors import CheckpointError, CorruptDataError, UnsupportedVersionError

from support.manifests import example_manifest

if TYPE_CHECKING:
    from pathlib import Path

PATH = "/runs/1/manifest.json"


def encoded_manifest() -> Manifest:
    manifest = example_manifest()
    first = manifest.leaves[0]
    shards = tuple(shard._replace(num_bytes=4, codec="zstd") for shard in first.shards)
    return replace(manifest, leaves=(first._replace(shards=shards), *manifest.leaves[1:]))


def edited(**fields: Any) -> bytes:
    value = json.loads(encoded_manifest().to_bytes())
    value["leaves"][0]["shards"][0].update(fields)
    return json.dumps(value).encode()


def test_a_codec_comes_back_with_its_shard() -> None:
    manifest = encoded_manifest()
    assert Manifest.from_bytes(manifest.to_bytes(), path=PATH) == manifest


def test_a_whole_leaf_that_is_encoded_is_not_taken_for_one_that_is_not() -> None:
    whole = LeafEntry(
        path=("model", "weight"),
        dtype="bfloat16",
        shape=(4, 3),
        shards=(ShardEntry(region=Region.whole((4, 3)), file=0, offset=0, num_bytes=24, key="k", codec="zstd"),),
    )
    manifest = replace(encoded_manifest(), leaves=(whole,))
    assert Manifest.from_bytes(manifest.to_bytes(), path=PATH).leaves == (whole,)


def test_a_codec_of_a_newer_release_is_named_with_file_and_leaf() -> None:
    with pytest.raises(UnsupportedVersionError, match="brotli") as caught:
        Manifest.from_bytes(edited(codec="brotli"), path=PATH)
    assert (caught.value.path, caught.value.leaf) == (PATH, "model.weight")


@pytest.mark.parametrize(
    "fields",
    [{"codec": None}, {"codec": 1}, {"num_bytes": 0}, {"num_bytes": 1 << 40}, {"stored_shape": [1 << 20, 3]}],
)
def test_an_encoded_shard_that_cannot_be_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError) as caught:
        Manifest.from_bytes(edited(**fields), path=PATH)
    assert isinstance(caught.value, CorruptDataError)
    assert caught.value.leaf == "model.weight"


def state() -> dict[str, Any]:
    ramp = torch.arange(6000.0)
    return {"x": {"ramp": ramp.reshape(60, 100), "again": ramp, "zeros": torch.zeros(100_000), "one": torch.tensor(1)}}


@pytest.mark.parametrize("blocking", [True, False])
def test_encoded_leaves_come_back_whole_in_parts_and_mapped(tmp_path: Path, blocking: bool) -> None:  # noqa: FBT001
    with CheckpointManager(tmp_path, format="orbax_zstd") as manager:
        manager.save(1, state(), blocking=blocking)
        manager.wait()
        into = {"x": {name: torch.zeros_like(value) for name, value in state()["x"].items()}}
        restored = [manager.restore(1, into), manager.restore(1), manager.restore(1, host_memory="mapped")]
        assert manager.verify() == []
    for found in (into, restored[1].state, restored[2].state):
        assert found is not None
        assert all(torch.equal(found["x"][name], value) for name, value in state()["x"].items())
    assert sum(path.stat().st_size for path in tmp_path.glob("1/x/ocdbt.*/d/*")) < 40_000


def test_encoded_pieces_are_gathered_into_files_of_bounded_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safepoint.manager.encoding.PACK_BYTES", 1000)
    arrays = {f"a{index}": torch.randint(0, 256, (400,), dtype=torch.uint8) for index in range(9)}
    arrays["large"] = torch.randint(0, 256, (5000,), dtype=torch.uint8)
    with CheckpointManager(tmp_path, format="orbax_zstd") as manager:
        manager.save(1, {"before": arrays["a0"], "x": arrays})
        back = manager.restore(1).state
        assert manager.verify() == []
    assert back is not None
    assert all(torch.equal(back["x"][name], value) for name, value in arrays.items())
    sizes = sorted(path.stat().st_size for path in tmp_path.glob("1/x/ocdbt.process_0/d/*"))
    assert len(sizes) == 6
    assert sizes[-2] <= 1000


def test_bytes_that_their_digests_confirm_and_that_are_no_encoding_are_an_error_of_the_leaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("safepoint.formats.codecs._Zstd.encode", lambda *_: lambda: b"nonsense")
    with CheckpointManager(tmp_path, format="orbax_zstd") as manager:
        manager.save(1, {"x": {"w": torch.ones(4)}})
        with pytest.raises(CorruptDataError, match="cannot be decoded") as caught:
            manager.restore(1)
    assert caught.value.leaf == "x.w"
