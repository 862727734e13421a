"""A root that commits by markers, on any storage, with what tests look at."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.manager.commit import Committer
from safepoint.manager.unsettled import read_marks

from support.steps import DATA, attempt_id, commit_step, prepare_step, record_for

if TYPE_CHECKING:
    from safepoint.formats.commit_record import CommitRecord
    from safepoint.formats.storage import Storage

__all__ = ["Root", "prepared"]


class Root:
    """One root without renames."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.committer = self.another()

    def another(self, *, process_count: int = 1) -> Committer:
        return Committer(self.storage, commit="marker", process_count=process_count)

    def commit(self, *steps: int) -> None:
        for step in steps:
            commit_step(self.committer, self.storage, step, attempt_id(0x1000 + self.committer.next_sequence()))

    def steps(self) -> dict[int, bytes]:
        """Steps with their contents, as somebody sees them who looks for the first time."""
        found = {}
        reader = self.another()
        for step in reader.list_steps():
            reader.check_files(step, reader.load_manifest(step))
            found[step.record.step] = self.storage.get(f"{step.files_prefix}/{DATA}", max_bytes=1000)
        return found

    def files(self, below: str = "") -> set[str]:
        found = set()
        for entry in self.storage.list(below):
            path = f"{below}/{entry.name}" if below else entry.name
            found |= self.files(path) if entry.is_dir else {path}
        return found

    def clean(self) -> None:
        """Check that nothing is left but steps."""
        assert self.committer.delete_hidden() == []
        assert read_marks(self.storage) == []
        steps = {step.prefix: step.files_prefix for step in self.another().list_steps()}
        assert {entry.name for entry in self.storage.list("")} - {".safepoint"} == set(steps)
        for path in self.files():
            step, _, rest = path.partition("/")
            assert rest == "commit.json" or path.startswith(f"{steps[step]}/"), path


def prepared(root: Root, step: int, attempt: str, *, committer: Committer | None = None) -> CommitRecord:
    """Write all of an attempt but its record."""
    committer = committer or root.committer
    manifest = prepare_step(committer, root.storage, step, attempt)
    return record_for(step, attempt, committer.next_sequence(), *committer.write_manifest(step, attempt, manifest))
