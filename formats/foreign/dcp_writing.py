"""Writes a directory that torch.distributed.checkpoint loads, by its own writer, one tensor in memory at a time.

The only module of formats that imports torch.distributed, and only when it is called.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import torch_dtype
from safepoint.formats.errors import StorageError
from safepoint.formats.region import Region

if TYPE_CHECKING:
    from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint

__all__ = ["write_dcp"]


def write_dcp(checkpoint: ForeignCheckpoint, path: str) -> None:
    """Write all of a checkpoint into an empty directory.

    Raises:
        StorageError: torch's writer failed.
    """
    from torch.distributed.checkpoint.api import CheckpointException  # noqa: PLC0415
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: PLC0415
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415
    from torch.distributed.checkpoint.state_dict_saver import save  # noqa: PLC0415

    arrays: dict[int, ForeignArray] = {}

    class Planner(DefaultSavePlanner):
        """Plans with tensors that have no data, and reads the data of each when it is written."""

        def resolve_data(self, write_item: Any) -> Any:
            value = self.lookup_object(write_item.index)
            array = arrays.get(id(value))
            return super().resolve_data(write_item) if array is None else _load(array)

    kept: list[torch.Tensor] = []  # so that no two of them have one id
    tree = _planned(checkpoint.tree, checkpoint, arrays, kept)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # torch 2.9's own writer uses it
        try:
            save(
                tree if isinstance(tree, dict) else {"state": tree},
                storage_writer=FileSystemWriter(path, single_file_per_rank=True, thread_count=1),
                planner=Planner(dedup_save_to_lowest_rank=True),
                no_dist=True,
            )
        except CheckpointException as error:  # which derives from BaseException
            raise StorageError(f"torch.distributed.checkpoint failed: {error}", path=path) from error


def _planned(
    value: Any, checkpoint: ForeignCheckpoint, arrays: dict[int, ForeignArray], kept: list[torch.Tensor]
) -> Any:
    if isinstance(value, LeafRef):
        array = checkpoint.arrays[value.path]
        made = torch.empty(array.shape, dtype=torch_dtype(array.dtype), device="meta")
        arrays[id(made)] = array
        kept.append(made)
        return made
    if isinstance(value, dict):
        return {key: _planned(child, checkpoint, arrays, kept) for key, child in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_planned(child, checkpoint, arrays, kept) for child in value)
    return value


def _load(array: ForeignArray) -> torch.Tensor:
    data = torch.empty(array.shape, dtype=torch_dtype(array.dtype))
    if data.numel():
        memory = data.reshape(-1).view(torch.uint8).numpy().data
        array.read_into(Region.whole(array.shape), memory)
    return data
