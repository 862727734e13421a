"""Deleting on request: one step, or all that is left over in a root and that no policy keeps.

First what would go is told; then it is done, as the root's owner, by the same renames as in a run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from safepoint.formats.storage import LocalStorage
from safepoint.manager.disk_usage import bytes_freed_in
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.owner import current_holder
from safepoint.manager.owning import owned_root
from safepoint.manager.pins import pinned_steps
from safepoint.manager.retention import unkept_steps
from safepoint.manager.step_listing import parse_name
from safepoint.manager.step_paths import find_step
from safepoint.manager.step_reading import StepReader
from safepoint.manager.unsettled import unsettled_marks

if TYPE_CHECKING:
    from safepoint.formats.storage import Storage
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


def plan_sweep(storage: Storage, keep: Policy | None = None) -> SweepPlan:
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
        kinds.update((step.files_prefix, "unkept") for step in unkept_steps(reader, keep))
    marks = {mark.files_prefix: mark for mark in unsettled_marks(storage)}
    kinds.update((name, mark.kind) for name, mark in marks.items())
    freed = bytes_freed_in(storage, sorted(kinds))
    leftovers = tuple(
        Leftover(name=name, kind=kinds[name], step=_step_of(name.partition("/")[0]), num_bytes=num_bytes)
        for name, num_bytes in zip(sorted(kinds), freed, strict=True)
    )
    holder = current_holder(storage.root if isinstance(storage, LocalStorage) else storage)
    alive = holder is not None and (holder.process is None or holder.process.state() != "gone")
    return SweepPlan(leftovers=leftovers, holder=holder if alive else None)


def _step_of(name: str) -> int | None:
    own = parse_name(name)
    return None if own is None else own.step


def sweep(storage: Storage, keep: Policy | None = None) -> tuple[tuple[Leftover, ...], tuple[str, ...]]:
    """Delete what `plan_sweep` tells.

    Returns:
        What went, and the names of what is hidden but could not be deleted now.

    Raises:
        RootInUseError: a manager owns the root; nothing was deleted.
    """
    plan = plan_sweep(storage, keep)
    with owned_root(storage) as owned:  # which hides what is unfinished or replaced
        committer = owned.committer()
        for step in unkept_steps(committer, keep) if keep is not None else ():
            committer.hide(step)
        remaining = committer.delete_hidden()
    gone = tuple(leftover for leftover in plan.leftovers if not _is_there(storage, leftover.name))
    return gone, tuple(remaining)


def _is_there(storage: Storage, name: str) -> bool:
    parent, _, last = name.rpartition("/")
    return any(entry.name == last for entry in storage.list(parent))


def remove_step(storage: Storage, step: int) -> tuple[str, ...]:
    """Delete one step, or what has its name and a record and is damaged; return what could not be deleted now.

    Raises:
        StepNotFoundError: there is none; lists those that are.
        InvalidArgumentError: it is pinned.
        CorruptDataError: a symbolic link has its name, which is not ours to delete.
        RootInUseError: a manager owns the root; nothing was deleted.
    """
    if step in pinned_steps(storage):
        raise InvalidArgumentError(
            f"step {step} is pinned",
            step=step,
            path=storage.location,
            hint="Take the pin off first: `safepoint unpin`.",
        )
    reader = StepReader(storage)
    problem = next((problem for problem in reader.problems() if problem.step == step), None)
    if problem is not None and problem.is_link:
        raise problem.error
    found = None if problem is not None else find_step(reader, step)
    with owned_root(storage) as owned:
        committer = owned.committer()
        if problem is not None:
            committer.hide_damaged(problem)
        if found is not None:
            committer.hide(found)
        return tuple(committer.delete_hidden())
