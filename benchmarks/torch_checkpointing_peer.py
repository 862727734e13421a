"""Meta's torch_checkpointing as a peer; it needs a newer torch than torch_xla runs with."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from benchmarks.peers import Peer, State

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TorchCheckpointing"]


class TorchCheckpointing(Peer):
    """torch_checkpointing, with the staging that its documentation names for machines without an accelerator.

    Its direct I/O is off: release 0.1.1 ends an unaligned file with EINVAL on ext4. Its async save stages before it
    returns, so that the caller may change the state, as with all others here.
    """

    name = "torch_checkpointing"
    needs = "torch_checkpointing"
    keeps = "nothing is synced"

    def __init__(self) -> None:
        self._library: Any = importlib.import_module("torch_checkpointing")
        self._manager = self._built(self._library.config.SyncCheckpointSaverConfig())
        self._behind: Any = None

    def _built(self, saver: Any) -> Any:
        storage: Any = importlib.import_module("torch_checkpointing.storage.filesystem")
        config = self._library.CheckpointManager.Config(
            save=saver, storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False)
        )
        return config.build()

    @override
    def save(self, state: State, path: Path) -> None:
        self._manager.save(str(path), {"model": state})

    @override
    def save_behind(self, state: State, path: Path) -> Any:
        if self._behind is None:
            staging: Any = importlib.import_module("torch_checkpointing.staging")
            stager = staging.CheckpointStagerConfig(
                use_pinned_memory=False, use_non_blocking_copy=False, use_async_staging=False
            )
            self._behind = self._built(self._library.config.AsyncCheckpointSaverConfig(staging_config=stager))
        return self._behind.save(str(path), {"model": state})

    @override
    def load_into(self, path: Path, state: State) -> None:
        self._manager.load(str(path), into={"model": state})

    @override
    def close(self) -> None:
        for manager in (self._manager, self._behind):
            if manager is not None:
                manager.close()
