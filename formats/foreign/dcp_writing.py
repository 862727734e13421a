"""Plans a directory that torch.distributed.checkpoint loads: the plan and `.metadata` by torch, the data by us.

torch's own planner and metadata are used because both change with torch's versions, and a directory is read by the
torch that is installed. Its writer of data is not: it needs a tensor at once in memory, starts from the beginning after
an interruption, and swallows the failure of a thread. So each part is the file that `torch.save` would make of it,
written by the writer of the format `torch`, part by part.

The only module of formats that imports torch.distributed, and only when it is called.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import torch_dtype
from safepoint.formats.errors import StorageError
from safepoint.formats.foreign.base import array_bytes
from safepoint.formats.foreign.dcp_files import open_dcp
from safepoint.formats.foreign.exporting import ArrayData, ExportFile, ExportPlan
from safepoint.formats.torch_file import tensor_archive, value_archive
from safepoint.formats.tree import display_path

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.checkpoint.storage import WriteResult

    from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint

__all__ = ["MAX_DCP_FILE_BYTES", "plan_dcp"]

MAX_DCP_FILE_BYTES = 10**9
"""Files are of about this size, so that an interrupted export loses no more; one tensor is never cut."""


def plan_dcp(checkpoint: ForeignCheckpoint, *, max_file_bytes: int = MAX_DCP_FILE_BYTES) -> ExportPlan:
    """Return files for all of a checkpoint: its tensors, and its plain values as the format `torch` keeps them."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: PLC0415

    arrays: dict[int, ForeignArray] = {}
    kept: list[torch.Tensor] = []  # so that no two of them have one id
    tree = _planned(checkpoint.tree, checkpoint, arrays, kept)
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
    planner.set_up_planner(tree if isinstance(tree, dict) else {"state": tree}, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    items = planner.finish_plan(plans[0]).items
    parts = {item.index: _Part(item, planner.lookup_object(item.index), arrays) for item in items}
    files = []
    results: list[WriteResult] = []
    for number, group in enumerate(_groups(list(parts.values()), max_file_bytes)):
        name = f"__0_{number}.distcp"
        offset = 0
        for part in group:
            results.append(_result(part, name, offset))
            offset += part.num_bytes
        files.append(ExportFile(name=name, parts=tuple(piece for part in group for piece in part.pieces)))

    def finish(path: str) -> None:
        _write_metadata(path, metadata, results)

    return ExportPlan(files=tuple(files), finish=finish, read_back=_read_back)


def _read_back(path: str) -> Mapping[str, ForeignArray]:
    return {display_path(at): array for at, array in open_dcp(path).arrays.items()}


def _planned(
    value: Any, checkpoint: ForeignCheckpoint, arrays: dict[int, ForeignArray], kept: list[torch.Tensor]
) -> Any:
    """Return the tree with tensors that have no data; a tuple with any becomes a list, which alone torch flattens."""
    if isinstance(value, LeafRef):
        array = checkpoint.arrays[value.path]
        made = torch.empty(array.shape, dtype=torch_dtype(array.dtype), device="meta")
        arrays[id(made)] = array
        kept.append(made)
        return made
    if isinstance(value, dict):
        return {key: _planned(child, checkpoint, arrays, kept) for key, child in value.items()}
    if isinstance(value, list | tuple):
        before = len(kept)
        children = [_planned(child, checkpoint, arrays, kept) for child in value]
        return tuple(children) if isinstance(value, tuple) and len(kept) == before else children
    return value


class _Part:
    """What one entry of the plan is stored as."""

    def __init__(self, item: WriteItem, value: Any, arrays: Mapping[int, ForeignArray]) -> None:
        self.item = item
        array = arrays.get(id(value))
        self.pieces: tuple[bytes | ArrayData, ...]
        if array is None:
            self.pieces = (value_archive(value),)
            self.num_bytes = len(self.pieces[0])
            return
        archive = tensor_archive(array.dtype, array.shape, array_bytes(array))
        self.num_bytes = archive.num_bytes
        data = ArrayData(
            name=item.index.fqn,
            array=array,
            after=lambda check: archive.after(0, [check]),
            num_bytes_after=archive.num_bytes - len(archive.header) - array_bytes(array),
        )
        self.pieces = (archive.header, data)


def _groups(parts: Sequence[_Part], limit: int) -> Iterator[list[_Part]]:
    group: list[_Part] = []
    room = limit
    for part in parts:
        if group and part.num_bytes > room:
            yield group
            group, room = [], limit
        group.append(part)
        room -= part.num_bytes
    if group:
        yield group


def _result(part: _Part, file: str, offset: int) -> WriteResult:
    from torch.distributed.checkpoint.filesystem import _StorageInfo  # noqa: PLC0415
    from torch.distributed.checkpoint.storage import WriteResult  # noqa: PLC0415

    return WriteResult(
        index=part.item.index,
        size_in_bytes=part.num_bytes,
        storage_data=_StorageInfo(relative_path=file, offset=offset, length=part.num_bytes),
    )


def _write_metadata(path: str, metadata: Metadata, results: list[WriteResult]) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # noqa: PLC0415

    class Writer(FileSystemWriter):
        def storage_meta(self) -> None:
            """Return nothing: it would be the path of a directory that is about to be renamed."""

    try:
        Writer(path).finish(metadata, [results])
    except OSError as error:
        raise StorageError(
            f"cannot write the metadata: {error.strerror}", path=os.path.join(path, ".metadata"), errno=error.errno
        ) from error
