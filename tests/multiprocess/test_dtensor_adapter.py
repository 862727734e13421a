"""DTensor leaves on real gloo processes; the cases are in `support/dtensor_cases.py`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.dtensor_cases import cases, run_case

if TYPE_CHECKING:
    from support.process_pool import ProcessPool

CASES = [(size, name) for size in (2, 4) for name in cases(size)]


@pytest.mark.parametrize(("size", "name"), CASES, ids=[f"{size} processes, {name}" for size, name in CASES])
def test_dtensors_are_read_and_written_exactly(process_pool: ProcessPool, size: int, name: str) -> None:
    process_pool.run(run_case, size, name, num_processes=size)
