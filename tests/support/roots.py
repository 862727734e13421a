"""One root of any kind, with what tests do there: managers, committers, copies by tools, and a look at what is left."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from safepoint.formats.storage import open_storage
from safepoint.manager import CheckpointManager
from safepoint.manager.commit import Committer
from safepoint.manager.step_listing import is_attempt
from safepoint.manager.unsettled import read_marks

from support.steps import DATA, attempt_id, commit_step, prepare_step, record_for

if TYPE_CHECKING:
    from collections.abc import Mapping

    import pytest

    from safepoint.formats.commit_record import CommitRecord
    from safepoint.formats.storage import Storage

__all__ = ["KINDS", "KINDS_WITHOUT_RENAMES", "OBJECT_KINDS", "SHARED_KINDS", "Root", "RootKind", "make_root"]

RootKind = Literal["directory", "markers", "memory", "s3", "gs"]

OBJECT_KINDS: tuple[RootKind, ...] = ("memory", "s3", "gs")
KINDS_WITHOUT_RENAMES: tuple[RootKind, ...] = ("markers", *OBJECT_KINDS)
KINDS: tuple[RootKind, ...] = ("directory", *KINDS_WITHOUT_RENAMES)
SHARED_KINDS: tuple[RootKind, ...] = ("directory", "markers", "s3", "gs")  # with other processes


@dataclass(frozen=True, kw_only=True)
class Root:
    """A root, or where one will be. May be sent to another process, which it then leads to its server.

    Attributes:
        kind: "directory" commits by renames; "markers" is a directory that does as object stores do.
        url: path or URL.
        environment: what a process needs to find its server.
    """

    kind: RootKind
    url: str
    environment: Mapping[str, str] = field(default_factory=dict)

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.kind, self.url, dict(self.environment))

    @cached_property
    def storage(self) -> Storage:
        return open_storage(self.url)

    @cached_property
    def committer(self) -> Committer:
        return self.another()

    @property
    def path(self) -> Path:
        """Where a directory is."""
        return Path(self.url)

    def beside(self, name: str) -> Root:
        """Return another root of the same kind."""
        return replace(self, url=f"{self.url}-{name}")

    def manager(self, **options: Any) -> CheckpointManager:
        how = "marker" if self.kind == "markers" else "auto"
        return CheckpointManager(self.url, **{"deadline_secs": 30.0, "commit": how, **options})

    def another(self, **options: Any) -> Committer:
        """Return a committer as another process would have it."""
        return Committer(self.storage, commit="marker" if self.kind == "markers" else None, **options)

    # Small steps without a manager

    def commit(self, *steps: int) -> None:
        for step in steps:
            commit_step(self.committer, self.storage, step, attempt_id(0x1000 + self.committer.next_sequence()))

    def prepared(self, step: int, attempt: str, *, committer: Committer | None = None) -> CommitRecord:
        """Write all of an attempt but its record, which is returned."""
        committer = committer or self.committer
        manifest = prepare_step(committer, self.storage, step, attempt)
        return record_for(step, attempt, committer.next_sequence(), *committer.write_manifest(step, attempt, manifest))

    def steps(self) -> dict[int, bytes]:
        """Steps in their order with their contents, as somebody sees them who looks for the first time."""
        found = {}
        reader = self.another()
        for step in reader.list_steps():
            reader.check_files(step, reader.load_manifest(step))
            found[step.record.step] = self.storage.get(f"{step.files_prefix}/{DATA}", max_bytes=1000)
        assert [step.record.step for step in self.committer.list_steps()] == list(found)
        return found

    # What lies there

    def files_of(self, step: int) -> str:
        """Return where the files of a committed step lie, relative to the root."""
        (prefix,) = [known.files_prefix for known in self.another().list_steps() if known.record.step == step]
        return prefix

    def read(self, path: str) -> bytes:
        return self.storage.get(path, max_bytes=1 << 20)

    def write(self, path: str, data: bytes) -> None:
        """Do as a tool does that copies a file to here, or damages it."""
        parts = path.split("/")[:-1]
        for depth in range(len(parts) + 1):
            self.storage.make_dir("/".join(parts[:depth]))
        self.storage.replace(path, data)

    def flip(self, path: str) -> None:
        """Change a bit near the end of a file."""
        data = bytearray(self.read(path))
        data[-5] ^= 1
        self.storage.replace(path, bytes(data))

    def files(self, below: str = "") -> set[str]:
        found = set()
        for entry in self.storage.list(below):
            path = f"{below}/{entry.name}" if below else entry.name
            found |= self.files(path) if entry.is_dir else {path}
        return found

    def contents(self) -> dict[str, bytes]:
        """Return all files but those of the root itself, with what is in them."""
        return {path: self.read(path) for path in self.files() if not path.startswith(".safepoint/")}

    def copy_from(self, other: Root, below: str = "", *, to: str | None = None) -> None:
        """Copy files as a tool does that knows nothing of steps, in the order of their names."""
        for path in sorted(other.files(below) or {below}):
            self.write(path if to is None else to + path.removeprefix(below), other.read(path))

    def names(self) -> set[str]:
        """Return what is in the root, but for what is the root's own."""
        return {entry.name for entry in self.storage.list("")} - {".safepoint"}

    def check_holds(self, *steps: int) -> None:
        """Check that a manager left these steps, each by one attempt, and nothing else of its own."""
        assert self.names() == set(map(str, steps))
        assert read_marks(self.storage) == []
        if self.kind != "directory":
            for step in steps:
                assert len([entry for entry in self.storage.list(str(step)) if is_attempt(entry.name)]) <= 1

    def check_clean(self) -> None:
        """Delete what is hidden, and check that nothing is left then but steps."""
        assert self.committer.delete_hidden() == []
        assert read_marks(self.storage) == []
        steps = {step.prefix: step.files_prefix for step in self.another().list_steps()}
        assert self.names() == set(steps)
        for path in self.contents():
            step, _, rest = path.partition("/")
            assert rest == "commit.json" or path.startswith(f"{steps[step]}/"), path


def _arrive(kind: RootKind, url: str, environment: dict[str, str]) -> Root:
    os.environ.update(environment)
    return Root(kind=kind, url=url, environment=environment)


def make_root(request: pytest.FixtureRequest, tmp_path: Path, unused_prefix: str) -> Root:
    """Return, for a fixture whose parameters are kinds, a root where nothing is yet.

    Where a server's package is not installed, the test is skipped.
    """
    kind = request.param
    if kind in ("s3", "gs"):
        server = request.getfixturevalue(kind)
        return Root(kind=kind, url=server.url(unused_prefix), environment=server.environment)
    if kind == "memory":
        return Root(kind=kind, url=f"memory://{unused_prefix}")
    return Root(kind=kind, url=str(tmp_path / "runs 实验" / "é 1"))
