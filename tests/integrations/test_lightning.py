"""A real Lightning Trainer with `SafepointCallback`, and `CheckpointIO` plugins, on one process."""

# mypy: ignore-errors
# ruff: noqa: PLC0415 - lightning takes seconds to import: when a test needs it

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import CheckpointManager, KeepBest, KeepLast
from safepoint.manager.errors import InvalidArgumentError, StepNotFoundError, UnsupportedValueError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.process_pool import ProcessPool

if importlib.util.find_spec("lightning") is None:
    pytest.skip("lightning is not installed", allow_module_level=True)
if importlib.util.find_spec("torch_xla") is not None:
    pytest.skip("once is enough; with torch_xla: tests/xla/test_lightning_xla.py", allow_module_level=True)

pytestmark = [
    # Lightning's own: advice about loaders and logging, and what it does with torch's and its own parts.
    pytest.mark.filterwarnings("ignore:.*(num_workers|tensorboardX|litlogger|in eval mode at the start):UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:lightning.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:lightning.*"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums come out the same as in the pool's processes, which have one."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


BY_STEP: dict[str, dict[str, Any]] = {
    "validations inside epochs": {"val_check_interval": 4},
    "gradients accumulated, no validation": {"accumulate_grad_batches": 4, "limit_val_batches": 0},
    "by the number of steps": {"max_steps": 14, "max_epochs": -1},
}


def steps_of(root: Path) -> list[int]:
    with CheckpointManager(root) as manager:
        return [info.step for info in manager.steps()]


@pytest.mark.parametrize("choices", BY_STEP.values(), ids=BY_STEP)
def test_a_run_goes_on_bit_for_bit_from_inside_and_from_the_end_of_an_epoch(
    tmp_path: Path, choices: dict[str, Any]
) -> None:
    from support.lightning_runs import NUM_BATCHES, fit

    whole, trainer, _ = fit(tmp_path / "whole", safepoint={"save_every": 1}, **choices)
    per_epoch = len({step for step, *_ in whole.losses[:NUM_BATCHES]})

    for step in (per_epoch - 1, per_epoch):
        shutil.copytree(tmp_path / "whole", tmp_path / str(step))
        again, resumed, callback = fit(tmp_path / str(step), safepoint={"resume": step}, **choices)

        assert callback.restored.step == step
        assert again.losses == [told for told in whole.losses if told[0] >= step]
        assert again.note == f"saved at {step}"
        assert resumed.global_step == trainer.global_step
        assert all(torch.equal(a, b) for a, b in zip(again.parameters(), whole.parameters(), strict=True))


def test_a_scheduler_that_follows_a_metric_goes_on_too(tmp_path: Path) -> None:
    from support.lightning_runs import fit

    whole, *_ = fit(tmp_path / "whole", told={"plateau": "epoch"}, safepoint={"save_every": 1}, max_epochs=4)
    assert len({rate for *_, rate in whole.losses}) > 1

    for step in (11, 12):
        shutil.copytree(tmp_path / "whole", tmp_path / str(step))
        again, *_ = fit(tmp_path / str(step), told={"plateau": "epoch"}, safepoint={"resume": step}, max_epochs=4)
        assert again.losses == [told for told in whole.losses if told[0] >= step]


def test_saving_changes_nothing_and_a_finished_run_is_gone_on_with(tmp_path: Path) -> None:
    from support.lightning_runs import fit

    plain, *_ = fit(None, max_epochs=2)
    saving, *_ = fit(tmp_path, safepoint={"save_every": 5}, max_epochs=2)
    assert saving.losses == plain.losses

    whole, *_ = fit(None, max_epochs=3)
    again, _, callback = fit(tmp_path, max_epochs=3)
    assert callback.restored.step == 12
    assert again.losses == whole.losses[12:]


def test_a_killed_run_goes_on_bit_for_bit(tmp_path: Path, process_pool: ProcessPool) -> None:
    from support.lightning_runs import fit

    (signal_number,) = process_pool.run(case_killed, str(tmp_path), num_processes=1, timeout_secs=110)
    assert signal_number == signal.SIGKILL
    assert steps_of(tmp_path) == [3, 6, 9]

    whole, *_ = fit(None)
    again, _, callback = fit(tmp_path, safepoint={"save_every": 3})

    assert callback.restored.step == 9
    assert again.losses == whole.losses[9:]


def case_killed(rank: int, root: str) -> int:
    """Fit in a fork of this process, which dies in it; the process has imported lightning for other cases."""
    del rank
    from support.lightning_runs import fit

    child = os.fork()
    if child == 0:
        try:
            fit(root, told={"ends_at": 10}, safepoint={"save_every": 3, "save_after_validation": False})
        finally:
            os._exit(1)
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def test_a_signal_ends_the_fit_after_a_step_that_is_saved(tmp_path: Path) -> None:
    from support.lightning_runs import fit

    before = signal.getsignal(signal.SIGTERM)
    for ends_at in (7, 11):  # inside an epoch, and at its last batch
        root = tmp_path / str(ends_at)
        with pytest.raises(SystemExit) as ended:
            fit(root, told={"ends_at": ends_at, "ends_by": signal.SIGTERM}, safepoint={"save_after_validation": False})

        assert ended.value.code == 128 + signal.SIGTERM
        assert signal.getsignal(signal.SIGTERM) is before
        assert len(steps_of(root)) == 1

        whole, *_ = fit(None)
        again, *_ = fit(root)
        assert 0 < len(again.losses) < 18 - ends_at
        assert again.losses == whole.losses[-len(again.losses) :]


def test_steps_are_kept_by_the_metric_of_the_validation_before_them(tmp_path: Path) -> None:
    from support.lightning_runs import fit

    keep = KeepLast(1) | KeepBest(1, metric="val_loss", order="min")
    _, trainer, _ = fit(tmp_path, safepoint={"save_every": 4, "keep": keep})

    with CheckpointManager(tmp_path) as manager:
        found = {info.step: dict(info.metrics) for info in manager.steps()}
    assert found[18]["val_loss"] == pytest.approx(trainer.callback_metrics["val_loss"].item())
    assert len(found) <= 2
    assert all("val_loss" in metrics for metrics in found.values())


def test_weights_that_a_callback_averages_come_back(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging

    from support.lightning_runs import fit

    def others() -> list[Any]:
        return [EMAWeightAveraging(decay=0.5), EarlyStopping("val_loss", patience=9)]

    whole = others()
    fit(tmp_path, callbacks=whole, safepoint={"save_every": 4})
    averages = whole[0].state_dict()
    again = others()
    fit(tmp_path, callbacks=again, safepoint={"resume": 8})

    assert again[1].state_dict()["best_score"] == whole[1].state_dict()["best_score"]
    assert again[0].state_dict() == averages


def test_what_cannot_be_is_refused_with_a_way_out(tmp_path: Path) -> None:
    from lightning.pytorch.strategies import FSDPStrategy

    from safepoint.manager.integrations.lightning import SafepointCallback

    from support.lightning_runs import fit

    with pytest.raises(InvalidArgumentError, match="save_every"):
        SafepointCallback(tmp_path, save_every=0)
    with pytest.raises(StepNotFoundError):
        fit(tmp_path, safepoint={"resume": 5})
    fit(tmp_path, max_epochs=1)
    with pytest.raises(InvalidArgumentError, match="ckpt_path"):
        fit(tmp_path, ckpt_path=str(own_checkpoint(tmp_path)))
    with pytest.raises(InvalidArgumentError, match="ModelParallelStrategy"):
        SafepointCallback(tmp_path).setup(SimpleNamespace(strategy=FSDPStrategy()), None, "fit")


def own_checkpoint(folder: Path) -> Path:
    from support.lightning_runs import fit

    _, trainer, _ = fit(None, max_epochs=1)
    trainer.save_checkpoint(folder / "own.ckpt")
    return folder / "own.ckpt"


# -- CheckpointIO ------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* is not empty:UserWarning")  # a resumed run's is not
def test_checkpoints_of_the_trainer_are_steps_and_it_resumes_from_them(tmp_path: Path) -> None:
    from lightning.pytorch.callbacks import ModelCheckpoint

    from safepoint.manager.integrations.lightning import SafepointCheckpointIO

    from support.lightning_runs import fit

    folder = tmp_path / "checkpoints"

    def run(**choices: Any) -> Any:
        saver = ModelCheckpoint(folder, save_top_k=1, monitor="val_loss", save_last=True)
        return fit(None, callbacks=[saver], plugins=[SafepointCheckpointIO()], enable_checkpointing=True, **choices)

    whole, trainer, _ = run()
    (best,) = [path for path in folder.iterdir() if path.name != "last.ckpt"]
    assert trainer.checkpoint_callback.best_model_path == str(best)

    found = SafepointCheckpointIO().load_checkpoint(best)
    assert found["global_step"] == steps_of(best)[0]
    assert list(found["state_dict"]) == list(whole.state_dict())
    resumed, *_ = run(ckpt_path=str(best), max_epochs=4)
    assert resumed.losses[0][0] == found["global_step"]
    (loaded,) = trainer.validate(whole, trainer.val_dataloaders, ckpt_path=str(best), verbose=False)
    assert loaded["val_loss"] == pytest.approx(trainer.checkpoint_callback.best_model_score.item())

    target = {"state_dict": torch.nn.Module()}
    target["state_dict"].net = torch.nn.Sequential(*[type(whole)().net])[0]
    with CheckpointManager(best) as manager:
        manager.restore_latest(target, items=["state_dict"])
    assert torch.equal(target["state_dict"].net[0].weight, found["state_dict"]["net.0.weight"])


def test_a_checkpoint_is_replaced_read_back_and_removed(tmp_path: Path) -> None:
    from safepoint.manager.integrations.lightning import SafepointCheckpointIO

    plugin = SafepointCheckpointIO()
    path = tmp_path / "last.ckpt"
    for step in (7, 9, 9, 8):
        plugin.save_checkpoint({"global_step": step, "x": torch.full((3,), step), "optimizer": {0: [1.5]}}, path)
        found = plugin.load_checkpoint(path, weights_only=True, map_location="cpu")
        assert found["global_step"] == step
        assert found["x"].tolist() == [step] * 3
        assert found["optimizer"] == {0: [1.5]}
    with pytest.raises(UnsupportedValueError, match="hyper_parameters"):
        plugin.save_checkpoint({"global_step": 10, "hyper_parameters": {"f": print}}, path)
    assert steps_of(path) == [8]

    bare = {"layer.weight": torch.ones(2)}
    for odd in (bare, {"checkpoint": 1}, {0: "a"}):
        plugin.save_checkpoint(odd, tmp_path / "odd.ckpt")
        assert str(plugin.load_checkpoint(tmp_path / "odd.ckpt")) == str(odd)

    for _ in range(2):
        plugin.remove_checkpoint(path)
        assert [one.name for one in tmp_path.iterdir()] == ["odd.ckpt"]
    with pytest.raises(StepNotFoundError):
        plugin.load_checkpoint(path)
    (tmp_path / "mine").mkdir()
    with pytest.raises(InvalidArgumentError):
        plugin.remove_checkpoint(tmp_path / "mine")
    with pytest.raises(InvalidArgumentError, match="storage_options"):
        plugin.save_checkpoint({}, path, storage_options={})


def test_lightnings_own_checkpoint_is_read_too(tmp_path: Path) -> None:
    from safepoint.manager.integrations.lightning import SafepointCheckpointIO

    from support.lightning_runs import fit

    whole, trainer, _ = fit(None, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "own.ckpt")

    found = SafepointCheckpointIO().load_checkpoint(tmp_path / "own.ckpt")

    assert torch.equal(found["state_dict"]["net.0.weight"], whole.net[0].weight)
    assert found["global_step"] == 6
