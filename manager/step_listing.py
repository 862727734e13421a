"""Which names in a root are ours, and which of them are committed steps. Reads only.

Names, all directories directly in the root:

    <step>                  a committed step, if it holds a valid commit record of that step; the record tells whether
                            its files lie beside it, or in a directory of their attempt's there
    <step>.tmp-<attempt>    a save under way, or what one left behind
    <step>.old-<attempt>    a step that the attempt was replacing: it is the step while there is no other
    .trash-<attempt>        hidden, being deleted (`-<n>` is added should the name be taken)
    .safepoint/             owner, pins, what is unsettled (`unsettled`)

In the place of the record may be a tombstone: then there is no step, whatever else lies there (`marker_commit`).

`<step>.damaged-<attempt>` is what was found unreadable under the name of a step that was saved again: kept for people
to look at, and foreign from then on.

Everything else belongs to others and is neither listed nor touched. That includes numbers in another spelling than
ours (`007`, `+5`), files, symbolic links, and a directory with a number for a name but no commit record in it. A link
with the name of a step that leads to a step elsewhere, or nowhere, is told of: somebody may take it for one.
"""

from __future__ import annotations

import errno
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Literal

from safepoint.formats.commit_record import COMMIT_MAX_BYTES
from safepoint.formats.layout import COMMIT_NAME
from safepoint.formats.storage.walking import leads_to
from safepoint.formats.tombstone import Tombstone, parse_slot
from safepoint.manager.errors import CheckpointError, CorruptDataError, StorageError
from safepoint.manager.policies import StepInfo

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from safepoint.formats.commit_record import CommitRecord
    from safepoint.formats.storage import Storage
    from safepoint.formats.storage.base import Entry

__all__ = [
    "CONTROL_DIR",
    "CommittedStep",
    "Listing",
    "OwnName",
    "RecordCache",
    "StepProblem",
    "is_attempt",
    "parse_name",
    "parse_step",
    "read_listing",
    "trash_name",
]

CONTROL_DIR = ".safepoint"
"""Directory of a root for what a restore does not need."""

MAX_STEP = 2**63 - 1

_NUM_READERS = 16
_STEPS = ("step", "old")

_ATTEMPT = r"[0-9a-f]{16,32}"
_STEP = r"0|[1-9][0-9]{0,18}"
_NAME = re.compile(rf"(?P<step>{_STEP})(?:\.(?P<kind>tmp|old)-(?P<attempt>{_ATTEMPT}))?", re.ASCII)
_TRASH = re.compile(rf"\.trash-(?P<attempt>{_ATTEMPT})(?:-[0-9]{{1,4}})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class OwnName:
    """What a name of ours says: kind "step", "tmp", "old" or "trash", and of what."""

    kind: Literal["step", "tmp", "old", "trash"]
    step: int | None
    attempt: str | None


def parse_step(name: str) -> int | None:
    """Return the step that this name spells in the one way in which we spell it, else None."""
    if re.fullmatch(_STEP, name, re.ASCII) is None:
        return None
    step = int(name)
    return step if step <= MAX_STEP else None


@lru_cache(maxsize=1 << 16)  # a root is looked at again and again
def parse_name(name: str) -> OwnName | None:
    """Return what a name in the root says, or None when it is not ours."""
    trash = _TRASH.fullmatch(name)
    if trash is not None:
        return OwnName("trash", None, trash["attempt"])
    match = _NAME.fullmatch(name)
    if match is None or int(match["step"]) > MAX_STEP:
        return None
    kind: Literal["step", "tmp", "old"] = "step"
    if match["kind"] is not None:
        kind = "tmp" if match["kind"] == "tmp" else "old"
    return OwnName(kind, int(match["step"]), match["attempt"])


def is_attempt(text: str) -> bool:
    """Say whether this can be the id of an attempt: 16 to 32 lower-case hexadecimal digits."""
    return re.fullmatch(_ATTEMPT, text, re.ASCII) is not None


def trash_name(attempt: str, number: int = 0) -> str:
    """Return the name under which a directory is hidden."""
    return f".trash-{attempt}-{number}" if number else f".trash-{attempt}"


@dataclass(frozen=True, slots=True)
class CommittedStep:
    """A committed step, and where it lies.

    Attributes:
        record: its commit record.
        prefix: the directory of its record, relative to the root.
    """

    record: CommitRecord
    prefix: str

    @property
    def files_prefix(self) -> str:
        """The directory of its manifest and data files, relative to the root."""
        return f"{self.prefix}/{self.record.files}" if self.record.files else self.prefix

    @property
    def info(self) -> StepInfo:
        """What policies may know of it."""
        record = self.record
        return StepInfo(record.step, record.sequence, record.attempt, record.metrics, record.num_bytes, record.run)


@dataclass(frozen=True, slots=True)
class StepProblem:
    """A directory that has the name of a step and a commit record, but is none: somebody should look.

    Attributes:
        step: the number in its name.
        prefix: its directory, relative to the root.
        error: what is wrong; carries the step and the path.
        is_link: whether it is a symbolic link, which is not ours to rename or delete.
    """

    step: int
    prefix: str
    error: CheckpointError
    is_link: bool = False


@dataclass(frozen=True, slots=True)
class Listing:
    """One look at a root.

    Attributes:
        steps: committed steps, ascending by sequence.
        problems: directories that should be steps and are not.
        superseded: valid `.old-` directories whose step is there again.
        occupied: names of the shape `<step>` in the root, whatever they are.
        tombstones: by directory, in the place of a record.
    """

    steps: tuple[CommittedStep, ...]
    problems: tuple[StepProblem, ...]
    superseded: tuple[CommittedStep, ...]
    occupied: frozenset[str]
    tombstones: Mapping[str, Tombstone] = field(default_factory=dict)

    @property
    def next_sequence(self) -> int:
        """One above the highest, counting those that cannot be read as if they came after all others."""
        highest = max((step.record.sequence for step in self.steps), default=0)
        return highest + len(self.problems) + 1


class RecordCache:
    """Commit records by directory, valid while the directory's identity is the same; used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, tuple[tuple[int, ...], CommittedStep]] = {}
        self._listed: tuple[list[Entry], Listing] | None = None

    def listing(self, entries: list[Entry]) -> Listing | None:
        """Return what was found when the root had just these entries, if all of it was known by their identities."""
        listed = self._listed
        return listed[1] if listed is not None and listed[0] == entries else None

    def keep_listing(self, entries: list[Entry], listing: Listing, decisive: Iterable[Entry]) -> None:
        """Remember what was found, if all `decisive` entries are directories of steps, known by their identities."""
        if not listing.problems and all(self._is_known(entry) for entry in decisive):
            self._listed = entries, listing

    def _is_known(self, entry: Entry) -> bool:
        known = self._known.get(entry.name)
        return known is not None and bool(entry.identity) and known[0] == entry.identity

    def get(self, storage: Storage, entry: Entry, step: int) -> CommittedStep | StepProblem | Tombstone | None:
        """Return what the directory is, reading its record only if that is not known."""
        known = self._known.get(entry.name)  # one dict, which is only ever added to or replaced
        if known is not None and entry.identity and known[0] == entry.identity:
            return known[1]
        found = _read_step(storage, entry.name, step)
        # Only what is whole stays as it is: somebody may just be copying a step into the root. And a record that is
        # replaced in its place may leave its directory the same times.
        if isinstance(found, CommittedStep) and not found.record.files:
            with self._lock:
                self._known[entry.name] = (entry.identity, found)
        return found

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget directories that are gone."""
        present = frozenset(names)
        with self._lock:
            if not self._known.keys() <= present:
                self._known = {name: known for name, known in self._known.items() if name in present}


def read_listing(
    storage: Storage, cache: RecordCache, *, process_index: int | None = None, only: int | None = None
) -> Listing:
    """Look at the root and return what is there.

    Neither times nor the order of names matter. Directories may come and go meanwhile: each is listed or not.

    Args:
        storage: of the root.
        cache: of its records.
        process_index: whose root it is, where processes have roots of their own: steps of others are problems.
        only: the step to look for; the records of others are not read.
    """
    steps: dict[int, CommittedStep] = {}
    old: dict[int, list[CommittedStep]] = {}
    entries = [entry for entry in storage.list("") if entry.name != CONTROL_DIR]  # it says nothing of steps
    listed = cache.listing(entries) if only is None else None
    if listed is not None:
        return listed
    cache.keep_only(entry.name for entry in entries)
    tombstones: dict[str, Tombstone] = {}
    named = [(entry, name) for entry in entries if (name := parse_name(entry.name)) is not None and name.kind in _STEPS]
    if only is not None:
        named = [(entry, name) for entry, name in named if name.step == only]
    occupied = frozenset(entry.name for entry, name in named if name.kind == "step")
    links = [_linked(storage, entry) for entry, name in named if entry.is_link and name.kind == "step"]
    problems = [problem for problem in links if problem is not None]
    decisive = [entry for entry, _ in named if entry.is_dir or entry.is_link]
    named = [(entry, name) for entry, name in named if entry.is_dir]
    for (entry, name), read in zip(named, _read_all(storage, cache, named), strict=True):
        found = read if process_index is None else _check_process(read, storage, process_index)
        if isinstance(found, CommittedStep):
            if name.kind == "step":
                steps[found.record.step] = found
            else:
                old.setdefault(found.record.step, []).append(found)
        elif isinstance(found, StepProblem):
            problems.append(found)
        elif found is not None:
            tombstones[entry.name] = found
    superseded = _stand_in(steps, old)
    listing = Listing(
        steps=tuple(sorted(steps.values(), key=_order)),
        problems=tuple(sorted(problems, key=lambda problem: (problem.step, problem.prefix))),
        superseded=tuple(superseded),
        occupied=occupied,
        tombstones=tombstones,
    )
    if only is None:
        cache.keep_listing(entries, listing, decisive)
    return listing


_Read = CommittedStep | StepProblem | Tombstone | None


def _linked(storage: Storage, entry: Entry) -> StepProblem | None:
    """Return what is wrong with a link that has the name of a step; None where it leads to something else."""
    path, step = storage.describe(entry.name), int(entry.name)
    if not leads_to(path, COMMIT_NAME):
        return None
    error = CorruptDataError(
        "a symbolic link has the name of this step, and links in a root are not followed",
        step=step,
        path=path,
        hint="Put the step itself here: move it back, or `safepoint copy` it from where it lies now.",
    )
    return StepProblem(step, entry.name, error, is_link=True)


def _read_all(storage: Storage, cache: RecordCache, named: Sequence[tuple[Entry, OwnName]]) -> list[_Read]:
    """Read what the cache does not have; several at once where each is a request to a server."""

    def read(found: tuple[Entry, OwnName]) -> _Read:
        entry, name = found
        return cache.get(storage, entry, name.step or 0)

    if storage.renames or len(named) <= 1:
        return list(map(read, named))
    with ThreadPoolExecutor(min(_NUM_READERS, len(named)), "safepoint-listing") as pool:
        return list(pool.map(read, named))


def _check_process(found: _Read, storage: Storage, process_index: int) -> _Read:
    if not isinstance(found, CommittedStep):
        return found
    record = found.record
    if record.scope != "per_process" or record.process_index == process_index:
        return found
    error = CorruptDataError(
        f"this is the root of process {process_index}, but the step was committed here by process "
        f"{record.process_index}",
        step=record.step,
        path=storage.describe(f"{found.prefix}/{COMMIT_NAME}"),
        process_index=process_index,
        hint="Give each process the root that it saved to; nothing of this step is touched.",
    )
    return StepProblem(record.step, found.prefix, error)


def _stand_in(steps: dict[int, CommittedStep], old: dict[int, list[CommittedStep]]) -> list[CommittedStep]:
    """Let the newest `.old-` directory of a step that is not there be it; return the others."""
    superseded: list[CommittedStep] = []
    for number, candidates in old.items():
        candidates.sort(key=_order)
        if number not in steps:
            steps[number] = candidates.pop()
        superseded.extend(candidates)
    return superseded


def _order(step: CommittedStep) -> tuple[int, str]:
    return step.record.sequence, step.record.attempt


def _read_step(storage: Storage, prefix: str, step: int) -> _Read:
    path = f"{prefix}/{COMMIT_NAME}"
    full_path = storage.describe(path)
    try:
        record = parse_slot(storage.get(path, max_bytes=COMMIT_MAX_BYTES), path=full_path)
    except StorageError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            return None  # vanished since, or no step of ours
        return StepProblem(step, prefix, error.with_context(step=step))
    except CheckpointError as error:
        return StepProblem(step, prefix, error.with_context(step=step))
    if isinstance(record, Tombstone):
        return record
    if record.step != step:
        mismatch = CorruptDataError(
            f"the directory is named {step}, but its commit record is that of step {record.step}",
            step=step,
            path=full_path,
            hint=f"Rename it to {record.step} if it was renamed or copied by hand.",
        )
        return StepProblem(step, prefix, mismatch)
    return CommittedStep(record, prefix)
