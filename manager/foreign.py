"""Restoring what other libraries wrote: Orbax, torch, torch.distributed.checkpoint, safetensors and Hugging Face.

Local: every process reads for itself what its target holds, straight from the files. Owns how foreign arrays get into
live leaves; which belongs to which is `foreign_names`'.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.formats.foreign.base import Refused
from safepoint.formats.foreign.opening import open_foreign
from safepoint.formats.foreign.torch_files import TensorArray
from safepoint.formats.manifest import LeafEntry, Node, TreePath, display_path
from safepoint.formats.region import Region
from safepoint.manager.adapting import AdaptationReport, Rename
from safepoint.manager.errors import CorruptDataError, StructureMismatchError, UnsupportedValueError
from safepoint.manager.foreign_names import Alignment, align, flat_names, renamed
from safepoint.manager.foreign_views import View, unstack
from safepoint.manager.shared_memory import store_apart
from safepoint.manager.sources import byte_view
from safepoint.manager.state import flatten
from safepoint.manager.targets import match

if TYPE_CHECKING:
    import os
    from collections.abc import Collection, Mapping

    from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint
    from safepoint.manager.adapters import ArrayLeaf
    from safepoint.manager.adapting import Adaptation

__all__ = ["ForeignResult", "restore_foreign"]

BUFFER_BYTES = 64 << 20
"""How much of a leaf is read at once where it cannot be read in place."""


@dataclass(frozen=True, kw_only=True)
class ForeignResult:
    """What was restored.

    Attributes:
        kind: "orbax", "safetensors", "torch", "xlafsdp" or "dcp".
        num_bytes: of arrays that this process read.
        state: tensors and containers, when there was no target; else None.
        metadata: what the checkpoint says of itself.
        adapted: what `adapt` let differ.
    """

    kind: str
    num_bytes: int
    state: Any
    metadata: Mapping[str, Any]
    adapted: AdaptationReport


def restore_foreign(
    path: str | os.PathLike[str],
    into: Mapping[str, Any] | None = None,
    *,
    items: Collection[str] | None = None,
    adapt: Collection[Adaptation] = (),
    transposed: Collection[str] = (),
    stacked: Mapping[str, int] | None = None,
) -> ForeignResult:
    """Restore a checkpoint that another library wrote. Local: meets nobody, and needs neither JAX nor Orbax.

    Parts are found by their dotted names: `model.layers.0.weight` in the target is that in the checkpoint, however
    nested. `adapt=[Rename({"params.layers_*.kernel": "model.layers.*.weight"})]` is the table for other names, from
    theirs to the target's.

    Args:
        path: a step or an item of Orbax, a directory of torch.distributed.checkpoint, a safetensors file, a directory
            of them as Hugging Face writes it, a file of torch.save (Lightning's .ckpt and those of xm.save, too), or a
            directory with a file for each rank of torch_xla's FSDP.
        into: the state to fill in place, on the devices and placements that its tensors have now. None returns
            host tensors.
        items: top-level keys of the target to restore; None for all.
        adapt: differences that are allowed: `Rename`, `Cast`, `Partial`.
        transposed: patterns of dotted paths in the target whose matrices are stored transposed, as flax's kernels are;
            where inputs or outputs have several dimensions there (heads and their size, say), they are flattened.
        stacked: dotted names in the checkpoint, each with the dimension along which the arrays below it hold all layers
            of a scanned model: `{"params.decoder.layers": 1}` makes `params.decoder.layers.0.…` of them, and so on,
            before `Rename` looks at names.

    Raises:
        InvalidArgumentError: the path is of no kind that is known, or `stacked` does not go with what is there.
        StructureMismatchError: target and checkpoint differ; lists every difference. Nothing was changed.
        CorruptDataError: the checkpoint is damaged; `target_modified` says whether parts were written to the target.
        UnsupportedValueError: it holds what cannot be read safely, or what torch has no type for.
        StorageError: it cannot be read.
    """
    checkpoint = open_foreign(path)
    if into is None:
        checkpoint.check_nothing_lost()
        state, num_bytes = _load_tree(checkpoint)
        return _result(checkpoint, num_bytes, state, AdaptationReport())
    wanted = into if items is None else {name: value for name, value in into.items() if name in items}
    flat = flatten(wanted, process_index=0, process_count=1, share=store_apart)
    checkpoint, names = unstack(checkpoint, flat_names(checkpoint.tree), stacked or {})
    names = renamed(names, adapt)
    _check_refused(checkpoint, names, flat.nodes)
    alignment = align(names, flat.nodes)
    if items is not None:
        _leave_out_others(alignment, wanted)
    specs = {at: leaf.spec for at, leaf in flat.arrays.items()}
    dtypes = {at: spec.dtype for at, spec in specs.items()}
    sources = {at: _source(checkpoint, value, dtypes.get(at), at) for at, value in alignment.arrays.items()}
    pattern = [fnmatch.translate(text) for text in transposed]
    views = {
        at: View(source, is_kernel=_matches(pattern, at), wanted=specs[at].shape if at in specs else None)
        for at, source in sources.items()
    }
    entries = [LeafEntry(path=at, dtype=view.dtype, shape=view.shape, shards=()) for at, view in views.items()]
    try:
        target = match(
            alignment.structure,
            entries,
            into,
            items=items,
            process_index=0,
            process_count=1,
            adapt=[one for one in adapt if not isinstance(one, Rename)],
        )
    except StructureMismatchError as error:
        raise error.with_context(path=checkpoint.location) from None
    num_bytes = 0
    try:
        for at, leaf in target.wanted.items():
            for region in leaf.spec.regions:
                num_bytes += _fill(leaf, region, views[at])
    except CorruptDataError as error:
        error.target_modified = True
        raise
    target.apply()
    return _result(checkpoint, num_bytes, None, target.report())


def _result(checkpoint: ForeignCheckpoint, num_bytes: int, state: Any, adapted: AdaptationReport) -> ForeignResult:
    return ForeignResult(
        kind=checkpoint.kind, num_bytes=num_bytes, state=state, metadata=checkpoint.metadata, adapted=adapted
    )


def _check_refused(checkpoint: ForeignCheckpoint, names: dict[str, Any], wanted: Mapping[TreePath, Node]) -> None:
    """Put texts for the objects that were not made: left over in the checkpoint, and refused where one is wanted."""
    if not checkpoint.refused:
        return
    asked = {display_path(at) for at in wanted if at}
    old = {id(value): name for name, value in flat_names(checkpoint.tree).items() if isinstance(value, Refused)}
    for name, value in names.items():
        if isinstance(value, Refused):
            found = old[id(value)]
            # An object may be what its container is wanted for; an array is by its own name.
            is_array = not isinstance(checkpoint.refused[found], str)
            if name in asked or (not is_array and name.rpartition(".")[0] in asked):
                raise checkpoint.refusal(found)
            names[name] = value.name


def _leave_out_others(alignment: Alignment, wanted: Mapping[str, Any]) -> None:
    """Forget what belongs to items that are not asked for."""
    for at in [at for at in alignment.structure if at and at[0] not in wanted]:
        del alignment.structure[at]
        alignment.arrays.pop(at, None)


def _matches(patterns: list[str], at: TreePath) -> bool:
    return any(re.fullmatch(pattern, display_path(at)) for pattern in patterns)


def _source(checkpoint: ForeignCheckpoint, value: Any, dtype: str | None, at: TreePath) -> ForeignArray:
    """Return the array behind a reference; a plain number becomes one, if the target's dtype holds it exactly."""
    if isinstance(value, LeafRef):
        return checkpoint.arrays[value.path]
    made = torch.tensor(value, dtype=None if dtype is None else torch_dtype(dtype))
    if made.item() != value and value == value:  # noqa: PLR0124 - NaN
        raise UnsupportedValueError(f"the number {value!r} does not fit the dtype {dtype}", leaf=display_path(at))
    return TensorArray(made, display_path(at))


def _fill(leaf: ArrayLeaf, region: Region, view: View) -> int:
    num_bytes = region.num_elements * ITEM_BYTES[view.dtype]
    if not num_bytes:
        return 0
    memory = leaf.target_buffer(region)
    if memory is not None:
        view.read(region, memory)
        return num_bytes
    rows = region.shape[0] if region.shape else 1
    step = max(1, rows * BUFFER_BYTES // num_bytes)
    for start in range(0, rows, step):
        part = region
        if region.shape:
            sizes = (min(step, rows - start), *region.shape[1:])
            part = Region((region.offsets[0] + start, *region.offsets[1:]), sizes)
        data = torch.empty(part.shape, dtype=torch_dtype(view.dtype))
        view.read(part, byte_view(data))
        leaf.write(part, data)
    return num_bytes


def _load_tree(checkpoint: ForeignCheckpoint) -> tuple[Any, int]:
    num_bytes = 0

    def load(value: Any) -> Any:
        nonlocal num_bytes
        if isinstance(value, LeafRef):
            array = checkpoint.arrays[value.path]
            data = torch.empty(array.shape, dtype=torch_dtype(array.dtype))
            if data.numel():
                array.read_into(Region.whole(array.shape), byte_view(data))
            num_bytes += data.nbytes
            return data
        if isinstance(value, dict):
            return {key: load(child) for key, child in value.items()}
        if type(value) in (list, tuple):
            return type(value)(load(child) for child in value)
        return value

    return load(checkpoint.tree), num_bytes
