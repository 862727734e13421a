"""The memory of async saves: used again, and only taken where there is so much."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from safepoint.manager import CheckpointManager
from safepoint.manager.errors import UnsupportedValueError
from safepoint.manager.staging import HostSlab

if TYPE_CHECKING:
    from pathlib import Path


def test_a_slab_is_used_again_and_its_images_begin_on_pages() -> None:
    slab = HostSlab()
    first = slab.images([5000, 0, 3 << 20])
    assert [image.numel() for image in first] == [5000, 0, 3 << 20]
    assert all(image.data_ptr() % 4096 == 0 for image in first if image.numel())
    capacity = slab.capacity_bytes
    again = slab.images([3 << 20])
    assert slab.capacity_bytes == capacity
    assert again[0].data_ptr() == first[0].data_ptr()
    assert slab.images([4 << 20])[0].numel() == 4 << 20
    assert slab.capacity_bytes == 4 << 20


def test_a_slab_knows_what_it_lacks_and_needs_nothing_for_what_it_has() -> None:
    slab = HostSlab(lambda: 1 << 20)
    assert slab.shortage([500_000, 400_000]) == 0
    assert slab.shortage([1 << 20]) == (1 << 20) // 10
    slab.images([1 << 20])
    assert slab.shortage([1 << 20]) == 0
    assert slab.shortage([3 << 20]) == (2 << 20) - ((1 << 20) - (1 << 20) // 10)
    assert HostSlab(lambda: None).shortage([1 << 60]) == 0


def test_an_async_save_without_memory_for_its_copy_is_committed_when_it_returns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = {"model": {"weight": torch.ones(300, 300)}}
    with CheckpointManager(tmp_path) as manager:
        manager._slab = HostSlab(lambda: 1000)
        manager.save(1, state, blocking=False)
        assert manager._in_flight is None
        assert [info.step for info in manager.steps()] == [1]
        assert "step 1 is saved before save() returns" in caplog.text
        assert manager._slab.capacity_bytes == 0
        manager._slab = HostSlab()
        manager.save(2, state, blocking=False)
        state["model"]["weight"].zero_()
        manager.wait()
        assert manager.restore(2).state["model"]["weight"].min() == 1
        manager._slab = HostSlab(lambda: 1000)
        with pytest.raises(UnsupportedValueError):
            manager.save(3, {"model": object()}, blocking=False)
        manager.save(4, state)
        assert [info.step for info in manager.steps()] == [1, 2, 4]
