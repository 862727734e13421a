"""What a disk may hold after a power cut, told from the calls that a storage has seen.

    recorder = Recorder(LocalStorage(root))      # use it as the storage; then
    for disk in recorder.disks_after(number): …  # everything that may be there had the power failed after that call

The model is that of a file system that promises nothing beyond POSIX: what was not synced may be there or not, in any
combination. A file's bytes last from its fsync on, a name in a directory from the fsync of that directory on, and a
rename is atomic: one name or the other. Deleting a tree may have got anywhere.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from typing_extensions import override

from safepoint.formats.storage import FileWriter, MemoryStorage, Storage, WrittenFile

from support.faulty_storage import FaultyStorage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from typing_extensions import Buffer

__all__ = ["Recorder"]


@dataclass(eq=False)
class _Node:
    """A file, or a directory: its names that last, and changes of names that may be lost."""

    content: bytes | None = None
    names: dict[str, _Node] = field(default_factory=dict)
    pending: list[_Change] = field(default_factory=list)

    def now(self) -> dict[str, _Node]:
        """Return the names as a running system sees them."""
        names = dict(self.names)
        for change in self.pending:
            change.apply(names)
        return names


@dataclass(eq=False)
class _Change:
    """One change in one directory: `name` now means `node` (None: nothing), and `old` nothing."""

    name: str
    node: _Node | None
    old: str | None = None

    def apply(self, names: dict[str, _Node]) -> None:
        if self.old is not None:
            if self.old not in names and self.node is not None and self.name in names:
                return
            names.pop(self.old, None)
        if self.node is None:
            names.pop(self.name, None)
        else:
            names[self.name] = self.node


class _Disk:
    """The model of one disk, changed by events."""

    def __init__(self) -> None:
        self.root = _Node()

    def find(self, path: str) -> _Node:
        node = self.root
        for part in filter(None, path.split("/")):
            node = node.now()[part]
        return node

    def change(self, path: str, node: _Node | None, *, old: str | None = None) -> None:
        parent, _, name = path.rpartition("/")
        self.find(parent).pending.append(_Change(name, node, old))

    def sync(self, path: str) -> None:
        node = self.find(path)
        node.names, node.pending = node.now(), []

    def delete_tree(self, path: str) -> None:
        parent, _, name = path.rpartition("/")
        node = self.find(parent).now().get(name)
        if node is None:
            return
        if node.content is None:
            for child in list(node.now()):
                self.delete_tree(f"{path}/{child}")
        self.change(path, None)

    def pending(self) -> list[_Change]:
        found: list[_Change] = []
        seen: set[int] = set()

        def walk(node: _Node) -> None:
            if id(node) in seen:
                return
            seen.add(id(node))
            found.extend(node.pending)
            for child in [*node.names.values(), *(change.node for change in node.pending if change.node)]:
                walk(child)

        walk(self.root)
        return found

    def materialise(self, lasting: set[int]) -> MemoryStorage:
        """Return a storage with what lasts: all that was synced, and of the rest the changes with these ids."""
        storage = MemoryStorage()
        storage.make_dir("")

        def put(node: _Node, path: str) -> None:
            names = dict(node.names)
            for change in node.pending:
                if id(change) in lasting:
                    change.apply(names)
            for name, child in names.items():
                below = f"{path}/{name}".lstrip("/")
                if child.content is None:
                    storage.make_dir(below)
                    put(child, below)
                else:
                    storage.put(below, child.content)

        put(self.root, "")
        return storage


class Recorder(FaultyStorage):
    """A storage that remembers what was done to it."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner)
        self.events: list[Callable[[_Disk], None]] = []
        self.names: list[str] = []

    def _did(self, name: str, event: Callable[[_Disk], None]) -> None:
        self.names.append(name)
        self.events.append(event)

    def unsettled_after(self, number: int) -> int:
        """Return how many changes may still be lost after the first `number` calls."""
        return len(self._disk_after(number).pending())

    def _disk_after(self, number: int) -> _Disk:
        disk = _Disk()
        for event in self.events[:number]:
            event(disk)
        return disk

    def disks_after(self, number: int, *, samples: int, seed: int = 0) -> Iterator[MemoryStorage]:
        """Yield what may be there after the first `number` calls.

        Nothing of what may be lost; all of it; each change alone; all but each; and `samples` random choices.
        """
        disk = self._disk_after(number)
        changes = [id(change) for change in disk.pending()]
        chance = random.Random(seed + number)  # noqa: S311 - a sample, no secret
        choices: list[set[int]] = [set(), set(changes)]
        choices += [{change} for change in changes] + [set(changes) - {change} for change in changes]
        choices += [{change for change in changes if chance.random() < 0.5} for _ in range(samples)]
        for lasting in {frozenset(choice) for choice in choices}:
            yield disk.materialise(set(lasting))

    # What changes the storage

    @override
    def make_dir(self, path: str, *, exist_ok: bool = True) -> None:
        is_new = path != "" and not any(e.name == path.rpartition("/")[2] for e in self.inner.list(_parent(path)))
        super().make_dir(path, exist_ok=exist_ok)
        if is_new:
            self._did(f"make_dir {path}", lambda disk: disk.change(path, _Node()))

    @override
    def put(self, path: str, data: bytes) -> None:
        self._did(f"create {path}", lambda disk: disk.change(path, _Node(content=b"")))
        super().put(path, data)
        self._did(f"put {path}", lambda disk: _set_content(disk, path, data))

    @override
    def rename_dir(self, source: str, target: str) -> bool:
        done = super().rename_dir(source, target)
        if done:
            self._did(
                f"rename_dir {source} -> {target}",
                lambda disk: disk.change(target, disk.find(source), old=source),
            )
        return done

    @override
    def link_file(self, source: str, target: str) -> bool:
        done = super().link_file(source, target)
        if done:
            self._did(f"link_file {source} -> {target}", lambda disk: disk.change(target, disk.find(source)))
        return done

    @override
    def sync_dir(self, path: str) -> None:
        super().sync_dir(path)
        self._did(f"sync_dir {path}", lambda disk: disk.sync(path))

    @override
    def delete(self, path: str) -> None:
        super().delete(path)
        self._did(f"delete {path}", lambda disk: disk.delete_tree(path))

    @override
    def delete_tree(self, path: str) -> None:
        super().delete_tree(path)
        self._did(f"delete_tree {path}", lambda disk: disk.delete_tree(path))

    @override
    def open_writer(self, path: str, *, num_bytes: int, block_bytes: int = 8 << 20) -> FileWriter:
        writer = super().open_writer(path, num_bytes=num_bytes, block_bytes=block_bytes)
        self._did(f"open_writer {path}", lambda disk: disk.change(path, _Node(content=b"")))
        return _RecordingWriter(self, path, writer)


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _set_content(disk: _Disk, path: str, data: bytes) -> None:
    disk.find(path).content = data


class _RecordingWriter(FileWriter):
    def __init__(self, storage: Recorder, path: str, inner: FileWriter) -> None:
        self._storage = storage
        self._path = path
        self._inner = inner

    @override
    def append(self, data: Buffer) -> None:
        self._inner.append(data)

    @override
    def finish(self) -> WrittenFile:
        written = self._inner.finish()
        data = self._storage.inner.get(self._path, max_bytes=1 << 30)
        path = self._path
        self._storage._did(f"finish {path}", lambda disk: _set_content(disk, path, data))
        return written

    @override
    def abort(self) -> None:
        self._inner.abort()
