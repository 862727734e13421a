from __future__ import annotations

import threading

import pytest
import torch

from safepoint.manager.packing import SMALL_BYTES, Packer, pack


def expected(tensors: list[torch.Tensor]) -> bytes:
    return b"".join(tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors)


def test_packed_tensors_are_their_bytes_back_to_back() -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    tensors = [
        torch.randn(3, 5, dtype=torch.float64),
        torch.empty(0, 4),
        torch.tensor(2.5),
        bits.view(torch.float32),  # all kinds of NaN
        bits.view(torch.bfloat16),
        bits.view(torch.float8_e4m3fn),
        torch.randn(SMALL_BYTES),
        bits.view(torch.complex64),
        torch.tensor([True, False, True]),
        bits.view(torch.int16),
        torch.randn(7, dtype=torch.float16),
        torch.randn(4 << 20),
    ]
    out = torch.empty(sum(tensor.nbytes for tensor in tensors), dtype=torch.uint8)
    pack(tensors, out)
    assert out.numpy().tobytes() == expected(tensors)


def test_packing_takes_an_odd_place() -> None:
    tensors = [torch.randn(3), torch.randn(4)]
    out = torch.zeros(29, dtype=torch.uint8)
    pack(tensors, out[1:])
    assert out.numpy().tobytes() == b"\0" + expected(tensors)


def test_packing_takes_parameters_and_nothing() -> None:
    parameter = torch.nn.Parameter(torch.randn(3))
    out = torch.empty(12, dtype=torch.uint8)
    pack([parameter], out)
    assert out.numpy().tobytes() == expected([parameter.detach()])
    pack([], out[:0])


def test_runs_that_several_threads_copy_are_there_when_the_packer_is_left() -> None:
    runs = [[torch.randn(3 << 20), torch.randn(5), torch.randn(SMALL_BYTES + number)] for number in range(6)]
    out = torch.zeros(sum(tensor.nbytes for run in runs for tensor in run), dtype=torch.uint8)
    with Packer(out.numel()) as packer:
        start = 0
        for run in runs:
            end = start + sum(tensor.nbytes for tensor in run)
            packer.pack(run, out[start:end])
            start = end
    assert out.numpy().tobytes() == b"".join(map(expected, runs))
    assert "safepoint-copy" not in {thread.name for thread in threading.enumerate()}


def test_a_copy_that_fails_in_any_thread_fails_the_packing() -> None:
    out = torch.empty(64 << 20, dtype=torch.uint8)
    tensor = torch.randn(9 << 20)

    def pack_too_much() -> None:
        with Packer(256 << 20) as packer:
            for _ in range(4):
                packer.pack([tensor], out[: tensor.nbytes - 1])

    with pytest.raises(ValueError, match="broadcast"):
        pack_too_much()
    assert "safepoint-copy" not in {thread.name for thread in threading.enumerate()}


class _Interrupted(Packer):
    def _copy_until(self, limit_bytes: int) -> None:
        if limit_bytes == 0:
            raise KeyboardInterrupt


def test_a_packing_that_is_interrupted_while_it_is_left_ends_its_threads() -> None:
    out = torch.empty(64 << 20, dtype=torch.uint8)
    with pytest.raises(KeyboardInterrupt), _Interrupted(256 << 20) as packer:
        packer.pack([torch.randn(16 << 20)], out)
    assert "safepoint-copy" not in {thread.name for thread in threading.enumerate()}


def test_a_packing_that_is_broken_off_ends_its_threads() -> None:
    out = torch.empty(64 << 20, dtype=torch.uint8)

    def break_off() -> None:
        with Packer(256 << 20) as packer:
            packer.pack([torch.randn(16 << 20)], out)
            raise KeyError

    with pytest.raises(KeyError):
        break_off()
    assert "safepoint-copy" not in {thread.name for thread in threading.enumerate()}
