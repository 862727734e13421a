"""numpy's dtypes, and scalars of every dtype that numpy has without objects, to JSON and back, bit for bit.

A part of `values`, apart only for its size; must not know anything else.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from safepoint.formats.errors import UnsupportedValueError

if TYPE_CHECKING:
    from safepoint.formats.manifest import JSON

__all__ = ["decode_dtype", "decode_numpy", "encode_dtype", "encode_numpy"]

_MAX_DTYPE_DEPTH = 16
_DTYPE = re.compile(r"[qQ]|[<>|=][biufcSUVmM]\d{1,9}(\[\d{0,9}[a-zA-Zμ]{1,7}\])?")


def encode_numpy(value: np.generic) -> JSON:
    """Return the tagged form of a numpy scalar.

    Raises:
        UnsupportedValueError: it holds objects or named fields, or its dtype is not numpy's own.
    """
    if isinstance(value, np.str_):  # an array element loses trailing zeros, so these two do not go through one
        return {"numpy.str": str.encode(value, "utf-8", "surrogatepass").hex()}
    if isinstance(value, np.bytes_):
        return {"numpy.bytes": base64.b64encode(bytes(value)).decode()}
    dtype = value.dtype
    # C's long long has a type of its own, which only its letter tells from that of the same width.
    text = dtype.char if dtype.char in "qQ" else encode_dtype(dtype)
    if text is None or decode_dtype(text).type is not type(value):
        raise UnsupportedValueError(
            f"a numpy scalar of dtype {dtype} cannot be kept exactly",
            hint="Keep it as an array or a tensor, its fields one by one, or as a plain number.",
        )
    return {"numpy": [text, base64.b64encode(value.tobytes()).decode()]}


def encode_dtype(dtype: np.dtype[Any]) -> JSON:
    """Return the form of a dtype, or None where it could not be made again: objects, and what others add to numpy."""
    form = _dtype_form(dtype)
    try:
        same = not dtype.hasobject and decode_dtype(form) == dtype
    except (ValueError, TypeError):
        same = False
    return form if same else None


def _dtype_form(dtype: np.dtype[Any]) -> JSON:
    if dtype.subdtype is not None:
        base, shape = dtype.subdtype
        return {"base": _dtype_form(base), "shape": list(shape)}
    if dtype.names is None:
        return dtype.str
    fields = [dtype.fields[name] for name in dtype.names] if dtype.fields is not None else []
    form = {
        "names": list(dtype.names),
        "formats": [_dtype_form(field[0]) for field in fields],
        "offsets": [field[1] for field in fields],
        "itemsize": dtype.itemsize,
        "align": dtype.isalignedstruct,
    }
    titles = [field[2] if len(field) > 2 else None for field in fields]  # noqa: PLR2004 - numpy's own tuple
    return {**form, "titles": titles} if any(titles) else form


def decode_dtype(form: JSON, depth: int = 0) -> np.dtype[Any]:
    """Return the dtype that `encode_dtype` described, as anybody may have written it.

    Raises:
        ValueError, TypeError, LookupError: it is none.
    """
    if isinstance(form, str):
        if not _DTYPE.fullmatch(form):
            raise ValueError(f"{form!r} is no numpy dtype")
        return np.dtype(form)
    if not isinstance(form, dict) or depth > _MAX_DTYPE_DEPTH:
        raise ValueError("not the form of a numpy dtype")
    if "base" in form:
        shape = tuple(form["shape"])
        if not all(type(size) is int and 0 <= size < 1 << 31 for size in shape):
            raise ValueError("a subarray has an impossible shape")
        return np.dtype((decode_dtype(form["base"], depth + 1), shape))
    fields = {name: form[name] for name in ("names", "offsets", "itemsize", "titles") if name in form}
    formats = [decode_dtype(inner, depth + 1) for inner in form["formats"]]
    described: Any = {**fields, "formats": formats}
    made: np.dtype[Any] = np.dtype(described, align=form.get("align") is True)
    return made


def decode_numpy(tag: str, payload: Any) -> Any:
    """Return the scalar of a tagged form; ValueError, TypeError or LookupError where it is none."""
    if tag == "numpy.str":
        return np.str_(bytes.fromhex(payload).decode("utf-8", "surrogatepass"))
    if tag == "numpy.bytes":
        return np.bytes_(base64.b64decode(payload, validate=True))
    text, content = payload
    dtype = decode_dtype(text)
    data = base64.b64decode(content, validate=True)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {dtype}")
    if not data:
        return np.zeros((), dtype)[()]  # numpy reads no element from an empty buffer
    return np.frombuffer(bytearray(data), dtype)[0]
