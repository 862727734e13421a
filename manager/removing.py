"""Deleting on request: one step, or all that is left over in a root and that no policy keeps.

First what would go is told; then it is done, as the root's owner, by the same renames as in a run.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from safepoint.manager import sweeping
from safepoint.manager.disk_usage import bytes_freed
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.owner import current_holder
from safepoint.manager.owning import owned_root
from safepoint.manager.pins import pinned_steps
from safepoint.manager.retention import unkept_steps
from safepoint.manager.step_listing import parse_name
from safepoint.manager.step_paths import find_step
from safepoint.manager.step_reading import StepReader

if TYPE_CHECKING:
    from safepoint.formats.storage import LocalStorage
    from safepoint.manager.owner import Holder
    from safepoint.manager.policies import Policy

__all__ = ["Leftover", "SweepPlan", "plan_sweep", "remove_step", "sweep"]

LeftoverKind = Literal["unfinished", "replaced", "deleted", "unkept"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftover:
    """A directory that is to go.

    Attributes:
        name: in the root.
        kind: "unfinished": a save that never committed. "replaced": a step that another attempt replaced. "deleted":
            hidden already. "unkept": a committed step that no policy keeps.
        step: its step, where the name tells.
        num_bytes: what deleting it frees, after those before it: files that a step shares with it stay.
    """

    name: str
    kind: LeftoverKind
    step: int | None
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepPlan:
    """What would go.

    Attributes:
        leftovers: the directories.
        holder: a live manager that owns the root, whose saves under way are among them; None where there is none.
    """

    leftovers: tuple[Leftover, ...]
    holder: Holder | None

    @property
    def num_bytes(self) -> int:
        """What it would free."""
        return sum(leftover.num_bytes for leftover in self.leftovers)


def plan_sweep(storage: LocalStorage, keep: Policy | None = None) -> SweepPlan:
    """Return what `sweep` would delete. Changes nothing, and needs no ownership.

    Args:
        storage: of the root.
        keep: which committed steps stay; None keeps all. The latest and pinned ones stay anyway.
    """
    reader = StepReader(storage)
    listing = reader.listing()
    kinds: dict[str, LeftoverKind] = {step.prefix: "replaced" for step in listing.superseded}
    for entry in storage.list(""):
        own = parse_name(entry.name)
        if entry.is_dir and own is not None and own.kind in ("tmp", "trash"):
            kinds[entry.name] = "unfinished" if own.kind == "tmp" else "deleted"
    if keep is not None:
        kinds.update((step.prefix, "unkept") for step in unkept_steps(reader, keep))
    freed = bytes_freed([storage.root / name for name in sorted(kinds)])
    leftovers = tuple(
        Leftover(name=name, kind=kinds[name], step=_step_of(name), num_bytes=num_bytes)
        for name, num_bytes in zip(sorted(kinds), freed, strict=True)
    )
    holder = current_holder(storage.root)
    alive = holder is not None and (holder.process is None or holder.process.state() != "gone")
    return SweepPlan(leftovers=leftovers, holder=holder if alive else None)


def _step_of(name: str) -> int | None:
    own = parse_name(name)
    return None if own is None else own.step


def sweep(storage: LocalStorage, keep: Policy | None = None) -> tuple[tuple[Leftover, ...], tuple[str, ...]]:
    """Delete what `plan_sweep` tells.

    Returns:
        What went, and the names of what is hidden but could not be deleted now.

    Raises:
        RootInUseError: a manager owns the root; nothing was deleted.
    """
    plan = plan_sweep(storage, keep)
    with owned_root(storage.root) as owned:  # which hides what is unfinished or replaced
        committer = owned.committer()
        for step in unkept_steps(committer, keep) if keep is not None else ():
            committer.hide(step)
        remaining = committer.delete_hidden()
    there = {entry.name for entry in storage.list("")}
    return tuple(leftover for leftover in plan.leftovers if leftover.name not in there), tuple(remaining)


def remove_step(storage: LocalStorage, step: int) -> tuple[str, ...]:
    """Delete one step, or what has its name and a record and is damaged; return what could not be deleted now.

    Raises:
        StepNotFoundError: there is none; lists those that are.
        InvalidArgumentError: it is pinned.
        RootInUseError: a manager owns the root; nothing was deleted.
    """
    if step in pinned_steps(storage):
        raise InvalidArgumentError(
            f"step {step} is pinned",
            step=step,
            path=storage.location,
            hint="Take the pin off first: `safepoint unpin`.",
        )
    prefix, attempt = _find_any(storage, step)
    with owned_root(storage.root) as owned:
        sweeping.to_trash(storage, prefix, attempt)
        return tuple(owned.committer().delete_hidden())


def _find_any(storage: LocalStorage, step: int) -> tuple[str, str]:
    reader = StepReader(storage)
    for problem in reader.problems():
        if problem.step == step:
            return problem.prefix, secrets.token_hex(8)
    found = find_step(reader, step)
    return found.prefix, found.record.attempt
