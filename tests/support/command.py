"""The `safepoint` command in this process, and roots for it: saved by a manager, or by several processes in one."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from typer.testing import CliRunner

from safepoint.formats.base import WriteJob
from safepoint.formats.commit_record import CommitRecord
from safepoint.formats.region import Region
from safepoint.formats.registry import get_format
from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.cli.app import app
from safepoint.manager.commit import Committer
from safepoint.manager.directing import Direction
from safepoint.manager.manifesting import assemble_manifest
from safepoint.manager.planner import WriteAssignment
from safepoint.manager.remembering import Memo
from safepoint.manager.sources import LiveSource
from safepoint.manager.state import flatten
from safepoint.manager.writing import plan_files, write_files

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Printed", "commit_sharded", "example_state", "flip_byte", "run", "save_steps"]


@dataclass(frozen=True)
class Printed:
    """What a command did."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        """The document on its output."""
        return json.loads(self.out)


def run(*arguments: object, columns: int = 200) -> Printed:
    """Run the command; an exception that it lets out is raised."""
    result = CliRunner().invoke(app, [str(one) for one in arguments], env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    out = "\n".join(line.rstrip() for line in result.stdout.splitlines())
    return Printed(result.exit_code, out, result.stderr)


def example_state(step: int) -> dict[str, Any]:
    """Return a small state of several kinds, whose every number depends on the step."""
    weight = torch.arange(12, dtype=torch.float32).reshape(4, 3) + step
    return {
        "model": {"weight": weight, "bias": torch.full((3,), step, dtype=torch.bfloat16), "tied": weight},
        "tokens": 100 * step,
    }


def save_steps(root: Path, *steps: int, **options: Any) -> None:
    """Save steps with a manager, in this order."""
    with CheckpointManager(root, **options) as manager:
        for step in steps:
            manager.save(step, example_state(step), metrics={"loss": 1 / (step + 1)})


def commit_sharded(root: Path, step: int, state: Mapping[str, Any], *, process_count: int = 2, **fields: Any) -> None:
    """Commit a step whose leaves are cut by rows, a part a process, as so many processes would have.

    `fields` are of its commit record.
    """
    storage = LocalStorage(root)
    committer = Committer(storage)
    attempt = secrets.token_hex(8)
    flat = flatten(state, process_index=0, process_count=1)
    specs = {path: leaf.spec for path, leaf in flat.arrays.items()}
    prefix = committer.begin(step, attempt)
    reports = []
    for process in range(process_count):
        files = plan_files(
            [
                WriteAssignment(path, rows, process, process)
                for path, spec in specs.items()
                if (rows := _rows(spec.shape, process, process_count)) is not None
            ],
            specs,
            file_format=get_format("safetensors"),
            job=WriteJob(mode="sharded", process_index=process, process_count=process_count),
        )
        source = LiveSource(flat.arrays)
        reports.append(write_files(storage, prefix, files, source, process_index=process, attempt=attempt))
    manifest = assemble_manifest(
        reports,
        specs,
        flat.nodes,
        direction=Direction(attempt=attempt, mode="sharded"),
        step=step,
        file_format="safetensors",
        memo=Memo(),
    )
    num_bytes, digest = committer.write_manifest(step, attempt, manifest)
    committer.publish(
        CommitRecord(
            step=step,
            sequence=committer.next_sequence(),
            attempt=attempt,
            mode="sharded",
            format="safetensors",
            num_bytes=sum(file.num_bytes for file in manifest.files),
            num_leaves=len(manifest.leaves),
            process_count=process_count,
            manifest_bytes=num_bytes,
            manifest_digest=digest,
            **({"created": "2026-01-01T00:00:00Z", "run": "run"} | fields),
        )
    )


def _rows(shape: tuple[int, ...], process: int, process_count: int) -> Region | None:
    if not shape or shape[0] < process_count:
        return Region.whole(shape) if process == 0 else None
    start, stop = (shape[0] * index // process_count for index in (process, process + 1))
    return Region((start, *(0,) * (len(shape) - 1)), (stop - start, *shape[1:]))


def flip_byte(path: Path, offset: int = -1) -> None:
    """Change one byte of a file."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))
