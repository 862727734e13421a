"""XLA tensors: whole ones, and those that SPMD has sharded over the devices of this process.

Owns all that torch_xla's internals demand: batched device-to-host copies, padding, replicas, dtypes that come back
signed, and the checks before `_load_local_shards`, which aborts the process, or reinterprets bits, where it is given
anything else than it expects. torch_xla is imported only once there is an XLA tensor. Checked against torch_xla 2.9.

Everything here needs the lazy graph to have been cut before (`Coordinator.sync_devices`): until then a result has no
sharding. Must not know process groups: which process keeps a replica is the planner's choice.

Kept exactly but for one thing: torch_xla itself gives every float16 NaN the same payload.
"""

from __future__ import annotations

import re
import sys
from abc import abstractmethod
from typing import TYPE_CHECKING, Any

import torch

from safepoint.formats.dtypes import dtype_name
from safepoint.formats.errors import IncompleteCoverageError, UnsupportedValueError
from safepoint.formats.region import Region, subtract
from safepoint.manager.adapters.base import ArrayLeaf, ArraySpec, held_regions
from safepoint.manager.adapters.bits import as_bits, byte_buffer, changing
from safepoint.manager.adapters.refusals import check_plain, check_type

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["XlaLeaf", "empty_like", "is_xla", "prefetch", "wrap_xla"]

_REPLICATED, _TILED, _PARTIAL = 0, 3, 5
_OTHER_SHARDINGS = {1: "maximal", 2: "tuple", 4: "manual", 6: "unknown"}
_TILES = re.compile(r"\{devices=\[(\d+(?:,\d+)*)\]")


def _xlac() -> Any:
    return sys.modules["_XLAC"]  # the only interface to shards; loaded, since there is an XLA tensor


def is_xla(value: torch.Tensor) -> bool:
    """Say whether this is an XLA tensor, or torch_xla's wrapper of a sharded one."""
    return value.device.type == "xla" and "torch_xla" in sys.modules


def _unwrapped(value: torch.Tensor) -> torch.Tensor:
    module = sys.modules.get("torch_xla.distributed.spmd.xla_sharded_tensor")
    if module is not None and isinstance(value, module.XLAShardedTensor):
        inner: torch.Tensor = value.global_tensor
        return inner
    return value


class XlaLeaf(ArrayLeaf):
    """What whole and sharded XLA tensors share: host copies that come in batches, and writes applied at once.

    `read` always gives a copy, which the leaf forgets once all of it was handed out. `target_buffer` gives staging
    memory. Writes collect there until `finish`, which needs every local region to be complete.
    """

    __slots__ = ("_host", "_staged", "_unread", "_written", "value")

    def __init__(self, spec: ArraySpec, name: str, value: torch.Tensor) -> None:
        super().__init__(spec, name)
        self.value = value
        self._host: dict[Region, torch.Tensor] = {}
        self._unread: dict[Region, int] = {}
        self._staged: dict[Region, torch.Tensor] = {}
        self._written: dict[Region, list[Region]] = {}

    @property
    def is_on_host(self) -> bool:
        """Whether copies of an earlier prefetch are still to be read."""
        return bool(self._host)

    def read(self, region: Region) -> torch.Tensor:
        """Return a part of what `prefetch` brought; without that, fetch the leaf on its own."""
        held = self._held(region)
        if held not in self._host:
            self.release()
            prefetch([self])
        part = self._host[held][region.slices_in(held)]
        self._unread[held] -= region.num_elements
        if self._unread[held] <= 0:
            del self._host[held], self._unread[held]
        return as_bits(part).contiguous().view(part.dtype)

    def release(self) -> None:
        """Forget the host copies that were not read."""
        self._host.clear()
        self._unread.clear()

    def keep_host_copy(self, region: Region, data: torch.Tensor) -> None:
        """Take what `prefetch` brought for one held region; unsigned integers may have come back signed."""
        self._host[region] = data.detach().view(self.value.dtype)
        self._unread[region] = region.num_elements

    def target_buffer(self, region: Region) -> memoryview | None:
        """Return staging memory, unless padding lies between the region's rows; counts as written."""
        part = self._staged_part(region)
        if not part.is_contiguous():
            return None
        self._written.setdefault(self._held(region), []).append(region)
        return byte_buffer(part)

    def write(self, region: Region, data: torch.Tensor) -> None:
        """Copy into staging memory."""
        self.check_data(region, data)
        as_bits(self._staged_part(region)).copy_(as_bits(data))
        self._written.setdefault(self._held(region), []).append(region)

    def finish(self) -> None:
        """Replace the device's data by what was staged; does nothing where nothing was."""
        staged, written = self._staged, self._written
        self._staged, self._written = {}, {}
        if not staged:
            return
        for held in self.spec.regions:
            if subtract(held, written.get(held, [])):
                raise IncompleteCoverageError(
                    f"region {held} of an XLA tensor can only be replaced as a whole, and a part of it was not read",
                    leaf=self.name,
                )
        if not Region.whole(self.spec.shape).is_empty:
            self._apply(staged)

    def why_not_writable(self) -> str | None:
        """Say so of views: functionalised writes to them add up, or reshard the base."""
        if self.value._is_view():  # noqa: SLF001 - there is no public way to ask
            return "writing to a view on an XLA device would give its base another value, or another sharding"
        return None

    @abstractmethod
    def _new_buffer(self, held: Region) -> torch.Tensor:
        """Return zeroed host memory for one held region, padded as the device wants it."""

    @abstractmethod
    def _apply(self, staged: dict[Region, torch.Tensor]) -> None:
        """Replace the device's data by the complete buffers."""

    def _held(self, region: Region) -> Region:
        if len(region.shape) == len(self.spec.shape):
            for held in self.spec.regions:
                if held == region or held.contains(region):
                    return held
        raise self.not_held(region)

    def _staged_part(self, region: Region) -> torch.Tensor:
        reason = self.why_not_writable()
        if reason is not None:
            raise UnsupportedValueError(reason, leaf=self.name, hint="Restore into the tensor that it is a view of.")
        held = self._held(region)
        if held not in self._staged:
            self._staged[held] = self._new_buffer(held)
        return self._staged[held][region.slices_in(held)]


class WholeXlaLeaf(XlaLeaf):
    """An XLA tensor that every device of this process holds wholly."""

    __slots__ = ()

    def _new_buffer(self, held: Region) -> torch.Tensor:
        return torch.empty(held.shape, dtype=self.value.dtype)

    def _apply(self, staged: dict[Region, torch.Tensor]) -> None:
        (data,) = staged.values()
        with changing(self.value):
            self.value.copy_(data)


class ShardedXlaLeaf(XlaLeaf):
    """An XLA tensor of which each device holds a region, padded to one size; several may hold the same.

    Attributes:
        shard_regions: the region of each local device, in device order; None where all of it is padding.
    """

    __slots__ = ("_padded", "_padded_shape", "shard_regions")

    def __init__(self, spec: ArraySpec, name: str, value: torch.Tensor, shard_regions: Sequence[Region | None]) -> None:
        super().__init__(spec, name, value)
        self.shard_regions = tuple(shard_regions)
        self._padded: dict[Region, torch.Tensor] = {}
        self._padded_shape: tuple[int, ...] | None = None

    def keep_shards(self, shards: Sequence[torch.Tensor]) -> None:
        """Take the padded shards of all local devices; the first that holds a region serves for its replicas."""
        for region, shard in zip(self.shard_regions, shards, strict=True):
            if region is not None and region not in self._host:
                self.keep_host_copy(region, _unpadded(shard, region))

    def _new_buffer(self, held: Region) -> torch.Tensor:
        if held.is_empty:
            return torch.empty(held.shape, dtype=self.value.dtype)
        # The caller sees the unpadded part only; the device gets all of it.
        self._padded[held] = self._padding()
        return _unpadded(self._padded[held], held)

    def _padding(self) -> torch.Tensor:
        if self._padded_shape is None:
            self._padded_shape = self._find_padded_shape()
        return torch.zeros(self._padded_shape, dtype=self.value.dtype)

    def _find_padded_shape(self) -> tuple[int, ...]:
        """Return the one shape of all shards: from the sharding's text, or else, dearly, from the shards themselves."""
        ndim = len(self.spec.shape)
        match = _TILES.match(_xlac()._get_xla_sharding_spec(self.value))  # noqa: SLF001
        tiles = [int(text) for text in match[1].split(",")][:ndim] if match else []
        if len(tiles) == ndim:
            shape = tuple(-(-size // tile) for size, tile in zip(self.spec.shape, tiles, strict=True))
            if all(n <= m for held in self.spec.regions for n, m in zip(held.shape, shape, strict=True)):
                return shape
        ((shard, _), *_) = _xlac()._get_local_shards([self.value])[0]  # noqa: SLF001
        return tuple(shard.shape)

    def _apply(self, staged: dict[Region, torch.Tensor]) -> None:
        del staged  # views of the padded buffers
        devices = _xlac()._xla_get_runtime_devices()  # noqa: SLF001 - "CPU:0", …: the order of local shards
        padded, self._padded = self._padded, {}
        padding = self._padding() if None in self.shard_regions else None
        buffers = [padding if region is None else padded[region] for region in self.shard_regions]
        # Each of these would abort the process, or silently reinterpret bits, inside the client.
        if len(devices) != len(buffers) or any(
            buffer is None or buffer.dtype != self.value.dtype or tuple(buffer.shape) != self._padded_shape
            for buffer in buffers
        ):
            raise UnsupportedValueError(
                f"{len(buffers)} shards of shape {self._padded_shape} do not fit the {len(devices)} devices of this "
                "process",
                leaf=self.name,
                hint="The tensor's sharding changed since the restore began: restore again.",
            )
        _xlac()._load_local_shards(self.value, buffers, devices)  # noqa: SLF001


def _unpadded(shard: torch.Tensor, region: Region) -> torch.Tensor:
    """Return the part of a padded shard that is not padding, which XLA puts at the end of each dimension."""
    return shard[tuple(slice(0, size) for size in region.shape)]


def wrap_xla(value: torch.Tensor, name: str) -> XlaLeaf:
    """Return the leaf of an XLA tensor whose lazy graph has been cut.

    Its regions are all that devices of this process hold, replicas included.

    Raises:
        UnsupportedValueError: a dtype that torch_xla does not move exactly, or a sharding without global indices.
    """
    value = _unwrapped(value)
    check_type(value, name)
    check_plain(value, name)
    if value.dtype == torch.complex128:
        raise UnsupportedValueError(
            "torch_xla loses the imaginary part of complex128 tensors",
            leaf=name,
            hint="Save `torch.view_as_real(value)`, or move it to the CPU when it is made.",
        )
    shape = tuple(value.shape)
    dtype = dtype_name(value.dtype)
    whole = Region.whole(shape)
    kind = _xlac()._get_xla_sharding_type(value)  # noqa: SLF001
    if kind is None or kind == _REPLICATED:
        spec = ArraySpec(dtype=dtype, shape=shape, regions=(whole,), kind="xla")
        return WholeXlaLeaf(spec, name, value)
    if kind not in (_TILED, _PARTIAL):
        raise UnsupportedValueError(
            f"an XLA tensor of {_OTHER_SHARDINGS.get(kind, kind)} sharding has no global indices",
            leaf=name,
            hint="Give it a mesh sharding (`mark_sharding`), or save it outside the manual region.",
        )
    shard_regions = _shard_regions(value)
    regions = [whole] if whole.is_empty else [region for region in shard_regions if region is not None]
    spec = ArraySpec(dtype=dtype, shape=shape, regions=held_regions(shape, regions), kind="xla_sharded")
    return ShardedXlaLeaf(spec, name, value, shard_regions)


def _shard_regions(value: torch.Tensor) -> list[Region | None]:
    """Return the region of each local device's shard, in device order."""
    regions: list[Region | None] = []
    for _, indices in _xlac()._get_local_shard_replica_and_indices([value])[0]:  # noqa: SLF001
        if indices is Ellipsis:
            regions.append(Region.whole(tuple(value.shape)))
        elif any(index.start >= index.stop for index in indices):
            regions.append(None)
        else:
            starts = tuple(index.start for index in indices)
            regions.append(Region(starts, tuple(index.stop - index.start for index in indices)))
    return regions


def prefetch(leaves: Sequence[XlaLeaf]) -> None:
    """Bring the leaves to the host: one transfer for all whole tensors, one for all sharded ones.

    A sharded tensor's replicas on this process come too, and are dropped: torch_xla does not hand out fewer.
    """
    missing = [leaf for leaf in leaves if not leaf.is_on_host]
    for leaf in missing:
        if Region.whole(leaf.spec.shape).is_empty:
            leaf.keep_host_copy(Region.whole(leaf.spec.shape), torch.empty(leaf.spec.shape, dtype=leaf.value.dtype))
    missing = [leaf for leaf in missing if not leaf.is_on_host]
    whole = [leaf for leaf in missing if isinstance(leaf, WholeXlaLeaf)]
    if whole:
        copies = _xlac()._xla_get_cpu_tensors([leaf.value for leaf in whole])  # noqa: SLF001
        for leaf, copy in zip(whole, copies, strict=True):
            leaf.keep_host_copy(Region.whole(leaf.spec.shape), copy)
    sharded = [leaf for leaf in missing if isinstance(leaf, ShardedXlaLeaf)]
    if sharded:
        batch = _xlac()._get_local_shards([leaf.value for leaf in sharded])  # noqa: SLF001
        for held_by, shards in zip(sharded, batch, strict=True):
            held_by.keep_shards([shard for shard, _ in shards])


def empty_like(parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor of the parameter's shape, device and sharding."""
    parameter = _unwrapped(parameter)
    xlac = _xlac()
    # From the host: a tensor that is still a node of the lazy graph forgets its sharding when the graph is cut.
    made = torch.empty(tuple(parameter.shape), dtype=dtype).to(parameter.device)
    if xlac._get_xla_sharding_type(parameter) is not None:  # noqa: SLF001
        xlac._xla_mark_sharding(made, xlac._get_xla_op_sharding(parameter))  # noqa: SLF001
    return made
