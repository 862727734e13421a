"""What the rest of safepoint sees of a live array: its global geometry, and host bytes in and out.

Owns the two types that every adapter speaks, and the geometry that they share. Knows nothing of torch's tensor
kinds, of numpy or of XLA (those are the modules beside this one), nor of files, plans or processes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.region import Region
from safepoint.formats.tree import TreePath, display_path

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

__all__ = ["XLA_KINDS", "ArrayLeaf", "ArraySpec", "Memory", "held_regions"]


XLA_KINDS = ("xla", "xla_sharded")
"""What `ArraySpec.kind` is of XLA tensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """The geometry of one leaf, as one process sees it.

    Attributes:
        dtype: torch's name without `torch.` ("bfloat16"); numpy arrays use the same names.
        shape: the global shape.
        regions: what this process holds, distinct, in offset order. Replicas count: each process that holds a copy
            lists it. None is empty, unless the leaf itself has no elements; then it is the whole leaf.
            Empty where this process holds no part of the leaf.
        kind: "tensor", "dtensor", "xla", "xla_sharded" or "numpy": for messages, and to build the like again.
    """

    dtype: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Where the elements of a leaf lie, so that leaves can be found that show the same ones.

    Attributes:
        space: what the address is in: a device, or numpy's host memory.
        start: address of the first element, in bytes.
        shape: in items.
        strides: in bytes; negative ones are numpy's.
        item_bytes: of one item.
        is_conj: whether the memory holds the conjugate of the values.
        is_neg: whether it holds the negative.
    """

    space: str
    start: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    item_bytes: int
    is_conj: bool = False
    is_neg: bool = False

    @property
    def bounds(self) -> tuple[int, int]:
        """The lowest address, and the one past the highest."""
        reach = [stride * (size - 1) for stride, size in zip(self.strides, self.shape, strict=True)]
        low = self.start + sum(part for part in reach if part < 0)
        return low, self.start + sum(part for part in reach if part > 0) + self.item_bytes

    @property
    def is_lazy(self) -> bool:
        """Whether the memory holds something else than the values."""
        return self.is_conj or self.is_neg


class ArrayLeaf(ABC):
    """One live array: read its regions to the host, or write restored ones into it.

    A leaf holds a reference to the live value, and nothing else for longer than a call, except what `prefetch`
    brought to the host and `read` has not handed out yet, and what `write` staged for `finish`.

    Attributes:
        spec: geometry and dtype; fixed while the leaf lives.
    """

    __slots__ = ("_name", "spec")

    def __init__(self, spec: ArraySpec, name: str | TreePath) -> None:
        self.spec = spec
        self._name = name

    @property
    def name(self) -> str:
        """Dotted path of the leaf, for messages."""
        if not isinstance(self._name, str):
            self._name = display_path(self._name)  # only now: most leaves never need it
        return self._name

    @abstractmethod
    def read(self, region: Region) -> torch.Tensor:
        """Return the bytes of `region` on the host.

        Args:
            region: lies in one region of `spec.regions`.

        Returns:
            A CPU tensor of the leaf's dtype and the region's shape, contiguous in C order, without gradient. It
            shares the live memory where the region is contiguous host memory already, so it is only to be read,
            and shows later changes of the leaf. Everywhere else it is a copy.

        Raises:
            InvalidArgumentError: this process does not hold the region.
        """

    def target_buffer(self, region: Region) -> memoryview | None:
        """Return the live memory of `region` as writable bytes, or None where it must go through `write`.

        The view is one-dimensional, of format "B", and keeps the memory alive. After the bytes were put there,
        call `finish` as after `write`.
        """
        del region
        return None

    @abstractmethod
    def write(self, region: Region, data: torch.Tensor) -> None:
        """Put `data` where `region` is held; it may take effect only with `finish`.

        Args:
            region: lies in one region of `spec.regions`.
            data: a CPU tensor of the leaf's dtype and the region's shape; may be reused after the return.

        Raises:
            InvalidArgumentError: another dtype or shape, or a region that this process does not hold.
            UnsupportedValueError: the live value cannot take it (see `why_not_writable`).
        """

    def finish(self) -> None:
        """Make all that was written take effect. Call it once, after the last write of this leaf.

        Raises:
            IncompleteCoverageError: the live value can only be replaced as a whole, and a part was not written.
            UnsupportedValueError: elements that share memory were given different values; nothing was changed.
        """

    def release(self) -> None:
        """Forget host copies that `prefetch` brought and nobody read. Call it when a save ends, however it ends."""

    def why_not_writable(self) -> str | None:
        """Return why this value cannot be a restore target, or None if it can. Costs nothing."""
        return None

    def memory(self) -> Memory | None:
        """Return where the whole leaf lies in memory, or None where it has no elements or that cannot be told."""
        return None

    def extent(self) -> tuple[str, int, int] | None:
        """Return the space of `memory`, its lowest address and the one past its highest, or None where that does."""
        memory = self.memory()
        return None if memory is None else (memory.space, *memory.bounds)

    def address(self, region: Region) -> int | None:
        """Return where the live host memory of `region` begins if it holds its bytes in C order, or None.

        Like `target_buffer`, but keeps nothing alive, and costs a tenth. After bytes were put there, call `finish`.
        """
        del region
        return None

    def device_memory(self, region: Region) -> torch.Tensor | None:
        """Return the live memory of `region` where that is on a CUDA device and holds its values, or None.

        It is strided, of the region's shape and without gradient; only to be read.
        """
        del region
        return None

    def check_data(self, region: Region, data: torch.Tensor) -> None:
        """Check that `data` has exactly the leaf's dtype and the region's shape: nothing is ever cast."""
        dtype = str(data.dtype).removeprefix("torch.")
        if dtype != self.spec.dtype or tuple(data.shape) != region.shape:
            raise InvalidArgumentError(
                f"{dtype} data of shape {tuple(data.shape)} cannot be written to a {self.spec.dtype} region of shape "
                f"{region.shape}",
                leaf=self.name,
            )

    def not_held(self, region: Region) -> InvalidArgumentError:
        """Return the error for a region that no region of `spec.regions` contains."""
        return InvalidArgumentError(
            f"region {region} of shape {self.spec.shape} is not held by this process, which holds {self.spec.regions}",
            leaf=self.name,
        )


def held_regions(shape: tuple[int, ...], regions: Iterable[Region]) -> tuple[Region, ...]:
    """Return the distinct regions in offset order, without empty ones unless the leaf itself is empty."""
    whole = Region.whole(shape)
    distinct = set(regions)
    if whole.is_empty:
        return (whole,) if distinct else ()
    return tuple(sorted(region for region in distinct if not region.is_empty))
