"""A real `transformers.Trainer` on two processes, in DDP: one is preempted."""

# ruff: noqa: PLC0415 - a case imports what it needs in its own process

from __future__ import annotations

import importlib.util
import signal
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import PoolView

for package in ("transformers", "accelerate"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)
if importlib.util.find_spec("torch_xla") is not None:
    pytest.skip("where torch_xla is installed, the Trainer takes its device", allow_module_level=True)


def test_a_signal_to_one_process_ends_both_at_one_step_from_which_they_go_on(pool2: PoolView, tmp_path: Path) -> None:
    ended = pool2.run(case_preempted, tmp_path, timeout_secs=110)

    assert [status for status, *_ in ended] == [143, 143]
    assert len({step for _, step, *_ in ended}) == 1
    for _, _, again, whole in ended:
        assert again == whole


def case_preempted(rank: int, output: Path) -> tuple[Any, ...]:
    from safepoint.manager.integrations.transformers import SafepointCallback

    from support.transformers_runs import losses_of, train

    choices: dict[str, Any] = {"per_device_train_batch_size": 1}
    whole = train(output, None, **choices)
    status: Any = None
    try:
        ending = {"ends_at": 3} if rank == 1 else {}
        train(output, SafepointCallback(output / "run"), ends_by=signal.SIGTERM, **ending, **choices)
    except SystemExit as error:
        status = error.code
    callback = SafepointCallback(output / "run")
    again = train(output, callback, **choices)
    assert callback.restored is not None
    return status, callback.restored.step, losses_of(again), losses_of(whole)
