"""Saves behind the training loop from CUDA devices; run where there is one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import CheckpointManager
from safepoint.manager.coordination.device_sync import sync_devices
from safepoint.manager.device_copies import DeviceCopies
from safepoint.manager.staging import HostSlab

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def make_state() -> dict[str, Any]:
    torch.manual_seed(0)
    device = "cuda"
    big = torch.randn(1 << 20, 3, device=device)
    return {
        "big": big,
        "transposed": torch.randn(300, 500, device=device).t(),
        "strided": torch.randn(64, 64, device=device)[::2, 1:],
        "conjugate": torch.randn(5, 7, device=device, dtype=torch.complex64).conj(),
        "scalar": torch.tensor(3.5, device=device, dtype=torch.float64),
        "flags": torch.tensor([True, False, True], device=device),
        "half": torch.randn(7, device=device).to(torch.bfloat16),
        "nothing": torch.empty(0, 4, device=device),
        "parameter": torch.nn.Parameter(torch.randn(11, device=device)),
        "host": torch.randn(33),
        "tied": big,
    }


def test_what_was_there_when_the_save_returned_comes_back_bit_for_bit(tmp_path: Path) -> None:
    state = make_state()
    expected = {name: tensor.detach().clone() for name, tensor in state.items()}
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2):  # the second uses the slab again
            state["big"].mul_(2)  # under way on the device when the save begins
            expected["big"].mul_(2)
            manager.save(step, {"model": state}, blocking=False)
            state["big"].zero_()
            manager.wait()
            target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
            target["tied"] = target["big"]
            manager.restore(step, {"model": target})
            state["big"].copy_(expected["big"])
            for name, tensor in target.items():
                assert torch.equal(tensor, expected["big" if name == "tied" else name]), name


def test_the_slab_is_pinned_once_and_let_go_with_it() -> None:
    slab = HostSlab()
    (image,) = slab.images([1 << 20])
    live = torch.arange(1 << 18, device="cuda", dtype=torch.int32)
    for _ in range(2):
        with DeviceCopies(slab.pin) as copies:
            copies.begin(live, image)
    assert image.is_pinned()
    assert torch.equal(image.view(torch.int32), live.cpu())
    (larger,) = slab.images([4 << 20])
    assert not larger.is_pinned()
    slab.pin(live.device)
    assert larger.is_pinned()
    del slab
    assert not larger.is_pinned()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_a_device_that_nobody_uses_is_not_opened_by_a_save() -> None:
    torch.ones(1, device="cuda:0")
    sync_devices()
    assert not torch._C._cuda_hasPrimaryContext(1)  # type: ignore[attr-defined]
