"""A save in Orbax's layout that fails at any file costs no committed step: those of its databases are written last."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def state(version: int) -> dict[str, Any]:
    many = {f"w{index}": torch.full((3,), float(version)) for index in range(20)}
    return {"many": many, "few": {"w": torch.full((2, 2), version)}, "n": version}


class FailingWriters:
    """Makes the storage fail at its k-th new file, before or after it is durable."""

    def __init__(self, patch: pytest.MonkeyPatch, at: int, *, done: bool) -> None:
        self.count = 0
        self.paths: list[str] = []
        real: Callable[..., Any] = LocalStorage.open_writer

        def open_writer(storage: LocalStorage, path: str, **options: Any) -> Any:
            self.count += 1
            self.paths.append(path)
            writer = real(storage, path, **options)
            if self.count != at:
                return writer
            if done:
                writer.append(bytes(options["num_bytes"]))
                writer.finish()
            else:
                writer.abort()
            raise StorageError("injected", errno=errno.EIO, path=path)

        patch.setattr(LocalStorage, "open_writer", open_writer)


@pytest.mark.parametrize("done", [False, True], ids=["not written", "answer lost"])
@pytest.mark.parametrize("file_format", ["orbax", "orbax_zstd"])
def test_a_failure_at_any_file_of_a_save_leaves_the_step_before_and_the_next_save_works(
    tmp_path: Path,
    file_format: str,
    done: bool,  # noqa: FBT001 - whether the file is there
) -> None:
    with CheckpointManager(tmp_path, format=file_format) as manager:
        manager.save(1, state(1))
        with pytest.MonkeyPatch.context() as patch:
            every = FailingWriters(patch, 0, done=done)
            manager.save(2, state(2))
        assert any(path.endswith("/manifest.ocdbt") for path in every.paths)
        for at in range(1, every.count + 1):
            with pytest.MonkeyPatch.context() as patch:
                FailingWriters(patch, at, done=done)
                with pytest.raises(StorageError, match="injected") as caught:
                    manager.save(3, state(3))
            assert caught.value.outcome == "not_committed"
        assert [step.step for step in manager.steps()] == [1, 2]
        assert sorted(path.name for path in tmp_path.iterdir() if path.name[0] != ".") == ["1", "2"]
        manager.save(3, state(3))
        assert manager.verify() == []
        for step in (1, 2, 3):
            found = manager.restore(step).state
            assert found is not None
            assert all(torch.equal(found["many"][name], value) for name, value in state(step)["many"].items())
