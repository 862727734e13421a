"""numpy scalars of every dtype that numpy has without objects, to tagged JSON and back, bit for bit.

Part of `values`, apart only for its size; must not know anything else.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from safepoint.formats.errors import UnsupportedValueError

if TYPE_CHECKING:
    from safepoint.formats.manifest import JSON

__all__ = ["check_dtype_text", "decode_numpy", "encode_numpy"]

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
    text = dtype.char if dtype.char in "qQ" else dtype.str
    if dtype.names is not None or dtype.hasobject or not _is_numpys_own(text, value):
        raise UnsupportedValueError(
            f"a numpy scalar of dtype {dtype} cannot be kept exactly",
            hint="Keep it as an array or a tensor, its fields one by one, or as a plain number.",
        )
    return {"numpy": [text, base64.b64encode(value.tobytes()).decode()]}


def _is_numpys_own(text: str, value: np.generic) -> bool:
    # Extension dtypes (bfloat16 of ml_dtypes) call themselves void or float; made again from their text they differ.
    return _DTYPE.fullmatch(text) is not None and np.dtype(text).type is type(value)


def check_dtype_text(text: object) -> np.dtype[Any]:
    """Return the dtype that `dtype.str` described.

    Raises:
        ValueError: it is anything else.
    """
    if not isinstance(text, str) or not _DTYPE.fullmatch(text):
        raise ValueError(f"{text!r} is no numpy dtype")
    return np.dtype(text)


def decode_numpy(tag: str, payload: Any) -> np.generic:
    """Return the scalar of a tagged form; ValueError, TypeError or LookupError where it is none."""
    if tag == "numpy.str":
        return np.str_(bytes.fromhex(payload).decode("utf-8", "surrogatepass"))
    if tag == "numpy.bytes":
        return np.bytes_(base64.b64decode(payload, validate=True))
    text, content = payload
    dtype = check_dtype_text(text)
    data = base64.b64decode(content, validate=True)
    if len(data) != dtype.itemsize:
        raise ValueError(f"{len(data)} bytes are no {dtype}")
    if not data:
        empty: np.generic = dtype.type()  # numpy reads no element from an empty buffer
        return empty
    scalar: np.generic = np.frombuffer(data, dtype)[0]
    return scalar
