"""The manager on one process: save, restore, retention, and what it refuses."""

from __future__ import annotations

import os
import resource
import shutil
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from safepoint.manager import (
    CheckpointManager,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    RNGState,
)
from safepoint.manager.errors import (
    AsyncSaveError,
    CorruptDataError,
    InvalidArgumentError,
    NoRestorableStepError,
    RootInUseError,
    StepExistsError,
    StepNotFoundError,
    StorageError,
    StructureMismatchError,
    UnsupportedValueError,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def make_state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Linear(7, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return {
        "model": model,
        "half": torch.randn(33, 9, generator=generator).to(torch.bfloat16),
        "table": np.arange(12, dtype=np.int16).reshape(3, 4) + seed,
        "tokens": seed * 1000,
        "notes": {"name": f"run {seed}", "schedule": [0.1, seed, None]},
    }


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, first: int = 0) -> list[float]:
    losses = []
    for step in range(first, first + num_steps):
        batch = torch.randn(8, 5, generator=torch.Generator().manual_seed(step))
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def digest_of(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


def committed_files(root: Path) -> dict[str, bytes]:
    return {name: data for name, data in digest_of(root).items() if not name.startswith(".safepoint")}


def assert_equal_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    for key, value in expected["model"].state_dict().items():
        assert torch.equal(actual["model"].state_dict()[key], value), key
    assert actual["half"].dtype == torch.bfloat16
    assert torch.equal(actual["half"], expected["half"])
    assert actual["table"].dtype == expected["table"].dtype
    assert np.array_equal(actual["table"], expected["table"])
    assert actual["tokens"] == expected["tokens"]
    assert actual["notes"] == expected["notes"]


def test_restore_latest_gives_back_exactly_what_was_saved_in_place(tmp_path: Path) -> None:
    saved, target = make_state(1), make_state(2)
    memory = target["half"].data_ptr()
    with CheckpointManager(tmp_path / "run") as manager:
        result = manager.save(10, saved)
        assert (result.saved, result.mode, result.step) == (True, "consolidated", 10)
        assert result.num_bytes > 0
    with CheckpointManager(tmp_path / "run") as manager:
        restored = manager.restore_latest(target)
    assert restored is not None
    assert restored.step == 10
    assert target["half"].data_ptr() == memory
    assert_equal_state(target, saved)


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
@pytest.mark.parametrize("blocking", [True, False])
def test_every_mode_restores_blocking_or_not(tmp_path: Path, mode: Any, *, blocking: bool) -> None:
    saved, target = make_state(1), make_state(2)
    with CheckpointManager(tmp_path, mode=mode) as manager:
        assert manager.save(3, saved, blocking=blocking).mode == mode
        manager.restore(3, target)
        assert_equal_state(target, saved)


def test_without_a_target_host_tensors_and_plain_values_come_back(tmp_path: Path) -> None:
    saved = make_state(1)
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, saved)
        restored = manager.restore(0)
    assert restored.state is not None
    assert torch.equal(restored.state["half"], saved["half"])
    assert restored.state["notes"] == saved["notes"]
    assert restored.state["tokens"] == 1000
    assert torch.equal(restored.state["model"]["0.weight"], saved["model"][0].weight)


def test_nothing_committed_restores_none(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "new" / "run") as manager:
        assert manager.restore_latest({"x": torch.zeros(1)}) is None
        assert manager.latest_step() is None


def test_the_state_is_not_changed_by_a_save(tmp_path: Path) -> None:
    state = make_state(1)
    before = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state)
        manager.save(2, state, blocking=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state["model"].state_dict().items())
    assert state["tokens"] == 1000


def test_an_async_save_keeps_what_was_there_when_it_returned(tmp_path: Path) -> None:
    state: dict[str, Any] = {"x": torch.arange(300_000), "list": [1, 2], "count": 1}
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, state, blocking=False)
        state["x"].zero_()
        state["list"].append(3)
        state["count"] = 2
        manager.wait()
        restored = manager.restore(1).state
    assert restored is not None
    assert torch.equal(restored["x"], torch.arange(300_000))
    assert restored["list"] == [1, 2]
    assert restored["count"] == 1


def test_steps_sort_as_integers_by_commit(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (1, 2, 10, 900000, 1080000):
            manager.save(step, {"x": step})
        assert [info.step for info in manager.steps()] == [1, 2, 10, 900000, 1080000]
        assert manager.latest_step() == 1080000


def test_step_zero_is_a_step(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_every=5) as manager:
        assert manager.save(0, {"x": 1}).saved
        target = {"x": 0}
        restored = manager.restore_latest(target)
    assert restored is not None
    assert (restored.step, target["x"]) == (0, 1)


def test_copying_or_renaming_the_root_with_other_times_changes_nothing(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path / "a") as manager:
        for step in (5, 7, 6):
            manager.save(step, {"x": torch.full((4,), step)})
    shutil.copytree(tmp_path / "a", tmp_path / "实验 é", copy_function=shutil.copy)
    for age, step in enumerate((6, 7, 5)):
        for path in [tmp_path / "实验 é" / str(step), *(tmp_path / "实验 é" / str(step)).rglob("*")]:
            os.utime(path, (1_000_000 + age, 1_000_000 + age))
    with CheckpointManager(tmp_path / "实验 é") as manager:
        target = {"x": torch.zeros(4, dtype=torch.int64)}
        restored = manager.restore_latest(target)
    assert restored is not None
    assert restored.step == 6
    assert target["x"].tolist() == [6, 6, 6, 6]


def test_save_every_skips_locally_and_force_saves(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, save_every=10) as manager:
        skipped = manager.save(7, {"x": 1})
        assert not skipped.saved
        assert "10" in skipped.reason
        assert manager.save(7, {"x": 1}, force=True).saved
        assert manager.save(20, {"x": 1}).saved
        assert [info.step for info in manager.steps()] == [7, 20]


def test_policies_combine_and_nan_is_worst(tmp_path: Path) -> None:
    keep = KeepLast(1) | KeepEvery(10) | KeepBest(1, metric="loss", order="min")
    losses = {0: 5.0, 3: 1.0, 10: 4.0, 12: float("nan"), 13: 2.0}
    with CheckpointManager(tmp_path, keep=keep) as manager:
        for step, loss in losses.items():
            manager.save(step, {"x": step}, metrics={"loss": loss})
        assert [info.step for info in manager.steps()] == [0, 3, 10, 13]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"0", "3", "10", "13", ".safepoint"}


def test_keep_last_deletes_only_after_the_next_commit(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        manager.save(1, {"x": torch.ones(3)})
        with pytest.raises(UnsupportedValueError):
            manager.save(2, {"x": lambda: None})
        assert [info.step for info in manager.steps()] == [1]
        manager.save(3, {"x": torch.ones(3)})
        assert [info.step for info in manager.steps()] == [3]


def test_the_step_restored_from_stays_until_a_newer_commit_of_this_run(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=KeepAll()) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"x": step})
    with CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        manager.restore(1, {"x": 0})
        manager.save(4, {"x": 4})
        assert 4 in [info.step for info in manager.steps()]
        manager.save(5, {"x": 5})
        assert [info.step for info in manager.steps()] == [5]


def test_going_back_makes_the_new_branch_the_latest(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for step in (500, 600, 700):
            manager.save(step, {"x": step})
    with CheckpointManager(tmp_path) as manager:
        manager.restore(500, {"x": 0})
        manager.save(510, {"x": 510})
        assert manager.latest_step() == 510
        restored = manager.restore_latest({"x": 0})
        assert restored is not None
        assert (restored.step, restored.abandoned) == (510, (600, 700))
        manager.save(600, {"x": -600})  # of the branch that was left: replaced
        target = {"x": 0}
        manager.restore(600, target)
        assert target["x"] == -600


def test_going_back_within_one_run_replaces_its_own_later_steps(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": 1})
        manager.save(2, {"x": 2})
        manager.restore(1, {"x": 0})
        assert manager.save(2, {"x": 22}).saved
        assert not manager.save(2, {"x": 222}).saved
        target = {"x": 0}
        manager.restore_latest(target)
        assert target["x"] == 22


def test_on_exists_modes(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, {"x": 1})
        assert manager.save(5, {"x": 2}).reason
        with pytest.raises(StepExistsError) as caught:
            manager.save(5, {"x": 2}, on_exists="error")
        assert caught.value.outcome == "not_committed"
        assert manager.save(5, {"x": 3}, on_exists="replace").saved
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(StepExistsError, match="another run"):
            manager.save(5, {"x": 4})
        assert not manager.save(5, {"x": 4}, on_exists="skip").saved
        target = {"x": 0}
        manager.restore(5, target)
        assert target["x"] == 3


@pytest.mark.parametrize("step", [-1, 1.5, "7", None, True, float("nan"), 1 << 80])
def test_a_step_that_is_none_is_refused(tmp_path: Path, step: Any) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(InvalidArgumentError, match="whole number"):
            manager.save(step, {"x": 1})
        assert manager.steps() == []


def test_numpy_integers_are_steps(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        assert manager.save(np.int64(4), {"x": 1}).step == 4  # type: ignore[arg-type]


def test_a_missing_step_lists_those_that_are_there(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, {"x": 1})
        manager.save(10, {"x": 1})
        with pytest.raises(StepNotFoundError, match="5, 10") as caught:
            manager.restore(7, {"x": 0})
        assert caught.value.available == (5, 10)
        assert isinstance(caught.value, FileNotFoundError)


def test_every_mismatch_is_listed_at_once_and_nothing_changes(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"a": torch.ones(3), "b": torch.ones(2), "c": 1, "gone": 5})
        target = {"a": torch.zeros(4), "b": torch.zeros(2, dtype=torch.float16), "c": 0, "extra": 7}
        with pytest.raises(StructureMismatchError) as caught:
            manager.restore(1, target)
    text = str(caught.value)
    assert caught.value.mismatches is not None
    assert len(caught.value.mismatches) == 4
    assert all(name in text for name in ("a: ", "b: ", "gone: ", "extra: ", "[3]", "[4]", "float16"))
    assert target["c"] == 0
    assert target["b"].tolist() == [0, 0]


def test_partial_restore_by_item_and_by_pattern(tmp_path: Path) -> None:
    saved, target = make_state(1), make_state(2)
    bias = target["model"][0].bias.detach().clone()
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, saved)
        manager.restore(1, target, items=["tokens"])
        assert target["tokens"] == 1000
        assert not torch.equal(target["half"], saved["half"])
        manager.restore(1, target, keys=["model.0.weight"])
    assert torch.equal(target["model"][0].weight, saved["model"][0].weight)
    assert torch.equal(target["model"][0].bias, bias)


def test_optimizer_state_needs_no_priming_and_training_continues_bit_for_bit(tmp_path: Path) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = build()
    expected = train(model, optimizer, 10)
    model, optimizer = build()
    train(model, optimizer, 5)
    with CheckpointManager(tmp_path) as manager:
        manager.save(4, {"model": model, "optimizer": optimizer})
        model, optimizer = build()
        manager.restore_latest({"model": model, "optimizer": optimizer})
    assert train(model, optimizer, 5, first=5) == expected[5:]


def test_random_state_continues(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, {"rng": RNGState()})
        expected = torch.rand(3)
        manager.restore_latest({"rng": RNGState()})
        assert torch.equal(torch.rand(3), expected)


def test_an_unsupported_value_is_named_before_anything_is_written(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(UnsupportedValueError, match="callback") as caught:
            manager.save(1, {"model": torch.ones(2), "hooks": {"callback": lambda: None}})
        assert caught.value.outcome == "not_committed"
        assert manager.steps() == []
    assert {path.name for path in tmp_path.iterdir()} <= {".safepoint"}


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match="directory"):
        CheckpointManager(tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_junk_foreign_and_half_written_directories_are_neither_listed_nor_touched(tmp_path: Path) -> None:
    for name in ("007", "+5", "-1", "5 ", "notes", "12", "٣", "9.tmp-short", "checkpoint-100"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "keep.me").write_text(name)
    (tmp_path / "8").write_text("a file with the name of a step")
    before = digest_of(tmp_path)
    with CheckpointManager(tmp_path, keep=KeepLast(1)) as manager:
        assert manager.restore_latest({"x": 0}) is None
        manager.save(1, {"x": 1})
        manager.save(2, {"x": 2})
        assert [info.step for info in manager.steps()] == [2]
        with pytest.raises(StepExistsError):
            manager.save(12, {"x": 3})
    after = digest_of(tmp_path)
    assert {name: after.get(name) for name in before} == before


def test_debris_of_a_killed_save_is_swept_by_the_next_owner(tmp_path: Path) -> None:
    half = tmp_path / "3.tmp-0123456789abcdef"
    half.mkdir()
    (half / "shard-00000-of-00001.safetensors").write_bytes(b"half")
    (tmp_path / ".trash-fedcba9876543210").mkdir()
    with CheckpointManager(tmp_path) as manager:
        assert manager.restore_latest({"x": 0}) is None
        assert half.exists()  # reading owns nothing and sweeps nothing
        manager.save(3, {"x": 3})
    assert {path.name for path in tmp_path.iterdir()} == {"3", ".safepoint"}


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "manifest"])
def test_restore_latest_falls_back_past_a_damaged_step_and_names_it(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": torch.arange(1000)})
        manager.save(2, {"x": torch.arange(1000) + 1})
    data = tmp_path / "2" / "x" / "x.safetensors"
    content = bytearray(data.read_bytes())
    if damage == "flip":
        content[-5] ^= 1
        data.write_bytes(content)
    elif damage == "truncate":
        data.write_bytes(content[:-1])
    elif damage == "remove":
        data.unlink()
    else:
        manifest = tmp_path / "2" / "manifest.json"
        manifest.write_text(manifest.read_text().replace("int64", "int32"))
    with CheckpointManager(tmp_path) as manager:
        target = {"x": torch.zeros(1000, dtype=torch.int64)}
        restored = manager.restore_latest(target)
        assert restored is not None
        assert restored.step == 1
        assert torch.equal(target["x"], torch.arange(1000))
        assert "step 2" in restored.skipped[0]
        assert "step 2" in caplog.text
        with pytest.raises(CorruptDataError) as caught:
            manager.restore(2, {"x": torch.zeros(1000, dtype=torch.int64)})
        assert caught.value.step == 2 or "2/" in str(caught.value.path)
        assert bool(caught.value.target_modified) == (damage == "flip")


def test_committed_but_none_sound_is_an_error_and_nothing_is_deleted(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": torch.arange(10)})
    (tmp_path / "1" / "x" / "x.safetensors").unlink()
    before = committed_files(tmp_path)
    with CheckpointManager(tmp_path) as manager, pytest.raises(NoRestorableStepError, match="step 1"):
        manager.restore_latest({"x": torch.zeros(10, dtype=torch.int64)})
    assert committed_files(tmp_path) == before


def test_a_second_manager_on_the_same_root_may_read_but_not_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as first, CheckpointManager(tmp_path) as second:
        first.save(1, {"x": 1})
        target = {"x": 0}
        assert second.restore_latest(target) is not None
        assert target["x"] == 1
        with pytest.raises(RootInUseError, match=str(os.getpid())):
            second.save(2, {"x": 2})
        first.save(3, {"x": 3})
    with CheckpointManager(tmp_path) as third:
        assert third.save(4, {"x": 4}).saved


@contextmanager
def small_files_only(num_bytes: int) -> Iterator[None]:
    """Let the kernel refuse larger files, as a quota would."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_failed_save_leaves_nothing_and_the_next_one_works(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": torch.ones(10)})
        with small_files_only(100_000), pytest.raises(StorageError) as caught:
            manager.save(2, {"x": torch.ones(100_000)})
        assert caught.value.outcome == "not_committed"
        assert caught.value.step == 2
        assert {path.name for path in tmp_path.iterdir()} == {"1", ".safepoint"}
        assert manager.save(2, {"x": torch.ones(100_000)}).saved


def test_a_failed_async_save_surfaces_once_at_the_next_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(5, {"x": 1})
        with small_files_only(100_000):
            manager.save(10, {"x": torch.ones(100_000)}, blocking=False)
            manager._wait_in_flight()
        with pytest.raises(AsyncSaveError, match="step 10") as caught:
            manager.save(20, {"x": 1})
        assert caught.value.step == 10
        assert caught.value.outcome == "not_committed"
        assert isinstance(caught.value.__cause__, StorageError)
        assert [info.step for info in manager.steps()] == [5]
        assert manager.save(30, {"x": 1}).saved


def test_a_closed_manager_refuses(tmp_path: Path) -> None:
    manager = CheckpointManager(tmp_path)
    manager.close()
    manager.close()
    with pytest.raises(InvalidArgumentError, match="closed"):
        manager.save(1, {"x": 1})


@pytest.mark.parametrize(
    "options",
    [
        {"save_every": 0},
        {"mode": "both"},
        {"format": "pickle"},
        {"deadline_secs": 0},
        {"deadline_secs": float("inf")},
        {"deadline_secs": 10**400},
        {"store": 29500},
        {"keep": 3},
        {"root_scope": "mine"},
        {"root_scope": "per_process", "mode": "consolidated"},
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        CheckpointManager(tmp_path, **options)


def test_files_follow_the_umask_and_are_read_by_safetensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    before = os.umask(0o027)
    try:
        with CheckpointManager(tmp_path / "run") as manager:
            manager.save(1, {"model": model})
    finally:
        os.umask(before)
    path = tmp_path / "run" / "1" / "model" / "model.safetensors"
    assert path.stat().st_mode & 0o777 == 0o640
    loaded = load_file(path)
    assert torch.equal(loaded["weight"], model.weight)


def test_a_fallback_to_a_step_that_does_not_fit_says_that_the_target_was_written_to(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"x": torch.arange(7)})
        manager.save(2, {"x": torch.arange(1000)})
    data = tmp_path / "2" / "x" / "x.safetensors"
    content = bytearray(data.read_bytes())
    content[-5] ^= 1
    data.write_bytes(content)
    with CheckpointManager(tmp_path) as manager, pytest.raises(StructureMismatchError) as caught:
        manager.restore_latest({"x": torch.zeros(1000, dtype=torch.int64)})
    assert any("damaged" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    "metrics",
    [
        {"loss": "3"},
        {"loss": 10**400},
        {"loss": torch.zeros(2)},
        {7: 1.0},
        {"m" * (1 << 20): 1.0},
        {f"metric {number}": number / 3 for number in range(50_000)},
        ["loss"],
    ],
    ids=["text", "beyond floats", "two numbers", "no name", "long name", "many", "no mapping"],
)
def test_metrics_that_a_listing_could_not_read_are_refused_before_anything_is_written(
    tmp_path: Path, metrics: Any
) -> None:
    with CheckpointManager(tmp_path) as manager:
        with pytest.raises(InvalidArgumentError):
            manager.save(0, {"n": 1}, metrics=metrics)
        assert manager.steps() == []
        manager.save(0, {"n": 1}, metrics={f"metric {number}": number / 3 for number in range(5_000)})
        assert manager.latest_step() == 0


def test_a_loss_with_its_graph_is_a_metric(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, {"n": 1}, metrics={"loss": torch.full((), 0.5, requires_grad=True)})
        assert manager.steps()[0].metrics == {"loss": 0.5}


@pytest.mark.parametrize("root", [None, 3, b"bytes", "", "nul\0"])
def test_a_root_that_is_no_path_is_refused(root: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="root must be"):
        CheckpointManager(root)


def test_no_step_is_not_the_latest_one(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match="got None"):
                manager.restore(None, {"n": 0})  # type: ignore[arg-type]
            manager.save(0, {"n": 1})


def test_a_step_that_is_there_is_said_to_be_of_this_run_or_another(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(7, {"n": 1})
        with pytest.raises(StepExistsError, match="committed by this run") as caught:
            manager.save(7, {"n": 1}, on_exists="error")
        assert caught.value.path == str(tmp_path / "7")
    with CheckpointManager(tmp_path) as manager, pytest.raises(StepExistsError, match="committed by another run"):
        manager.save(7, {"n": 1})


def test_a_pattern_that_matches_nothing_is_named_beside_those_that_match(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(0, {"model": torch.nn.Linear(2, 2), "n": 1})
        with pytest.raises(InvalidArgumentError, match=r"matches 'modle\.\*'\n") as caught:
            manager.restore(0, {"model": torch.nn.Linear(2, 2), "n": 0}, keys=["n", "modle.*"])
        assert "'n'" not in caught.value.message
        for keys in (3, [3]):
            with pytest.raises(InvalidArgumentError, match="collection of texts"):
                manager.restore(0, keys=keys)  # type: ignore[arg-type]
