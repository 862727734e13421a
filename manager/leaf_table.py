"""What one process holds, without the data: brought to the rendezvous of a save.

Owns the table's bytes: equal for equal tables, so that processes with one structure share one by digest. Must not
know live values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safepoint.formats.errors import CorruptDataError, InvalidArgumentError
from safepoint.formats.fields import known_json, parse_json
from safepoint.formats.region import Region
from safepoint.formats.tree import check_data, structure_from_rows, structure_to_rows
from safepoint.manager.adapters import ArraySpec

if TYPE_CHECKING:
    from safepoint.formats.manifest import Node, TreePath

__all__ = ["LeafTable"]

_WHAT = "a leaf table"


@dataclass(frozen=True, kw_only=True)
class LeafTable:
    """The structure and the geometry of a state, as one process sees it.

    Attributes:
        nodes: node by path, parents first, in the state's order; `()` is the root.
        arrays: spec of each array leaf.
    """

    nodes: dict[TreePath, Node]
    arrays: dict[TreePath, ArraySpec]

    def to_bytes(self) -> bytes:
        """Return the table as canonical JSON, in time linear in the number of nodes."""
        rows, index = structure_to_rows(self.nodes)
        arrays = [
            [index[path], spec.dtype, list(spec.shape), spec.kind, _regions_to_json(spec)]
            for path, spec in self.arrays.items()
        ]
        check_data(self.nodes)
        return known_json({"nodes": rows, "arrays": arrays}).encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes) -> LeafTable:
        """Return the table that another process brought.

        Raises:
            CorruptDataError: it is none.
        """
        value = parse_json(data, what=_WHAT, path=_WHAT)
        try:
            nodes, paths = structure_from_rows(value["nodes"], path=_WHAT)
            arrays = {paths[row]: _spec(rest) for row, *rest in value["arrays"]}
        except (KeyError, IndexError, TypeError, ValueError, InvalidArgumentError) as error:
            raise CorruptDataError(f"{_WHAT} is malformed: {error}") from error
        return cls(nodes=nodes, arrays=arrays)


def _regions_to_json(spec: ArraySpec) -> Any:
    # Nearly every leaf is held whole; a null keeps the table of a large replicated state small.
    return None if spec.regions == (Region.whole(spec.shape),) else [region.to_json() for region in spec.regions]


def _spec(row: list[Any]) -> ArraySpec:
    dtype, shape, kind, regions = row
    shape = tuple(shape)
    held = (
        (Region.whole(shape),)
        if regions is None
        else tuple(Region(tuple(offsets), tuple(sizes)) for offsets, sizes in regions)
    )
    return ArraySpec(dtype=dtype, shape=shape, regions=held, kind=kind)
