"""Turns live arrays into leaves: global shape, regions held here, host bytes in and out.

Owns the choice of the adapter for a value. One module a kind: plain tensors on any device, `DTensor`, XLA, numpy.
Must not know the state tree, files, plans or processes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch

from safepoint.formats.errors import UnsupportedValueError
from safepoint.formats.tree import display_path
from safepoint.manager.adapters import dtensor, numpy_array, tensor, xla
from safepoint.manager.adapters.base import XLA_KINDS, ArrayLeaf, ArraySpec, Memory
from safepoint.manager.adapters.refusals import check_plain, check_type, problem_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from safepoint.formats.tree import TreePath

__all__ = [
    "XLA_KINDS",
    "ArrayLeaf",
    "ArraySpec",
    "Memory",
    "empty_like_parameter",
    "finish_all",
    "prefetch",
    "wrap_array",
]


_PLAIN = (torch.Tensor, torch.nn.Parameter)


def wrap_array(value: Any, path: TreePath | str) -> ArrayLeaf | None:
    """Return the leaf of an array, or None for a value that is none (numpy scalars are values, too).

    XLA tensors must have been synced: before that, their sharding is not known.

    Args:
        value: anything.
        path: where it is in the state, as a path or dotted: for messages.

    Raises:
        UnsupportedValueError: an array that cannot be kept exactly; names the path and a way out.
    """
    try:
        if type(value) in _PLAIN and problem_of(value) is None and (value.is_cpu or not xla.is_xla(value)):
            # Nearly all are, so no name is made of the path.
            return tensor.wrap_tensor(value, path)
        if isinstance(value, np.ndarray):
            return numpy_array.wrap_numpy(value, _name(path))
        if isinstance(value, torch.Tensor):
            return _wrap_tensor(value, _name(path))
    except UnsupportedValueError as error:
        raise error.with_context(leaf=_name(path))  # noqa: B904 - the same error
    return None


def _name(path: TreePath | str) -> str:
    return path if isinstance(path, str) else display_path(path)


def _wrap_tensor(value: torch.Tensor, name: str) -> ArrayLeaf:
    if dtensor.is_dtensor(value):
        return dtensor.wrap_dtensor(cast("Any", value), name)
    if xla.is_xla(value):
        return xla.wrap_xla(value, name)
    check_type(value, name)
    check_plain(value, name)
    return tensor.wrap_tensor(value, name)


def prefetch(leaves: Sequence[ArrayLeaf]) -> None:
    """Bring all XLA leaves among these to the host in one execution; `read` then serves, and releases, the copies.

    Does nothing for other leaves, nor for a leaf that has not handed out all of an earlier prefetch.
    """
    xla.prefetch([leaf for leaf in leaves if leaf.spec.kind in XLA_KINDS and isinstance(leaf, xla.XlaLeaf)])


def finish_all(leaves: Iterable[ArrayLeaf]) -> None:
    """Finish leaves as `ArrayLeaf.finish` does each, but tell autograd of all at once: that costs as much as of one."""
    untold: list[torch.Tensor] = []
    try:
        for leaf in leaves:
            if type(leaf) is tensor.TensorLeaf:
                untold += leaf.finish_untold()
            else:
                leaf.finish()
    finally:
        tensor.tell_autograd(untold)


def empty_like_parameter(parameter: torch.Tensor, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor for state that belongs to a parameter and does not exist yet.

    Args:
        parameter: the owner; a tensor, DTensor or XLA tensor.
        shape: the global shape of the new tensor.
        dtype: its dtype.

    Returns:
        A tensor with the parameter's device, placements and sharding where it has the parameter's shape, else one on
        the CPU. It does not require grad.
    """
    if tuple(shape) != tuple(parameter.shape):
        return torch.empty(tuple(shape), dtype=dtype)
    with torch.no_grad():
        if xla.is_xla(parameter):
            return xla.empty_like(parameter, dtype)
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
