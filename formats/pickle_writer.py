"""The pickle inside a `.pt` file, written opcode by opcode: only what `torch.load(weights_only=True)` reads.

Owns the encoding of plain values, containers and references to storages. Reads no pickle, and writes none that calls
anything but the constructors below. Source: Python's `pickletools`, and torch's `_weights_only_unpickler`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.errors import UnsupportedValueError

__all__ = ["STORAGES", "TensorRecord", "contiguous_strides", "write_pickle"]

_MAX_INT_BYTES = 255  # of the opcode LONG1; the restricted reader knows no longer one
_MAX_TEXT_BYTES = 0xFFFF_FFFF
_LONGEST_SHORT_TUPLE = 3

STORAGES = {
    "bool": "BoolStorage",
    "uint8": "ByteStorage",
    "int8": "CharStorage",
    "int16": "ShortStorage",
    "int32": "IntStorage",
    "int64": "LongStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "float64": "DoubleStorage",
    "complex64": "ComplexFloatStorage",
    "complex128": "ComplexDoubleStorage",
}
"""Storages that have a name of their own; tensors of any other dtype are rebuilt from an untyped one."""


class TensorRecord:
    """A tensor as the pickle describes it.

    Args:
        key: name of its storage, as in `data/<key>`.
        dtype: our name of its dtype.
        shape: in items; contiguous.
        num_bytes: of the storage.
    """

    def __init__(self, key: str, dtype: str, shape: tuple[int, ...], num_bytes: int) -> None:
        self.key = key
        self.dtype = dtype
        self.shape = shape
        self.num_bytes = num_bytes


def write_pickle(value: Any, tensor_of: Callable[[LeafRef], TensorRecord]) -> bytes:
    """Return the pickle of a value.

    dict, OrderedDict, list, tuple, set, str, bytes, bool, int, float, complex, None and torch's Size, device and dtype
    are kept; other mappings become dicts, a deque a list, and what is left its text.

    Args:
        value: containers and plain values, with a `LeafRef` for each tensor.
        tensor_of: gives the tensor of a reference.

    Raises:
        UnsupportedValueError: a text of more than 4 GiB.
    """
    writer = _Writer(tensor_of)
    writer.write(value)
    return b"\x80\x02" + b"".join(writer.parts) + b"."


class _Writer:
    def __init__(self, tensor_of: Callable[[LeafRef], TensorRecord]) -> None:
        import torch  # noqa: PLC0415 - manifests are read without it

        self.parts: list[bytes] = []
        self._tensor_of = tensor_of
        self._writers: dict[type, Callable[[Any], None]] = {
            type(None): lambda _: self._put(b"N"),
            bool: lambda value: self._put(b"\x88" if value else b"\x89"),
            int: self._int,
            float: lambda value: self._put(b"G" + struct.pack(">d", value)),
            complex: lambda value: self._call("builtins complex", value.real, value.imag),
            str: self._text,
            bytes: lambda value: self._call("_codecs encode", value.decode("latin1"), "latin1"),
            list: self._list,
            deque: self._list,
            tuple: self._tuple,
            dict: self._dict,
            OrderedDict: self._ordered,
            set: lambda value: self._call("builtins set", list(value)),
            torch.Size: lambda value: self._call("torch Size", tuple(value)),
            torch.device: lambda value: self._call("torch device", str(value)),
            torch.dtype: lambda value: self._global(str(value).replace(".", " ", 1)),
            LeafRef: lambda value: self._tensor(self._tensor_of(value)),
        }

    def write(self, value: Any) -> None:
        writer = self._writers.get(type(value))
        if writer is not None:
            writer(value)
        elif isinstance(value, Mapping):
            self._dict(dict(value))
        else:
            self._text(str(value))

    def _put(self, data: bytes) -> None:
        self.parts.append(data)

    def _global(self, name: str) -> None:
        module, _, attribute = name.partition(" ")
        self._put(f"c{module}\n{attribute}\n".encode())

    def _call(self, name: str, *args: Any) -> None:
        self._global(name)
        self._tuple(args)
        self._put(b"R")

    def _int(self, value: int) -> None:
        if -(1 << 31) <= value < 1 << 31:
            self._put(b"J" + struct.pack("<i", value))
            return
        num_bytes = value.bit_length() // 8 + 1
        if num_bytes > _MAX_INT_BYTES:
            self._text(hex(value))
        else:
            self._put(b"\x8a" + bytes([num_bytes]) + value.to_bytes(num_bytes, "little", signed=True))

    def _text(self, value: str) -> None:
        data = value.encode("utf-8", "surrogatepass")
        if len(data) > _MAX_TEXT_BYTES:
            raise UnsupportedValueError("a text of more than 4 GiB cannot be kept in a .pt file")
        self._put(b"X" + struct.pack("<I", len(data)) + data)

    def _list(self, value: Any) -> None:
        self._put(b"](")
        for item in value:
            self.write(item)
        self._put(b"e")

    def _tuple(self, value: tuple[Any, ...]) -> None:
        if not value:
            self._put(b")")
            return
        if len(value) > _LONGEST_SHORT_TUPLE:
            self._put(b"(")
        for item in value:
            self.write(item)
        self._put({1: b"\x85", 2: b"\x86", 3: b"\x87"}.get(len(value), b"t"))

    def _dict(self, value: Mapping[Any, Any]) -> None:
        self._put(b"}")
        self._items(value)

    def _items(self, value: Mapping[Any, Any]) -> None:
        self._put(b"(")
        for key, item in value.items():
            self.write(key if isinstance(key, str | int | float | bytes | tuple | None) else str(key))
            self.write(item)
        self._put(b"u")

    def _ordered(self, value: OrderedDict[Any, Any]) -> None:
        self._call("collections OrderedDict")
        self._items(value)
        metadata = getattr(value, "_metadata", None)  # versions of the modules in a state dict
        if metadata is not None:
            self.write({"_metadata": metadata})
            self._put(b"b")

    def _tensor(self, tensor: TensorRecord) -> None:
        storage = STORAGES.get(tensor.dtype)
        self._global("torch._utils _rebuild_tensor_v2" if storage else "torch._utils _rebuild_tensor_v3")
        self._put(b"((")
        self._text("storage")
        self._global(f"torch {storage}" if storage else "torch.storage UntypedStorage")
        self._text(tensor.key)
        self._text("cpu")
        strides = contiguous_strides(tensor.shape)
        item_bytes = ITEM_BYTES[tensor.dtype]
        self._int(tensor.num_bytes // item_bytes if storage else tensor.num_bytes)
        self._put(b"tQ")
        self._int(0)
        self._tuple(tensor.shape)
        self._tuple(strides)
        self.write(False)  # noqa: FBT003 - requires_grad
        self._call("collections OrderedDict")
        if not storage:
            self._global(f"torch {tensor.dtype}")
        self._put(b"tR")


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides that torch gives a contiguous tensor, in items."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
