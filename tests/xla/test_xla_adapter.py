"""XLA leaves on the real torch_xla; the cases are in `support/xla_adapter_cases.py`, in processes of their own.

A mistake there aborts the process, or wedges the client. So the cases of one setting share a process, and one that
ends or hangs it fails alone: the next case gets a new one.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="torch_xla is not installed"),
    pytest.mark.timeout(150),
]

CASE_SECS = 120
SCRIPT = Path(__file__).parent.parent / "support" / "xla_adapter_cases.py"
BEHAVIOURS = [
    "geometry",
    "batched transfers",
    "modules",
    "wrapper",
    "computed",
    "incomplete writes",
    "wrong data",
    "refusals",
    "views",
    "new state like a parameter",
    "handing on",
]
DTYPES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
    *("float16", "bfloat16", "float32", "float64", "complex64", "float8_e4m3fn", "float8_e5m2"),
]


class Worker:
    """A process that runs cases one after another, and is started again when it was lost."""

    def __init__(self, mode: str, num_devices: int) -> None:
        self._mode = mode
        self._environment = {
            **os.environ,
            "PJRT_DEVICE": "CPU",
            "CPU_NUM_DEVICES": str(num_devices),
            "RES_OPTIONS": "timeout:1 attempts:1",
            "PYTHONPATH": os.pathsep.join(sys.path),  # where the imports of this file were found
        }
        self._process: subprocess.Popen[str] | None = None
        self._answers: queue.Queue[str] = queue.Queue()

    def run(self, case: str) -> str | None:
        """Return what went wrong in the case, or None."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        try:
            answer = self._answers.get(timeout=CASE_SECS)
        except queue.Empty:
            self.close()
            return f"no answer within {CASE_SECS} s"
        if not answer:
            return f"the process ended with {self._process.wait()}"
        error: str | None = json.loads(answer)["error"]
        return error

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    self._process.stdin.close()
            self._reader.join()
            self._process = None

    def _start(self) -> None:
        self.close()
        self._answers = queue.Queue()
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), self._mode],
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # the compiler's warnings; failures come as answers
            text=True,
        )
        self._reader = threading.Thread(target=_forward, args=(self._process, self._answers), daemon=True)
        self._reader.start()


def _forward(process: subprocess.Popen[str], answers: queue.Queue[str]) -> None:
    assert process.stdout is not None
    with process.stdout as lines:
        for line in lines:
            if line.startswith("{"):
                answers.put(line)
    answers.put("")


@pytest.fixture(scope="module")
def spmd() -> Iterator[Worker]:
    """SPMD over eight devices."""
    worker = Worker("spmd", 8)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def spmd_16() -> Iterator[Worker]:
    """SPMD over sixteen devices: sorted by name, CPU:10 would come before CPU:2."""
    worker = Worker("spmd", 16)
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def plain() -> Iterator[Worker]:
    """One device, without SPMD."""
    worker = Worker("plain", 1)
    yield worker
    worker.close()


@pytest.mark.parametrize("case", BEHAVIOURS)
def test_sharded_tensors_keep_their_promises(spmd: Worker, case: str) -> None:
    error = spmd.run(case)
    assert error is None, error


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_layout_is_read_and_written_from_any_other(spmd: Worker, dtype: str) -> None:
    error = spmd.run(f"layouts of {dtype}")
    assert error is None, error


@pytest.mark.slow
def test_shards_go_to_their_devices_however_many_there_are(spmd_16: Worker) -> None:
    error = spmd_16.run("layouts of int32")
    assert error is None, error


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_of_one_device_are_read_and_written(plain: Worker, dtype: str) -> None:
    error = plain.run(f"plain {dtype}")
    assert error is None, error
