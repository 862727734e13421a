"""Reads a pickle as data: opcodes are run over plain values, and a name in it is a key of the caller's own table.

Nothing is imported, looked up or called by name; what the table does not have is an error that says so. For the
metadata of torch.distributed.checkpoint. Source: Python's `pickletools`, whose parser finds the opcodes.
"""

from __future__ import annotations

import pickletools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from safepoint.formats.errors import CorruptDataError, UnsupportedValueError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["PickleMachine", "Record", "read_pickle", "run_pickle"]


@dataclass(slots=True, eq=False)
class Record:
    """An instance of a class in the table: its name, and the state that the pickle gives it."""

    name: str
    state: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Name:
    text: str


class _Mark:
    pass


def read_pickle(data: bytes, *, classes: frozenset[str], functions: Mapping[str, Callable[..., Any]], path: str) -> Any:
    """Return what a pickle describes.

    Args:
        data: anything.
        classes: full names of the classes that become a `Record`.
        functions: what stands for a callable of that name; called with plain values and records.
        path: of the file, for errors.

    Raises:
        UnsupportedValueError: a name that is in neither table.
        CorruptDataError: not a pickle, or one that does not work out.
    """
    return run_pickle(PickleMachine(classes, functions, path), data, path=path)


def run_pickle(machine: PickleMachine, data: bytes, *, path: str) -> Any:
    """Return what a pickle describes to a machine.

    Raises:
        UnsupportedValueError: a name that the machine does not know.
        CorruptDataError: not a pickle, or one that does not work out.
    """
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                (value,) = machine.stack
                return value
            machine.run(opcode.name, argument)
    except (CorruptDataError, UnsupportedValueError):
        raise
    except Exception as error:
        raise CorruptDataError(f"the pickle cannot be read: {type(error).__name__}: {error}", path=path) from error
    raise CorruptDataError("the pickle has no end", path=path)


_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_VALUES = frozenset(
    {
        *("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"),
        *("UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8"),
        *("BINBYTES", "SHORT_BINBYTES", "BINBYTES8"),
    }
)
_EMPTY: Mapping[str, Callable[[], Any]] = {
    "EMPTY_DICT": dict,
    "EMPTY_LIST": list,
    "EMPTY_TUPLE": tuple,
    "EMPTY_SET": set,
}
_IGNORED = frozenset({"PROTO", "FRAME"})


class PickleMachine:
    """Runs opcodes. What a name stands for is looked up in `_push_name`, and called in `_reduce` and `_newobj`."""

    def __init__(self, classes: frozenset[str], functions: Mapping[str, Callable[..., Any]], path: str) -> None:
        self.stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._classes = classes
        self._functions = functions
        self._path = path

    def run(self, name: str, argument: Any) -> None:
        """Run one opcode, by the name that `pickletools` gives it.

        Raises:
            UnsupportedValueError: it does more than hold data.
        """
        if name in _VALUES:
            self.stack.append(argument)
        elif name in _CONSTANTS:
            self.stack.append(_CONSTANTS[name])
        elif name in _EMPTY:
            self.stack.append(_EMPTY[name]())
        elif name not in _IGNORED:
            action = getattr(self, f"_{name.lower()}", None)
            if action is None:
                raise UnsupportedValueError(f"the pickle does more than hold data: {name}", path=self._path)
            action(argument)

    # -- memo and stack

    def _memoize(self, _: Any) -> None:
        self._memo[len(self._memo)] = self.stack[-1]

    def _binput(self, index: int) -> None:
        self._memo[index] = self.stack[-1]

    _put = _long_binput = _binput

    def _binget(self, index: int) -> None:
        self.stack.append(self._memo[index])

    _get = _long_binget = _binget

    def _mark(self, _: Any) -> None:
        self.stack.append(_Mark)

    def _pop(self, _: Any) -> None:
        self.stack.pop()

    def _since_mark(self) -> list[Any]:
        at = len(self.stack) - 1 - self.stack[::-1].index(_Mark)
        items = self.stack[at + 1 :]
        del self.stack[at:]
        return items

    # -- containers

    def _tuple(self, _: Any) -> None:
        self.stack.append(tuple(self._since_mark()))

    def _last(self, count: int) -> None:
        items = tuple(self.stack[-count:])
        del self.stack[-count:]
        self.stack.append(items)

    def _tuple1(self, _: Any) -> None:
        self._last(1)

    def _tuple2(self, _: Any) -> None:
        self._last(2)

    def _tuple3(self, _: Any) -> None:
        self._last(3)

    def _list(self, _: Any) -> None:
        self.stack.append(self._since_mark())

    def _append(self, _: Any) -> None:
        value = self.stack.pop()
        self.stack[-1].append(value)

    def _appends(self, _: Any) -> None:
        items = self._since_mark()
        self.stack[-1].extend(items)

    def _setitem(self, _: Any) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][key] = value

    def _setitems(self, _: Any) -> None:
        items = self._since_mark()
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    def _additems(self, _: Any) -> None:
        items = self._since_mark()
        self.stack[-1].update(items)

    # -- names

    def _global(self, argument: str) -> None:
        self._push_name(argument.replace(" ", "."))

    def _stack_global(self, _: Any) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self._push_name(f"{module}.{name}")

    def _push_name(self, text: str) -> None:
        if text not in self._classes and text not in self._functions:
            raise UnsupportedValueError(
                f"the pickle names {text[:120]!r}, which is not of this kind of file",
                path=self._path,
                hint="Nothing of it was run. Open it with the program that wrote it, if you trust it.",
            )
        self.stack.append(_Name(text))

    def _reduce(self, _: Any) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        self.stack.append(self._functions[name.text](*arguments))

    def _newobj(self, _: Any) -> None:
        arguments, name = self.stack.pop(), self.stack.pop()
        if name.text in self._functions:
            self.stack.append(self._functions[name.text](*arguments))
        else:
            self.stack.append(Record(name.text))

    def _build(self, _: Any) -> None:
        state = self.stack.pop()
        record = self.stack[-1]
        if isinstance(state, dict):
            record.state.update(state)
        else:
            record.state["state"] = state
