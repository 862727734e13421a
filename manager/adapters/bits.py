"""The memory of a tensor as integers and as bytes, and the modes in which it may be changed.

Moving integers of the same width keeps every bit of every dtype, those included for which torch has no copy operator.
Must not know leaves or regions.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["as_bits", "byte_buffer", "changing", "copy_bits", "host_copy", "is_lazy_view", "make_lazy_like", "physical"]

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as integers of the same width, so that no operator can alter or refuse a value.

    The 16 bytes of a complex128 have no integer type; torch moves those unchanged.
    """
    bits = _BITS.get(tensor.element_size())
    return tensor if bits is None else tensor.view(bits)


def copy_bits(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors of one dtype and shape, neither a lazy view; strided ones too. Call it within `changing`.

    On the host one thread does it: torch's meet after every tensor, which on busy cores takes many times the copy.
    """
    target_bits, source_bits = as_bits(target), as_bits(source)
    if not (target.is_cpu and source.is_cpu):
        target_bits.copy_(source_bits)
        return
    np.copyto(target_bits.detach().numpy(), source_bits.detach().numpy())
    if not target.is_inference():
        torch.autograd.graph.increment_version(target)  # numpy tells autograd nothing


def byte_buffer(tensor: torch.Tensor) -> memoryview:
    """Return contiguous host memory as a writable one-dimensional view of bytes that keeps it alive."""
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


def is_lazy_view(tensor: torch.Tensor) -> bool:
    """Say whether the memory holds the conjugate or the negative of the values."""
    return tensor.is_conj() or tensor.is_neg()


def physical(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory under a conjugate or negative view, as a view that is neither."""
    if tensor.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if tensor.is_neg() else tensor  # noqa: SLF001 - the only way to undo one


def make_lazy_like(tensor: torch.Tensor, model: torch.Tensor) -> torch.Tensor:
    """Return `tensor` as the kind of view that `model` is of its own memory."""
    if model.is_conj():
        tensor = tensor.conj()
    return torch._neg_view(tensor) if model.is_neg() else tensor  # noqa: SLF001 - the only way to make one


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values on the host, C contiguous: the same memory where it is that already, else a copy."""
    if tensor.is_cpu and tensor.is_contiguous() and not is_lazy_view(tensor):
        return tensor.detach() if tensor.requires_grad else tensor
    with torch.no_grad():
        if is_lazy_view(tensor):
            tensor = tensor.resolve_conj().resolve_neg()
        return as_bits(tensor).cpu().contiguous().view(tensor.dtype)


@contextlib.contextmanager
def changing(tensor: torch.Tensor) -> Iterator[None]:
    """Allow a change in place: without a graph, and in inference mode for the tensors that need it."""
    with torch.inference_mode() if tensor.is_inference() else torch.no_grad():
        yield
