"""numpy arrays of every dtype without objects, in any byte order and layout.

Owns the names (`dtype_of`). What torch has no name for (dates, texts, records, the platform's long double) is a leaf of
bytes, with one more dimension for those of an item; `numpy_dtype` says what they are. Objects, and dtypes that others
add to numpy, are refused by name with the way out. bfloat16 and the float8 kinds of ml_dtypes are recognised without
importing it. Must not know tensors' devices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.region import Region
from safepoint.manager.adapters.base import ArrayLeaf, ArraySpec, Memory

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["NumpyLeaf", "dtype_of", "is_kept_as_bytes", "wrap_numpy"]

_WAYS_OUT = {
    "O": "Save what the objects stand for: a list, or arrays of numbers.",
    "V": "Save each field without objects as an array of its own: `{name: array[name] for name in array.dtype.names}`.",
    "T": "Save `array.tolist()`, or an array of fixed width: `array.astype(str)`.",
}
_BYTES_KINDS = "VUSMmfc"
_ONE_BYTE = {
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "float8_e8m0fnu",
}


def dtype_of(dtype: np.dtype[Any]) -> str | None:
    """Return torch's name of a numpy dtype, whatever its byte order, or None if torch has none."""
    if dtype.kind in "biufc" and dtype.type.__module__ == "numpy":
        name = dtype.newbyteorder("=").name
        return name if isinstance(getattr(torch, name, None), torch.dtype) else None
    if dtype.type.__module__.partition(".")[0] == "ml_dtypes":
        is_known = dtype.name in _ONE_BYTE if dtype.itemsize == 1 else dtype.name == "bfloat16"
        return dtype.name if is_known and hasattr(torch, dtype.name) else None
    return None


class NumpyLeaf(ArrayLeaf):
    """A leaf whose memory is a numpy array.

    `read` copies nothing where the region is writable, aligned, contiguous and of native byte order.
    """

    __slots__ = ("_array", "is_bytes", "numpy_dtype")

    def __init__(self, spec: ArraySpec, name: str, array: NDArray[Any], numpy_dtype: np.dtype[Any]) -> None:
        super().__init__(spec, name)
        self._array = array
        self.numpy_dtype = numpy_dtype
        self.is_bytes = array.dtype != numpy_dtype

    def memory(self) -> Memory | None:
        """Return the memory, unless its items are in another byte order than the stored ones."""
        array = self._array
        if array.size == 0 or not array.dtype.isnative or self.numpy_dtype.type.__module__ != "numpy":
            return None
        return Memory(
            space="numpy",
            start=array.__array_interface__["data"][0],
            shape=array.shape,
            strides=array.strides,
            item_bytes=array.itemsize,
        )

    def read(self, region: Region) -> torch.Tensor:
        """Return the live memory where that can be had, else a native, contiguous copy."""
        part = self._live(region)
        if not _is_plain(part):
            part = part.astype(part.dtype.newbyteorder("="), order="C", copy=True)
        flat = torch.from_numpy(part.reshape(-1).view(np.uint8))
        return flat.view(self._torch_dtype).reshape(region.shape)

    def target_buffer(self, region: Region) -> memoryview | None:
        """Return the live memory, unless it is strided, read-only, or in another byte order."""
        part = self._live(region)
        return part.reshape(-1).view(np.uint8).data if _is_plain(part) else None

    def write(self, region: Region, data: torch.Tensor) -> None:
        """Copy through the view, into the array's own byte order."""
        self.check_data(region, data)
        reason = self.why_not_writable()
        if reason is not None:
            raise UnsupportedValueError(reason, leaf=self.name, hint="Restore into a copy: `array.copy()`.")
        part = self._live(region)
        native = part.dtype.newbyteorder("=")
        flat = data.contiguous().reshape(-1).view(torch.uint8).numpy().view(native)
        part[...] = flat.reshape(region.shape)

    def why_not_writable(self) -> str | None:
        """Say so of read-only arrays."""
        if not self._array.flags.writeable:
            return "the numpy array is read-only"
        return None

    @property
    def _torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.spec.dtype)
        return dtype

    def _live(self, region: Region) -> NDArray[Any]:
        whole = Region.whole(self.spec.shape)
        if len(region.shape) != len(whole.shape) or not whole.contains(region):
            raise self.not_held(region)
        # The trailing Ellipsis keeps a 0-d array an array, and a view.
        index: Any = (*region.slices_in(whole), ...)
        part: NDArray[Any] = self._array[index]
        return part


def _is_plain(array: NDArray[Any]) -> bool:
    flags = array.flags
    return flags.c_contiguous and flags.aligned and flags.writeable and array.dtype.isnative


def wrap_numpy(array: NDArray[Any], name: str) -> NumpyLeaf:
    """Return the leaf of a numpy array.

    Raises:
        UnsupportedValueError: a dtype or a subclass that cannot be kept exactly.
    """
    if type(array) not in (np.ndarray, np.memmap):
        raise UnsupportedValueError(
            f"{type(array).__module__}.{type(array).__qualname__} is a subclass of numpy.ndarray that would come back "
            "without what it adds",
            leaf=name,
            hint="Save `numpy.asarray(value)`, and what it adds (a mask, …) as an item of its own.",
        )
    dtype = dtype_of(array.dtype)
    stored: NDArray[Any] = array
    if dtype is None and is_kept_as_bytes(array.dtype):
        dtype, stored = "uint8", _as_bytes(array)
    if dtype is None:
        raise UnsupportedValueError(
            f"numpy arrays of dtype {array.dtype} cannot be kept exactly",
            leaf=name,
            hint=_WAYS_OUT.get(array.dtype.kind, 'Convert it to a dtype that torch has too: `.astype("float64")`.'),
        )
    shape = tuple(stored.shape)
    spec = ArraySpec(dtype=dtype, shape=shape, regions=(Region.whole(shape),), kind="numpy")
    return NumpyLeaf(spec, name, stored, array.dtype)


def is_kept_as_bytes(dtype: np.dtype[Any]) -> bool:
    """Say whether the bytes of an array of this dtype say all, although torch has no name for it."""
    return (
        dtype.kind in _BYTES_KINDS
        and dtype.type.__module__ == "numpy"
        and not dtype.hasobject
        and dtype_of(dtype) is None
    )


def _as_bytes(array: NDArray[Any]) -> NDArray[Any]:
    """Return the same memory with one more dimension, over the bytes of an item."""
    if array.dtype.itemsize == 0:
        return np.empty((*array.shape, 0), np.uint8)
    return array[..., np.newaxis].view(np.uint8)
