"""The manifest of a step: the structure of the state, where each region of each leaf lies, and the files' digests.

It owns `manifest.json` as `docs/format.md` defines it, and checks all of it when reading: what `Manifest.from_bytes`
returns can be followed without looking again. It must not know how the state became a tree or who wrote the files.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from safepoint.formats.commit_record import CommitRecord
from safepoint.formats.entries import FileEntry, LeafEntry, ShardEntry
from safepoint.formats.errors import CorruptDataError, IncompleteCoverageError, InvalidArgumentError
from safepoint.formats.fields import Fields, known_json, parse_json
from safepoint.formats.layout import COMMIT_NAME, LAYOUT_VERSION, MANIFEST_NAME, MODES, Mode, Scope, check_header
from safepoint.formats.leaf_text import cut_leaves, leaf_text, read_leaf_texts
from safepoint.formats.region import check_tiling
from safepoint.formats.tree import (
    JSON,
    Node,
    PathKey,
    TaggedKey,
    TreePath,
    check_data,
    display_path,
    structure_from_rows,
    structure_to_rows,
)

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator, Mapping, Sequence

__all__ = [
    "COMMIT_NAME",
    "JSON",
    "LAYOUT_VERSION",
    "MANIFEST_NAME",
    "CommitRecord",
    "FileEntry",
    "LeafEntry",
    "Manifest",
    "Mode",
    "Node",
    "PathKey",
    "Scope",
    "ShardEntry",
    "TaggedKey",
    "TreePath",
    "display_path",
]

_KIND = "safepoint-manifest"
_WHAT = "the manifest"


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """All that is needed to read a step, apart from the data.

    Attributes:
        structure: node by path, parents first, in the state's order.
        leaves: the arrays; each has a node.
        files: the data files.
        process_count: how many processes saved.
        format: name of the files' format.
        mode: who wrote what.
        step: the step.
        attempt: the attempt that wrote the step.
        partial: whether this is one of several private records, so that its regions need not tile their leaves.
    """

    structure: Mapping[TreePath, Node]
    leaves: tuple[LeafEntry, ...]
    files: tuple[FileEntry, ...]
    process_count: int
    format: str
    mode: Mode
    step: int
    attempt: str
    partial: bool = False

    @property
    def linked_bytes(self) -> int:
        """Size of the files that earlier attempts wrote, and that this step has by a second name."""
        return sum(file.num_bytes for file in self.files if file.attempt != self.attempt)

    def to_bytes(self) -> bytes:
        """Return `manifest.json`; equal manifests give equal bytes.

        Raises:
            InvalidArgumentError: the structure is no tree with its parents first, or a leaf has no node in it.
            UnsupportedValueError: a node's data is not JSON.
        """
        rows, index = structure_to_rows(self.structure)
        leaves = []
        for leaf in self.leaves:
            row = index.get(leaf.path)
            if row is None:
                raise InvalidArgumentError(f"leaf {display_path(leaf.path)!r} has no node in the structure")
            leaves.append(leaf_text(leaf, row))
        check_data(self.structure)
        texts = {
            "kind": known_json(_KIND),
            "version": known_json(LAYOUT_VERSION),
            "step": known_json(self.step),
            "attempt": known_json(self.attempt),
            "process_count": known_json(self.process_count),
            "format": known_json(self.format),
            "mode": known_json(self.mode),
            "partial": known_json(self.partial),
            "structure": known_json(rows),
            "files": known_json([file.to_json() for file in self.files]),
            "leaves": f"[{','.join(leaves)}]",
        }
        return f"{{{','.join(f'{known_json(name)}:{texts[name]}' for name in sorted(texts))}}}".encode("ascii")

    @classmethod
    def from_bytes(cls, data: bytes, *, path: str) -> Manifest:
        """Return the manifest that anybody may have written, checked throughout.

        Args:
            data: content of `manifest.json`.
            path: where it was read, for errors.

        Raises:
            UnsupportedVersionError: a newer safepoint wrote it.
            CorruptDataError: anything else is wrong with it; names `path`, and the leaf where it is one.
        """
        cut = cut_leaves(data)
        fields = Fields(_parse(data, path) if cut is None else cut[0], what=_WHAT, path=path)
        check_header(fields, kind=_KIND)
        process_count = fields.integer("process_count", minimum=1)
        partial = fields.flag("partial")
        structure, paths = structure_from_rows(fields.items("structure"), path=path)
        files = tuple(
            FileEntry.from_json(file, index=index, process_count=process_count, path=path)
            for index, file in enumerate(fields.items("files"))
        )
        leaves = None if cut is None else read_leaf_texts(cut[1], paths=paths, files=files)
        if leaves is None:
            every = fields if cut is None else Fields(_parse(data, path), what=_WHAT, path=path)
            leaves = _one_by_one(every.items("leaves"), paths=paths, files=files, path=path)
        _check_names(leaves, files, path=path)
        _check_ranges(leaves, files, path=path)
        if not partial:
            _check_tilings(leaves, path=path)
        return cls(
            structure=structure,
            leaves=leaves,
            files=files,
            process_count=process_count,
            format=fields.identifier("format"),
            mode=fields.choice("mode", MODES),
            step=fields.integer("step"),
            attempt=fields.identifier("attempt"),
            partial=partial,
        )


def _parse(data: bytes, path: str) -> Any:
    return parse_json(data, what=_WHAT, path=path)


def _one_by_one(
    values: Sequence[JSON], *, paths: Sequence[TreePath], files: Sequence[FileEntry], path: str
) -> tuple[LeafEntry, ...]:
    return tuple(
        LeafEntry.from_json(value, index=index, paths=paths, files=files, path=path)
        for index, value in enumerate(values)
    )


def _check_names(leaves: Sequence[LeafEntry], files: Sequence[FileEntry], *, path: str) -> None:
    """Check that no file, no leaf and no key of a file occurs twice."""
    for index in _repeated([file.path for file in files]):
        raise CorruptDataError(f"the manifest has the file {files[index].path} twice", path=path)
    for index in _repeated([leaf.path for leaf in leaves]):
        raise CorruptDataError("the manifest has a leaf twice", path=path, leaf=display_path(leaves[index].path))
    shards = [shard for leaf in leaves for shard in leaf.shards]
    for index in _repeated([(shard.file, shard.key) for shard in shards]):
        leaf = [leaf for leaf in leaves for _ in leaf.shards][index]
        raise CorruptDataError(
            f"a shard has the key of another in the file {files[shards[index].file].path}",
            path=path,
            leaf=display_path(leaf.path),
        )


def _repeated(names: Sequence[Hashable]) -> Iterator[int]:
    """Yield the index of each name that an earlier one equals."""
    if len(set(names)) == len(names):
        return
    seen = set()
    for index, name in enumerate(names):
        if name in seen:
            yield index
        seen.add(name)


def _check_ranges(leaves: Sequence[LeafEntry], files: Sequence[FileEntry], *, path: str) -> None:
    """Check that no byte of a file belongs to two shards."""
    ranges: list[list[tuple[int, int, int]]] = [[] for _ in files]
    for index, leaf in enumerate(leaves):
        for shard in leaf.shards:
            if shard.num_bytes:
                ranges[shard.file].append((shard.offset, shard.offset + shard.num_bytes, index))
    for file, held in zip(files, ranges, strict=True):
        held.sort()
        for (_, end, _), (start, _, index) in itertools.pairwise(held):
            if start < end:
                raise CorruptDataError(
                    f"a shard shares bytes of the file {file.path} with another",
                    path=path,
                    leaf=display_path(leaves[index].path),
                )


def _check_tilings(leaves: Sequence[LeafEntry], *, path: str) -> None:
    for leaf in leaves:
        if len(leaf.shards) == 1 and leaf.shards[0].region.shape == leaf.shape:
            continue  # inside the shape and as large: the whole of it
        try:
            check_tiling(leaf.shape, (shard.region for shard in leaf.shards), leaf=display_path(leaf.path))
        except IncompleteCoverageError as error:
            raise CorruptDataError(
                f"the shards do not tile their leaf: {error.message}", path=path, leaf=error.leaf
            ) from error
