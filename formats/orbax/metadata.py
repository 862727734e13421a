"""The JSON files of Orbax's layout: of an array, of an item, of a step. Pure: values to bytes."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from safepoint.formats.dtypes import ITEM_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from safepoint.formats.codecs import Codec
    from safepoint.formats.orbax.names import Entry

__all__ = ["array_json", "item_metadata", "step_metadata", "stored_form", "strings_json"]

_HANDLERS = "orbax.checkpoint._src.handlers"
STANDARD_HANDLER = f"{_HANDLERS}.standard_checkpoint_handler.StandardCheckpointHandler"
JSON_HANDLER = f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler"

# Those that TensorStore's driver `zarr3` knows by the same name; others are stored as bytes.
_ZARR_DTYPES = frozenset(
    {
        "bool",
        *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
        *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
        *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
    }
)


def stored_form(dtype: str, shape: Sequence[int]) -> tuple[str, list[int]]:
    """Return zarr's dtype and shape; what it does not know is bytes, with one more dimension: those of an item."""
    if dtype in _ZARR_DTYPES:
        return dtype, list(shape)
    return "uint8", [*shape, ITEM_BYTES[dtype]]


def array_json(dtype: str, shape: Sequence[int], grid: Sequence[int], codec: Codec | None = None) -> bytes:
    """Return `zarr.json` of an array whose chunks are the bytes of their items, encoded or not, and a checksum."""
    encodings = [] if codec is None else [{"name": codec.name, "configuration": dict(codec.configuration)}]
    stored, stored_shape = stored_form(dtype, shape)
    _, stored_grid = stored_form(dtype, grid)
    fill: Any = False if stored == "bool" else 0.0 if "float" in stored else 0
    return _encode(
        {
            "zarr_format": 3,
            "node_type": "array",
            "shape": stored_shape,
            "data_type": stored,
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": stored_grid}},
            "chunk_key_encoding": {"name": "default"},
            "fill_value": [0.0, 0.0] if "complex" in stored else fill,
            "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, *encodings, {"name": "crc32c"}],
        }
    )


def item_metadata(entries: Sequence[Entry], *, use_ocdbt: bool) -> bytes:
    """Return `_METADATA` of an item."""
    value_types = {"array": "np.ndarray"}
    tree = {
        repr(tuple(key for key, _ in entry.keys)): {
            "key_metadata": [{"key": key, "key_type": 1 if is_index else 2} for key, is_index in entry.keys],
            "value_metadata": {
                "value_type": value_types.get(entry.kind, entry.kind),
                "skip_deserialize": entry.kind not in ("array", "scalar", "string"),
            },
        }
        for entry in entries
    }
    return _encode(
        {
            "tree_metadata": tree,
            "use_ocdbt": use_ocdbt,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
    )


def strings_json(entries: Sequence[Entry]) -> bytes | None:
    """Return `_strings.json` of an item, None where it has no texts."""
    texts = {entry.name: entry.value for entry in entries if entry.kind == "string"}
    return _encode(texts) if texts else None


def step_metadata(handlers: Mapping[str, str], metrics: Mapping[str, float], *, time_nsecs: int) -> bytes:
    """Return `_CHECKPOINT_METADATA` of a step.

    Args:
        handlers: class path of the handler of each item, for Orbax.
        metrics: by name.
        time_nsecs: when the save began, in nanoseconds since 1970.
    """
    return _encode(
        {
            "item_handlers": dict(handlers),
            "metrics": dict(metrics),
            "performance_metrics": {},
            "init_timestamp_nsecs": time_nsecs,
            "commit_timestamp_nsecs": time_nsecs,
            "custom_metadata": {},
        }
    )


def _encode(value: Any) -> bytes:
    return json.dumps(value).encode()
