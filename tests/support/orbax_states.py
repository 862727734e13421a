"""A state that the format `orbax` lays out in both of its ways: an item of few leaves, and one of many."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safepoint.formats.orbax.layout import FILES_MAX_ARRAYS

from support.sharded_states import LEAVES, expected, make_state

if TYPE_CHECKING:
    import torch

__all__ = ["BLOCKS", "expected_items", "make_both"]

BLOCKS = FILES_MAX_ARRAYS // len(LEAVES) + 1


def make_both(mesh_shape: tuple[int, ...], *, zeros: bool = False) -> dict[str, Any]:
    """Return the state of this process on a mesh: `leaves` is few, `blocks` many, `plain` an array by itself."""
    state = make_state(mesh_shape, zeros=zeros)
    made = [make_state(mesh_shape, zeros=zeros, seed=index)["leaves"] for index in range(BLOCKS)]
    return {
        **state,
        "blocks": {f"{name}-{index}": leaf for index in range(BLOCKS) for name, leaf in made[index].items()},
    }


def expected_items() -> dict[str, dict[str, torch.Tensor]]:
    """Return each array of `leaves` and `blocks`, by its name in Orbax."""
    return {
        "leaves": {name: expected(name) for name in LEAVES},
        "blocks": {f"{name}-{index}": expected(name, index) for index in range(BLOCKS) for name in LEAVES},
    }
