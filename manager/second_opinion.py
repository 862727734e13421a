"""What another library restores from a step, compared leaf by leaf with what we do.

Ours is read with its digests verified, in bounded memory; the other one's is told by a process of its own
(`orbax_reader`), so that neither JAX nor Orbax is ever in this one. Reads only; meets nobody.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Literal, get_args

import xxhash

from safepoint.formats.base import LeafRef
from safepoint.formats.orbax.files import scalar_bytes
from safepoint.formats.orbax.layout import OrbaxFormat
from safepoint.formats.orbax.metadata import stored_form
from safepoint.formats.orbax.names import item_json
from safepoint.formats.registry import get_format
from safepoint.formats.storage import LocalStorage
from safepoint.manager.errors import CheckpointError, CorruptDataError, InvalidArgumentError
from safepoint.manager.leaf_reading import cut, read_parts
from safepoint.manager.options import check_choice
from safepoint.manager.outline import outline_state
from safepoint.manager.progress import QUIET
from safepoint.manager.reader_process import ReaderProcess
from safepoint.manager.sources import flat_bytes
from safepoint.manager.step_paths import OpenStep
from safepoint.manager.step_reading import StepReader, attempt_at
from safepoint.manager.verifying import steps_to_verify, verify_steps

if TYPE_CHECKING:
    from safepoint.formats.manifest import LeafEntry, TreePath
    from safepoint.formats.orbax.layout import OrbaxItem
    from safepoint.formats.orbax.names import Entry
    from safepoint.formats.storage import Storage
    from safepoint.manager.progress import Progress
    from safepoint.manager.step_listing import CommittedStep

__all__ = ["StepVerifier", "verify_with"]

StepVerifier = Literal["safepoint", "orbax"]
"""Whose reader verifies a step."""

_PROGRAM = os.path.join(os.path.dirname(os.path.abspath(__file__)), "orbax_reader.py")
_PART_BYTES = 64 << 20
"""How much of a leaf of ours is in memory at once."""


def verify_with(
    reader: StepVerifier,
    storage: Storage,
    *,
    step: int | None = None,
    private_to: int | None = None,
    deadline_secs: float,
    progress: Progress = QUIET,
) -> list[CheckpointError]:
    """Return what a reader finds wrong with one step, or with all.

    Args:
        reader: "safepoint": every byte against its digest, an error for each file. "orbax": what Orbax restores,
            against what we do, an error for each leaf.
        storage: of the root.
        step: the step; None for all that are committed.
        private_to: the process whose root this is, where processes have roots of their own.
        deadline_secs: for each answer of another library's reader.
        progress: told of the bytes that were read here.

    Raises:
        StepNotFoundError: the step asked for is not there; lists those that are.
        InvalidArgumentError: Orbax cannot read a step of this format, or on this storage.
        MissingPackageError: Orbax is not installed.
        ReaderFailedError: its process ended, or gave no answer within the deadline.
        StorageError: the root cannot be listed.
    """
    check_choice("reader", reader, get_args(StepVerifier))
    if reader == "safepoint":
        return verify_steps(storage, step=step, private_to=private_to, progress=progress)
    if not isinstance(storage, LocalStorage):
        raise InvalidArgumentError("Orbax is asked about directories only", path=storage.location)
    chosen, found = steps_to_verify(storage, step=step, private_to=private_to)
    formats = [_format_of(known) for known in chosen]
    progress.begin("verify", sum(known.record.num_bytes for known in chosen))
    with ReaderProcess(_PROGRAM, library="Orbax", extra="orbax", deadline_secs=deadline_secs) as process:
        for known, file_format in zip(chosen, formats, strict=True):
            errors = _compare(storage, known, file_format, process, progress)
            if errors and attempt_at(storage, known.prefix) == known.record.attempt:  # nobody deleted it meanwhile
                found += [(known.record.step, error.with_context(step=known.record.step)) for error in errors]
    return [error for _, error in sorted(found, key=lambda pair: pair[0])]


def _format_of(known: CommittedStep) -> OrbaxFormat:
    record = known.record
    file_format = get_format(record.format)
    if not isinstance(file_format, OrbaxFormat):
        raise InvalidArgumentError(
            f"the step is of the format {record.format}, which Orbax does not read",
            step=record.step,
            hint='Save in the format "orbax", or convert the step to it.',
        )
    return file_format


def _compare(
    storage: LocalStorage, known: CommittedStep, file_format: OrbaxFormat, process: ReaderProcess, progress: Progress
) -> list[CheckpointError]:
    try:
        step = OpenStep(storage=storage, committed=known, manifest=StepReader(storage).load_manifest(known))
        items = {item.directory: item for item in file_format.items(lambda: outline_state(step.manifest.structure))}
    except CheckpointError as error:
        return [error]
    request = {
        # Orbax's manager looks for the step's files in the step's directory, and there alone.
        "root": None if known.record.files else storage.location,
        "step": step.step,
        "directory": storage.describe(step.prefix),
        "items": {name: item.layout for name, item in items.items()},
    }
    opinion = _Opinion(step, items, progress)
    for message in process.ask(request):
        opinion.hear(message)
    return opinion.errors()


class _Opinion:
    """What is expected of each leaf, and what was heard of it."""

    def __init__(self, step: OpenStep, items: dict[str, OrbaxItem], progress: Progress) -> None:
        self._step = step
        self._items = items
        self._progress = progress
        self._leaves = {entry.path: entry for entry in step.manifest.leaves}
        self._digests: dict[TreePath, str] = {}
        self._found: list[CheckpointError] = []
        self._unreadable: set[str | None] = set()
        self._missing = {
            (name, entry.name): entry
            for name, item in items.items()
            for entry in item.entries
            if item.layout != "json" and entry.kind in ("array", "scalar", "string")
        }

    def hear(self, message: dict[str, Any]) -> None:
        """Compare what Orbax says of a leaf, an item or the root with what is there."""
        item, name = message["item"], message.get("name")
        if "error" in message:
            for key in [key for key in self._missing if key[0] == item and name in (None, key[1])]:
                del self._missing[key]
            self._add(f"Orbax cannot restore it: {message['error']}", item, name or "")
        elif item is None:
            self._hear_of_root(message)
        elif "json" in message:
            if message["json"] != item_json(self._items[item].value):
                self._add("Orbax restores another value", item, "")
        else:
            self._hear_of_leaf(message, item, message["name"])

    def errors(self) -> list[CheckpointError]:
        """Return all differences; nothing more will be heard."""
        for item, name in self._missing:
            self._add("Orbax does not know it", item, name)
        return self._found

    def _hear_of_root(self, message: dict[str, Any]) -> None:
        record = self._step.committed.record
        if record.step not in message["steps"]:
            self._add(f"Orbax's manager lists the steps {message['steps']} only", None, "")
        elif record.metrics and repr(sorted(message["metrics"].items())) != repr(sorted(record.metrics.items())):
            self._add(f"Orbax's manager has the metrics {message['metrics']}", None, "")

    def _hear_of_leaf(self, message: dict[str, Any], item: str, name: str) -> None:
        entry = self._missing.pop((item, name), None)
        if entry is None:
            self._add("Orbax restores a leaf that the step does not have", item, name)
            return
        told = message["text"] if "text" in message else (message["dtype"], message["shape"], message["digest"])
        try:
            expected = self._expected(entry)
        except CorruptDataError as error:
            if error.path not in self._unreadable:  # once for a file, whatever lies in it
                self._unreadable.add(error.path)
                error.leaf = None
                self._found.append(error)
            return
        if told != expected:
            self._add(f"Orbax restores {_shown(told)}, and we {_shown(expected)}", item, name)

    def _expected(self, entry: Entry) -> Any:
        if entry.kind == "string":
            return entry.value
        if entry.kind == "scalar":
            dtype, data = scalar_bytes(entry.value)
            return dtype, [], xxhash.xxh3_128_hexdigest(data)
        assert isinstance(entry.value, LeafRef)
        leaf = self._leaves[entry.value.path]
        if leaf.path not in self._digests:
            self._digests[leaf.path] = _digest(self._step, leaf, self._progress)
        dtype, shape = stored_form(leaf.dtype, leaf.shape)
        return dtype, shape, self._digests[leaf.path]

    def _add(self, text: str, item: str | None, name: str) -> None:
        leaf = f"{item}.{name}" if item and name else item
        self._found.append(CorruptDataError(text, leaf=leaf, path=self._path(item)))

    def _path(self, item: str | None) -> str:
        return self._step.storage.describe(f"{self._step.prefix}/{item}" if item else self._step.prefix)


def _digest(step: OpenStep, leaf: LeafEntry, progress: Progress) -> str:
    found = xxhash.xxh3_128()
    for part in cut(leaf, _PART_BYTES):
        (tensor,) = read_parts(step, [part])
        data = flat_bytes(tensor)
        found.update(data.numpy().data)
        progress.advance(len(data))
    return found.hexdigest()


def _shown(told: Any) -> str:
    if not isinstance(told, tuple):
        return repr(told)
    dtype, shape, digest = told
    return f"{dtype} {list(shape or ())} with the digest {str(digest)[:8]}"
