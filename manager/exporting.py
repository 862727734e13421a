"""A checkpoint as a directory of others: written beside its place, gone on with after a kill, read back, then renamed.

The directory appears under its name when it is whole. In it is `EXPORT_NAME`, which tells of what it was made; so
whoever starts the same work again finds it done.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import xxhash

from safepoint.formats.checksum import digest
from safepoint.formats.foreign.base import array_bytes, read_parts
from safepoint.formats.foreign.dcp_writing import plan_dcp
from safepoint.formats.foreign.exporting import ArrayData, write_export_file
from safepoint.formats.foreign.huggingface import plan_huggingface
from safepoint.formats.storage import LocalStorage
from safepoint.manager.done_files import DoneFiles
from safepoint.manager.errors import CheckpointError, CorruptDataError, InvalidArgumentError, StorageError
from safepoint.manager.rewriting import DONE_NAME

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from safepoint.formats.foreign.exporting import ExportFile, ExportPlan
    from safepoint.manager.opened import Opened
    from safepoint.manager.progress import Progress
    from safepoint.manager.rewriting import Outcome

__all__ = ["EXPORT_FORMATS", "EXPORT_NAME", "Exported", "Exporting", "export"]

EXPORT_FORMATS = ("dcp", "huggingface")
EXPORT_NAME = ".safepoint-export.json"
_MAX_BYTES = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A directory that is there now.

    Attributes:
        files: their names.
        num_bytes: of all of them.
        outcome: as of `Rewritten`.
    """

    files: tuple[str, ...]
    num_bytes: int
    outcome: Outcome


@dataclass(frozen=True, kw_only=True)
class Exporting:
    """What is to be made of a checkpoint.

    Attributes:
        format: one of `EXPORT_FORMATS`.
        item: for Hugging Face: as of `convert`.
        max_file_bytes: of one file; one array is never cut.
    """

    format: str
    item: str | None
    max_file_bytes: int


def export(opened: Opened, path: str, chosen: Exporting, progress: Progress) -> Exported:
    """Write a checkpoint as a directory of others, unless it is there.

    Args:
        opened: the checkpoint.
        path: of the directory, absolute.
        chosen: what it is to be.
        progress: told of the bytes written, then of those read back.

    Raises:
        InvalidArgumentError: something else has the name, or there is no such item.
        UnsupportedValueError: a dtype that the format does not have.
        CorruptDataError: the source is damaged, or what was written came back as something else.
        StorageError: the directory cannot be written. What is done stays for the next try.
    """
    if os.path.lexists(path):
        return _present(path, opened.identity, chosen)
    plan = _plan(opened, chosen)
    with _unfinished(path, digest(repr((opened.identity, chosen)).encode())[:16]) as (temporary, begun):
        storage = LocalStorage(temporary)
        try:
            _write(plan, storage, progress)
            record = {"identity": opened.identity, "chosen": asdict(chosen), "files": _sizes(temporary)}
            storage.replace(EXPORT_NAME, json.dumps(record, indent=1).encode())
            storage.sync_dir("")
            _rename(temporary, path)
        except StorageError:
            raise
        except CheckpointError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    sizes = _sizes(path)
    return Exported(
        files=tuple(sorted(sizes)), num_bytes=sum(sizes.values()), outcome="resumed" if begun else "written"
    )


def _plan(opened: Opened, chosen: Exporting) -> ExportPlan:
    opened.check_complete()
    opened.check_whole_arrays()
    if chosen.format == "dcp":
        return plan_dcp(opened.checkpoint, max_file_bytes=chosen.max_file_bytes)
    tree = _item_of(opened, chosen.item)
    return plan_huggingface(tree, opened.checkpoint, max_file_bytes=chosen.max_file_bytes)


def _item_of(opened: Opened, item: str | None) -> Any:
    tree = opened.checkpoint.tree
    names = list(tree) if isinstance(tree, dict) else []
    if item is None:
        return tree["model"] if "model" in names else tree
    if item not in names:
        raise InvalidArgumentError(
            f"the checkpoint has no item {item!r}",
            path=opened.checkpoint.location,
            hint=f"Items: {', '.join(map(str, names)) or 'none'}.",
        )
    return tree[item]


def _write(plan: ExportPlan, storage: LocalStorage, progress: Progress) -> None:
    progress.begin("write", sum(map(_data_bytes, plan.files)))
    digests: dict[str, str] = {}
    with DoneFiles(storage, DONE_NAME) as done:
        for file in plan.files:
            found = done.get(file.name)
            if found is None or storage.size(file.name) != file.num_bytes:
                storage.delete_tree(file.name)
                found = write_export_file(storage, file, progress.advance)
                storage.sync_dir("")
                done.add(file.name, found)
            else:
                progress.advance(_data_bytes(file))
            digests.update(found)
        plan.finish(storage.location)
        _read_back(plan, storage.location, digests, progress)
        done.remove()


def _data_bytes(file: ExportFile) -> int:
    return sum(array_bytes(part.array) for part in file.parts if isinstance(part, ArrayData))


def _read_back(plan: ExportPlan, path: str, digests: Mapping[str, str], progress: Progress) -> None:
    arrays = plan.read_back(path)
    if arrays.keys() != digests.keys():
        names = sorted(arrays.keys() ^ digests.keys())
        raise CorruptDataError("what was written has other arrays than what was read", path=path, leaf=names[0])
    progress.begin("read back", sum(map(array_bytes, arrays.values())))
    for name, array in arrays.items():
        state = xxhash.xxh3_128()
        for part in read_parts(array):
            state.update(part)
            progress.advance(len(part))
        if state.hexdigest() != digests[name]:
            raise CorruptDataError("what was written is not what was read", path=path, leaf=name)


def _present(path: str, identity: str, chosen: Exporting) -> Exported:
    """Return a directory that an earlier call made of the same; refuse anything else."""
    record: Any = None
    try:
        if os.path.isdir(path) and LocalStorage(path).size(EXPORT_NAME) is not None:
            record = json.loads(LocalStorage(path).get(EXPORT_NAME, max_bytes=_MAX_BYTES))
    except (CheckpointError, ValueError):
        record = None
    is_same = isinstance(record, dict) and (record.get("identity"), record.get("chosen")) == (identity, asdict(chosen))
    made: dict[str, int] = record["files"] if is_same else {}
    sizes = _sizes(path) if is_same else {}
    if not is_same or any(sizes.get(name) != size for name, size in made.items()):
        raise InvalidArgumentError(
            "there is something of that name already", path=path, hint="Choose another name, or remove it first."
        )
    return Exported(files=tuple(sorted(made)), num_bytes=sum(made.values()), outcome="present")


def _sizes(path: str) -> dict[str, int]:
    return {name: os.path.getsize(os.path.join(path, name)) for name in os.listdir(path) if name != EXPORT_NAME}


@contextmanager
def _unfinished(path: str, name: str) -> Iterator[tuple[str, bool]]:
    """Own the directory in which an export is made; give its path, and whether somebody had begun it.

    Whoever makes it holds a lock on it, which ends with the process. What others left, of other content, is removed.
    """
    start = f"{path}.tmp-"
    temporary = f"{start}{name}"
    begun = os.path.isdir(temporary)
    LocalStorage(temporary).make_dir("")
    try:
        handle = _lock(temporary)
    except OSError as error:
        raise StorageError(f"cannot make it: {error.strerror}", path=temporary, errno=error.errno) from error
    if handle is None:
        raise InvalidArgumentError("another process is writing it", path=path, hint="Wait for it.")
    try:
        _sweep(os.path.dirname(path), os.path.basename(start), temporary)
        yield temporary, begun
    finally:
        os.close(handle)


def _lock(path: str) -> int | None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


def _sweep(folder: str, start: str, kept: str) -> None:
    for name in os.listdir(folder):
        other = os.path.join(folder, name)
        if not name.startswith(start) or other == kept or not os.path.isdir(other):
            continue
        handle = _lock(other)
        if handle is not None:
            shutil.rmtree(other, ignore_errors=True)
            os.close(handle)


def _rename(temporary: str, path: str) -> None:
    try:
        os.rename(temporary, path)
    except OSError as error:
        raise StorageError(f"cannot rename it: {error.strerror}", path=path, errno=error.errno) from error
    LocalStorage(os.path.dirname(path)).sync_dir("")
