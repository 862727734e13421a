"""One table of dtypes: our name (torch's, without "torch."), bytes per item, and the name in a safetensors file.

Names and sizes need no torch, so that a manifest can be checked without it; `torch_dtype` and `dtype_name` import it.
Quantised dtypes are absent: their scale is not in their bytes.
"""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import TYPE_CHECKING

from safepoint.formats.errors import UnsupportedValueError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

__all__ = ["ITEM_BYTES", "SAFETENSORS_NAMES", "dtype_name", "torch_dtype"]

ITEM_BYTES: Mapping[str, int] = MappingProxyType(
    {
        "bool": 1,
        **{f"uint{bits}": 1 for bits in range(1, 9)},
        **{f"int{bits}": 1 for bits in range(1, 9)},
        "uint16": 2,
        "uint32": 4,
        "uint64": 8,
        "int16": 2,
        "int32": 4,
        "int64": 8,
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float64": 8,
        "complex32": 4,
        "bcomplex32": 4,  # of two bfloat16; torch 2.14
        "complex64": 8,
        "complex128": 16,
        "float8_e4m3fn": 1,
        "float8_e4m3fnuz": 1,
        "float8_e5m2": 1,
        "float8_e5m2fnuz": 1,
        "float8_e8m0fnu": 1,
        "float4_e2m1fn_x2": 1,  # two values an item
        "bits8": 1,
        "bits16": 2,
        "bits1x8": 1,
        "bits2x4": 1,
        "bits4x2": 1,
    }
)
"""Bytes per item of every dtype that can be kept, by name."""

SAFETENSORS_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "bool": "BOOL",
        "uint8": "U8",
        "int8": "I8",
        "uint16": "U16",
        "uint32": "U32",
        "uint64": "U64",
        "int16": "I16",
        "int32": "I32",
        "int64": "I64",
        "float16": "F16",
        "bfloat16": "BF16",
        "float32": "F32",
        "float64": "F64",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2": "F8_E5M2",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
        "float8_e8m0fnu": "F8_E8M0",
    }
)
"""The dtypes that safetensors' own readers give back as they are; the others are stored as bytes (`U8`)."""


@functools.cache
def _torch_dtypes() -> dict[str, torch.dtype]:
    import torch  # noqa: PLC0415  # a manifest can be read without it

    return {name: dtype for name in ITEM_BYTES if isinstance(dtype := getattr(torch, name, None), torch.dtype)}


@functools.cache
def _names() -> dict[torch.dtype, str]:
    return {dtype: name for name, dtype in _torch_dtypes().items()}


def dtype_name(dtype: torch.dtype) -> str:
    """Return our name of a torch dtype.

    Raises:
        UnsupportedValueError: it is quantised, or unknown to this release.
    """
    name = _names().get(dtype)
    if name is None:
        hint = "This release does not know it: a newer one may, or save a view of it as integers of the same size."
        if str(dtype).startswith(("torch.qint", "torch.quint")):
            hint = "Save a quantised tensor as its integer representation, with its scales and zero points beside it."
        raise UnsupportedValueError(f"dtype {dtype} cannot be kept", hint=hint)
    return name


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of one of our names.

    Raises:
        UnsupportedValueError: no such name, or this torch has no such dtype.
    """
    dtype = _torch_dtypes().get(name)
    if dtype is None:
        known = "this torch release has no such dtype" if name in ITEM_BYTES else "no such dtype is known"
        raise UnsupportedValueError(
            f"dtype {name!r}: {known}", hint="Install the torch release that the step was saved with, or a newer one."
        )
    return dtype
