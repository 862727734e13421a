"""Restoring into a live state: everything is compared first, then the data is read, then applied.

    match(…) → RestoreTarget      compares; changes nothing
    target.check_shared(read)     sees to what the target ties and the step does not
    target.wanted                 the live leaves that the reader fills
    target.apply()                finishes leaves, loads objects, puts plain values in place

The walk is `matching`'s. Must not know files or processes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

from safepoint.formats.errors import InvalidArgumentError
from safepoint.manager.adapters import finish_all
from safepoint.manager.adapting import Adaptation, AdaptationReport, Adapting
from safepoint.manager.errors import StructureMismatchError
from safepoint.manager.fills import Fills
from safepoint.manager.matching import Make, Matcher
from safepoint.manager.saved_tree import Selection, build_tree
from safepoint.manager.state import check_items
from safepoint.manager.stateful_targets import visit_stateful

if TYPE_CHECKING:
    from safepoint.formats.manifest import LeafEntry, Node, TreePath
    from safepoint.manager.adapters import ArrayLeaf
    from safepoint.manager.shared_targets import Read

__all__ = ["RestoreTarget", "match", "refuse_extra"]

_LISTED = 25  # differences that the message names; all are in `mismatches`


class RestoreTarget:
    """A live state that fits a step, ready to be filled.

    Attributes:
        wanted: the live leaf for each stored leaf that is to be read. It may be new memory that `apply` puts in place.
        extra: what the step has and this target has not, by path; an error unless another process has it.
    """

    def __init__(
        self,
        into: Mapping[str, Any],
        makes: Mapping[str, Make],
        fills: Fills,
        adapting: Adapting,
        extra: Mapping[TreePath, str],
    ) -> None:
        self.extra = extra
        self._shared = fills.settle()
        self.wanted: dict[TreePath, ArrayLeaf] = fills.wanted()
        self._into = into
        self._makes = makes
        self._adapting = adapting

    def check_shared(self, read: Read) -> None:
        """Check that the target can hold what it ties and the step does not. Changes nothing of the target.

        Args:
            read: fills leaves that are given by their paths in the step. Called only where there is such a tie.

        Raises:
            StructureMismatchError: the step has different data for it.
        """
        self._shared.check(read)

    def report(self) -> AdaptationReport:
        """Return what differs between step and target, as it was allowed to."""
        return self._adapting.report()

    def apply(self) -> None:
        """Finish the restore. Call it once, after all of `wanted` was filled.

        Raises:
            CheckpointError: an object refused its state.
        """
        finish_all(self.wanted.values())
        self._shared.finish()
        for name, make in self._makes.items():
            value = make()
            if value is not self._into[name]:
                assert isinstance(self._into, MutableMapping)  # `match` has checked it
                self._into[name] = value


def match(
    structure: Mapping[TreePath, Node],
    leaf_entries: Iterable[LeafEntry],
    into: Mapping[str, Any],
    *,
    process_index: int,
    process_count: int,
    items: Collection[str] | None = None,
    keys: Collection[str] | None = None,
    adapt: Collection[Adaptation] = (),
) -> RestoreTarget:
    """Compare a target with a step, and plan how to fill it. Nothing is changed.

    Args:
        structure: of the step.
        leaf_entries: its stored leaves.
        into: the state to be filled, in place.
        process_index: this process.
        process_count: how many restore.
        items: names of the items to restore; None is all. Others are left untouched.
        keys: patterns as of `fnmatch` on dotted paths: what one matches is restored with everything below it. Of an
            object that is only partly selected, the selected tensors are filled, and no method of it is called.
        adapt: differences that are allowed; without, every one is an error.

    Raises:
        StructureMismatchError: target and step differ; lists every difference. Where several processes restore, what
            only the step has is not among them, but in the target's `extra`: `refuse_extra` is to be asked.
        InvalidArgumentError: `into` is no mapping of items, or what is asked for is not in the step.
    """
    check_items(into)
    selection = Selection.of(items, keys)
    adapting = Adapting.of(adapt, has_target=True)
    renamed = adapting.rename(structure)
    root = build_tree(renamed.structure, selection, origins=renamed.old)
    fills = Fills(leaf_entries, adapting)
    matcher = Matcher(
        fills, selection, own=(process_index, process_count), adapting=adapting, visit_stateful=visit_stateful
    )
    makes: dict[str, Make] = {}
    for name, live in into.items():
        saved = root.children.get(name)
        if saved is None:
            matcher.note_missing((name,), live)
        elif saved.extent != "none":
            makes[name] = matcher.visit(saved, live)
    for key, saved in root.children.items():
        if key not in into:
            matcher.note_extra(saved)
    if len(fills.problems) > (len(matcher.extra) if process_count > 1 else 0):
        raise _mismatch(fills.problems)
    _check_mutable(into, makes)
    return RestoreTarget(into, makes, fills, adapting, matcher.extra)


def refuse_extra(extras: Sequence[Mapping[TreePath, str]]) -> None:
    """Refuse what the step has and no process's target has.

    Processes that hold different parts (stages of a pipeline, experts) saved the union of them, and each of their
    targets has its own part only.

    Args:
        extras: of each process that reads this step.

    Raises:
        StructureMismatchError: some of it is in none of the targets.
    """
    left = {
        path: text
        for extra in extras
        for path, text in extra.items()
        if all(any(path[:end] in other for end in range(1, len(path) + 1)) for other in extras)
    }
    if left:
        raise _mismatch(list(left.values()))


def _check_mutable(into: Mapping[str, Any], makes: Mapping[str, Make]) -> None:
    if makes and not isinstance(into, MutableMapping):
        raise InvalidArgumentError(
            f"a {type(into).__name__} cannot take restored values", hint="Pass a dict: `dict(state)`."
        )


def _mismatch(problems: list[str]) -> StructureMismatchError:
    listed = "\n".join(f"  {problem}" for problem in problems[:_LISTED])
    rest = len(problems) - _LISTED
    more = f"\n  … and {rest} more (see .mismatches)" if rest > 0 else ""
    count = "1 difference" if len(problems) == 1 else f"{len(problems)} differences"
    return StructureMismatchError(
        f"the target does not fit the step: {count}; nothing was changed\n{listed}{more}",
        mismatches=tuple(problems),
        hint=_hint(problems),
    )


def _hint(problems: list[str]) -> str:
    for prefix, wrapper in (("module.", "DistributedDataParallel"), ("_orig_mod.", "torch.compile")):
        sides = [{text.split(":")[0] for text in problems if side in text} for side in (": missing ", ": extra ")]
        stripped = [{path.replace(f".{prefix}", ".", 1) for path in side} for side in sides]
        if sides[0] and stripped[0] == stripped[1]:
            return (
                f"The names differ by {prefix!r} only, which {wrapper} adds: save and restore the module inside the "
                "wrapper on both sides."
            )
    return "Give a target of the saved structure, or choose what to restore with `items=` or `keys=`."
