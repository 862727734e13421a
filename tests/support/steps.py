"""Small whole steps on any storage, made through the commit protocol."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from safepoint.formats.checksum import BLOCK_BYTES, digest
from safepoint.formats.commit_record import CommitRecord
from safepoint.formats.entries import FileEntry
from safepoint.formats.manifest import Manifest, Node

if TYPE_CHECKING:
    from safepoint.formats.storage import Storage
    from safepoint.manager.commit import CommittedStep, Committer

__all__ = ["attempt_id", "commit_step", "content_of", "prepare_step", "record_for", "save_step"]

DATA = "model/data.bin"


def attempt_id(number: int) -> str:
    """Return the id of the attempt that tests call by this number."""
    return f"{number:016x}"


def content_of(attempt: str) -> bytes:
    """Return the data that an attempt writes: its own id, so that a mixture of two would show."""
    return attempt.encode() * 4


def prepare_step(committer: Committer, storage: Storage, step: int, attempt: str) -> Manifest:
    """Begin an attempt and write its data; return the manifest that belongs to it."""
    prefix = committer.begin(step, attempt)
    data = content_of(attempt)
    storage.make_dir(f"{prefix}/model")
    storage.put(f"{prefix}/{DATA}", data)
    storage.sync_dir(f"{prefix}/model")
    return Manifest(
        structure={(): Node(kind="dict")},
        leaves=(),
        files=(
            FileEntry(
                path=DATA,
                num_bytes=len(data),
                block_bytes=BLOCK_BYTES,
                digests=(digest(data),),
                process_index=0,
                attempt=attempt,
            ),
        ),
        process_count=1,
        format="safetensors",
        mode="consolidated",
        step=step,
        attempt=attempt,
    )


def record_for(
    step: int, attempt: str, sequence: int, manifest_bytes: int, manifest_digest: str, **changes: Any
) -> CommitRecord:
    """Return the commit record of a step that `prepare_step` made."""
    fields: dict[str, Any] = {
        "step": step,
        "sequence": sequence,
        "attempt": attempt,
        "run": "run",
        "mode": "consolidated",
        "format": "safetensors",
        "num_bytes": len(content_of(attempt)),
        "num_leaves": 0,
        "process_count": 1,
        "manifest_bytes": manifest_bytes,
        "manifest_digest": manifest_digest,
    }
    return CommitRecord(**(fields | changes))


def commit_step(committer: Committer, storage: Storage, step: int, attempt: str, **changes: Any) -> CommittedStep:
    """Commit a step as `save_step` does, and return it as listed."""
    save_step(committer, storage, step, attempt, **changes)
    return next(known for known in committer.list_steps() if known.record.attempt == attempt)


def save_step(committer: Committer, storage: Storage, step: int, attempt: str, **changes: Any) -> None:
    """Commit a step as a manager does, replacing one of its number."""
    replace = next((known for known in committer.list_steps() if known.record.step == step), None)
    sequence = committer.next_sequence()
    manifest = prepare_step(committer, storage, step, attempt)
    written = committer.write_manifest(step, attempt, manifest)
    committer.publish(record_for(step, attempt, sequence, *written, **changes), replace)
