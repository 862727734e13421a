"""Tensors that have memory of their own: one or more strided pieces, on any device that torch can copy from.

Owns reading and writing of strided memory bit for bit: transposed, sliced, expanded, conjugated and negated views,
inference tensors, leaves that require grad. `DTensor` uses it with the pieces of its local tensor.
Must not know placements, XLA or numpy.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch

from safepoint.formats.dtypes import dtype_name
from safepoint.formats.region import Region
from safepoint.manager.adapters.base import ArrayLeaf, ArraySpec, Memory
from safepoint.manager.adapters.bits import byte_buffer, changing, copy_bits, host_copy, is_lazy_view
from safepoint.manager.adapters.shared_memory import shares_elements, write_shared

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from safepoint.formats.tree import TreePath

__all__ = ["Piece", "TensorLeaf", "tell_autograd", "wrap_tensor"]

_ADDRESSED = ("cpu", "cuda")  # elsewhere an address may be a handle, with which nothing can be computed


class Piece(NamedTuple):
    """A box of the leaf, and the live strided memory that holds it."""

    region: Region
    tensor: torch.Tensor

    @property
    def shares_elements(self) -> bool:
        """Whether elements may share memory, with each other or with those of another part of the piece."""
        return shares_elements(self.tensor)


class TensorLeaf(ArrayLeaf):
    """A leaf whose pieces are strided tensors.

    `read` copies nothing where the region is contiguous on the host and is no conjugate or negative view.
    """

    __slots__ = ("_bypassed", "_pieces", "_staged")

    def __init__(self, spec: ArraySpec, name: str | TreePath, pieces: Sequence[Piece]) -> None:
        self.spec = spec
        self._name = name
        self._pieces = tuple(pieces)
        self._staged: tuple[tuple[torch.Tensor, torch.Tensor], ...] = ()
        self._bypassed: tuple[torch.Tensor, ...] = ()

    def read(self, region: Region) -> torch.Tensor:
        """Return the live memory where that can be had, else a copy of the region's own elements only."""
        return host_copy(self._find(region)[1])

    def target_buffer(self, region: Region) -> memoryview | None:
        """Return the live memory, unless it is strided, on a device, or a conjugate or negative view."""
        piece, live = self._find(region)
        if live.device.type != "cpu" or not live.is_contiguous() or is_lazy_view(live) or piece.shares_elements:
            return None
        self._bypassed += (live,)
        return byte_buffer(live)

    def address(self, region: Region) -> int | None:
        """Return that of a tensor which is one piece on the host."""
        if len(self._pieces) != 1:
            return None
        piece = self._pieces[0]
        live = piece.tensor
        if piece.region is not region or not (live.is_cpu and live.is_contiguous()):
            return None
        if live.is_conj() or live.is_neg():
            return None
        self._bypassed = (live,)
        return live.data_ptr()

    def write(self, region: Region, data: torch.Tensor) -> None:
        """Copy through the view at once; where elements share memory, `finish` does."""
        self.check_data(region, data)
        piece, live = self._find(region)
        if piece.shares_elements:
            self._staged += ((live, data.clone(memory_format=torch.contiguous_format)),)
            return
        with changing(live):
            if is_lazy_view(live):
                live.copy_(data)
            else:
                copy_bits(live, data)

    def finish(self) -> None:
        """Write what shares memory, and tell autograd of what was put into target buffers."""
        tell_autograd(self.finish_untold())

    def finish_untold(self) -> tuple[torch.Tensor, ...]:
        """Write what shares memory; return what was put into target buffers, for `tell_autograd`."""
        staged, self._staged = self._staged, ()
        if staged:
            write_shared(staged, self.name)
        bypassed, self._bypassed = self._bypassed, ()
        return bypassed

    def device_memory(self, region: Region) -> torch.Tensor | None:
        """Return the piece, or the part of it, as it lies on its device."""
        live = self._find(region)[1]
        return live.detach() if live.is_cuda and not is_lazy_view(live) else None

    def memory(self) -> Memory | None:
        """Return the memory of a plain tensor on a device whose addresses are told."""
        live = self._pieces[0].tensor if len(self._pieces) == 1 else None
        if live is None or self.spec.kind != "tensor" or live.device.type not in _ADDRESSED or not live.numel():
            return None
        item = live.element_size()
        return Memory(
            space=str(live.device),
            start=live.data_ptr(),
            shape=self.spec.shape,
            strides=tuple(stride * item for stride in live.stride()),
            item_bytes=item,
            is_conj=live.is_conj(),
            is_neg=live.is_neg(),
        )

    def extent(self) -> tuple[str, int, int] | None:
        """Return the place of a contiguous tensor at little cost."""
        if len(self._pieces) == 1 and self.spec.kind == "tensor":
            live = self._pieces[0].tensor
            if live.is_cpu and live.is_contiguous() and (num_bytes := live.nbytes):
                start = live.data_ptr()
                return "cpu", start, start + num_bytes
        return super().extent()

    def _find(self, region: Region) -> tuple[Piece, torch.Tensor]:
        if len(region.shape) == len(self.spec.shape):
            for piece in self._pieces:
                if piece.region is region or piece.region == region:
                    return piece, piece.tensor
                if piece.region.contains(region):
                    return piece, piece.tensor[region.slices_in(piece.region)]
        raise self.not_held(region)


def tell_autograd(tensors: Iterable[torch.Tensor]) -> None:
    """Tell of bytes that were put there behind its back: a graph that saved one of the tensors must notice."""
    torch.autograd.graph.increment_version([live for live in tensors if not live.is_inference()])


def wrap_tensor(value: torch.Tensor, name: str | TreePath) -> TensorLeaf:
    """Return the leaf of a strided tensor that this process holds wholly.

    Raises:
        UnsupportedValueError: the dtype cannot be kept.
    """
    spec = _whole_spec(value.dtype, value.shape)
    # A view costs more than all else here, and only what has a graph needs one.
    return TensorLeaf(spec, name, (Piece(spec.regions[0], value.detach() if value.requires_grad else value),))


@lru_cache(maxsize=4096)
def _whole_spec(dtype: torch.dtype, shape: torch.Size) -> ArraySpec:
    """Return the spec of a tensor that is held whole; one for many, since a model has few different ones."""
    return ArraySpec(dtype=dtype_name(dtype), shape=tuple(shape), regions=(Region.whole(shape),), kind="tensor")
