"""The states that are saved: a transformer's parameters, and many small leaves."""

from __future__ import annotations

import torch

__all__ = ["num_bytes_of", "small_state", "transformer_state", "zeros_like"]

_WIDTH = 512


def transformer_state(num_bytes: int) -> dict[str, torch.Tensor]:
    """Return about `num_bytes` of float32 parameters: blocks of 12 MiB in twelve tensors, and an embedding."""
    shapes: list[tuple[str, tuple[int, ...]]] = [
        ("attention.qkv.weight", (3 * _WIDTH, _WIDTH)),
        ("attention.qkv.bias", (3 * _WIDTH,)),
        ("attention.out.weight", (_WIDTH, _WIDTH)),
        ("attention.out.bias", (_WIDTH,)),
        ("norm_1.weight", (_WIDTH,)),
        ("norm_1.bias", (_WIDTH,)),
        ("mlp.up.weight", (4 * _WIDTH, _WIDTH)),
        ("mlp.up.bias", (4 * _WIDTH,)),
        ("mlp.down.weight", (_WIDTH, 4 * _WIDTH)),
        ("mlp.down.bias", (_WIDTH,)),
        ("norm_2.weight", (_WIDTH,)),
        ("norm_2.bias", (_WIDTH,)),
    ]
    block_bytes = 4 * sum(torch.Size(shape).numel() for _, shape in shapes)
    blocks = max(1, num_bytes // block_bytes)
    rows = max(1, (num_bytes - blocks * block_bytes) // (4 * _WIDTH))
    generator = torch.Generator().manual_seed(0)
    state = {"embedding.weight": torch.randn(rows, _WIDTH, generator=generator)}
    for block in range(blocks):
        for name, shape in shapes:
            state[f"blocks.{block}.{name}"] = torch.randn(shape, generator=generator)
    return state


def small_state(count: int) -> dict[str, torch.Tensor]:
    """Return `count` leaves of 1 KiB, each with memory of its own."""
    return {f"leaf.{number:06}": torch.full((256,), float(number)) for number in range(count)}


def zeros_like(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return a target for a restore: memory that is there already."""
    return {name: torch.zeros_like(tensor) for name, tensor in state.items()}


def num_bytes_of(state: dict[str, torch.Tensor]) -> int:
    """Return the bytes of all tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in state.values())
