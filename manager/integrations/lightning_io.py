"""`CheckpointIO` plugins: what Lightning hands over as one checkpoint becomes the one step of a root at that path.

Lightning calls them on global zero only, after its strategy has cut the lazy graph on every process and before a
barrier of its own; so here one process saves alone. Owns the way from Lightning's dict to a state and back.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree

from safepoint.manager.checkpoint_manager import CheckpointManager
from safepoint.manager.coordination.detect import ALONE
from safepoint.manager.errors import InvalidArgumentError, RootInUseError, StepNotFoundError
from safepoint.manager.foreign import restore_foreign
from safepoint.manager.integrations.requiring import missing_package
from safepoint.manager.options import is_step
from safepoint.manager.pins import CONTROL_DIR
from safepoint.manager.policies import KeepLast

try:
    from lightning.fabric.plugins import CheckpointIO, XLACheckpointIO
except ModuleNotFoundError as error:
    raise missing_package(error, extra="lightning") from error

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SafepointCheckpointIO", "SafepointXLACheckpointIO"]

_WRAPPED = "checkpoint"
"""The item that holds a checkpoint which is no mapping of items, such as a bare state dict."""


class SafepointCheckpointIO(CheckpointIO):  # type: ignore[misc]  # lightning's types are not followed
    """Writes and reads the checkpoints of Fabric and of the Trainer: `plugins=[SafepointCheckpointIO()]`.

    The path that Lightning names (`epoch=1-step=200.ckpt`) becomes a directory with one step in it, its number being
    the checkpoint's `global_step`, or 0. A path that is written again keeps the former step until the new one is
    committed. Strategies that write their own checkpoints (FSDP, ModelParallel, DeepSpeed) never call it: use
    `SafepointCallback`, or a `CheckpointManager` in a loop of Fabric's.

    Args:
        format: of the data files, as of `CheckpointManager`.
    """

    def __init__(self, *, format: str = "safetensors") -> None:  # noqa: A002 the field's word for it
        super().__init__()
        self._format = format

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Commit a checkpoint at a path, in the place of what is there. Called on one process.

        Raises:
            UnsupportedValueError: something in it cannot be kept; named before anything is written.
            InvalidArgumentError: there are storage options.
            RootInUseError: another process writes to this path.
            StorageError: the disk is full, read-only or broken, or the path is a file.
        """
        if storage_options is not None:
            raise InvalidArgumentError("SafepointCheckpointIO takes no storage_options", path=os.fspath(path))
        number = checkpoint.get("global_step", 0)
        with CheckpointManager(
            path, keep=KeepLast(1), mode="consolidated", format=self._format, store=ALONE
        ) as manager:
            manager.save(number if is_step(number) else 0, _as_items(checkpoint), force=True, on_exists="replace")

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: torch.device | str | None = None,
        weights_only: bool | None = None,  # noqa: FBT001  # Lightning's
    ) -> dict[str, Any]:
        """Return a checkpoint, its tensors on the host or where `map_location` says. Called by any process.

        A file is read as one of `torch.save`, such as Lightning's own checkpoints. Nothing is unpickled either way
        but by a reader that knows plain types, whatever `weights_only` says.

        Raises:
            StepNotFoundError: nothing is committed there.
            CorruptDataError: it is damaged.
            UnsupportedValueError: the file holds what cannot be read safely.
        """
        del weights_only
        move = _mover(map_location)
        location = os.path.abspath(os.fspath(path))
        found = restore_foreign(location).state if os.path.isfile(location) else _restore(location)
        checkpoint: dict[str, Any] = move(_from_items(found))
        return checkpoint

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint: out of sight first, then bit by bit. One that is not there is no error.

        Raises:
            InvalidArgumentError: the directory is no checkpoint of this plugin.
        """
        location = os.path.abspath(os.fspath(path))
        if os.path.isfile(location):
            os.unlink(location)
            return
        if not os.path.isdir(location):
            return
        if not os.path.isdir(os.path.join(location, CONTROL_DIR)):
            raise InvalidArgumentError("this directory is no checkpoint, and is not removed", path=location)
        parent, name = os.path.split(location)
        hidden = os.path.join(parent, f".trash-{secrets.token_hex(8)}-{name}")
        os.rename(location, hidden)
        shutil.rmtree(hidden)


class SafepointXLACheckpointIO(SafepointCheckpointIO, XLACheckpointIO):  # type: ignore[misc]  # as above
    """`SafepointCheckpointIO` for strategies on XLA devices, which take no plugin but a kind of `XLACheckpointIO`."""

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any = None
    ) -> None:
        """Commit a checkpoint at a path. See `SafepointCheckpointIO.save_checkpoint`.

        Lightning's launcher also calls it on *every* process at the end of a fit, to hand weights that are the same
        everywhere to the process that started them (`.temp.ckpt`). They are written once on each host; where hosts
        share the path, by the one that comes first.
        """
        import torch_xla.runtime as xr  # noqa: PLC0415 - the class can be named without it

        if xr.global_ordinal() == 0:
            super().save_checkpoint(checkpoint, path, storage_options)
        elif xr.local_ordinal() == 0:
            try:
                super().save_checkpoint(checkpoint, path, storage_options)
            except RootInUseError:
                return  # what another host writes there is the same


def _as_items(checkpoint: Mapping[Any, Any]) -> dict[str, Any]:
    items = dict(checkpoint)
    has_names = all(type(name) is str and name and name.isprintable() for name in items)
    is_bare = all(isinstance(value, torch.Tensor) for value in items.values())
    if not has_names or is_bare or set(items) == {_WRAPPED}:
        return {_WRAPPED: checkpoint}
    return items


def _from_items(found: Any) -> Any:
    return found[_WRAPPED] if isinstance(found, Mapping) and set(found) == {_WRAPPED} else found


def _restore(location: str) -> dict[str, Any]:
    result = None
    if os.path.isdir(location):  # a manager would make it
        with CheckpointManager(location, store=ALONE) as manager:
            result = manager.restore_latest()
    if result is None or result.state is None:
        raise StepNotFoundError("no checkpoint is committed at this path", path=location, available=())
    return result.state


def _mover(map_location: Any) -> Callable[[Any], Any]:
    if map_location is None:
        return lambda found: found
    if not isinstance(map_location, str | torch.device):
        raise InvalidArgumentError(f"map_location is a device, not {map_location!r}")
    return lambda found: _pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(map_location), found)
