"""Where in a file of torch.save an object lies that its restricted reader refused: for the error, which names the leaf.

Runs the pickle as data, with nothing behind its names. A guess that fails is no error: then no leaf is named.
"""

from __future__ import annotations

import pickletools
import zipfile
from typing import TYPE_CHECKING, Any

from safepoint.formats.pickle_machine import PickleMachine

if TYPE_CHECKING:
    from collections.abc import Iterator

    from safepoint.formats.tree import TreePath

__all__ = ["find_named"]

_MAX_PICKLE_BYTES = 1 << 28


def find_named(path: str, name: str) -> TreePath | None:
    """Return where in the tree of a zipped file the first object is that the pickle makes by a name.

    Args:
        path: of the file.
        name: full name of the class or function, as the pickle has it.
    """
    try:
        machine = _Searcher(name, path)
        for opcode, argument, _ in pickletools.genops(_read_pickle(path)):
            if opcode.name == "STOP":
                break
            machine.run(opcode.name, argument)
        return next(_places(machine.stack[-1], (), set()), None)
    except Exception:  # noqa: BLE001 - what is wrong with the file is told by the error that this is for
        return None


def _read_pickle(path: str) -> bytes:
    with zipfile.ZipFile(path) as archive:
        entry = next(one for one in archive.infolist() if one.filename.endswith("/data.pkl"))
        if entry.file_size > _MAX_PICKLE_BYTES:
            raise ValueError(entry.file_size)
        return archive.read(entry)


class _Made:
    """What a call would have made."""

    def __init__(self, name: str, parts: Any) -> None:
        self.name = name
        self.parts = parts


class _Searcher(PickleMachine):
    def __init__(self, name: str, path: str) -> None:
        super().__init__(frozenset(), {}, path)
        self._wanted = name

    def _push_name(self, text: str) -> None:
        self.stack.append(_Found() if text == self._wanted else _Made(text, ()))

    def _reduce(self, _: Any) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if isinstance(name, _Made) and name.name == "collections.OrderedDict" and not arguments:
            self.stack.append({})
        else:
            self.stack.append(name if isinstance(name, _Found) else _Made("", arguments))

    _newobj = _reduce

    def _build(self, _: Any) -> None:
        self.stack.pop()

    def _binpersid(self, _: Any) -> None:
        self.stack[-1] = None

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        if isinstance(self.stack[-1], dict):
            self.stack[-1][key if isinstance(key, str | int) else str(key)] = value


class _Found:
    """An object by the name that is looked for."""


def _places(value: Any, at: TreePath, seen: set[int]) -> Iterator[TreePath]:
    if isinstance(value, _Found):
        yield at
    elif isinstance(value, _Made):
        yield from _places(value.parts, at, seen)
    elif isinstance(value, dict | list | tuple) and id(value) not in seen:
        seen.add(id(value))
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(child, (*at, key if isinstance(key, str | int) else str(key)), seen)
