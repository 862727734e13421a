"""What every format promises, as a suite that anybody's format can pass: inherit `FormatContract` under pytest.

    class TestMine(FormatContract):
        file_format = MyFormat()

pytest collects the methods that begin with `test_`; nothing here imports it. A message says what a failure means.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from safepoint.formats.base import FilePlan, Format, LeafParts, LeafRef, Portion, WriteJob, WrittenPart
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.fields import check_relative_path
from safepoint.formats.layout import COMMIT_NAME, MANIFEST_NAME, Mode
from safepoint.formats.region import Region, check_tiling
from safepoint.formats.registry import FORMAT_PARTS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from safepoint.formats.tree import TreePath

__all__ = ["FormatContract"]

_SHAPES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "matrix": ("float32", (7, 5)),
    "vector": ("bfloat16", (9,)),
    "scalar": ("int64", ()),
    "nothing": ("float16", (0, 3)),
    "odd": ("complex32", (4, 2)),
}
_COUNTS: Mapping[str, tuple[int, ...]] = {"consolidated": (1,), "sharded": (1, 2, 3)}

_Planned = list[tuple[list[Portion], list[FilePlan]]]


class FormatContract:
    """The suite. Leaves of several dtypes and shapes are planned in each mode, for one to three processes.

    Attributes:
        file_format: the format that is tested.
    """

    file_format: Format

    def test_it_has_all_that_a_format_has(self) -> None:
        """Its name is one that users can write, its modes are modes, and nothing of `Format` is missing."""
        missing = [part for part in FORMAT_PARTS if not hasattr(self.file_format, part)]
        assert not missing, f"it lacks {', '.join(missing)}"
        assert self.file_format.name.isidentifier(), f"the name {self.file_format.name!r} is no identifier"
        assert self.file_format.modes, "it has no modes"
        assert set(self.file_format.modes) <= set(_COUNTS), f"unknown modes: {self.file_format.modes}"

    def test_every_element_is_written_once_and_lies_inside_its_file(self) -> None:
        """The placements follow each other, are as large as what they hold, and their regions tile every leaf."""
        for mode, count in self._cases():
            held: dict[TreePath, list[Region]] = {("item", name): [] for name in _SHAPES}
            for portions, plans in self._planned(mode, count):
                for plan in plans:
                    for portion, region in _checked_contents(portions, plan):
                        held[portion.path].append(region)
            for name, (_, shape) in _SHAPES.items():
                check_tiling(shape, held["item", name], leaf=name)

    def test_no_two_processes_write_one_file(self) -> None:
        """Paths are relative, stay in the step, are not those of the records, and are one file's each."""
        for mode, count in self._cases():
            _check_paths(plan.path for _, plans in self._planned(mode, count) for plan in plans)

    def test_equal_arguments_give_equal_plans(self) -> None:
        """A plan follows from its arguments: nothing in it is drawn or counted."""
        for mode, count in self._cases():
            one, other = self._planned(mode, count), self._planned(mode, count)
            for (_, first), (_, second) in zip(one, other, strict=True):
                assert list(map(_described, first)) == list(map(_described, second)), "two plans differ"

    def test_a_file_is_exactly_as_long_as_it_says(self) -> None:
        """Header, placements and what the framing puts after each make up the file."""
        for mode, count in self._cases():
            for _, plans in self._planned(mode, count):
                for plan in plans:
                    _check_length(plan)

    def test_it_concludes_with_whole_files_that_no_process_wrote(self) -> None:
        """What is written at the end holds no data, and has paths of its own."""
        for mode, count in self._cases():
            planned = self._planned(mode, count)
            found = self.file_format.conclude(_written_parts(planned), self._job(mode, 0, count))
            for plan in found:
                assert not plan.contents, f"{plan.path} holds data"
                _check_length(plan)
            _check_paths([plan.path for plan in found] + [plan.path for _, plans in planned for plan in plans])

    def _cases(self) -> list[tuple[Mode, int]]:
        return [(mode, count) for mode in self.file_format.modes for count in _COUNTS[mode]]

    def _planned(self, mode: Mode, count: int) -> _Planned:
        """Return portions and plans of each process."""
        found = []
        for process in range(count):
            portions = [
                Portion(path=leaf.path, dtype=leaf.dtype, shape=leaf.shape, region=region)
                for leaf in _leaves(mode, count)
                for index, region in enumerate(leaf.regions)
                if index % count == process
            ]
            found.append((portions, self.file_format.plan(portions, self._job(mode, process, count))))
        return found

    def _job(self, mode: Mode, process: int, count: int) -> WriteJob:
        leaves = _leaves(mode, count)
        return WriteJob(
            mode=mode,
            process_index=process,
            process_count=count,
            notes=self.file_format.arrange(leaves, _outline),
            leaves=leaves if process == 0 else (),
            outline=_outline,
            metrics={"loss": 1.0} if process == 0 else {},
        )


def _leaves(mode: Mode, count: int) -> list[LeafParts]:
    """Return leaves whose first dimension is cut as torch cuts it over some processes."""
    made = []
    for name, (dtype, shape) in _SHAPES.items():
        cut: tuple[Region, ...] = (Region.whole(shape),)
        if mode == "sharded" and shape and shape[0]:
            size = -(-shape[0] // count)
            rest = [0] * (len(shape) - 1)
            cut = tuple(
                Region((start, *rest), (min(size, shape[0] - start), *shape[1:])) for start in range(0, shape[0], size)
            )
        made.append(LeafParts(path=("item", name), dtype=dtype, shape=shape, regions=cut))
    return made


def _outline() -> dict[str, Any]:
    """Return the state around the leaves."""
    return {"item": {name: LeafRef(("item", name)) for name in _SHAPES}, "plain": {"n": 5, "none": None}}


def _checked_contents(portions: list[Portion], plan: FilePlan) -> list[tuple[Portion, Region]]:
    """Return what a file holds and counts for us, after a look at where it lies."""
    assert len(plan.contents) == len(plan.layout.placements), f"{plan.path}: one content for each placement"
    held = []
    end = len(plan.layout.header)
    for content, placement in zip(plan.contents, plan.layout.placements, strict=True):
        portion = portions[content.portion]
        stored = math.prod(placement.piece.shape) * ITEM_BYTES[portion.dtype]
        assert placement.num_bytes == stored, f"{plan.path}: {placement.piece.key} has {stored} bytes"
        assert placement.offset >= end, f"{plan.path}: {placement.piece.key} overlaps what is before it"
        assert portion.region.contains(content.region), f"{plan.path}: {content.region} is not in its portion"
        end = placement.offset + stored
        if not content.is_copy and not content.region.is_empty:
            held.append((portion, content.region))
    assert end <= plan.layout.num_bytes, f"{plan.path} ends before its data do"
    return held


def _check_paths(paths: Iterable[str]) -> None:
    seen: set[str] = set()
    for path in paths:
        check_relative_path(path, what="a plan")
        assert path not in (COMMIT_NAME, MANIFEST_NAME), f"{path} is the name of a record"
        assert path not in seen, f"{path} is written twice"
        seen.add(path)


def _described(plan: FilePlan) -> tuple[Any, ...]:
    return plan.path, plan.layout.header, plan.layout.num_bytes, plan.layout.placements, plan.contents


def _check_length(plan: FilePlan) -> None:
    """Write the file with zeros for data."""
    framing = plan.layout.framing if plan.layout.codec is None else None
    data = plan.layout.header
    checks: list[int] = []
    for index, placement in enumerate(plan.layout.placements):
        assert len(data) == placement.offset, f"{plan.path}: {placement.piece.key} lies at {len(data)}"
        zeros = bytes(placement.num_bytes)
        data += zeros
        if framing is not None:
            checks.append(framing.check(memoryview(zeros)))
            data += framing.after(index, checks)
    assert len(data) == plan.layout.num_bytes, f"{plan.path} has {len(data)} bytes, not {plan.layout.num_bytes}"


def _written_parts(planned: _Planned) -> list[WrittenPart]:
    return [
        WrittenPart(
            path=portions[content.portion].path,
            key=placement.piece.key,
            file=plan.path if plan.layout.codec is None else f"{plan.path}{0:08x}",
            offset=placement.offset,
            num_bytes=placement.num_bytes,
        )
        for portions, plans in planned
        for plan in plans
        for content, placement in zip(plan.contents, plan.layout.placements, strict=True)
    ]
