"""The digests of what a save would write: of the live state and of staged images, large and small pieces alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from safepoint.formats.base import WriteJob
from safepoint.formats.checksum import digest
from safepoint.formats.region import Region
from safepoint.formats.registry import get_format
from safepoint.manager.file_bytes import stage_files
from safepoint.manager.piece_digests import ImageSource, digest_pieces
from safepoint.manager.planner import WriteAssignment
from safepoint.manager.sources import LiveSource, flat_bytes
from safepoint.manager.staging import HostSlab
from safepoint.manager.state import flatten
from safepoint.manager.writing import plan_files

STATES: dict[str, dict[str, Any]] = {
    "many small": {f"w{i}": torch.full((i % 7,), i, dtype=torch.int32) for i in range(300)},
    "a few large": {f"w{i}": torch.arange(3_000_000 + i, dtype=torch.float32) for i in range(5)},
    "one": {"w": torch.arange(9_000_000, dtype=torch.uint8)},
    "nothing": {"w": torch.zeros(0, 4)},
    "odd": {
        "strided": torch.arange(600.0).reshape(20, 30).T,
        "bool": torch.tensor([True, False]),
        "bf16": torch.ones(33, dtype=torch.bfloat16),
        "c128": torch.ones(5, dtype=torch.complex128),
        "scalar": torch.tensor(7),
    },
}


@pytest.mark.parametrize("name", STATES)
def test_each_digest_is_that_of_the_bytes_live_and_staged(name: str) -> None:
    flat = flatten({"model": STATES[name]}, process_index=0, process_count=1)
    specs = {path: leaf.spec for path, leaf in flat.arrays.items()}
    files = plan_files(
        [WriteAssignment(path, Region.whole(spec.shape), 0, 0) for path, spec in specs.items()],
        specs,
        file_format=get_format("safetensors"),
        job=WriteJob(mode="consolidated", process_index=0, process_count=1),
    )
    pieces = [piece for file in files for piece in file.pieces]
    live = LiveSource(flat.arrays)
    wanted = [digest(flat_bytes(live.load(piece)).numpy().data) for piece in pieces]
    assert digest_pieces(pieces, live) == wanted
    images = stage_files(files, live, HostSlab(), lambda _: None)
    staged = ImageSource(files, images)
    assert digest_pieces(pieces, staged) == wanted
    for piece in reversed(pieces):
        assert torch.equal(flat_bytes(staged.load(piece)), flat_bytes(live.load(piece)))
