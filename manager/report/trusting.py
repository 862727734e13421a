"""Values from records that anybody may have written, as numbers and short texts or not at all."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

__all__ = ["as_number", "as_secs", "as_text", "as_time", "as_whole"]

_MAX_TEXT = 500
_MAX_SECS = 1e9


def as_number(value: Any) -> float | None:
    """Return a finite number; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def as_secs(value: Any) -> float:
    """Return a duration in seconds, 0 where it is none."""
    number = as_number(value)
    return number if number is not None and 0 <= number < _MAX_SECS else 0.0


def as_whole(value: Any) -> int | None:
    """Return a whole number of at least 0 below 2⁶³; None for anything else."""
    return value if type(value) is int and 0 <= value < 1 << 63 else None


def as_text(value: Any) -> str:
    """Return a text of bounded length, "" where it is none; what is not printable is escaped, line ends aside."""
    if not isinstance(value, str):
        return ""
    short = value if len(value) <= _MAX_TEXT else value[: _MAX_TEXT - 1] + "…"
    return "".join(
        char if char.isprintable() or char == "\n" else char.encode("unicode_escape").decode() for char in short
    )


def as_time(value: Any) -> float | None:
    """Return seconds since 1970, from such a number or an ISO 8601 text; None for anything else."""
    number = as_number(value)
    if isinstance(value, str):
        try:
            then = datetime.fromisoformat(value)
            number = (then if then.tzinfo is not None else then.replace(tzinfo=UTC)).timestamp()
        except (ValueError, OverflowError):
            return None
    return number if number is not None and 0 <= number < 1 << 37 else None
