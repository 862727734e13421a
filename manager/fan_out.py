"""One stored leaf that fills several live arrays: tied when it was saved, apart in the target.

Must not know the tree or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.manager.adapters import ArrayLeaf, ArraySpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from safepoint.formats.region import Region

__all__ = ["FanOutLeaf", "fan_out"]


class FanOutLeaf(ArrayLeaf):
    """Writes to all of `leaves`, which have one dtype and global shape, and any regions."""

    __slots__ = ("_leaves",)

    def __init__(self, leaves: Sequence[ArrayLeaf]) -> None:
        first = leaves[0].spec
        regions = dict.fromkeys(region for leaf in leaves for region in leaf.spec.regions)
        spec = ArraySpec(dtype=first.dtype, shape=first.shape, regions=tuple(sorted(regions)), kind=first.kind)
        super().__init__(spec, leaves[0].name)
        self._leaves = tuple(leaves)

    def read(self, region: Region) -> torch.Tensor:
        """Return the region from the first array that holds it."""
        for leaf in self._leaves:
            if any(held.contains(region) for held in leaf.spec.regions):
                return leaf.read(region)
        raise self.not_held(region)

    def write(self, region: Region, data: torch.Tensor) -> None:
        """Put `data` into every array that holds a part of the region."""
        self.check_data(region, data)
        for leaf in self._leaves:
            for held in leaf.spec.regions:
                if held == region:
                    leaf.write(region, data)
                elif (common := held.intersect(region)) is not None:
                    leaf.write(common, data[common.slices_in(region)].contiguous())

    def finish(self) -> None:
        """Finish all of them."""
        for leaf in self._leaves:
            leaf.finish()


def fan_out(leaves: Sequence[ArrayLeaf]) -> ArrayLeaf:
    """Return one leaf that fills all of these."""
    return leaves[0] if len(leaves) == 1 else FanOutLeaf(leaves)
