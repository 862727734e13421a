"""Whatever is done to a file of others, reading it gives what is there or an error of ours that names a file."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from safepoint.manager.errors import CheckpointError
from safepoint.manager.foreign import restore_foreign

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARED = Path(__file__).parent.parent / "compat" / "foreign"
PATHS = [
    "torch/zip.pt",
    "torch/before-zip.pt",
    "lightning/trainer.ckpt",
    "xlafsdp/flattened",
    "xlafsdp/rows",
    "xla_manager/12",
    "dcp/dcp",
    "huggingface/one",
    "huggingface/several",
]
IGNORED = {"config.json", "generation_config.json", ".manager_metadata"}


def damages(data: bytes, seed: str) -> Iterator[bytes]:
    drawn = random.Random(seed)  # noqa: S311 - the same damages each time
    for keep in {0, 1, 3, 8, len(data) // 3, len(data) // 2, len(data) - 30, len(data) - 1}:
        yield data[: max(keep, 0)]
    for _ in range(20):
        changed = bytearray(data)
        start = drawn.randrange(len(data))
        for position in range(start, min(len(data), start + drawn.choice((1, 1, 4)))):
            changed[position] = drawn.choice(
                (0, 255, changed[position] ^ 1 << drawn.randrange(8), drawn.randrange(256))
            )
        yield bytes(changed)
    yield data + b"more"
    yield data[: len(data) // 2] + data[len(data) // 2 + 7 :]


@pytest.mark.parametrize("path", PATHS)
def test_no_damage_is_anything_but_an_error_of_ours(tmp_path: Path, path: str) -> None:
    copy = tmp_path / Path(path).name
    shutil.copytree(SHARED / path, copy) if (SHARED / path).is_dir() else shutil.copy(SHARED / path, copy)
    unnamed: list[str] = []
    files = sorted(file for file in copy.rglob("*") if file.is_file()) or [copy]
    for file in (file for file in files if file.name not in IGNORED):
        sound = file.read_bytes()
        for number, data in enumerate(damages(sound, file.name)):
            file.write_bytes(data)
            try:
                restore_foreign(copy)
            except CheckpointError as error:
                unnamed += [f"{file.name}, {number}: {error}"] if error.path is None else []
        file.write_bytes(sound)
    restore_foreign(copy)
    assert unnamed == []
