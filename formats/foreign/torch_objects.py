"""A file of torch.save that holds objects of somebody's: the tensors and plain values in it, and where the objects are.

For files that torch's restricted reader refuses as a whole, such as a Lightning checkpoint with a class among its
hyper-parameters. The pickle is read as data: an object is not made, only its name is kept, and nothing behind it is
looked up. Tensors are read from their places in the file, by regions.
"""

from __future__ import annotations

import os
import zipfile
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.formats.errors import CorruptDataError, StorageError
from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint, Refused, checked_region, read_exactly
from safepoint.formats.foreign.torch_archive import ArchivedTensor, TensorMachine, data_offset, read_pickled
from safepoint.formats.foreign.torch_files import tensor_bytes
from safepoint.formats.pickle_machine import run_pickle
from safepoint.formats.pickle_writer import contiguous_strides
from safepoint.formats.region import Region
from safepoint.formats.tree import display_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from safepoint.formats.tree import TreePath

__all__ = ["open_with_objects"]


def open_with_objects(path: str) -> ForeignCheckpoint | None:
    """Open a file; None where it is none of torch's zip format, or more is wrong with it than the objects.

    Raises:
        StorageError: it cannot be read.
    """
    arrays: dict[TreePath, ForeignArray] = {}
    refused: dict[str, str] = {}
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            entries, pickled = read_pickled(archive)
            value = run_pickle(_Machine(path), pickled, path=path)

            def place(tensor: ArchivedTensor) -> int:
                return data_offset(file, entries[f"data/{tensor.storage.key}"])

            tree = _Tree(path, place, arrays, refused).build(value, ())
    except OSError as error:
        raise StorageError(f"cannot read it: {error.strerror}", path=path, errno=error.errno) from error
    except Exception:  # noqa: BLE001 - torch's reader has told what is wrong
        return None
    return ForeignCheckpoint(kind="torch", location=path, tree=tree, arrays=arrays, refused=refused)


_BUILTINS = ("builtins", "__builtin__")  # the second in pickles as torch writes them, of protocol 2
_CALLS: Mapping[str, Callable[..., Any]] = {
    "collections.OrderedDict": lambda items=(): dict(items),
    "torch._utils._rebuild_parameter": lambda data, *_: data,
    "torch.Size": lambda sizes=(): tuple(sizes),
    "torch.device": lambda *parts: ":".join(map(str, parts)),
    **{f"{module}.set": lambda items=(): set(items) for module in _BUILTINS},
    **{f"{module}.complex": complex for module in _BUILTINS},
    "_codecs.encode": lambda text, encoding: text.encode("latin1" if encoding == "latin1" else "utf-8"),
}


class _Name:
    def __init__(self, text: str) -> None:
        self.text = text


class _Machine(TensorMachine):
    """Reads tensors and plain values; everything else becomes `Refused`, with whatever is put into it."""

    def _push_name(self, text: str) -> None:
        if text in self.known:
            super()._push_name(text)
        else:
            self.stack.append(_Name(text))

    def _reduce(self, argument: Any) -> None:
        arguments, name = self.stack[-1], self.stack[-2]
        if not isinstance(name, _Name):
            super()._reduce(argument)
            return
        del self.stack[-2:]
        call = _CALLS.get(name.text)
        self.stack.append(Refused(name.text) if call is None else call(*arguments))

    def _newobj(self, _: Any) -> None:
        name = self.stack[-2]
        del self.stack[-2:]
        self.stack.append(Refused(name.text if isinstance(name, _Name) else "an object"))

    def _build(self, _: Any) -> None:
        self.stack.pop()  # of a state dict: the versions of its modules

    def _setitem(self, argument: Any) -> None:
        if isinstance(self.stack[-3], Refused):
            del self.stack[-2:]
        else:
            super()._setitem(argument)

    def _setitems(self, _: Any) -> None:
        items = self._since_mark()
        if not isinstance(self.stack[-1], Refused):
            self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _append(self, argument: Any) -> None:
        if isinstance(self.stack[-2], Refused):
            self.stack.pop()
        else:
            super()._append(argument)

    def _appends(self, _: Any) -> None:
        items = self._since_mark()
        if not isinstance(self.stack[-1], Refused):
            self.stack[-1].extend(items)


class _Tree:
    def __init__(
        self,
        path: str,
        place: Callable[[ArchivedTensor], int],
        arrays: dict[TreePath, ForeignArray],
        refused: dict[str, str],
    ) -> None:
        self._path = path
        self._place = place
        self._arrays = arrays
        self._refused = refused

    def build(self, value: Any, at: TreePath) -> Any:
        if isinstance(value, ArchivedTensor):
            self._arrays[at] = _Tensor(self._path, value, self._place(value), display_path(at))
            return LeafRef(at)
        if isinstance(value, dict):
            return {key: self.build(child, (*at, _key(key))) for key, child in value.items()}
        if isinstance(value, list | tuple):
            children = [self.build(child, (*at, index)) for index, child in enumerate(value)]
            return children if isinstance(value, list) else tuple(children)
        if isinstance(value, _Name):
            value = Refused(value.text)  # a class, or a function
        if isinstance(value, Refused):
            self._refused[display_path(at)] = value.name
        return value


def _key(key: Any) -> str | int:
    return key if isinstance(key, str | int) else str(key)


class _Tensor(ForeignArray):
    """A tensor in the file, contiguous or not."""

    def __init__(self, path: str, tensor: ArchivedTensor, storage_offset: int, name: str) -> None:
        self._path = path
        self._strides = tensor.strides
        self._offset = storage_offset + tensor.first * ITEM_BYTES[tensor.dtype]
        self._name = name
        self.dtype = tensor.dtype
        self.shape = tensor.shape

    def read_into(self, region: Region, out: memoryview) -> None:
        item_bytes = ITEM_BYTES[self.dtype]
        if not checked_region(self, region, out, item_bytes):
            return
        try:
            with open(self._path, "rb", buffering=0) as file:
                if self._strides != contiguous_strides(self.shape):
                    torch.frombuffer(out, dtype=torch.uint8).copy_(tensor_bytes(self._load(file)[_index(region)]))
                    return
                filled = 0
                for start, length in region.runs_in(Region.whole(self.shape)):
                    size = length * item_bytes
                    read_exactly(file, self._offset + start * item_bytes, out[filled : filled + size])
                    filled += size
        except OSError as error:
            raise StorageError(
                f"cannot read it: {error.strerror}", path=self._path, leaf=self._name, errno=error.errno
            ) from error
        except EOFError:
            raise CorruptDataError("the file is cut short", path=self._path, leaf=self._name) from None

    def _load(self, file: Any) -> torch.Tensor:
        """Return the tensor with all that lies between its first and its last element."""
        span = 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self._strides, strict=True))
        held = os.fstat(file.fileno()).st_size - self._offset
        if span < 1 or span * ITEM_BYTES[self.dtype] > held or min(self._strides, default=0) < 0:
            raise EOFError
        memory = bytearray(span * ITEM_BYTES[self.dtype])
        read_exactly(file, self._offset, memoryview(memory))
        return torch.frombuffer(memory, dtype=torch_dtype(self.dtype)).as_strided(self.shape, self._strides)


def _index(region: Region) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(region.offsets, region.shape, strict=True))
