"""How a restore may differ from the step, where the caller allows it, and the report of what was done.

    manager.restore(7, state, adapt=[Cast("model.*"), Partial("head.*"), Rename({"encoder.*": "backbone.*"})])

Without these a restore is strict. Pure: works on dotted paths and the structure of a step. Must not know live values.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from safepoint.formats.errors import InvalidArgumentError
from safepoint.formats.manifest import Node, PathKey, TreePath, display_path

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Adaptation", "AdaptationReport", "Adapting", "Cast", "Partial", "Rename", "Renamed"]


class _OnKeys:
    """Patterns as of `fnmatch` on the target's dotted paths; none named is all."""

    __slots__ = ("keys",)

    def __init__(self, *keys: str) -> None:
        given: tuple[object, ...] = keys
        if not all(isinstance(key, str) for key in given):
            raise InvalidArgumentError(f"{type(self).__name__} takes patterns of dotted paths, got {keys!r}")
        self.keys = keys or ("*",)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.keys))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _OnKeys) and (type(other), other.keys) == (type(self), self.keys)

    def __hash__(self) -> int:
        return hash((type(self), self.keys))


class Cast(_OnKeys):
    """Lets arrays change to the dtype that they have in the target, as `torch.can_cast` allows: never to lose a kind.

    Example:
        manager.restore_latest(state, adapt=[Cast("model.*")])
    """

    __slots__ = ()


class Partial(_OnKeys):
    """Lets step and target each have what the other lacks: what both have is restored, the rest stays as it is.

    Shapes and kinds still have to agree.

    Example:
        manager.restore_latest(state, adapt=[Partial("model.head.*")])
    """

    __slots__ = ()


class Rename:
    """Gives parts of the step other names, before anything is compared.

    Args:
        names: a pattern of dotted paths in the step → the dotted path in the target. Each `*` of the pattern stands
            for any text, which the `*` at the same place of the new path repeats. The first pattern that fits counts.

    Example:
        manager.restore_latest(state, adapt=[Rename({"model.encoder.*": "model.backbone.*"})])
    """

    __slots__ = ("names",)

    def __init__(self, names: Mapping[str, str]) -> None:
        given: object = names
        if not isinstance(given, Mapping) or not all(isinstance(text, str) for pair in given.items() for text in pair):
            raise InvalidArgumentError(f"Rename takes new dotted paths by pattern, got {names!r}")
        for old, new in names.items():
            if not old or not new or old.count("*") != new.count("*"):
                raise InvalidArgumentError(
                    f"Rename cannot make {new!r} of {old!r}: both need the same number of `*`",
                    hint='For example {"model.encoder.*": "model.backbone.*"}.',
                )
        self.names = dict(names)

    def __repr__(self) -> str:
        return f"Rename({self.names!r})"


Adaptation: TypeAlias = Cast | Partial | Rename


@dataclass(frozen=True, kw_only=True)
class AdaptationReport:
    """What a restore did beyond filling the target with what the step has. Paths are dotted, and the target's.

    Attributes:
        cast: path, saved dtype and dtype in the target of each array that was cast.
        missing: what the target has and the step has not; it stayed as it was.
        extra: what the step has and the target has not; it was not used.
        renamed: path in the step and in the target of each part that was renamed.
    """

    cast: tuple[tuple[str, str, str], ...] = ()
    missing: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()
    renamed: tuple[tuple[str, str], ...] = ()


@dataclass(kw_only=True)
class Adapting:
    """The adaptations of one restore, and what became of them."""

    cast_keys: re.Pattern[str] | None = None
    partial_keys: re.Pattern[str] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    _cast: list[tuple[str, str, str]] = field(default_factory=list)
    _missing: list[str] = field(default_factory=list)
    _extra: list[str] = field(default_factory=list)
    _renamed: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, adaptations: Collection[Adaptation] | None, *, has_target: bool) -> Adapting:
        """Return the adaptations that a caller asked for.

        Raises:
            InvalidArgumentError: something else is among them, or a restore without a target cannot do it.
        """
        given: object = adaptations or ()
        chosen: list[object] = list(given) if isinstance(given, Collection) else [[given]]
        names: dict[str, str] = {}
        for adaptation in chosen:
            if not isinstance(adaptation, (Cast, Partial, Rename)):
                raise InvalidArgumentError(
                    f"adapt takes a list of Cast, Partial and Rename, got {adaptations!r}", hint="adapt=[Cast()]"
                )
            if isinstance(adaptation, Rename):
                names.update(adaptation.names)
            elif not has_target:
                raise InvalidArgumentError(f"{adaptation!r} says how to fill a target, and there is none")
        return cls(cast_keys=_keys(chosen, Cast), partial_keys=_keys(chosen, Partial), names=names)

    def may_cast(self, path: TreePath) -> bool:
        """Say whether an array may change its dtype."""
        return self.cast_keys is not None and self.cast_keys.fullmatch(display_path(path)) is not None

    def may_differ(self, path: TreePath) -> bool:
        """Say whether one side may have this, or a part of it, and the other not."""
        return self.partial_keys is not None and self.partial_keys.fullmatch(display_path(path)) is not None

    def note_cast(self, path: TreePath, saved: str, target: str) -> None:
        """Note that an array is cast."""
        self._cast.append((display_path(path), saved, target))

    def note_missing(self, path: TreePath) -> None:
        """Note that something of the target stays as it is."""
        self._missing.append(display_path(path))

    def note_extra(self, path: TreePath) -> None:
        """Note that something of the step is not used."""
        self._extra.append(display_path(path))

    def report(self) -> AdaptationReport:
        """Return what was done."""
        return AdaptationReport(
            cast=tuple(self._cast),
            missing=tuple(self._missing),
            extra=tuple(self._extra),
            renamed=tuple(self._renamed),
        )

    def rename(self, structure: Mapping[TreePath, Node]) -> Renamed:
        """Return the structure under its new names.

        Raises:
            InvalidArgumentError: a pattern fits nothing, two parts get one name, or a part would leave its container.
        """
        if not self.names:
            return Renamed(structure=structure, old={})
        renamer = _Renamer(self.names)
        renamed = renamer.run(structure)
        self._renamed += renamer.done
        return renamed


def _keys(chosen: Iterable[object], kind: type[_OnKeys]) -> re.Pattern[str] | None:
    keys = [key for adaptation in chosen if isinstance(adaptation, kind) for key in adaptation.keys]
    return re.compile("|".join(fnmatch.translate(key) for key in keys)) if keys else None


@dataclass(frozen=True, kw_only=True)
class Renamed:
    """A structure under new names, and the old path by each new one that differs."""

    structure: Mapping[TreePath, Node]
    old: Mapping[TreePath, TreePath]


class _Renamer:
    def __init__(self, names: Mapping[str, str]) -> None:
        self.done: list[tuple[str, str]] = []
        self._rules: list[tuple[str, re.Pattern[str], str]] = []
        for old, new in names.items():
            self._rules.append((old, _with_groups(old), new))
            if old.endswith(".*") and new.endswith(".*"):  # the container itself goes with all that is in it
                self._rules.append((old, _with_groups(old[:-2]), new[:-2]))

    def run(self, structure: Mapping[TreePath, Node]) -> Renamed:
        moved: dict[TreePath, TreePath] = {}
        nodes: dict[TreePath, Node] = {}
        used: set[str] = set()
        for path, node in structure.items():
            new = (*moved[path[:-1]], self._key(path, moved[path[:-1]], used)) if path else ()
            if new in nodes:
                raise InvalidArgumentError(f"Rename gives two parts of the step the name {display_path(new)!r}")
            moved[path] = new
            nodes[new] = node
        for rule, _, _ in self._rules:
            if rule not in used:
                raise InvalidArgumentError(
                    f"nothing in the step matches {rule!r}",
                    hint="Patterns of Rename are on dotted paths of the step, as `model.encoder.*`.",
                )
        return Renamed(structure=nodes, old={new: old for old, new in moved.items() if new != old})

    def _key(self, path: TreePath, parent: TreePath, used: set[str]) -> PathKey:
        text = display_path(path)
        for rule, pattern, new in self._rules:
            match = pattern.fullmatch(text)
            if match is None:
                continue
            used.add(rule)
            parts: Sequence[str] = new.split("*")
            name = parts[0] + "".join(a + b for a, b in zip(match.groups(), parts[1:], strict=True))
            return self._last_key(path, parent, name)
        return path[-1]

    def _last_key(self, path: TreePath, parent: TreePath, name: str) -> PathKey:
        above = f"{display_path(parent)}." if parent else ""
        unchanged = display_path((*parent, path[-1])) == name
        if unchanged:
            return path[-1]  # its container has the new name already
        if not name.startswith(above) or name == above:
            raise InvalidArgumentError(
                f"Rename would move {display_path(path)!r} out of its container, to {name!r}",
                hint="A new name differs in the last part only, or rename the container itself.",
            )
        self.done.append((display_path(path), name))
        return name[len(above) :]


def _with_groups(pattern: str) -> re.Pattern[str]:
    return re.compile("(.*)".join(re.escape(part) for part in pattern.split("*")), re.DOTALL)
