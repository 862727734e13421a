"""What a file format is: from parts of leaves to files, and to the place of each part in one.

A format never touches data: it says where the bytes go, and storage puts them there. What it cannot know beforehand
(a checksum between two tensors, say) its `Framing` makes from what was written. Knows no processes and no storage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from safepoint.formats.codecs import Codec
    from safepoint.formats.layout import Mode
    from safepoint.formats.region import Region
    from safepoint.formats.tree import JSON, TreePath

__all__ = [
    "Content",
    "FileLayout",
    "FilePlan",
    "Format",
    "Framing",
    "LeafParts",
    "LeafRef",
    "Piece",
    "Placement",
    "Portion",
    "WriteJob",
    "WrittenPart",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One region of one leaf, to be written under a name of its own.

    Attributes:
        key: its name inside the file; unique there.
        dtype: our name of the dtype (`safepoint.formats.dtypes`).
        shape: of the region, in items.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where a piece lies.

    Attributes:
        piece: what lies there, in C order, little-endian. Its shape may be larger than the region that it holds, which
            then is its first corner; zeros fill the rest.
        offset: its first byte, from the start of the file.
        num_bytes: its size.
    """

    piece: Piece
    offset: int
    num_bytes: int


class Framing(Protocol):
    """Makes the bytes of a file that depend on its data."""

    def check(self, data: memoryview) -> int:
        """Return the checksum of the bytes of one placement."""
        ...

    def after(self, index: int, checks: Sequence[int]) -> bytes:
        """Return what follows placement `index`, up to the next one or the end.

        Args:
            index: of the placement that was written last.
            checks: of all placements up to and with that one.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """A file before its data: `header`, the bytes of the placements in order, what `framing` puts after each, no more.

    Attributes:
        header: the first bytes of the file.
        placements: all pieces, in file order; the first begins where the header ends.
        num_bytes: of the whole file.
        framing: what follows each placement; None where they lie back to back.
        codec: what the bytes of each placement are encoded with when they are written, and then framed. How long they
            get nobody knows before: the placements and `num_bytes` say how they lie until then, without a header.
    """

    header: bytes
    placements: tuple[Placement, ...]
    num_bytes: int
    framing: Framing | None = None
    codec: Codec | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Portion:
    """A part of a leaf that one process writes.

    Attributes:
        path: the leaf.
        dtype: our name of its dtype.
        shape: its global shape.
        region: the part.
    """

    path: TreePath
    dtype: str
    shape: tuple[int, ...]
    region: Region


@dataclass(frozen=True, kw_only=True, slots=True)
class LeafParts:
    """A leaf, and how it is cut over all processes.

    Attributes:
        path: of the leaf.
        dtype: our name of its dtype.
        shape: its global shape.
        regions: that are written; they tile the shape.
    """

    path: TreePath
    dtype: str
    shape: tuple[int, ...]
    regions: tuple[Region, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Content:
    """What a placement of a file holds.

    Attributes:
        portion: index of the portion.
        region: the part of it.
        is_copy: whether another placement holds it too, which is the one that counts for us.
    """

    portion: int
    region: Region
    is_copy: bool = False


@dataclass(frozen=True, kw_only=True)
class FilePlan:
    """One file to be written.

    Attributes:
        path: in the step. With a codec there are as many files as it takes, whose names begin so and end in a number of
            eight hexadecimal digits.
        layout: where what goes.
        contents: one for each placement, in file order.
    """

    path: str
    layout: FileLayout
    contents: tuple[Content, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPart:
    """Where some process put a region of a leaf.

    Attributes:
        path: the leaf.
        key: of the piece.
        file: path of the file in the step.
        offset: of the first byte.
        num_bytes: as written; what its framing put after it is not in it.
    """

    path: TreePath
    key: str
    file: str
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class LeafRef:
    """Stands for an array where the state is described without its data."""

    path: TreePath


def _no_state() -> Mapping[str, Any]:
    return {}


@dataclass(frozen=True, kw_only=True)
class WriteJob:
    """What the portions of one process are part of.

    Attributes:
        mode: who writes what.
        process_index: the process that writes the portions.
        process_count: how many save.
        notes: what `Format.arrange` noted about the portions' leaves (on the primary, about all).
        leaves: all leaves; on the primary only.
        outline: gives the whole state as other tools know it (standard containers and plain values), with a `LeafRef`
            for each array; on the primary only.
        metrics: of the step, by name; on the primary only.
        time_nsecs: when the save began, in nanoseconds since 1970.
        part_bytes: how large a file should be at most, where the format can cut its files; None for no limit.
    """

    mode: Mode
    process_index: int
    process_count: int
    notes: Mapping[TreePath, JSON] = field(default_factory=dict)
    leaves: Sequence[LeafParts] = ()
    outline: Callable[[], Mapping[str, Any]] = field(default=_no_state)
    metrics: Mapping[str, float] = field(default_factory=dict)
    time_nsecs: int = 0
    part_bytes: int | None = None


class Format(Protocol):
    """A way to lay out a state in files."""

    @property
    def name(self) -> str:
        """Name of the format, as users write it and as manifests record it."""
        ...

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes in which it can be written."""
        ...

    @property
    def allows_private_roots(self) -> bool:
        """Whether what one process wrote is readable without what the others wrote."""
        ...

    @property
    def allows_parts(self) -> bool:
        """Whether any file may hold any of the leaves, so that an item may lie in several and in older ones."""
        ...

    @property
    def plans_by_geometry(self) -> bool:
        """Whether a plan follows from the portions, the mode and the process alone; it is kept for later saves then."""
        ...

    def arrange(self, leaves: Sequence[LeafParts], outline: Callable[[], Mapping[str, Any]]) -> Mapping[TreePath, JSON]:
        """Return what a process must know of a leaf beyond its own portions; {} where that is nothing.

        Called by: the primary, before anything is written.

        Args:
            leaves: all of them.
            outline: as in `WriteJob`.

        Raises:
            UnsupportedValueError: the format cannot hold this state; names the leaf.
        """
        ...

    def plan(self, portions: Sequence[Portion], job: WriteJob) -> list[FilePlan]:
        """Return the files that one process writes; equal arguments give equal plans.

        Args:
            portions: consolidated: whole leaves, each once. Sharded: this process's regions.
            job: what they are part of.

        Raises:
            InvalidArgumentError: more than a file can hold.
            UnsupportedValueError: a name or dtype that the format cannot hold; names the leaf.
        """
        ...

    def conclude(self, parts: Iterable[WrittenPart], job: WriteJob) -> list[FilePlan]:
        """Return files without data that say where the others' data are; [] for a format that needs none.

        Called by: the primary, after all processes have written; it writes them, and then commits.

        Args:
            parts: of all processes, copies too.
            job: of the primary.
        """
        ...
