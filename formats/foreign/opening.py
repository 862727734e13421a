"""Finds out what kind of checkpoint a path is, and opens it. A closed table: no name in a file chooses any code."""

from __future__ import annotations

import errno
import os
from typing import TYPE_CHECKING

from safepoint.formats.errors import CheckpointError, InvalidArgumentError, StorageError, UnsupportedValueError
from safepoint.formats.foreign.dcp_files import is_dcp, open_dcp
from safepoint.formats.foreign.orbax_files import is_orbax, open_orbax
from safepoint.formats.foreign.safetensors_files import is_safetensors, open_safetensors
from safepoint.formats.foreign.torch_files import is_torch, open_torch
from safepoint.formats.foreign.torch_objects import open_with_objects
from safepoint.formats.foreign.xlafsdp_files import is_xlafsdp, open_xlafsdp
from safepoint.formats.storage.system import raised_as_storage_error

if TYPE_CHECKING:
    from safepoint.formats.foreign.base import ForeignCheckpoint

__all__ = ["open_foreign"]

_KINDS = (
    (is_orbax, open_orbax),
    (is_dcp, open_dcp),
    (is_safetensors, open_safetensors),
    (is_xlafsdp, open_xlafsdp),
    (is_torch, open_torch),
)


def open_foreign(path: str | os.PathLike[str]) -> ForeignCheckpoint:
    """Open a checkpoint that another library wrote: Orbax, torch, torch.distributed.checkpoint, safetensors.

    Raises:
        InvalidArgumentError: it is none of those.
        StorageError: there is nothing, or it cannot be read.
        CorruptDataError: it is damaged.
        UnsupportedValueError: it holds what cannot be read safely.
    """
    location = os.path.abspath(os.fspath(path))
    with raised_as_storage_error("read the checkpoint", location):
        try:
            os.stat(location)
        except FileNotFoundError:
            raise StorageError("there is no such file or directory", path=location, errno=errno.ENOENT) from None
        open_kind = next((open_kind for is_kind, open_kind in _KINDS if is_kind(location)), None)
        if open_kind is not None:
            try:
                return open_kind(location)
            except CheckpointError as error:
                found = open_with_objects(location) if _is_refusal(error, location) else None
                if found is None or not found.refused:
                    raise error.with_context(path=location) from error.__cause__
                return found
    raise InvalidArgumentError(
        "this is no checkpoint that can be read",
        path=location,
        hint="Known are steps and items of Orbax, directories of torch.distributed.checkpoint, .safetensors files and "
        "directories of them, files of torch.save, and directories of those that torch_xla's FSDP saved by rank.",
    )


def _is_refusal(error: CheckpointError, location: str) -> bool:
    return isinstance(error, UnsupportedValueError) and is_torch(location)
