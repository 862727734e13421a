"""What is saved in a root of any kind, by one process, comes back: all of it, exactly, and in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import RNGState
from safepoint.manager.errors import InvalidArgumentError, StructureMismatchError

from support.full_state import assert_same_state, make_full_state

if TYPE_CHECKING:
    from support.roots import Root


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


def test_restore_latest_gives_back_exactly_what_was_saved_in_place(root: Root) -> None:
    saved, target = make_full_state(1), make_full_state(2)
    memory = target["half"].data_ptr()
    with root.manager() as manager:
        result = manager.save(10, saved)
        assert (result.saved, result.mode, result.step) == (True, "consolidated", 10)
        assert result.path == f"{manager.root}/10"
        assert result.num_bytes > 0
        assert manager.verify() == []
    with root.manager() as manager:
        restored = manager.restore_latest(target)
    assert restored is not None
    assert restored.step == 10
    assert target["half"].data_ptr() == memory
    assert_same_state(target, saved)
    root.check_holds(10)


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
@pytest.mark.parametrize("blocking", [True, False])
def test_every_mode_restores_blocking_or_not(root: Root, mode: Any, *, blocking: bool) -> None:
    saved, target = make_full_state(1), make_full_state(2)
    with root.manager(mode=mode) as manager:
        assert manager.save(3, saved, blocking=blocking).mode == mode
        manager.restore(3, target)
        assert_same_state(target, saved)


def test_without_a_target_host_tensors_and_plain_values_come_back(root: Root) -> None:
    saved = make_full_state(1)
    with root.manager() as manager:
        manager.save(0, saved)
        restored = manager.restore(0)
    assert restored.state is not None
    assert_same_state(restored.state, saved)


def test_nothing_committed_restores_none(root: Root) -> None:
    with root.beside("new/run").manager() as manager:
        assert manager.restore_latest({"x": torch.zeros(1)}) is None
        assert manager.latest_step() is None


def test_the_state_is_not_changed_by_a_save(root: Root) -> None:
    state = make_full_state(1)
    before = {name: tensor.clone() for name, tensor in state["model"].state_dict().items()}
    with root.manager() as manager:
        manager.save(1, state)
        manager.save(2, state, blocking=False)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state["model"].state_dict().items())
    assert state["tokens"] == 1000


def test_an_async_save_keeps_what_was_there_when_it_returned(root: Root) -> None:
    state: dict[str, Any] = {"x": torch.arange(300_000), "list": [1, 2], "count": 1}
    with root.manager() as manager:
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


def test_step_zero_is_a_step(root: Root) -> None:
    with root.manager(save_every=5) as manager:
        assert manager.save(0, {"x": 1}).saved
        target = {"x": 0}
        restored = manager.restore_latest(target)
    assert restored is not None
    assert (restored.step, target["x"]) == (0, 1)


def test_every_mismatch_is_listed_at_once_and_nothing_changes(root: Root) -> None:
    with root.manager() as manager:
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


def test_partial_restore_by_item_and_by_pattern(root: Root) -> None:
    saved, target = make_full_state(1), make_full_state(2)
    bias = target["model"][0].bias.detach().clone()
    with root.manager() as manager:
        manager.save(1, saved)
        manager.restore(1, target, items=["tokens"])
        assert target["tokens"] == 1000
        assert not torch.equal(target["half"], saved["half"])
        manager.restore(1, target, keys=["model.0.weight"])
    assert torch.equal(target["model"][0].weight, saved["model"][0].weight)
    assert torch.equal(target["model"][0].bias, bias)


def test_a_pattern_that_matches_nothing_is_named_beside_those_that_match(root: Root) -> None:
    with root.manager() as manager:
        manager.save(0, {"model": torch.nn.Linear(2, 2), "n": 1})
        with pytest.raises(InvalidArgumentError, match=r"matches 'modle\.\*'\n") as caught:
            manager.restore(0, {"model": torch.nn.Linear(2, 2), "n": 0}, keys=["n", "modle.*"])
        assert "'n'" not in caught.value.message
        for keys in (3, [3]):
            with pytest.raises(InvalidArgumentError, match="collection of texts"):
                manager.restore(0, keys=keys)  # type: ignore[arg-type]


def test_optimizer_state_needs_no_priming_and_training_continues_bit_for_bit(root: Root) -> None:
    def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = build()
    expected = train(model, optimizer, 10)
    model, optimizer = build()
    train(model, optimizer, 5)
    with root.manager() as manager:
        manager.save(4, {"model": model, "optimizer": optimizer})
        model, optimizer = build()
        manager.restore_latest({"model": model, "optimizer": optimizer})
    assert train(model, optimizer, 5, first=5) == expected[5:]


def test_random_state_continues(root: Root) -> None:
    with root.manager() as manager:
        manager.save(0, {"rng": RNGState()})
        expected = torch.rand(3)
        manager.restore_latest({"rng": RNGState()})
        assert torch.equal(torch.rand(3), expected)


def test_a_loss_with_its_graph_is_a_metric(root: Root) -> None:
    with root.manager() as manager:
        manager.save(0, {"n": 1}, metrics={"loss": torch.full((), 0.5, requires_grad=True)})
        assert manager.steps()[0].metrics == {"loss": 0.5}
