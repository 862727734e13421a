"""`.pt` files as `torch.load(weights_only=True)` reads them: a stored zip of one pickle and the bytes of the tensors.

Consolidated only: one file an item, with the item's whole value in it, its tensors contiguous and on the CPU. They lie
uncompressed and aligned in the file, so that the manifest can say where, and our own reader needs no pickle.
Source: torch/serialization.py (`_save`) and caffe2/serialize/inline_container.cc. Knows no manifests and no storage.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safepoint.formats.base import Content, FileLayout, FilePlan, LeafRef, Piece, Placement, Portion, WriteJob
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import CheckpointError
from safepoint.formats.naming import item_file
from safepoint.formats.pickle_writer import TensorRecord, write_pickle
from safepoint.formats.zip_layout import ZipLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from safepoint.formats.base import LeafParts, WrittenPart
    from safepoint.formats.layout import Mode
    from safepoint.formats.tree import JSON, TreePath

__all__ = ["TorchFormat", "tensor_archive", "value_archive"]

_ARCHIVE = "archive"  # torch takes any name; every entry is below it


def tensor_archive(dtype: str, shape: tuple[int, ...], num_bytes: int) -> ZipLayout:
    """Return the file of one tensor, whose bytes follow its `header`."""
    record = TensorRecord(key="0", dtype=dtype, shape=shape, num_bytes=num_bytes)
    return _archive(write_pickle(LeafRef(()), lambda _: record), {record.key: num_bytes})


def value_archive(value: Any) -> bytes:
    """Return the file of a value without tensors."""

    def no_tensor(ref: LeafRef) -> TensorRecord:
        raise AssertionError(ref)

    return _archive(write_pickle(value, no_tensor), {}).header


def _archive(pickled: bytes, sizes: Mapping[str, int]) -> ZipLayout:
    small = {"data.pkl": pickled, "byteorder": b"little", "version": b"3\n"}
    return ZipLayout(
        {f"{_ARCHIVE}/{name}": data for name, data in small.items()},
        {f"{_ARCHIVE}/data/{key}": num_bytes for key, num_bytes in sizes.items()},
    )


class TorchFormat:
    """The format `torch`."""

    name = "torch"
    suffix = ".pt"
    modes: tuple[Mode, ...] = ("consolidated",)
    allows_private_roots = False
    allows_parts = False
    plans_by_geometry = False

    def arrange(self, leaves: Sequence[LeafParts], outline: Callable[[], Mapping[str, Any]]) -> Mapping[TreePath, JSON]:
        """Return nothing: a process needs to know its own portions only."""
        del leaves, outline
        return {}

    def plan(self, portions: Sequence[Portion], job: WriteJob) -> list[FilePlan]:
        """Return one file for each item of the state, with or without tensors."""
        if job.process_index != 0:
            return []
        by_path = {portion.path: index for index, portion in enumerate(portions)}
        return [self._plan_item(name, value, portions, by_path) for name, value in job.outline().items()]

    def conclude(self, parts: Iterable[WrittenPart], job: WriteJob) -> list[FilePlan]:
        """Return nothing: each file says itself what is in it."""
        del parts, job
        return []

    def _plan_item(
        self, item: str, value: Any, portions: Sequence[Portion], by_path: Mapping[TreePath, int]
    ) -> FilePlan:
        records: dict[TreePath, TensorRecord] = {}

        def tensor_of(ref: LeafRef) -> TensorRecord:
            if ref.path not in records:
                portion = portions[by_path[ref.path]]
                records[ref.path] = TensorRecord(
                    key=str(len(records)),
                    dtype=portion.dtype,
                    shape=portion.shape,
                    num_bytes=portion.region.num_elements * ITEM_BYTES[portion.dtype],
                )
            return records[ref.path]

        try:
            pickled = write_pickle(value, tensor_of)
        except CheckpointError as error:
            raise error.with_context(leaf=item) from None
        archive = _archive(pickled, {record.key: record.num_bytes for record in records.values()})
        placements = tuple(
            Placement(
                piece=Piece(key=record.key, dtype=record.dtype, shape=record.shape),
                offset=offset,
                num_bytes=record.num_bytes,
            )
            for record, offset in zip(records.values(), archive.offsets, strict=True)
        )
        contents = tuple(
            Content(portion=by_path[path], region=portions[by_path[path]].region, is_copy=path[0] != item)
            for path in records
        )
        return FilePlan(
            path=item_file((item,), self.suffix),
            layout=FileLayout(
                header=archive.header, placements=placements, num_bytes=archive.num_bytes, framing=archive
            ),
            contents=contents,
        )
