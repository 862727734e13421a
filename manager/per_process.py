"""`PerProcess`: the mark for state that every process has for itself.

Owns the public class and the rule for another number of processes. Must not know the tree around it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["PerProcess"]


class PerProcess:
    """Marks a part of the state that differs between processes: a random generator, a data-loader position.

    Each process saves its own. A restore by the same number of processes gives each its own back. Another number of
    processes is refused, with the choices spelled out, unless `merge` says what then becomes of them.

    Attributes:
        value: the marked part: plain values, tensors, containers of them, or anything with `state_dict`. A restore
            replaces it where it cannot be filled in place.
        merge: called with the parts of all saving processes in order (state dicts, for what has `state_dict`), and
            the index and number of the restoring process; returns the part of that process.

    Example:
        state = {"model": model, "rng": PerProcess(RNGState()), "position": PerProcess(0, merge=split_positions)}
    """

    def __init__(self, value: Any, merge: Callable[[Sequence[Any], int, int], Any] | None = None) -> None:
        self.value = value
        self.merge = merge

    def __repr__(self) -> str:
        return f"PerProcess({self.value!r})"
