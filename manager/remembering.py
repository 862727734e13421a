"""What a save works out from the geometry of the state alone is the same the next time; here it is kept for that.

Holds one result each: of a training run's states nearly all look alike. Results are never changed by who gets them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from safepoint.formats.entries import LeafEntry
    from safepoint.manager.directing import SaveLayout
    from safepoint.manager.file_bytes import PlannedFile

__all__ = ["Memo", "SaveMemos"]

_ResultT = TypeVar("_ResultT")


class Memo(Generic[_ResultT]):
    """The last result of a pure function, given again as long as its arguments are equal. For one thread at a time."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[Any, ...], _ResultT] | None = None

    def get(self, arguments: tuple[Any, ...], make: Callable[[], _ResultT]) -> _ResultT:
        """Return what `make()` returned for equal arguments, or returns now; they must not be changed later."""
        if self._kept is None or self._kept[0] != arguments:
            self._kept = None
            self._kept = (arguments, make())
        return self._kept[1]


@dataclass(kw_only=True, slots=True)
class SaveMemos:
    """What the saves of one manager keep for each other."""

    layout: Memo[SaveLayout] = field(default_factory=Memo)
    files: Memo[list[PlannedFile]] = field(default_factory=Memo)
    leaves: Memo[tuple[LeafEntry, ...]] = field(default_factory=Memo)
