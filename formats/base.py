"""What a file format is: from pieces of leaves to the header and the place of each in one file.

A format never touches data: it says where the bytes go, and storage puts them there. Knows no processes and no storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["FileLayout", "Format", "Piece", "Placement"]


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
        piece: what lies there, in C order, little-endian.
        offset: its first byte, from the start of the file.
        num_bytes: its size.
    """

    piece: Piece
    offset: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """A file before its data: `header`, then the bytes of each placement in order, back to back, and no more.

    Attributes:
        header: the first bytes of the file.
        placements: all pieces, in file order; the first begins where the header ends.
        num_bytes: of the whole file.
    """

    header: bytes
    placements: tuple[Placement, ...]
    num_bytes: int


class Format(Protocol):
    """A way to lay out pieces in one file."""

    @property
    def name(self) -> str:
        """Name of the format, as users write it and as manifests record it."""
        ...

    @property
    def suffix(self) -> str:
        """Suffix of its files, with the dot."""
        ...

    def layout(self, pieces: Sequence[Piece], metadata: Mapping[str, str]) -> FileLayout:
        """Return header and placements of a file that holds `pieces`; equal arguments give equal bytes.

        Args:
            pieces: what the file holds, with distinct keys.
            metadata: a few texts for people and other tools; nothing that a restore needs.

        Raises:
            InvalidArgumentError: a key twice, or more than one file can hold.
            UnsupportedValueError: a key or dtype that the format cannot hold.
        """
        ...
