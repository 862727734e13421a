"""A real `transformers.Trainer` with `SafepointCallback`, and model items that transformers and safetensors load."""

# mypy: ignore-errors
# ruff: noqa: PLC0415 - transformers takes seconds to import: when a test needs it

from __future__ import annotations

import importlib.util
import shutil
import signal
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import CheckpointManager, KeepBest, KeepLast
from safepoint.manager.converting import convert
from safepoint.manager.errors import InvalidArgumentError, StepNotFoundError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.process_pool import ProcessPool

for package in ("transformers", "accelerate"):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed", allow_module_level=True)

if importlib.util.find_spec("torch_xla") is not None:
    pytest.skip("where torch_xla is installed, the Trainer takes its device", allow_module_level=True)

CHOICES: dict[str, dict[str, Any]] = {
    "evaluated inside epochs": {"eval_strategy": "steps", "eval_steps": 2},
    "evaluated after epochs": {"eval_strategy": "epoch"},
    "gradients accumulated": {"gradient_accumulation_steps": 2},
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Sums come out the same as in the pool's processes, which have one."""
    former = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(former)


def steps_of(root: Path) -> list[int]:
    with CheckpointManager(root) as manager:
        return [info.step for info in manager.steps()]


@pytest.mark.parametrize("choices", CHOICES.values(), ids=CHOICES)
def test_a_training_goes_on_bit_for_bit_from_inside_and_from_the_end_of_an_epoch(
    tmp_path: Path, choices: dict[str, Any]
) -> None:
    from safepoint.manager.integrations.transformers import SafepointCallback

    from support.transformers_runs import losses_of, train

    plain = train(tmp_path, None, **choices)
    whole = train(tmp_path, SafepointCallback(tmp_path / "whole", save_every=1), **choices)
    assert losses_of(whole) == losses_of(plain)
    per_epoch = whole.state.max_steps // 2

    for step in (per_epoch - 1, per_epoch):
        shutil.copytree(tmp_path / "whole", tmp_path / str(step))
        callback = SafepointCallback(tmp_path / str(step), save_every=100)
        again = train(tmp_path, callback, step=step, **choices)

        assert callback.restored.step == step
        assert losses_of(again) == losses_of(whole)
        ours, theirs = (trainer.model.state_dict().values() for trainer in (again, whole))
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_killed_training_goes_on_bit_for_bit(tmp_path: Path, process_pool: ProcessPool) -> None:
    from safepoint.manager.integrations.transformers import SafepointCallback

    from support.transformers_runs import losses_of, train

    (error,) = process_pool.start(case_killed, tmp_path, num_processes=1).outcomes(timeout_secs=110).values()
    assert "died (-9)" in str(error)
    assert steps_of(tmp_path / "run") == [3, 6]

    again = train(tmp_path, SafepointCallback(tmp_path / "run", save_every=3))
    assert losses_of(again) == losses_of(train(tmp_path, None))


def case_killed(rank: int, output: Path) -> None:
    del rank
    from safepoint.manager.integrations.transformers import SafepointCallback

    from support.transformers_runs import train

    train(output, SafepointCallback(output / "run", save_every=3), ends_at=7)


def test_a_signal_ends_the_training_after_a_step_that_is_saved(tmp_path: Path) -> None:
    from safepoint.manager.integrations.transformers import SafepointCallback

    from support.transformers_runs import losses_of, train

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        train(tmp_path, SafepointCallback(tmp_path / "run"), ends_at=2, ends_by=signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is before
    assert len(steps_of(tmp_path / "run")) == 1

    again = train(tmp_path, SafepointCallback(tmp_path / "run"))
    assert losses_of(again) == losses_of(train(tmp_path, None))


def test_steps_are_kept_by_the_metric_of_their_evaluation(tmp_path: Path) -> None:
    from safepoint.manager.integrations.transformers import SafepointCallback

    from support.transformers_runs import losses_of, train

    keep = KeepLast(1) | KeepBest(1, metric="eval_loss", order="min")
    trainer = train(tmp_path, SafepointCallback(tmp_path / "run", keep=keep), eval_strategy="steps", eval_steps=3)

    evaluated = {step: loss for step, *_, loss in losses_of(trainer) if loss is not None}
    with CheckpointManager(tmp_path / "run") as manager:
        kept = {info.step: info.metrics["eval_loss"] for info in manager.steps()}
    best = min(evaluated, key=evaluated.__getitem__)
    assert kept == {step: loss for step, loss in evaluated.items() if step in (best, max(evaluated))}


def test_what_cannot_be_is_refused_with_a_way_out(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    from safepoint.manager.integrations.transformers import SafepointCallback

    from support.transformers_runs import train

    with pytest.raises(StepNotFoundError):
        train(tmp_path, SafepointCallback(tmp_path / "run"), step=4)
    from support.transformers_runs import make_model

    arguments = TrainingArguments(str(tmp_path / "unused"), report_to=[], use_cpu=True, save_strategy="no")
    callback = SafepointCallback(tmp_path / "run")
    trainer = Trainer(make_model(), arguments, train_dataset=[{"input_ids": [1]}], callbacks=[callback])
    with pytest.raises(InvalidArgumentError, match="introduced"):
        trainer.train()
    with pytest.raises(InvalidArgumentError, match="not the Trainer's"):
        SafepointCallback(tmp_path / "run").resume(trainer)


def test_a_model_item_is_a_directory_that_transformers_and_safetensors_load_as_it_is(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import GenerationConfig, GPT2LMHeadModel

    from support.transformers_runs import CONFIG, make_model

    model = make_model(seed=5).eval()
    with CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, {"model": model})
    item = tmp_path / "run" / "7" / "model"
    ids = torch.arange(8).reshape(1, 8)
    expected = model(ids).logits

    assert torch.equal(load_file(item / "model.safetensors")["transformer.wte.weight"], model.lm_head.weight)
    loaded = GPT2LMHeadModel.from_pretrained(item, config=CONFIG, generation_config=GenerationConfig())
    assert torch.equal(loaded.eval()(ids).logits, expected)

    convert(tmp_path / "run", tmp_path / "several", format="huggingface", item="model", max_file_bytes=4096)
    names = [path.name for path in (tmp_path / "several").iterdir()]
    model.config.save_pretrained(tmp_path / "several")
    assert "model.safetensors.index.json" in names
    assert len(names) > 2
    assert torch.equal(GPT2LMHeadModel.from_pretrained(tmp_path / "several").eval()(ids).logits, expected)
