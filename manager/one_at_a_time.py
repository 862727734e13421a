"""One operation of a manager at a time.

Two threads that save at once would write each other's data under each other's step, with digests that match. So would
a signal handler, or a `state_dict` of the user's, that saves in the middle of a save. The second one is refused.
"""

from __future__ import annotations

import threading
from functools import wraps
from typing import TYPE_CHECKING, Concatenate, ParamSpec, Protocol, TypeVar

from safepoint.manager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["OneAtATime", "one_at_a_time"]

_P = ParamSpec("_P")
_R = TypeVar("_R")


class OneAtATime:
    """Lets one operation in, and refuses others until it is over. Waits for nobody."""

    def __init__(self) -> None:
        self._current: dict[str, tuple[str, str]] = {}

    def run(self, name: str, operation: Callable[[], _R]) -> _R:
        """Return what `operation` returns.

        Raises:
            InvalidArgumentError: another one is under way, on this thread or another; names it.
        """
        mine = (name, threading.current_thread().name)
        try:  # around the entry too: an interrupt right after it must not leave it there
            current = self._current.setdefault("operation", mine)
            if current is not mine:
                raise InvalidArgumentError(
                    f"{name} was called on thread {mine[1]} while {current[0]} is under way on thread {current[1]}",
                    hint="One thread uses a manager, one call at a time: not a signal handler, and not a state_dict(). "
                    "For a save behind the training loop: save(..., blocking=False).",
                )
            return operation()
        finally:
            if self._current.get("operation") is mine:
                del self._current["operation"]


class _HasTurn(Protocol):
    _turn: OneAtATime


_M = TypeVar("_M", bound=_HasTurn)


def one_at_a_time(method: Callable[Concatenate[_M, _P], _R]) -> Callable[Concatenate[_M, _P], _R]:
    """Make a method one of those of which an object does one at a time, through its `_turn`."""

    @wraps(method)
    def alone(self: _M, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        return self._turn.run(f"{method.__name__.lstrip('_')}()", lambda: method(self, *args, **kwargs))

    return alone
