"""From any checkpoint that can be read to a step in any format, or to files that other libraries load.

Streams: no more of a state is in memory than one batch, or one leaf. What was read is verified on the way where it is
ours, and what was written is read back.
"""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING, Any, cast

from safepoint.formats.foreign.dcp_writing import write_dcp
from safepoint.formats.foreign.huggingface import MAX_FILE_BYTES, write_huggingface
from safepoint.manager.checkpoint_manager import CheckpointManager
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.opened import open_checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from safepoint.formats.foreign.base import ForeignCheckpoint
    from safepoint.manager.options import RequestedMode
    from safepoint.manager.results import SaveResult

__all__ = ["convert", "export_dcp", "export_huggingface"]


def convert(
    source: str | os.PathLike[str],
    root: str | os.PathLike[str],
    *,
    format: str = "safetensors",  # noqa: A002 the field's word for it
    step: int | None = None,
    to_step: int | None = None,
    mode: RequestedMode = "auto",
) -> SaveResult:
    """Write a checkpoint as a step of another root, in another format. Called by one process.

    A step of ours keeps everything: tree, values, metrics, objects' states. What others wrote becomes a step with their
    tree. An interrupted conversion leaves nothing that counts as a step: start it again.

    Args:
        source: a step or a root of ours, or anything that `restore_foreign` reads.
        root: of the new step; made if need be.
        format: of its files.
        step: which step of a root; None for the latest.
        to_step: number of the new step; None keeps the old one, and is 0 where there was none.
        mode: as of `CheckpointManager`.

    Raises:
        StepExistsError: the root has the step already.
        CorruptDataError: the source is damaged, or what was written came back as something else.
        UnsupportedValueError: the format cannot hold something in it; names it.
        RootInUseError: another manager saves to the root.
    """
    opened = open_checkpoint(source, step=step)
    if format != "safetensors":
        opened.check_whole_arrays()
    number = to_step if to_step is not None else opened.step or 0
    with CheckpointManager(root, format=format, mode=mode) as manager:
        result = manager.save(number, cast("Any", opened.state), metrics=opened.metrics, force=True, on_exists="error")
        for problem in manager.verify(number):
            raise problem
    return result


def export_huggingface(
    source: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    item: str | None = "model",
    step: int | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Write an item as Hugging Face lays out a model: `model.safetensors`, or several files and an index.

    Tied weights are written once, under the first of their names, as `save_pretrained` does. Called by one process.

    Args:
        source: as of `convert`.
        directory: a new one, which appears when it is whole.
        item: name of the item; None for all of the tree.
        step: which step of a root; None for the latest.
        max_file_bytes: of tensors in one file; one tensor is never cut.

    Returns:
        The names of the files.

    Raises:
        InvalidArgumentError: there is no such item, or the directory is there.
        UnsupportedValueError: a dtype that safetensors does not have.
    """
    checkpoint = _open_whole(source, step)
    tree = _item_of(checkpoint, item)
    return _into_new(directory, lambda path: write_huggingface(tree, checkpoint, path, max_file_bytes=max_file_bytes))


def export_dcp(
    source: str | os.PathLike[str], directory: str | os.PathLike[str], *, step: int | None = None
) -> list[str]:
    """Write a checkpoint as a directory that `torch.distributed.checkpoint.load` reads. Called by one process.

    Args:
        source: as of `convert`.
        directory: a new one, which appears when it is whole.
        step: which step of a root; None for the latest.

    Returns:
        The names of the files.

    Raises:
        InvalidArgumentError: the directory is there.
    """
    checkpoint = _open_whole(source, step)
    return _into_new(directory, lambda path: write_dcp(checkpoint, path))


def _open_whole(source: str | os.PathLike[str], step: int | None) -> ForeignCheckpoint:
    opened = open_checkpoint(source, step=step)
    opened.check_whole_arrays()
    return opened.checkpoint


def _item_of(checkpoint: ForeignCheckpoint, item: str | None) -> Any:
    if item is None:
        return checkpoint.tree
    if not isinstance(checkpoint.tree, dict) or item not in checkpoint.tree:
        raise InvalidArgumentError(f"the checkpoint has no item {item!r}", path=checkpoint.location)
    return checkpoint.tree[item]


def _into_new(directory: str | os.PathLike[str], write: Callable[[str], None]) -> list[str]:
    path = os.path.abspath(os.fspath(directory))
    if os.path.lexists(path):
        raise InvalidArgumentError("there is something of that name already", path=path)
    temporary = f"{path}.tmp-{secrets.token_hex(8)}"
    os.makedirs(temporary)
    try:
        write(temporary)
        os.rename(temporary, path)
    except BaseException:
        _remove(temporary)
        raise
    return sorted(os.listdir(path))


def _remove(path: str) -> None:
    for name in os.listdir(path):
        os.unlink(os.path.join(path, name))
    os.rmdir(path)
