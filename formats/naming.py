"""Names of files inside a step, and names of tensors inside a file.

Pure text. The names are for people and for other tools (Hugging Face's, `safetensors`'s): what belongs to which leaf
is read from the manifest, never from a name. So a name is the obvious one wherever that is safe and unambiguous,
and an injective encoding of it elsewhere.

The encoding is percent-style: UTF-8 bytes of the characters in question become `%41`; `%s` is an empty key, `%i7` the
int 7, `%k<kind>:<text>` a tagged key, and `%~` precedes the digest that ends a name too long for a directory. After a
percent sign from a character always come two of `0-9A-F`, so none of these can be mistaken for another.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from functools import lru_cache
from typing import TYPE_CHECKING

from safepoint.formats.layout import COMMIT_NAME, MANIFEST_NAME
from safepoint.formats.region import Region

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.formats.layout import Mode
    from safepoint.formats.tree import PathKey, TreePath

__all__ = ["file_keys", "item_file", "item_name", "shard_file"]

RESERVED_KEYS = frozenset({"__metadata__"})
"""Keys that safetensors keeps for itself."""

MAX_NAME_BYTES = 160
"""Longest item name, encoded; file systems take 255 bytes and the suffix is still to come."""

_UNSAFE_IN_NAME = re.compile(r"[^A-Za-z0-9._-]", re.ASCII)
_UNSAFE_IN_KEY = re.compile(r"[%@.]")


def shard_file(process_index: int, process_count: int, suffix: str) -> str:
    """Return the path, in the step, of the file that a process writes in sharded mode."""
    return f"shard-{process_index:05d}-of-{process_count:05d}{suffix}"


def item_file(path: TreePath, suffix: str) -> str:
    """Return the path, in the step, of the file that holds this leaf in consolidated mode: one a top-level key."""
    name = item_name(str(path[0]))
    return f"{name}/{name}{suffix}"


@lru_cache(maxsize=1024)
def item_name(item: str) -> str:
    """Return a directory name for a top-level key; distinct keys have distinct names.

    ASCII letters, digits, `.`, `_` and `-` stay as they are. The rest is encoded, and so is the first character of
    a name that begins with a dot or is the name of one of our own files.
    """
    if not item:
        return "%s"
    name = _UNSAFE_IN_NAME.sub(_encode, item)
    if name.startswith(".") or name.casefold() in (COMMIT_NAME, MANIFEST_NAME) or name.casefold().startswith("shard-"):
        name = _encode_text(name[0]) + name[1:]
    if len(name) > MAX_NAME_BYTES:
        digest = hashlib.sha256(item.encode("utf-8", "surrogatepass")).hexdigest()[:32]
        name = f"{name[: MAX_NAME_BYTES - len(digest) - 2]}%~{digest}"
    return name


def file_keys(
    pieces: Sequence[tuple[TreePath, Region]], shapes: Mapping[TreePath, tuple[int, ...]], *, mode: Mode
) -> list[str]:
    """Return the key of each piece of one file, in the order given; no two are equal.

    A key is the dotted path, without the item in a consolidated file (which is the item's own), unless another leaf
    of the file has the same one or it holds characters that the encoding needs; then it is the encoded path. A
    region that is not the whole leaf adds `@` and its offsets when the file holds several regions of that leaf.

    Args:
        pieces: leaf and region of each; distinct.
        shapes: global shapes of at least the leaves of `pieces`.
        mode: how the file is laid out.
    """
    named = {path: path[1:] or path if mode == "consolidated" else path for path, _ in pieces}
    dotted = {path: _dotted(keys) for path, keys in named.items()}
    claims = Counter(dotted.values())
    names = {
        path: text if text is not None and claims[text] == 1 else _encode_path(named[path])
        for path, text in dotted.items()
    }
    counts = Counter(path for path, _ in pieces)
    return [
        names[path]
        if counts[path] == 1 or region == Region.whole(shapes[path])
        else f"{names[path]}@{','.join(map(str, region.offsets))}"
        for path, region in pieces
    ]


def _dotted(keys: Sequence[PathKey]) -> str | None:
    """Return the plain dotted path, or None where only the encoded one will do."""
    if not all(isinstance(key, str | int) for key in keys):
        return None
    text = ".".join(map(str, keys))
    if not text or text in RESERVED_KEYS or not text.isprintable() or "%" in text or "@" in text:
        return None
    return text


def _encode_path(keys: Sequence[PathKey]) -> str:
    # Equal to the dotted path only where all keys are strings without special characters. So a plain key can equal
    # an encoded one only if both paths have the same dotted text, and then both were encoded.
    text = ".".join(map(_encode_key, keys))
    return _encode_text(text[0]) + text[1:] if text in RESERVED_KEYS else text


def _encode_key(key: PathKey) -> str:
    if isinstance(key, int):
        return f"%i{key}"
    if isinstance(key, str):
        return _encode_part(key) or "%s"
    return f"%k{_encode_part(key.kind).replace(':', '%3A')}:{_encode_part(key.text)}"


def _encode_part(text: str) -> str:
    text = _UNSAFE_IN_KEY.sub(_encode, text)
    return text if text.isprintable() else "".join(c if c.isprintable() else _encode_text(c) for c in text)


def _encode(match: re.Match[str]) -> str:
    return _encode_text(match.group())


def _encode_text(text: str) -> str:
    return "".join(f"%{byte:02X}" for byte in text.encode("utf-8", "surrogatepass"))
