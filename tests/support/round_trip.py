"""A step in memory: what a save keeps of a state, through the bytes of its table, without files or processes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.dtypes import torch_dtype
from safepoint.formats.fields import canonical_json, parse_json
from safepoint.formats.manifest import LeafEntry, Node, TreePath
from safepoint.formats.region import Region
from safepoint.formats.tree import structure_from_rows, structure_to_rows
from safepoint.manager.adapting import AdaptationReport
from safepoint.manager.leaf_table import LeafTable
from safepoint.manager.merging import merge_tables
from safepoint.manager.state import flatten
from safepoint.manager.targets import match
from safepoint.manager.unflatten import array_paths, select_structure, unflatten

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.manager.adapters import ArrayLeaf

__all__ = ["Step", "save_step"]


@dataclass(kw_only=True)
class Step:
    structure: dict[TreePath, Node]
    entries: list[LeafEntry]
    data: dict[TreePath, torch.Tensor]
    report: AdaptationReport = field(default_factory=AdaptationReport)

    def restore(self, into: Mapping[str, Any], *, own: tuple[int, int] = (0, 1), **options: Any) -> list[TreePath]:
        """Fill `into` as a restore does; return which leaves were read."""
        target = match(self.structure, self.entries, into, process_index=own[0], process_count=own[1], **options)
        target.check_shared(self._read)
        self._read(target.wanted)
        target.apply()
        self.report = target.report()
        return list(target.wanted)

    def _read(self, wanted: Mapping[TreePath, ArrayLeaf]) -> None:
        for path, leaf in wanted.items():
            for region in leaf.spec.regions:
                part = self.data[path][region.slices_in(Region.whole(self.data[path].shape))]
                buffer = leaf.target_buffer(region)
                if buffer is None:
                    leaf.write(region, part.contiguous())
                elif len(buffer):
                    buffer[:] = memoryview(part.contiguous().reshape(-1).view(torch.uint8).numpy())

    def without_target(self, *, own: tuple[int, int] = (0, 1), **selection: Any) -> dict[str, Any]:
        """Return the state as host tensors and mappings."""
        chosen = select_structure(self.structure, process_index=own[0], process_count=own[1], **selection)
        arrays = {path: self.data[path].clone() for path in array_paths(chosen) if path in self.data}
        return unflatten(chosen, arrays, process_index=own[0], process_count=own[1])


def save_step(*states: Mapping[str, Any]) -> Step:
    """Return the step that processes with these states save together; each leaf is held whole by one of them."""
    flats = [flatten(state, process_index=index, process_count=len(states)) for index, state in enumerate(states)]
    merged = merge_tables([LeafTable.from_bytes(flat.table().to_bytes()) for flat in flats])
    rows, _ = structure_to_rows(merged.nodes)
    read_back: Sequence[Any] = parse_json(canonical_json(rows), what="rows", path="test")
    structure, _ = structure_from_rows(read_back, path="test")
    entries, data = [], {}
    for path, spec in merged.arrays.items():
        leaf = next(flat.arrays[path] for flat in flats if path in flat.arrays)
        whole = torch.empty(spec.shape, dtype=torch_dtype(spec.dtype))
        for region in leaf.spec.regions:
            bits = leaf.read(region).contiguous().reshape(-1).view(torch.uint8).clone()
            part = bits.view(whole.dtype).reshape(region.shape)
            whole[region.slices_in(Region.whole(spec.shape))] = part
        data[path] = whole
        entries.append(LeafEntry(path=path, dtype=spec.dtype, shape=spec.shape, shards=()))
    return Step(structure=structure, entries=entries, data=data)
