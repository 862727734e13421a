"""The usual way to spread portions over files: one file an item, or one a process; and their keys in it.

Pure; what is in a file around the tensors is its format's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.formats.base import Content, FileLayout, FilePlan, Piece, Portion, WriteJob
from safepoint.formats.naming import file_keys, item_file, shard_file

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["file_plan", "group_portions", "pieces_of", "portion_keys"]


def group_portions(portions: Sequence[Portion], job: WriteJob, suffix: str) -> dict[str, list[int]]:
    """Return the portions of each file, as indices: an item's in consolidated mode, else all of this process's."""
    groups: dict[str, list[int]] = {}
    if job.mode == "consolidated":
        for index, portion in enumerate(portions):
            groups.setdefault(item_file(portion.path, suffix), []).append(index)
    elif portions:
        groups[shard_file(job.process_index, job.process_count, suffix)] = list(range(len(portions)))
    return groups


def portion_keys(portions: Sequence[Portion], indices: Sequence[int], job: WriteJob) -> dict[str, int]:
    """Return the portion of each key of one file, in the order given."""
    held = [portions[index] for index in indices]
    shapes = {portion.path: portion.shape for portion in held}
    keys = file_keys([(portion.path, portion.region) for portion in held], shapes, mode=job.mode)
    return dict(zip(keys, indices, strict=True))


def pieces_of(portions: Sequence[Portion], keys: Mapping[str, int]) -> list[Piece]:
    """Return the piece for each key."""
    return [
        Piece(key=key, dtype=portions[index].dtype, shape=portions[index].region.shape) for key, index in keys.items()
    ]


def file_plan(path: str, layout: FileLayout, portions: Sequence[Portion], keys: Mapping[str, int]) -> FilePlan:
    """Return the plan of a file each of whose placements is a whole portion."""
    contents = (keys[placement.piece.key] for placement in layout.placements)
    return FilePlan(
        path=path,
        layout=layout,
        contents=tuple(Content(portion=index, region=portions[index].region) for index in contents),
    )
