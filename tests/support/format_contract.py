"""What every format promises, as a suite: inherit `FormatContract` and give `file_format`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from safepoint.formats.base import FilePlan, Format, LeafParts, LeafRef, Portion, WriteJob, WrittenPart
from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.fields import check_relative_path
from safepoint.formats.layout import COMMIT_NAME, MANIFEST_NAME, Mode
from safepoint.formats.region import Region, check_tiling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from safepoint.formats.tree import TreePath

__all__ = ["FormatContract"]

SHAPES: Mapping[str, tuple[str, tuple[int, ...]]] = {
    "matrix": ("float32", (7, 5)),
    "vector": ("bfloat16", (9,)),
    "scalar": ("int64", ()),
    "nothing": ("float16", (0, 3)),
    "odd": ("complex32", (4, 2)),
}


def leaves(parts: int) -> list[LeafParts]:
    """Return leaves whose first dimension is cut as torch cuts it over some processes."""
    made = []
    for name, (dtype, shape) in SHAPES.items():
        cut: tuple[Region, ...] = (Region.whole(shape),)
        if shape and shape[0]:
            size = -(-shape[0] // parts)
            starts = range(0, shape[0], size)
            rest = [0] * (len(shape) - 1)
            cut = tuple(Region((start, *rest), (min(size, shape[0] - start), *shape[1:])) for start in starts)
        made.append(LeafParts(path=("item", name), dtype=dtype, shape=shape, regions=cut))
    return made


def outline() -> dict[str, Any]:
    """Return the state around the leaves."""
    return {"item": {name: LeafRef(("item", name)) for name in SHAPES}, "plain": {"n": 5, "none": None}}


class FormatContract:
    """The suite."""

    file_format: Format

    def planned(self, mode: Mode, num_processes: int) -> list[tuple[list[Portion], list[FilePlan]]]:
        """Return portions and plans of each process."""
        every = leaves(num_processes if mode == "sharded" else 1)
        notes: Mapping[TreePath, Any] = self.file_format.arrange(every, outline)
        found = []
        for process in range(num_processes):
            portions = [
                Portion(path=leaf.path, dtype=leaf.dtype, shape=leaf.shape, region=region)
                for leaf in every
                for index, region in enumerate(leaf.regions)
                if index % num_processes == process
            ]
            primary = process == 0
            job = WriteJob(
                mode=mode,
                process_index=process,
                process_count=num_processes,
                notes=notes,
                leaves=every if primary else (),
                outline=outline,
                metrics={"loss": 1.0} if primary else {},
            )
            found.append((portions, self.file_format.plan(portions, job)))
        return found

    def cases(self) -> list[tuple[Mode, int]]:
        """Return the modes of the format, with numbers of processes."""
        counts = {"consolidated": (1,), "sharded": (1, 2, 3)}
        return [(mode, count) for mode in self.file_format.modes for count in counts[mode]]

    def test_every_element_is_written_once_and_lies_inside_its_file(self) -> None:
        for mode, count in self.cases():
            held: dict[TreePath, list[Region]] = {("item", name): [] for name in SHAPES}
            for portions, plans in self.planned(mode, count):
                for plan in plans:
                    assert len(plan.contents) == len(plan.layout.placements)
                    end = len(plan.layout.header)
                    for content, placement in zip(plan.contents, plan.layout.placements, strict=True):
                        portion = portions[content.portion]
                        stored = math.prod(placement.piece.shape) * ITEM_BYTES[portion.dtype]
                        assert placement.num_bytes == stored
                        assert placement.offset >= end
                        end = placement.offset + stored
                        assert portion.region.contains(content.region)
                        if not content.is_copy and not content.region.is_empty:
                            held[portion.path].append(content.region)
                    assert end <= plan.layout.num_bytes
            for name, (_, shape) in SHAPES.items():
                check_tiling(shape, held["item", name], leaf=name)

    def test_no_two_processes_write_one_file(self) -> None:
        for mode, count in self.cases():
            paths = [plan.path for _, plans in self.planned(mode, count) for plan in plans]
            assert len(set(paths)) == len(paths)
            for path in paths:
                check_relative_path(path, what="a plan")
                assert path not in (COMMIT_NAME, MANIFEST_NAME)

    def test_equal_arguments_give_equal_plans(self) -> None:
        for mode, count in self.cases():
            one, other = self.planned(mode, count), self.planned(mode, count)
            for (_, first), (_, second) in zip(one, other, strict=True):
                assert [(plan.path, plan.layout.header, plan.contents) for plan in first] == [
                    (plan.path, plan.layout.header, plan.contents) for plan in second
                ]

    def test_a_file_is_exactly_as_long_as_it_says(self) -> None:
        for mode, count in self.cases():
            for _, plans in self.planned(mode, count):
                for plan in plans:
                    assert len(written(plan)) == plan.layout.num_bytes

    def test_it_concludes_with_whole_files_that_no_process_wrote(self) -> None:
        for mode, count in self.cases():
            planned = self.planned(mode, count)
            every = leaves(count if mode == "sharded" else 1)
            parts = [
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
            job = WriteJob(
                mode=mode,
                process_index=0,
                process_count=count,
                notes=self.file_format.arrange(every, outline),
                leaves=every,
                outline=outline,
            )
            found = self.file_format.conclude(parts, job)
            assert not any(plan.contents for plan in found)
            assert all(len(written(plan)) == plan.layout.num_bytes for plan in found)
            paths = [plan.path for plan in found] + [plan.path for _, plans in planned for plan in plans]
            assert len(set(paths)) == len(paths)
            for plan in found:
                check_relative_path(plan.path, what="a plan")
                assert plan.path not in (COMMIT_NAME, MANIFEST_NAME)

    def test_its_name_is_an_identifier(self) -> None:
        assert self.file_format.name.isidentifier()
        assert self.file_format.modes


def written(plan: FilePlan) -> bytes:
    """Return the file with zeros for data."""
    data = plan.layout.header
    checks: list[int] = []
    for index, placement in enumerate(plan.layout.placements):
        assert len(data) == placement.offset
        zeros = bytes(placement.num_bytes)
        data += zeros
        if plan.layout.framing is not None and plan.layout.codec is None:
            checks.append(plan.layout.framing.check(memoryview(zeros)))
            data += plan.layout.framing.after(index, checks)
    return data
