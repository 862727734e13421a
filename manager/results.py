"""What `save` and `restore` tell their caller: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safepoint.manager.adapting import AdaptationReport

if TYPE_CHECKING:
    from collections.abc import Mapping

    from safepoint.formats.manifest import Mode

__all__ = ["RestoreResult", "SaveResult"]


@dataclass(frozen=True, kw_only=True)
class SaveResult:
    """What `save` did on this process.

    Attributes:
        step: the step asked for.
        saved: whether it was written (with `blocking=False`: is being written).
        reason: why it was not saved; "" when it was.
        mode: "consolidated" or "sharded"; None when nothing was saved.
        mode_reason: why this mode.
        num_bytes: data bytes that this process wrote; with `blocking=False`, at most.
        blocked_secs: how long the caller was held up, in seconds.
        path: directory of the step; "" when nothing was saved.
        full_reason: with `unchanged="link"`, why this process linked nothing; "" when it did, or will be known later.
    """

    step: int
    saved: bool
    reason: str = ""
    mode: Mode | None = None
    mode_reason: str = ""
    num_bytes: int = 0
    blocked_secs: float = 0.0
    path: str = ""
    full_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class RestoreResult:
    """What was restored.

    Attributes:
        step: its number.
        metrics: as given when it was saved.
        mode: "consolidated" or "sharded", as it was written.
        num_bytes: bytes that this process read from the storage itself; on object stores, others of its host may have
            read the rest and handed it on.
        state: the restored state as host tensors and mappings, when there was no target; else None.
        skipped: one text for each newer step that was passed over because it is not sound.
        abandoned: steps with higher numbers that were committed earlier, on a branch that was left.
        adapted: what `adapt` let differ between step and target, on this process.
    """

    step: int
    metrics: Mapping[str, float]
    mode: str
    num_bytes: int = 0
    state: dict[str, Any] | None = None
    skipped: tuple[str, ...] = ()
    abandoned: tuple[int, ...] = ()
    adapted: AdaptationReport = field(default_factory=AdaptationReport)
