"""Which live arrays are the same memory.

Owns the identity of an array's memory: two arrays with one key show the same elements, so that one of them is stored
and the other is an alias of it. Must not know trees.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["SameMemory", "memory_key"]

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_MarkT = TypeVar("_MarkT")


class SameMemory(Generic[_MarkT]):
    """Finds arrays that show the memory of an earlier one. Keeps all that it was shown, so that addresses stay theirs.

    A state has thousands of arrays, and nearly all begin at an address of their own: only where two begin at one is a
    key made of either.
    """

    def __init__(self) -> None:
        self._by_address: dict[int, tuple[Any, object, _MarkT]] = {}
        self._by_key: dict[Hashable, tuple[Any, _MarkT]] = {}

    def first(self, value: Any, owner: object, mark: _MarkT) -> _MarkT | None:
        """Note an array; return the mark of the first one that shows the same memory in the same way, if there is one.

        Args:
            value: a tensor or numpy array.
            owner: as of `memory_key`.
            mark: returned for later arrays that are the same.
        """
        if type(value) in _PLAIN and value.is_cpu:
            try:
                address = value.data_ptr()
            except RuntimeError:  # no storage
                address = 0
            if address:  # else it has no element
                own = (value, owner, mark)
                earlier = self._by_address.setdefault(address, own)
                if earlier is own:
                    return None
                self._note(*earlier)
        return self._note(value, owner, mark)

    def _note(self, value: Any, owner: object, mark: _MarkT) -> _MarkT | None:
        key = memory_key(value, owner)
        if key is None:
            return None
        _, first = self._by_key.setdefault(key, (value, mark))
        return None if first is mark else first


def memory_key(value: Any, owner: object = None) -> Hashable | None:
    """Return what is equal for two arrays exactly when they show the same memory in the same way.

    It holds as long as both arrays live.

    Args:
        value: a tensor or numpy array.
        owner: the parameter or buffer that `value` is a detached view of, where the caller knows it. XLA tensors have
            no storage to compare, so only this tells that two of them are one.

    Returns:
        The key, or None where nothing can be told.
    """
    if isinstance(value, np.ndarray):
        return _numpy_key(value)
    if isinstance(value, torch.Tensor):
        return _tensor_key(value, owner)
    return None


def _numpy_key(value: np.ndarray[Any, Any]) -> Hashable | None:
    if value.size == 0:
        return None  # no memory, so an address says nothing
    return ("numpy", value.__array_interface__["data"][0], value.shape, value.strides, value.dtype.str)


def _tensor_key(value: torch.Tensor, owner: object) -> Hashable | None:
    if type(value) not in _PLAIN:
        local = getattr(value, "_local_tensor", None)
        if isinstance(local, torch.Tensor):  # a DTensor: tied when its local part is, under the same global view
            return ("sharded", tuple(value.shape), getattr(value, "placements", None), memory_key(local))
    if value.device.type == "xla":
        return ("object", id(value if owner is None else owner))
    try:
        storage = value.untyped_storage()._cdata  # noqa: SLF001  # the address is 0 for every empty storage
    except (NotImplementedError, RuntimeError):
        return None
    return (
        storage,
        value.storage_offset(),
        tuple(value.shape),
        value.stride(),
        value.dtype,
        value.is_conj(),
        value.is_neg(),
    )
