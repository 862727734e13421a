"""One leaf of a step as a value to look at: numbers, or the plain value that was saved.

A slice of an array reads that slice. What shares another array's memory is read through that array.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from safepoint.formats.manifest import LeafEntry, Node, TreePath, display_path
from safepoint.formats.region import Region
from safepoint.manager.errors import CorruptDataError, InvalidArgumentError
from safepoint.manager.leaf_reading import find_node, parse_slice, read_parts
from safepoint.manager.nodes import ARRAYS, alias_path, base_data, node_data
from safepoint.manager.numpy_arrays import as_numpy, is_numpy, with_dtype
from safepoint.manager.values import decode_value
from safepoint.manager.windows import Window, open_window

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from safepoint.manager.step_paths import OpenStep

__all__ = ["as_numbers", "plain_value", "read_leaf"]

_WIDER = {
    "bfloat16": torch.float32,
    "complex32": torch.complex64,
    "bcomplex32": torch.complex64,
    **{f"float8_{kind}": torch.float32 for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz", "e8m0fnu")},
}
"""Dtypes that numpy lacks, and the next wider one that holds each of their values."""


def plain_value(node: Node) -> Any:
    """Return the value of a node of kind "value"; members of an Enum come as their value, without their class.

    Raises:
        CorruptDataError: it is no form of a value.
    """
    try:
        return decode_value(node.data)
    except LookupError as error:
        raise CorruptDataError(f"this is no value: {error}") from error


def read_leaf(step: OpenStep, name: str, *, picked: str = "") -> Any:
    """Return an array of a step as a host tensor or numpy array, or the plain value of that name.

    Args:
        step: the step.
        name: the dotted path, or the keys as a JSON list.
        picked: a slice (see `parse_slice`); "" for all of it.

    Raises:
        InvalidArgumentError: there is no such leaf, it is a container, or the slice does not fit it.
        CorruptDataError: the step is damaged.
    """
    path, node = find_node(step.manifest, name)
    if node.kind == "value":
        if picked:
            raise InvalidArgumentError(f"{name} is a plain value: there is nothing to slice", step=step.step)
        return plain_value(node)
    if node.kind not in ARRAYS:
        raise InvalidArgumentError(
            f"{name} is a {node.kind}, not a leaf", step=step.step, hint="`safepoint show` lists the leaves."
        )
    entry = _entry(step, path if node.kind == "array" else alias_path(node))
    own = is_numpy(node_data(node))
    if node.kind != "view" and not (own and "dtype" in node_data(node)):
        region = parse_slice(picked, entry.shape) if picked else Region.whole(entry.shape)
        (tensor,) = read_parts(step, [(entry, region)])
        return tensor
    (whole,) = read_parts(step, [(entry, Region.whole(entry.shape))])
    return _sliced(_as_saved(whole, node), picked)


def _entry(step: OpenStep, path: TreePath) -> LeafEntry:
    for entry in step.manifest.leaves:
        if entry.path == path:
            return entry
    raise CorruptDataError("the data of this leaf is missing", leaf=display_path(path), step=step.step)


def _as_saved(whole: torch.Tensor, node: Node) -> Any:
    data = base_data(node)
    array: Any = as_numpy(whole, data) if is_numpy(data) else whole
    if node.kind != "view":
        return array
    window = Window.from_json(node_data(node).get("window"), num_bytes=array.nbytes)
    return with_dtype(open_window(array, window), node_data(node))


def _sliced(array: Any, picked: str) -> Any:
    if not picked:
        return array
    shape = tuple(array.shape)
    return array[parse_slice(picked, shape).slices_in(Region.whole(shape))]


def as_numbers(array: Any) -> NDArray[Any]:
    """Return what `read_leaf` returned as an array of numpy; a dtype that numpy lacks becomes a wider one, or bytes."""
    if isinstance(array, np.ndarray):
        return array
    tensor = array.resolve_conj().resolve_neg()
    wider = _WIDER.get(str(tensor.dtype).removeprefix("torch."))
    try:
        return np.asarray((tensor if wider is None else tensor.to(wider)).numpy())
    except TypeError:
        return np.asarray(tensor.contiguous().view(torch.uint8).numpy())
