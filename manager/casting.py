"""A live array that takes stored data of another dtype: each part is cast as it arrives.

Must not know the tree or files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from safepoint.formats.dtypes import torch_dtype
from safepoint.manager.adapters import ArrayLeaf, ArraySpec

if TYPE_CHECKING:
    from safepoint.formats.region import Region

__all__ = ["CastLeaf", "can_cast"]


def can_cast(saved: str, target: str) -> bool:
    """Say whether a cast keeps the kind of number: a float may lose digits, and becomes no integer."""
    one, other = torch_dtype(saved), torch_dtype(target)
    if not torch.can_cast(one, other):
        return False
    try:
        torch.zeros(1, dtype=torch.uint8).repeat(one.itemsize).view(one).to(other)
    except (NotImplementedError, RuntimeError):
        return False  # a dtype that torch only stores, as bits8 or float4
    return True


class CastLeaf(ArrayLeaf):
    """Writes to `leaf`, which has another dtype than the data."""

    __slots__ = ("_leaf",)

    def __init__(self, leaf: ArrayLeaf, dtype: str) -> None:
        spec = leaf.spec
        super().__init__(ArraySpec(dtype=dtype, shape=spec.shape, regions=spec.regions, kind=spec.kind), leaf.name)
        self._leaf = leaf

    def read(self, region: Region) -> torch.Tensor:
        """Return the region in the dtype of the step."""
        return self._leaf.read(region).to(torch_dtype(self.spec.dtype))

    def write(self, region: Region, data: torch.Tensor) -> None:
        """Cast, and write."""
        self.check_data(region, data)
        self._leaf.write(region, data.to(torch_dtype(self._leaf.spec.dtype)))

    def finish(self) -> None:
        """Finish the leaf."""
        self._leaf.finish()
