"""Random generators as state: torch's, numpy's and Python's own, to a small mapping and back.

Owns how each kind of generator gives and takes its state. Arrays stay arrays, so that a generator costs the manifest
next to nothing. Must not know trees, and never makes a generator: a state goes into one that exists.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from safepoint.manager.errors import CorruptDataError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["generator_state", "is_generator", "set_generator_state"]

_KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState, np.random.BitGenerator)


def is_generator(value: object) -> bool:
    """Say whether it is a random generator whose state can be told."""
    return isinstance(value, _KINDS) and not isinstance(value, random.SystemRandom)


def generator_state(generator: Any) -> dict[str, Any]:
    """Return the state of a generator, without drawing from it."""
    if isinstance(generator, torch.Generator):
        return {"state": generator.get_state()}
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss": gauss}
    if isinstance(generator, np.random.RandomState):
        return dict(generator.get_state(legacy=False))
    bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
    return dict(bits.state)


def set_generator_state(generator: Any, state: Mapping[str, Any]) -> None:
    """Put a saved state into a generator; the next draws are those that followed the save.

    Raises:
        CorruptDataError: it is no state of such a generator.
    """
    try:
        _set(generator, state)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CorruptDataError(f"this is no state of a {type(generator).__name__}: {error}") from error


def _set(generator: Any, state: Mapping[str, Any]) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state["state"].cpu())
    elif isinstance(generator, random.Random):
        generator.setstate((state["version"], tuple(state["words"].tolist()), state["gauss"]))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(dict(state))
    else:
        bits = generator.bit_generator if isinstance(generator, np.random.Generator) else generator
        bits.state = dict(state)
