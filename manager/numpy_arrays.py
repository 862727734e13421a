"""numpy arrays from what a step has of them: which dtype a node tells, and arrays of it.

Must not know trees or targets.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from safepoint.formats.dtypes import torch_dtype
from safepoint.formats.errors import CorruptDataError
from safepoint.manager.numpy_values import decode_dtype

if TYPE_CHECKING:
    from collections.abc import Mapping

    from safepoint.formats.manifest import JSON

__all__ = ["as_numpy", "dtype_of_node", "is_numpy", "new_numpy", "with_dtype"]


def is_numpy(data: Mapping[str, JSON]) -> bool:
    """Say whether the data of an array's node say that it was numpy's."""
    return data.get("kind") == "numpy"


def dtype_of_node(data: Mapping[str, JSON]) -> np.dtype[Any] | None:
    """Return the dtype that a node tells beside its leaf's; None where that says all.

    Raises:
        CorruptDataError: it tells none.
    """
    form = data.get("dtype")
    if form is None:
        return None
    try:
        dtype = decode_dtype(form)
    except (ValueError, TypeError, LookupError) as error:
        raise CorruptDataError(f"{form!r} is no numpy dtype") from error
    if dtype.hasobject:
        raise CorruptDataError(f"{form!r} is a numpy dtype with objects")
    return dtype


def new_numpy(shape: tuple[int, ...], dtype: str, data: Mapping[str, JSON], like: Any) -> Any:
    """Return a new array for a leaf: of the dtype that was saved; a tensor where numpy alone has none of its kind.

    Raises:
        CorruptDataError: leaf and node contradict each other.
    """
    told = dtype_of_node(data)
    if told is not None:
        return np.empty(_shape_of_items(shape, dtype, told), told)
    if isinstance(like, np.ndarray) and like.dtype.name == dtype:
        return np.empty(shape, like.dtype.newbyteorder("="))  # of ml_dtypes, which only the counterpart can tell
    made = torch.empty(shape, dtype=torch_dtype(dtype))
    return _plain_numpy(made)


def as_numpy(tensor: torch.Tensor, data: Mapping[str, JSON]) -> Any:
    """Return the array of a host tensor that was read: the same memory, but for another byte order.

    Raises:
        CorruptDataError: leaf and node contradict each other.
    """
    told = dtype_of_node(data)
    if told is None:
        return _plain_numpy(tensor)
    shape = _shape_of_items(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), told)
    if tensor.dtype is not torch.uint8 or len(shape) == tensor.ndim:
        return tensor.numpy().astype(told)
    if told.itemsize == 0:
        return np.empty(shape, told)
    return tensor.numpy().reshape(-1).view(told).reshape(shape)


def with_dtype(array: Any, data: Mapping[str, JSON]) -> Any:
    """Return a window on bytes as the array that it was."""
    told = dtype_of_node(data)
    if told is None or not isinstance(array, np.ndarray):
        return array
    if array.dtype != np.uint8 or array.ndim == 0 or array.shape[-1] != told.itemsize:
        raise CorruptDataError("a view is not of the dtype that it tells")
    return array.view(told)[..., 0]


def _plain_numpy(tensor: torch.Tensor) -> Any:
    try:
        return tensor.numpy()
    except TypeError:
        return tensor  # bfloat16 and the like, which numpy has only with the help of others


def _shape_of_items(shape: tuple[int, ...], dtype: str, told: np.dtype[Any]) -> tuple[int, ...]:
    if not told.isnative and told.newbyteorder("=").name == dtype:
        return shape
    if dtype != "uint8" or not shape or shape[-1] != told.itemsize:
        raise CorruptDataError(f"a leaf of dtype {dtype} and shape {list(shape)} holds no {told}")
    return shape[:-1]
