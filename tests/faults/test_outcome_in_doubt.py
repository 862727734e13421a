from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.errors import StorageError
from safepoint.manager import CheckpointManager

if TYPE_CHECKING:
    from collections.abc import Hashable

    from safepoint.formats.storage import Storage, VersionedBytes


class _Silence:
    """The record of one step is put, and from then on nobody answers about it until `heal`."""

    def __init__(self, storage: Storage, path: str) -> None:
        self._storage: Any = storage
        self._path = path
        self._put, self._read = storage.put_if_unchanged, storage.read_versioned
        self.is_silent = False
        self._storage.put_if_unchanged, self._storage.read_versioned = self.put_if_unchanged, self.read_versioned

    def heal(self) -> None:
        self.is_silent = False
        self._storage.put_if_unchanged, self._storage.read_versioned = self._put, self._read

    def put_if_unchanged(self, path: str, data: bytes, version: Hashable) -> bool:
        if self.is_silent and path == self._path:
            raise StorageError("no answer", path=path, errno=errno.ETIMEDOUT)
        done = self._put(path, data, version)
        if path == self._path and b'"manifest_digest"' in data:
            self.is_silent = True
            raise StorageError("no answer", path=path, errno=errno.ETIMEDOUT)
        return done

    def read_versioned(self, path: str, *, max_bytes: int) -> VersionedBytes | None:
        if self.is_silent and path == self._path:
            raise StorageError("no answer", path=path, errno=errno.ETIMEDOUT)
        return self._read(path, max_bytes=max_bytes)


def test_a_step_whose_outcome_was_unknown_and_that_is_found_committed_is_this_runs_own(request: Any) -> None:
    with CheckpointManager(f"memory://{request.node.name}") as manager:
        manager.save(1, {"w": torch.ones(3)})
        silence = _Silence(manager._session.storage, "2/commit.json")
        with pytest.raises(StorageError) as caught:
            manager.save(2, {"w": torch.full((3,), 2.0)})
        assert caught.value.outcome == "unknown"
        silence.heal()
        assert [info.step for info in manager.steps()] == [1, 2]
        again = manager.save(2, {"w": torch.zeros(3)})
        assert not again.saved
        found = manager.restore(2).state
        assert found is not None
        assert found["w"].tolist() == [2, 2, 2]
