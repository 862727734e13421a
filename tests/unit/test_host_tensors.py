from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.manager import CheckpointManager
from safepoint.manager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from pathlib import Path


def some_state() -> dict[str, torch.Tensor]:
    return {
        "large": torch.randn(3 << 20),
        "medium": torch.randn(100, 300).to(torch.bfloat16),
        "small": torch.arange(7),
        "odd": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "eighths": torch.randn(5).to(torch.float8_e5m2),
    }


@pytest.mark.parametrize("host_memory", ["owned", "mapped"])
def test_a_restore_without_a_target_gives_back_every_bit(tmp_path: Path, host_memory: str) -> None:
    state = some_state()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": state})
        restored = manager.restore(1, host_memory=host_memory).state  # type: ignore[arg-type]
    assert restored is not None
    assert list(restored["model"]) == list(state)
    for name, tensor in state.items():
        found = restored["model"][name]
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(found.reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8))
        assert found.untyped_storage().nbytes() == tensor.nbytes


def test_a_change_of_a_mapped_tensor_does_not_reach_the_file(tmp_path: Path) -> None:
    state = some_state()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": state})
        first = manager.restore(1, host_memory="mapped").state
        assert first is not None
        first["model"]["large"].zero_()
        assert manager.verify() == []
        again = manager.restore(1, host_memory="mapped").state
    assert again is not None
    assert torch.equal(again["model"]["large"], state["large"])


def test_a_mapped_tensor_outlives_its_manager_and_its_step(tmp_path: Path) -> None:
    state = some_state()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": state})
        restored = manager.restore(1, host_memory="mapped").state
    for file in sorted(tmp_path.rglob("*"), reverse=True):
        file.rmdir() if file.is_dir() else file.unlink()
    assert restored is not None
    assert torch.equal(restored["model"]["large"], state["large"])


def test_restored_tensors_can_be_changed(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": some_state()})
        restored = manager.restore(1).state
    assert restored is not None
    restored["model"]["large"].add_(1)


def test_another_word_for_host_memory_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"model": some_state()})
        with pytest.raises(InvalidArgumentError, match="host_memory"):
            manager.restore(1, host_memory="borrowed")  # type: ignore[arg-type]
