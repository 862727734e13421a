"""Whether the processes came with the same thing; if not, one error that names who brought what. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.manager.errors import DisagreementError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["require_same"]


def require_same(name: str, values: Sequence[object], *, doing: str) -> None:
    """Raise DisagreementError, naming who brought what, unless all values are equal."""
    holders: dict[object, list[int]] = {}
    for process, value in enumerate(values):
        holders.setdefault(value, []).append(process)
    if len(holders) == 1:
        return
    brought = tuple((f"{name} {value!r}", tuple(processes)) for value, processes in holders.items())
    text = "; ".join(f"{what} on {_processes(who)}" for what, who in brought)
    raise DisagreementError(
        f"the processes came to this {doing} with a different {name}: {text}",
        brought=brought,
        outcome="not_committed" if doing == "save" else None,
        hint=f"Every process must call {doing} with the same {name}.",
    )


def _processes(indices: Sequence[int]) -> str:
    return ("process " if len(indices) == 1 else "processes ") + ", ".join(map(str, indices))
