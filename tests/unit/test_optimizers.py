from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from safepoint.manager.errors import StructureMismatchError

from support.round_trip import save_step

Make = Callable[[torch.nn.Module], torch.optim.Optimizer]


class Net(torch.nn.Module):
    """Has a parameter that never gets a gradient."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.first = torch.nn.Linear(4, 6, dtype=dtype)
        self.unused = torch.nn.Parameter(torch.zeros(3, dtype=dtype))
        self.last = torch.nn.Linear(6, 1, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).relu())
        return out


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net(dtype)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range, scheduler: Any = None) -> list[float]:
    losses = []
    for n in steps:
        dtype = next(model.parameters()).dtype
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(n)).to(dtype)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(x).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        losses.append(float(optimizer.step(closure).detach()))  # type: ignore[arg-type,attr-defined]
        if isinstance(scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau):
            scheduler.step(1.0)
        elif scheduler is not None:
            scheduler.step()
    return losses


def two_groups(model: Any) -> list[dict[str, Any]]:
    return [
        {"params": [model.first.weight, model.unused], "lr": 0.01, "name": "wide"},
        {"params": [*model.last.parameters(), model.first.bias], "weight_decay": 0.0},
    ]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True),
    "tensor lr": lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)),
    "groups": lambda m: torch.optim.AdamW(two_groups(m), lr=0.02),
    "named": lambda m: torch.optim.AdamW(m.named_parameters(), lr=0.02),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
    "momentum": lambda m: torch.optim.SGD(m.parameters(), lr=0.01, momentum=0.9, nesterov=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters()),
    "adafactor": lambda m: torch.optim.Adafactor(m.parameters()),
    "rmsprop": lambda m: torch.optim.RMSprop(m.parameters(), momentum=0.5, centered=True),
    "rprop": lambda m: torch.optim.Rprop(m.parameters()),
    "asgd": lambda m: torch.optim.ASGD(m.parameters()),
    "nadam": lambda m: torch.optim.NAdam(m.parameters()),
    "radam": lambda m: torch.optim.RAdam(m.parameters()),
    "adamax": lambda m: torch.optim.Adamax(m.parameters()),
    "adadelta": lambda m: torch.optim.Adadelta(m.parameters()),
    "lbfgs": lambda m: torch.optim.LBFGS(m.parameters(), max_iter=3, history_size=4),
}


def equal_state(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    def parts(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return (value.dtype, value.device, value.reshape(-1).view(torch.uint8).tolist())
        if isinstance(value, dict):
            return [(key, parts(child)) for key, child in value.items()]
        if isinstance(value, (list, tuple)):
            return [type(value), *map(parts, value)]
        return (type(value), value)

    return bool(parts(one.state_dict()) == parts(other.state_dict()))


@pytest.mark.parametrize("primed", [False, True], ids=["fresh", "primed"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_training_goes_on_as_if_it_had_not_stopped(make: Make, *, primed: bool) -> None:
    model = net()
    optimizer = make(model)
    train(model, optimizer, range(3))
    step = save_step({"model": model, "optimizer": optimizer})
    saved = copy.deepcopy(optimizer.state_dict())
    live_model = net(1)
    live = make(live_model)
    if primed:
        train(live_model, live, range(20, 22))
    step.restore({"model": live_model, "optimizer": live})
    assert equal_state(live, optimizer)
    assert train(live_model, live, range(3, 8)) == train(model, optimizer, range(3, 8))
    assert equal_state(live, optimizer)
    make(net()).load_state_dict(step.without_target()["optimizer"])
    assert list(saved["state"]) == list(step.without_target()["optimizer"]["state"])


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_state_keeps_its_dtype_where_torch_would_cast_it(*, hooked: bool) -> None:
    model = net(dtype=torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(2))
    for state in optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].float() + 1e-7
    live_model = net(1, torch.bfloat16)
    live = torch.optim.AdamW(live_model.parameters(), lr=0.01)
    seen: list[Any] = []
    if hooked:
        live.register_load_state_dict_pre_hook(lambda _, state: seen.append(len(state["state"])))
    save_step({"model": model, "optimizer": optimizer}).restore({"model": live_model, "optimizer": live})
    assert equal_state(live, optimizer)
    assert live.state[live_model.first.weight]["exp_avg"].dtype is torch.float32
    assert seen == ([4] if hooked else [])


def test_hyper_parameters_come_from_the_step() -> None:
    model = net()
    optimizer = torch.optim.AdamW(two_groups(model), lr=0.5, betas=(0.1, 0.2))
    live_model = net()
    live = torch.optim.AdamW(two_groups(live_model), lr=0.7, betas=(0.3, 0.4))
    live.param_groups[0]["mine"] = "kept"
    save_step({"o": optimizer}).restore({"o": live})
    assert [group["lr"] for group in live.param_groups] == [0.01, 0.5]
    assert live.param_groups[1]["betas"] == (0.1, 0.2)
    assert live.param_groups[0]["name"] == "wide"
    assert live.param_groups[0]["mine"] == "kept"
    assert live.param_groups[0]["params"][0] is live_model.first.weight


def test_reordered_parameters_are_matched_by_name() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.01)
    train(model, optimizer, range(2))
    live_model = net(1)
    live = torch.optim.AdamW(reversed(list(live_model.named_parameters())), lr=0.01)
    save_step({"model": model, "optimizer": optimizer}).restore({"model": live_model, "optimizer": live})
    assert live.param_groups[0]["param_names"][0] == "last.bias"
    for (name, parameter), other in zip(model.named_parameters(), live_model.parameters(), strict=True):
        for key, value in optimizer.state[parameter].items():
            assert torch.equal(live.state[other][key], value), (name, key)
    assert train(live_model, live, range(2, 5)) == train(model, optimizer, range(2, 5))


def test_a_primed_optimizer_is_filled_in_the_memory_that_it_has() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(2))
    step = save_step({"o": optimizer})
    where = optimizer.state[model.first.weight]["exp_avg"].data_ptr()
    train(model, optimizer, range(2, 4))
    step.restore({"o": optimizer})
    assert optimizer.state[model.first.weight]["exp_avg"].data_ptr() == where
    assert float(optimizer.state[model.first.weight]["step"]) == 2


def test_state_that_the_step_has_not_is_gone_after_the_restore() -> None:
    model = net()
    fresh = torch.optim.AdamW(model.parameters())
    step = save_step({"o": fresh})
    train(model, fresh, range(1))
    step.restore({"o": fresh})
    assert fresh.state_dict()["state"] == {}


def broken(message: str, optimizer: torch.optim.Optimizer, live: torch.optim.Optimizer) -> None:
    before = copy.deepcopy(live.state_dict())
    with pytest.raises(StructureMismatchError, match=message):
        save_step({"o": optimizer}).restore({"o": live})
    assert str(before) == str(live.state_dict())


def test_another_optimizer_or_model_is_refused() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    broken("state of a torch.optim.adamw.AdamW", optimizer, torch.optim.SGD(model.parameters()))
    broken("1 parameter groups in the step, 2", optimizer, torch.optim.AdamW(two_groups(model)))
    broken("5 parameters in the step, 2", optimizer, torch.optim.AdamW(model.first.parameters()))
    other = Net()
    other.first = torch.nn.Linear(4, 7)
    broken(r"shape: \[6, 4\] in the step, \[7, 4\]", optimizer, torch.optim.AdamW(other.parameters()))
    named, renamed = (torch.optim.AdamW([(name, torch.nn.Parameter(torch.zeros(1)))]) for name in "ab")
    broken(r"'b' of the target is missing from the step\n.*'a' of the step is not", named, renamed)


def test_partial_state_of_a_parameter_is_refused() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, range(1))
    live = copy.deepcopy(optimizer)
    del optimizer.state[model.first.weight]["exp_avg_sq"]
    broken(r"o\.state\.1\.exp_avg_sq: missing from the step", optimizer, live)


def test_selected_state_is_filled_and_the_rest_is_left() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    train(model, optimizer, range(1))
    live_model = net(1)
    live = torch.optim.AdamW(reversed(list(live_model.named_parameters())), lr=0.2)
    train(live_model, live, range(1))
    before = live.state[live_model.first.weight]["exp_avg_sq"].clone()
    step = save_step({"o": optimizer})
    step.restore({"o": live}, keys=["o.state.*.exp_avg"])
    state = live.state[live_model.first.weight]
    assert torch.equal(state["exp_avg"], optimizer.state[model.first.weight]["exp_avg"])
    assert torch.equal(state["exp_avg_sq"], before)
    assert live.param_groups[0]["lr"] == 0.2
    with pytest.raises(StructureMismatchError, match="no tensor there to fill"):
        step.restore({"o": torch.optim.AdamW(net().parameters())}, keys=["o.state.*.exp_avg"])


def test_capturable_and_host_step_counts_stay_where_torch_keeps_them() -> None:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, range(1))
    live = torch.optim.AdamW(net().parameters())
    save_step({"o": optimizer}).restore({"o": live})
    state = next(iter(live.state.values()))
    assert (state["step"].device.type, state["step"].dtype, state["step"].shape) == ("cpu", torch.float32, ())


LambdaLR = torch.optim.lr_scheduler.LambdaLR
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda o: LambdaLR(o, lambda n: 0.9**n),
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "restarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "steps": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4, 4]),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=30),
    "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.LinearLR(o, 0.1), LambdaLR(o, lambda n: 0.5**n)], milestones=[4]
    ),
    "chained": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ExponentialLR(o, 0.9), torch.optim.lr_scheduler.ConstantLR(o)]
    ),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("order", [1, -1], ids=["optimizer first", "scheduler first"])
def test_the_learning_rates_go_on(make: Callable[[torch.optim.Optimizer], Any], order: int) -> None:
    def parts(seed: int) -> tuple[Any, Any, Any]:
        model = net(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, optimizer, make(optimizer)

    def rates(model: Any, optimizer: Any, scheduler: Any) -> list[Any]:
        return [
            (optimizer.param_groups[0]["lr"], train(model, optimizer, range(n, n + 1), scheduler)) for n in range(3, 9)
        ]

    source, live = parts(0), parts(1)
    train(*source[:2], range(3), source[2])
    step = save_step(dict(zip(("model", "optimizer", "scheduler"), source, strict=True)))
    names = ("model", "optimizer", "scheduler")[::order]
    step.restore(dict(zip(names, live[::order], strict=True)))
    assert rates(*live) == rates(*source)


def test_another_scheduler_is_refused() -> None:
    optimizer = torch.optim.SGD(net().parameters(), lr=0.1)
    step = save_step({"s": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)})
    with pytest.raises(StructureMismatchError, match="ExponentialLR"):
        step.restore({"s": torch.optim.lr_scheduler.StepLR(optimizer, 2)})


def test_a_gradient_scaler_goes_on() -> None:
    source, live = (torch.amp.GradScaler("cpu", init_scale=scale) for scale in (8.0, 2.0))
    for scaler in (source, live):
        scaler.scale(torch.zeros(1))  # makes the tensors that the scale lives in
    source.update(16.0)
    save_step({"s": source}).restore({"s": live})
    assert live.state_dict() == source.state_dict()
    off = torch.amp.GradScaler("cpu", enabled=False)
    save_step({"s": off}).restore({"s": off})
