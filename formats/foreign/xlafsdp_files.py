"""Checkpoints of torch_xla's FSDP, as Lightning's XLAFSDPStrategy writes them: a file of torch.save for each rank.

The parameters are put together again, by their names before wrapping, without copying: a region is read from the ranks'
files when it is wanted. Source: torch_xla/distributed/fsdp/state_dict_utils.py (names, flattening, padding);
lightning/fabric/strategies/xla_fsdp.py (file names). Knows no device.
"""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from safepoint.formats.base import LeafRef
from safepoint.formats.dtypes import ITEM_BYTES, dtype_name
from safepoint.formats.errors import CorruptDataError, InvalidArgumentError
from safepoint.formats.foreign.base import ForeignArray, ForeignCheckpoint, checked_region
from safepoint.formats.foreign.torch_files import TensorArray, load_tree, replace_tensors, tensor_bytes
from safepoint.formats.region import Region

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from safepoint.formats.tree import TreePath

__all__ = ["METADATA_KEY", "is_xlafsdp", "open_xlafsdp"]

METADATA_KEY = "shard_metadata"
_FILE = re.compile(r"(?P<prefix>.*)rank-(?P<rank>\d{1,9})-of-(?P<count>\d{1,9})(?P<suffix>\.(?:pth|pt|ckpt))")
_SHARD = "_fsdp_shard"
_FLAT = "_fsdp_wrapped_module.flat_param_"
_WRAPPERS = ("_fsdp_wrapped_module.", "_fpw_module.")


def is_xlafsdp(path: str) -> bool:
    """Say whether a directory, or the file of a rank, is one, by the names of the files."""
    if os.path.isfile(path):
        return _FILE.fullmatch(os.path.basename(path)) is not None
    return os.path.isdir(path) and any(_FILE.fullmatch(name) for name in os.listdir(path))


def open_xlafsdp(path: str) -> ForeignCheckpoint:
    """Open the files of all ranks: a directory that holds them, or any one of them.

    The tree is that of the files, with whole parameters instead of shards, and buffers in their dtype before FSDP cast
    them. What else differs between the ranks, or holds tensors (an optimizer's state is that of shards whose order the
    files do not tell), comes as a mapping by rank.

    Raises:
        CorruptDataError: a rank's file is missing or damaged, or the files are not of one save.
        InvalidArgumentError: the directory holds several checkpoints.
        UnsupportedValueError: a pickle holds more than tensors, plain values and containers.
        StorageError: a file cannot be read.
    """
    files = _files_of(path)
    trees = [load_tree(file) for file in files]
    if len(files) == 1 and os.path.isfile(path) and not _has_metadata(trees[0]):
        arrays: dict[TreePath, ForeignArray] = {}
        tree = replace_tensors(trees[0], (), arrays)
        return ForeignCheckpoint(kind="torch", location=path, tree=tree, arrays=arrays)
    ranks = [_Rank(file, tree, rank, len(files)) for rank, (file, tree) in enumerate(zip(files, trees, strict=True))]
    return _Joiner(path, ranks).join()


class _FileName(NamedTuple):
    name: str
    group: tuple[str, int, str]
    rank: int


def _files_of(path: str) -> list[str]:
    """Return the files by rank."""
    directory, wanted = (os.path.dirname(path), os.path.basename(path)) if os.path.isfile(path) else (path, None)
    groups: dict[tuple[str, int, str], list[_FileName]] = {}
    for name in sorted(os.listdir(directory)):
        found = _FILE.fullmatch(name)
        if found is not None:
            group = (found["prefix"], int(found["count"]), found["suffix"])
            groups.setdefault(group, []).append(_FileName(name, group, int(found["rank"])))
    if wanted is not None:
        groups = {group: names for group, names in groups.items() if any(one.name == wanted for one in names)}
    if len(groups) > 1:
        firsts = ", ".join(names[0].name for names in groups.values())
        raise InvalidArgumentError(
            f"the directory holds several checkpoints of ranks: {firsts}", path=path, hint="Name one of these files."
        )
    ((group, names),) = groups.items()
    ranks = [one.rank for one in names]
    if ranks != list(range(group[1])):
        missing = sorted(set(range(group[1])) - set(ranks))
        what = f"the files of ranks {_listed(missing)} are missing" if missing else f"there are the ranks {ranks}"
        raise CorruptDataError(f"of the {group[1]} ranks that saved, {what}", path=os.path.join(directory, group[0]))
    return [os.path.join(directory, one.name) for one in names]


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:10])) + (", …" if len(ranks) > 10 else "")  # noqa: PLR2004 - enough for people


def _has_metadata(tree: Any) -> bool:
    return isinstance(tree, dict) and METADATA_KEY in tree


class _Rank:
    """One rank's file, whose metadata fit its name."""

    def __init__(self, file: str, tree: Any, rank: int, count: int) -> None:
        self.file = file
        if not _has_metadata(tree):
            raise CorruptDataError(
                f"the file has no {METADATA_KEY}",
                path=file,
                hint="Without it nobody can tell how its shards make up parameters: save it with the model's.",
            )
        metadata = tree[METADATA_KEY]
        self.tree = {key: value for key, value in tree.items() if key != METADATA_KEY}
        told = [repr(metadata.get(key)) if isinstance(metadata, dict) else "?" for key in ("rank", "world_size")]
        if told != [str(rank), str(count)]:
            raise CorruptDataError(
                f"the file says that it is of rank {told[0]} of {told[1]}, and its name says {rank} of {count}",
                path=file,
            )
        self.metadata = {key: value for key, value in metadata.items() if key != "rank"}


class _Joiner:
    def __init__(self, path: str, ranks: Sequence[_Rank]) -> None:
        self._path = path
        self._ranks = ranks
        self._first = ranks[0]
        for other in ranks[1:]:
            if repr(other.metadata) != repr(self._first.metadata) or other.tree.keys() != self._first.tree.keys():
                raise CorruptDataError(
                    f"the ranks' files are not of one save: this one is of another model than {self._first.file}",
                    path=other.file,
                )
        self._arrays: dict[TreePath, ForeignArray] = {}

    def join(self) -> ForeignCheckpoint:
        tree: dict[Any, Any] = {}
        for key in self._first.tree:
            values = [rank.tree[key] for rank in self._ranks]
            name = key if isinstance(key, str | int) else str(key)
            if any(isinstance(value, dict) and any(map(_is_shard, value)) for value in values):
                tree[name] = self._join_model(name, values)
            else:
                tree[name] = self._join_other(name, values)
        return ForeignCheckpoint(
            kind="xlafsdp",
            location=self._path,
            tree=tree,
            arrays=self._arrays,
            metadata={"world_size": len(self._ranks)},
        )

    def _join_other(self, key: str | int, values: list[Any]) -> Any:
        found: list[dict[TreePath, ForeignArray]] = [{} for _ in values]
        trees = [
            replace_tensors(value, (key, rank), arrays)
            for rank, (value, arrays) in enumerate(zip(values, found, strict=True))
        ]
        if not any(found) and all(repr(value) == repr(values[0]) for value in values):
            return values[0]
        for arrays in found:
            self._arrays.update(arrays)
        return dict(enumerate(trees))

    def _join_model(self, key: str | int, states: list[Any]) -> dict[str, Any]:
        model: dict[str, Any] = {}
        for rank, state in zip(self._ranks, states, strict=True):
            if not isinstance(state, dict) or state.keys() != states[0].keys():
                raise CorruptDataError("the ranks' files hold parameters of other names", path=rank.file)
        for name, value in states[0].items():
            if _is_shard(name):
                shards = [state[name] for state in states]
                for full_name, array in self._whole(name, shards):
                    at = (key, full_name)
                    if full_name in model:
                        raise self._wrong(full_name, "is there twice")
                    self._arrays[at] = array
                    model[full_name] = LeafRef(at)
            else:
                plain = _plain_name(name)
                model[plain] = replace_tensors(self._buffer(name, value), (key, plain), self._arrays)
        return model

    def _buffer(self, name: str, value: Any) -> Any:
        """Return a buffer (rank 0's) in the dtype that it had before FSDP cast it."""
        info = self._table("buffer_info").get(name)
        dtype = info.get("_orig_dtype") if isinstance(info, dict) else None
        return value.to(dtype) if isinstance(value, torch.Tensor) and isinstance(dtype, torch.dtype) else value

    def _whole(self, name: str, shards: list[Any]) -> Iterator[tuple[str, ForeignArray]]:
        """Yield the parameters that the shards make up."""
        parts = name.split(".")
        at = next(index for index, part in enumerate(parts) if part.startswith(_SHARD))
        prefix, suffix = ".".join(parts[:at]), ".".join(parts[at:])
        info = self._table("shard_info").get(prefix)
        info = info.get(suffix) if isinstance(info, dict) else None
        if not isinstance(info, dict) or not isinstance(info.get("_orig_name"), str):
            raise self._wrong(name, "is not in the metadata")
        shape = self._shape(name, info.get("_orig_size"))
        self._check_shards(name, shards, shape)
        full_name = f"{prefix}.{info['_orig_name']}" if prefix else info["_orig_name"]
        if _FLAT not in full_name:
            yield _plain_name(full_name), _Joined(shards, 0, shape, _plain_name(full_name))
            return
        inside = full_name.rpartition(".")[0]
        start = 0
        for part_name, part_shape in self._flattened(full_name, shape):
            plain = _plain_name(f"{inside}.{part_name}" if inside else part_name)
            yield plain, _Joined(shards, start, part_shape, plain)
            start += Region.whole(part_shape).num_elements

    def _flattened(self, name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
        entry: Any = self._table("flatten_info").get(name)
        try:
            names, sizes, counts = map(list, entry)
        except (TypeError, ValueError):
            raise self._wrong(name, "is flattened, and the metadata do not tell how") from None
        shapes = [self._shape(name, size) for size in sizes]
        elements = [Region.whole(one).num_elements for one in shapes]
        if len(names) != len(shapes) or counts != elements or sum(elements) > Region.whole(shape).num_elements:
            raise self._wrong(name, "is flattened from parameters of other sizes")
        return [(str(part), one) for part, one in zip(names, shapes, strict=True)]

    def _check_shards(self, name: str, shards: list[Any], shape: tuple[int, ...]) -> None:
        for rank, shard in zip(self._ranks, shards, strict=True):
            if not isinstance(shard, torch.Tensor) or shard.dtype != shards[0].dtype or shard.shape != shards[0].shape:
                raise CorruptDataError(
                    "this rank's shard is not like that of rank 0", path=rank.file, leaf=_plain_name(name)
                )
        if sum(shard.numel() for shard in shards) < Region.whole(shape).num_elements:
            raise self._wrong(name, f"has shards that are together smaller than {shape}")

    def _shape(self, name: str, value: Any) -> tuple[int, ...]:
        if not isinstance(value, list | tuple) or any(type(size) is not int or size < 0 for size in value):
            raise self._wrong(name, f"has the shape {value!r}")
        return tuple(value)

    def _table(self, name: str) -> Mapping[Any, Any]:
        value = self._first.metadata.get(name, {})
        if not isinstance(value, dict):
            raise CorruptDataError(f"{METADATA_KEY} has no table {name}", path=self._first.file)
        return value

    def _wrong(self, name: str, what: str) -> CorruptDataError:
        return CorruptDataError(f"a sharded parameter {what}", path=self._first.file, leaf=_plain_name(name))


def _is_shard(name: Any) -> bool:
    return isinstance(name, str) and any(part.startswith(_SHARD) for part in name.split("."))


def _plain_name(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


class _Joined(ForeignArray):
    """Elements `start` and on of the ranks' shards, laid one behind the other; padding is what nobody asks for."""

    def __init__(self, shards: Sequence[torch.Tensor], start: int, shape: tuple[int, ...], name: str) -> None:
        TensorArray(shards[0], name)  # refuses what is no plain tensor
        self._shards = [shard.detach() for shard in shards]
        self._start = start
        self.dtype = dtype_name(shards[0].dtype)
        self.shape = shape

    def read_into(self, region: Region, out: memoryview) -> None:
        """Copy a region, run by run."""
        item_bytes = ITEM_BYTES[self.dtype]
        if not checked_region(self, region, out, item_bytes):
            return
        target = torch.frombuffer(out, dtype=torch.uint8)
        filled = 0
        for start, length in region.runs_in(Region.whole(self.shape)):
            for shard, first, count in self._parts(self._start + start, length):
                data = tensor_bytes(shard.reshape(-1)[first : first + count])
                target[filled : filled + count * item_bytes] = data
                filled += count * item_bytes

    def _parts(self, start: int, length: int) -> Iterator[tuple[torch.Tensor, int, int]]:
        size = self._shards[0].numel()
        while length:
            rank, first = divmod(start, size)
            count = min(length, size - first)
            yield self._shards[rank], first, count
            start += count
            length -= count
