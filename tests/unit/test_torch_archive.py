"""A tensor is found in a file of torch.save without loading it; where it is not a plain one, nobody guesses."""

from __future__ import annotations

import io
import pickle  # noqa: TID251 - makes a file that is no tensor
from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.formats.dtypes import ITEM_BYTES, torch_dtype
from safepoint.formats.foreign.torch_archive import find_tensor
from safepoint.formats.torch_file import tensor_archive, value_archive

if TYPE_CHECKING:
    from pathlib import Path

BEFORE = b"before" * 7


def saved(value: object, **options: object) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)  # type: ignore[arg-type]
    return stream.getvalue()


def find(tmp_path: Path, data: bytes) -> tuple[object, bytes]:
    path = tmp_path / "x.distcp"
    path.write_bytes(BEFORE + data + b"after")
    place = find_tensor(str(path), len(BEFORE), len(data))
    if place is None:
        return None, b""
    size = torch.Size(place.shape).numel() * ITEM_BYTES[place.dtype]
    return (place.dtype, place.shape), path.read_bytes()[place.offset : place.offset + size]


@pytest.mark.parametrize("shape", [(3, 4), (), (0, 2), (1000,)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int64", "complex64", "uint16", "float8_e4m3fn"])
def test_what_torch_saved_is_found(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    count = torch.Size(shape).numel()
    data = (torch.arange(count * ITEM_BYTES[dtype]) % (2 if dtype == "bool" else 100)).to(torch.uint8)
    tensor = data.view(torch_dtype(dtype)).reshape(shape)
    assert find(tmp_path, saved(tensor)) == ((dtype, shape), bytes(data.numpy()))


def test_what_we_write_is_found_and_torch_loads_it(tmp_path: Path) -> None:
    data = torch.arange(12, dtype=torch.bfloat16)
    raw = data.view(torch.uint8).numpy().tobytes()
    archive = tensor_archive("bfloat16", (3, 4), len(raw))
    whole = archive.header + raw + archive.after(0, [archive.check(memoryview(raw))])
    assert find(tmp_path, whole) == (("bfloat16", (3, 4)), raw)
    assert torch.equal(torch.load(io.BytesIO(whole), weights_only=True), data.reshape(3, 4))
    assert torch.load(io.BytesIO(value_archive({"a": [1, "x"]})), weights_only=True) == {"a": [1, "x"]}


def test_a_part_of_a_storage_is_found_where_it_begins(tmp_path: Path) -> None:
    whole = torch.arange(20.0)
    assert find(tmp_path, saved(whole[5:9])) == (("float32", (4,)), whole[5:9].numpy().tobytes())


@pytest.mark.parametrize(
    "data",
    [
        saved(torch.arange(12.0).reshape(3, 4).T),
        saved(torch.arange(3.0), _use_new_zipfile_serialization=False),
        saved([torch.ones(2)]),
        saved(torch.nn.Parameter(torch.ones(2))),
        saved(torch.ones(2).to_sparse()),
        saved(torch.tensor([1 + 2j]).conj()),
        saved(torch.ones(100))[:-30],
        pickle.dumps({"a": 1}),
        b"",
    ],
    ids=["transposed", "before zip", "list", "parameter", "sparse", "conjugated", "cut short", "pickle", "empty"],
)
def test_what_is_no_plain_tensor_is_left_to_torch(tmp_path: Path, data: bytes) -> None:
    assert find(tmp_path, data) == (None, b"")
