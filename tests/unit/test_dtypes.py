"""The table of dtypes against the torch that is installed, and against safetensors' own readers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from safepoint.formats.dtypes import ITEM_BYTES, SAFETENSORS_NAMES, dtype_name, torch_dtype
from safepoint.formats.errors import UnsupportedValueError

QUANTISED = {"qint8", "qint32", "quint8", "quint4x2", "quint2x4"}


def torch_names() -> dict[str, torch.dtype]:
    """Return every dtype of the installed torch by its own name, without aliases like `float`."""
    dtypes = {value for value in vars(torch).values() if isinstance(value, torch.dtype)}
    return {str(dtype).removeprefix("torch."): dtype for dtype in dtypes}


def test_every_dtype_of_this_torch_is_known_except_quantised_ones() -> None:
    assert set(torch_names()) - set(ITEM_BYTES) == QUANTISED


@pytest.mark.parametrize("name", sorted(set(torch_names()) - QUANTISED))
def test_name_size_and_dtype_agree_with_torch(name: str) -> None:
    dtype = torch_names()[name]
    assert dtype_name(dtype) == name
    assert torch_dtype(name) is dtype
    assert ITEM_BYTES[name] == dtype.itemsize


@pytest.mark.parametrize("name", sorted(QUANTISED))
def test_quantised_dtypes_are_refused_with_a_way_out(name: str) -> None:
    with pytest.raises(UnsupportedValueError, match="scales"):
        dtype_name(torch_names()[name])


@pytest.mark.parametrize("name", ["", "float", "torch.float32", "float24", "__class__", "nn"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedValueError, match="no such dtype is known"):
        torch_dtype(name)


def test_safetensors_names_are_distinct_and_of_known_dtypes() -> None:
    assert set(SAFETENSORS_NAMES) <= set(ITEM_BYTES)
    assert len(set(SAFETENSORS_NAMES.values())) == len(SAFETENSORS_NAMES)


def test_sizes_and_manifests_need_no_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "import safepoint.formats.manifest, safepoint.formats.registry\n"
        "from safepoint.formats.dtypes import ITEM_BYTES\n"
        "assert ITEM_BYTES['bfloat16'] == 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
