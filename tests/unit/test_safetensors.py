"""The safetensors layout: read by safetensors' own readers, and by a strict reader of ours that nothing can fool."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from safepoint.formats.base import FileLayout, Piece
from safepoint.formats.dtypes import ITEM_BYTES, SAFETENSORS_NAMES
from safepoint.formats.errors import CorruptDataError, InvalidArgumentError, UnsupportedValueError
from safepoint.formats.registry import format_names, get_format
from safepoint.formats.safetensors import DATA_ALIGNMENT, FileHeader, SafetensorsFormat, read_header

if TYPE_CHECKING:
    from pathlib import Path

SHAPES = [(), (1,), (5,), (0,), (0, 3), (2, 0, 4), (3, 2, 2)]
FORMAT = SafetensorsFormat()


def pattern(num_bytes: int, dtype: str) -> bytes:
    """Return bytes that differ from item to item; a bool has only two values."""
    return bytes(i % 2 if dtype == "bool" else (i * 37 + 11) % 256 for i in range(num_bytes))


def fill(layout: FileLayout) -> bytes:
    """Return the whole file: what storage would write."""
    return layout.header + b"".join(pattern(p.num_bytes, p.piece.dtype) for p in layout.placements)


def raw(tensor: torch.Tensor) -> bytes:
    """Return the tensor's bytes, whatever its dtype."""
    return bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()) if tensor.numel() else b""


def read_back(data: bytes) -> FileHeader:
    """Return the header as our own reader sees it."""
    return read_header(data, path="x.safetensors", file_bytes=len(data))


def file_of(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    """Return a file with any header at all."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.parametrize("dtype", sorted(SAFETENSORS_NAMES))
def test_safetensors_reads_what_it_has_a_dtype_for(dtype: str, tmp_path: Path) -> None:
    pieces = [Piece(key=f"t{i}", dtype=dtype, shape=shape) for i, shape in enumerate(SHAPES)]
    layout = FORMAT.layout(pieces, {})
    path = tmp_path / "x.safetensors"
    path.write_bytes(fill(layout))
    loaded = load_file(path)
    with safe_open(path, framework="pt") as opened:
        for placement in layout.placements:
            piece = placement.piece
            for tensor in (loaded[piece.key], opened.get_tensor(piece.key)):
                assert tensor.dtype is getattr(torch, dtype)
                assert tuple(tensor.shape) == piece.shape
                assert raw(tensor) == pattern(placement.num_bytes, dtype)


@pytest.mark.parametrize("dtype", sorted(set(ITEM_BYTES) - set(SAFETENSORS_NAMES)))
def test_other_dtypes_are_read_as_bytes_with_a_dimension_for_the_item(dtype: str, tmp_path: Path) -> None:
    pieces = [Piece(key=f"t{i}", dtype=dtype, shape=shape) for i, shape in enumerate(SHAPES)]
    layout = FORMAT.layout(pieces, {})
    path = tmp_path / "x.safetensors"
    path.write_bytes(fill(layout))
    loaded = load_file(path)
    for placement in layout.placements:
        tensor = loaded[placement.piece.key]
        assert tensor.dtype is torch.uint8
        assert tuple(tensor.shape) == (*placement.piece.shape, ITEM_BYTES[dtype])
        assert raw(tensor) == pattern(placement.num_bytes, dtype)


def test_one_file_holds_every_dtype_at_once(tmp_path: Path) -> None:
    pieces = [Piece(key=f"{dtype}.{i}", dtype=dtype, shape=s) for dtype in ITEM_BYTES for i, s in enumerate(SHAPES)]
    data = fill(FORMAT.layout(pieces, {}))
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    assert set(load_file(path)) == set(read_back(data).tensors) == {piece.key for piece in pieces}


def test_data_begins_on_a_page_and_follows_back_to_back() -> None:
    for count in (0, 1, 50, 400):
        pieces = [Piece(key=f"layer.{i}.weight", dtype="float32", shape=(i % 3,)) for i in range(count)]
        layout = FORMAT.layout(pieces, {})
        assert len(layout.header) % DATA_ALIGNMENT == 0
        offset = len(layout.header)
        for placement in layout.placements:
            assert placement.offset == offset
            offset += placement.num_bytes
        assert layout.num_bytes == offset


def test_wide_dtypes_come_first_and_equals_keep_their_order() -> None:
    dtypes = ["bool", "float64", "bfloat16", "complex128", "float32", "int8", "int64"]
    layout = FORMAT.layout([Piece(key=dtype, dtype=dtype, shape=(3,)) for dtype in dtypes], {})
    assert [p.piece.key for p in layout.placements] == [
        "complex128",
        "float64",
        "int64",
        "float32",
        "bfloat16",
        "bool",
        "int8",
    ]
    assert all(p.offset % ITEM_BYTES[p.piece.dtype] == 0 for p in layout.placements)


def test_equal_arguments_give_equal_bytes() -> None:
    pieces = [Piece(key="b", dtype="int8", shape=(2,)), Piece(key="a", dtype="int8", shape=(1,))]
    first = FORMAT.layout(pieces, {"x": "1", "a": "2"})
    assert first == FORMAT.layout(list(pieces), {"a": "2", "x": "1"})


def test_metadata_is_text_that_hugging_face_accepts(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(fill(FORMAT.layout([Piece(key="a", dtype="int8", shape=(2,))], {"step": "3", "n": "实验"})))
    with safe_open(path, framework="pt") as opened:
        assert opened.metadata() == {"format": "pt", "step": "3", "n": "实验"}
    other = FORMAT.layout([], {"format": "flax"})
    assert read_back(other.header).metadata == {"format": "flax"}


def test_keys_are_any_unicode_text(tmp_path: Path) -> None:
    keys = ["", "a.b", "实验", "😀", 'a"b\\c\n', "\x00"]
    path = tmp_path / "x.safetensors"
    path.write_bytes(fill(FORMAT.layout([Piece(key=key, dtype="int8", shape=(1,)) for key in keys], {})))
    assert set(load_file(path)) == set(keys)


@pytest.mark.parametrize("key", ["__metadata__", "\ud800", "a\udfffb"])
def test_keys_that_no_header_can_hold_are_refused(key: str) -> None:
    with pytest.raises(UnsupportedValueError):
        FORMAT.layout([Piece(key=key, dtype="int8", shape=(1,))], {})


def test_a_key_twice_is_refused() -> None:
    piece = Piece(key="a", dtype="int8", shape=(1,))
    with pytest.raises(InvalidArgumentError, match="'a'"):
        FORMAT.layout([piece, piece], {})


def test_unknown_dtypes_and_negative_sizes_are_refused() -> None:
    with pytest.raises(UnsupportedValueError, match="qint8"):
        FORMAT.layout([Piece(key="a", dtype="qint8", shape=(1,))], {})
    with pytest.raises(InvalidArgumentError, match="-1"):
        FORMAT.layout([Piece(key="a", dtype="int8", shape=(-1,))], {})


def test_metadata_that_is_no_text_is_refused() -> None:
    with pytest.raises(UnsupportedValueError):
        FORMAT.layout([], {"step": 3})  # type: ignore[dict-item]


def test_a_header_that_no_reader_accepts_is_refused_before_anything_is_written() -> None:
    with pytest.raises(InvalidArgumentError, match="sharded"):
        FORMAT.layout([Piece(key="k" * 100_000_001, dtype="int8", shape=())], {})


def test_our_reader_agrees_with_safetensors_own_writer() -> None:
    tensors = {"w": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3), "b": torch.ones(()), "e": torch.ones(0, 2)}
    data = save(tensors, metadata={"k": "v"})
    header = read_back(data)
    assert header.metadata == {"k": "v"}
    assert {key: tensor.shape for key, tensor in header.tensors.items()} == {"w": (2, 3), "b": (), "e": (0, 2)}
    stored = header.tensors["w"]
    assert data[stored.offset : stored.offset + stored.num_bytes] == raw(tensors["w"])


def tensor(dtype: object = "I8", shape: object = (2,), offsets: object = (0, 2)) -> dict[str, object]:
    """Return the header's entry of one tensor."""
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HUGE = 2**62
BAD_FILES = {
    "empty": b"",
    "shorter than its length": b"\1\0\0",
    "claims petabytes": file_of({}, length=2**63),
    "claims more than is there": file_of({}, length=100),
    "no JSON": file_of(b"{nonsense"),
    "no object": file_of(b"[]"),
    "no brace first": file_of(b" {}"),
    "no UTF-8": file_of(b'{"\xff": 1}'),
    "a key twice": file_of(
        b'{"a":{"dtype":"I8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}'
    ),
    "deep nesting": file_of(b'{"a":' * 90_000),
    "NaN": file_of(b'{"a":{"dtype":"I8","shape":[NaN],"data_offsets":[0,0]}}'),
    "huge integer": file_of(b'{"a":{"dtype":"I8","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,0]}}'),
    "unknown dtype": file_of({"a": tensor(dtype="I7")}, b"ab"),
    "dtype of another type": file_of({"a": tensor(dtype=["I8"])}, b"ab"),
    "shape overflows": file_of({"a": tensor("F64", (HUGE, HUGE), (0, 0))}),
    "shape claims petabytes": file_of({"a": tensor("I8", (2**50,), (0, 2**50))}),
    "negative size": file_of({"a": tensor(shape=(-2, -1))}, b"ab"),
    "true as a size": file_of({"a": tensor(shape=(True, 2))}, b"ab"),
    "float as a size": file_of({"a": tensor(shape=(2.0,))}, b"ab"),
    "too many dimensions": file_of({"a": tensor(shape=[1] * 1000, offsets=(0, 1))}, b"a"),
    "offsets backwards": file_of({"a": tensor(offsets=(2, 0))}, b"ab"),
    "one offset": file_of({"a": tensor(offsets=(2,))}, b"ab"),
    "offsets of another size": file_of({"a": tensor(offsets=(0, 3))}, b"abc"),
    "a gap": file_of({"a": tensor(offsets=(1, 3))}, b"abc"),
    "an overlap": file_of({"a": tensor(), "b": tensor(offsets=(1, 3))}, b"abc"),
    "the same bytes twice": file_of({"a": tensor(), "b": tensor()}, b"ab"),
    "trailing bytes": file_of({"a": tensor()}, b"abc"),
    "cut short": file_of({"a": tensor()}, b"a"),
    "a field missing": file_of({"a": {"dtype": "I8", "shape": [2]}}, b"ab"),
    "a tensor that is a list": file_of({"a": []}),
    "metadata that is no object": file_of({"__metadata__": "x"}),
    "metadata that is no text": file_of({"__metadata__": {"a": 1}}),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_refused_by_name(name: str) -> None:
    with pytest.raises(CorruptDataError) as caught:
        read_back(BAD_FILES[name])
    assert caught.value.path == "x.safetensors"


def test_a_header_is_read_without_the_data() -> None:
    data = file_of({"a": tensor("I8", (2**50,), (0, 2**50))})
    header = read_header(data, path="x", file_bytes=len(data) + 2**50)
    assert header.tensors["a"].num_bytes == 2**50


def test_formats_are_found_by_name() -> None:
    assert get_format("safetensors").name == "safetensors"
    assert get_format("safetensors").suffix == ".safetensors"


@pytest.mark.parametrize("name", ["", "Safetensors", "pickle", "os.path"])
def test_an_unknown_format_lists_those_that_there_are(name: str) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        get_format(name)
    assert all(known in str(caught.value) for known in format_names())
