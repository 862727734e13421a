"""Files that torch.save or xm.save wrote, as `torch.load(weights_only=True)` reads them: no code of a file runs.

Files of torch's zip format are mapped, so that only what is wanted is read. Lightning's `.ckpt` are such files.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import ITEM_BYTES, dtype_name
from safepoint.formats.errors import CorruptDataError, StorageError, UnsupportedValueError
from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint, checked_region

if TYPE_CHECKING:
    from safepoint.formats.region import Region
    from safepoint.formats.tree import TreePath

__all__ = ["TensorArray", "is_torch", "load_tree", "open_torch", "replace_tensors", "tensor_bytes"]

_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_ZIP_START = b"PK"


def is_torch(path: str) -> bool:
    """Say whether it is such a file: by its first bytes, or its name for the format before zip."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(2) == _ZIP_START or path.endswith(_SUFFIXES)


def open_torch(path: str) -> ForeignCheckpoint:
    """Open a file.

    Raises:
        UnsupportedValueError: its pickle holds more than tensors, plain values and containers.
        CorruptDataError: it is cut short or damaged.
        StorageError: it cannot be read.
    """
    arrays: dict[TreePath, ForeignArray] = {}
    tree = replace_tensors(load_tree(path), (), arrays)
    return ForeignCheckpoint(kind="torch", location=path, tree=tree, arrays=arrays)


def load_tree(path: str) -> Any:
    """Return what torch's restricted reader makes of a file; its tensors are on the CPU."""
    try:
        with open(path, "rb") as file:
            is_zip = file.read(2) == _ZIP_START
        if is_zip and not zipfile.is_zipfile(path):
            raise CorruptDataError("the file is cut short: it has no directory at its end", path=path)
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except OSError as error:
        raise StorageError(f"cannot read it: {error.strerror}", path=path, errno=error.errno) from error
    except CorruptDataError:
        raise
    except Exception as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if "weights_only" in str(error).lower() or "unsupported" in text.lower():
            raise UnsupportedValueError(
                f"the file holds more than tensors and plain values: {_cause(str(error))}",
                path=path,
                hint="Save it again without objects of your own: their state_dict, or plain values.",
            ) from error
        raise CorruptDataError(f"the file cannot be read: {text}", path=path) from error


def _cause(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "GLOBAL" in line or "Unsupported" in line]
    return lines[0][:200] if lines else text.splitlines()[0][:200]


def replace_tensors(value: Any, at: TreePath, arrays: dict[TreePath, ForeignArray]) -> Any:
    """Return the tree with references for its tensors, which are put into `arrays`."""
    if isinstance(value, torch.Tensor):
        arrays[at] = TensorArray(value, ".".join(map(str, at)))
        return LeafRef(at)
    if isinstance(value, Mapping):
        return {
            key: replace_tensors(child, (*at, key if isinstance(key, str | int) else str(key)), arrays)
            for key, child in value.items()
        }
    if type(value) in (list, tuple):
        children = [replace_tensors(child, (*at, index), arrays) for index, child in enumerate(value)]
        return children if isinstance(value, list) else tuple(children)
    return value


class TensorArray(ForeignArray):
    """A tensor on the host."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            raise UnsupportedValueError("only plain, dense tensors can be read", leaf=name)
        self._tensor = tensor.detach()
        self.dtype = dtype_name(tensor.dtype)
        self.shape = tuple(tensor.shape)

    def read_into(self, region: Region, out: memoryview) -> None:
        """Copy a region."""
        if not checked_region(self, region, out, ITEM_BYTES[self.dtype]):
            return
        index = tuple(slice(o, o + n) for o, n in zip(region.offsets, region.shape, strict=True))
        target = torch.frombuffer(out, dtype=torch.uint8)
        target.copy_(tensor_bytes(self._tensor[index].resolve_conj().resolve_neg()))


def tensor_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor in C order, without a copy where they lie so."""
    flat = tensor.contiguous().reshape(-1)
    if flat.numel() and flat.stride(0) != 1:  # one element with any stride counts as contiguous
        flat = flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)
