"""`adapt`: casts, partial restores and new names, each only where it was allowed, and each reported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from safepoint.formats.errors import InvalidArgumentError
from safepoint.manager import AdaptationReport, Cast, CheckpointManager, Partial, Rename
from safepoint.manager.errors import StructureMismatchError

from support.round_trip import save_step

if TYPE_CHECKING:
    from pathlib import Path

State = dict[str, Any]


def restored(saved: State, live: State, *adapt: Any, **options: Any) -> AdaptationReport:
    step = save_step(saved)
    step.restore(live, adapt=list(adapt), **options)
    return step.report


def refused(saved: State, live: State, *adapt: Any) -> tuple[str, ...]:
    with pytest.raises(StructureMismatchError) as caught:
        restored(saved, live, *adapt)
    return caught.value.mismatches


# -- cast --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float64, torch.float16),
        (torch.float32, torch.float8_e4m3fn),
        (torch.float32, torch.complex64),
        (torch.int32, torch.float32),
        (torch.int64, torch.int8),
        (torch.bool, torch.int64),
    ],
)
def test_a_cast_gives_what_torch_gives(saved: torch.dtype, target: torch.dtype) -> None:
    value = torch.tensor([1.0, 0.0, 3.5, -2.0]).to(saved)
    live = {"a": torch.zeros(4, dtype=target)}
    report = restored({"a": value}, live, Cast())
    assert live["a"].dtype is target
    assert live["a"].tolist() == value.to(target).tolist()
    assert report == AdaptationReport(cast=(("a", str(saved)[6:], str(target)[6:]),))


@pytest.mark.parametrize(
    ("saved", "target"),
    [
        (torch.float32, torch.int32),
        (torch.complex64, torch.float32),
        (torch.int32, torch.bool),
        (torch.bits8, torch.uint8),
    ],
)
def test_a_cast_never_loses_the_kind_of_number(saved: torch.dtype, target: torch.dtype) -> None:
    value = torch.zeros(saved.itemsize, dtype=torch.uint8).view(saved)
    assert len(refused({"a": value}, {"a": torch.zeros(1, dtype=target)}, Cast())) == 1


def test_only_what_may_be_cast_is_cast_and_only_where_it_differs() -> None:
    saved = {"m": {"a": torch.ones(2), "b": torch.ones(2)}, "n": np.ones(3)}
    live = {"m": {"a": torch.zeros(2).half(), "b": torch.zeros(2)}, "n": np.zeros(3, np.float32)}
    assert refused(saved, live, Cast("m.*")) == ("n: dtype: float64 in the step, float32 in the target",)
    report = restored(saved, live, Cast("m.*", "n"))
    assert report.cast == (("m.a", "float32", "float16"), ("n", "float64", "float32"))
    assert live["n"].tolist() == [1, 1, 1]
    assert live["m"]["a"].dtype is torch.float16


def test_a_module_is_cast_in_place_and_views_are_too() -> None:
    model, live_model = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2).bfloat16()
    weight = live_model.weight
    report = restored(
        {"m": model, "row": model.weight.detach()[0]}, {"m": live_model, "row": torch.zeros(3).double()}, Cast()
    )
    assert live_model.weight is weight
    assert torch.equal(weight, model.weight.bfloat16())
    assert [path for path, _, _ in report.cast] == ["m.weight", "m.bias", "row"]


def test_texts_and_dates_are_never_cast() -> None:
    saved = {"a": np.array(["2020-01-01"], "M8[D]"), "b": np.array(["xy"])}
    live = {"a": np.zeros(1, "M8[s]"), "b": np.zeros(1, "U5")}
    assert refused(saved, live, Cast()) == (
        "a: dtype: datetime64[D] in the step, datetime64[s] in the target",
        "b: dtype: <U2 in the step, <U5 in the target",
    )


# -- partial -----------------------------------------------------------------------------------------------------------


def test_a_partial_restore_takes_what_both_have_and_reports_the_rest() -> None:
    saved = {"a": torch.ones(1), "cfg": {"x": torch.ones(1), "old": torch.ones(1)}, "gone": 3}
    live = {"a": torch.zeros(1), "cfg": {"x": torch.zeros(1), "new": torch.full((1,), 5.0)}, "here": 4}
    report = restored(saved, live, Partial())
    assert (live["a"].item(), live["cfg"]["x"].item(), live["cfg"]["new"].item(), live["here"]) == (1, 1, 5, 4)  # type: ignore[index]
    assert report == AdaptationReport(missing=("cfg.new", "here"), extra=("cfg.old", "gone"))


def test_a_partial_restore_is_partial_only_where_it_may_be() -> None:
    saved = {"a": {"x": torch.ones(1)}, "b": {"x": torch.ones(1)}}
    live = {"a": {"y": torch.zeros(1)}, "b": {"y": torch.zeros(1)}}
    problems = refused(saved, live, Partial("a.*"))
    assert [problem.partition(":")[0] for problem in problems] == ["b.y", "b.x"]


def test_a_new_head_on_an_old_body() -> None:
    body = torch.nn.Linear(3, 3)
    old = torch.nn.ModuleDict({"body": body, "head": torch.nn.Linear(3, 2)})
    new = torch.nn.ModuleDict({"body": torch.nn.Linear(3, 3), "classifier": torch.nn.Linear(3, 5)})
    before = new["classifier"].weight.clone()
    report = restored({"model": old}, {"model": new}, Partial("model.head.*", "model.classifier.*"))
    assert torch.equal(new["body"].weight, body.weight)
    assert torch.equal(new["classifier"].weight, before)
    assert report.missing == ("model.classifier.weight", "model.classifier.bias")
    assert report.extra == ("model.head.weight", "model.head.bias")


def test_an_optimizer_of_a_grown_model_keeps_what_the_step_knows() -> None:
    def trained(names: list[str], value: float) -> tuple[dict[str, torch.nn.Parameter], torch.optim.Optimizer]:
        parameters = {name: torch.nn.Parameter(torch.ones(2)) for name in names}
        optimizer = torch.optim.AdamW(list(parameters.items()), lr=value)
        for parameter in parameters.values():
            parameter.grad = torch.full((2,), value)
        optimizer.step()
        return parameters, optimizer

    old_parameters, old = trained(["a", "dropped", "b"], 0.1)
    new_parameters, new = trained(["b", "new", "a"], 0.7)
    kept = new.state[new_parameters["new"]]["exp_avg"].clone()
    assert len(refused({"o": old}, {"o": new})) == 2
    report = restored({"o": old}, {"o": new}, Partial("o.*"))
    for name in ("a", "b"):
        assert torch.equal(new.state[new_parameters[name]]["exp_avg"], old.state[old_parameters[name]]["exp_avg"])
    assert torch.equal(new.state[new_parameters["new"]]["exp_avg"], kept)
    assert new.param_groups[0]["lr"] == 0.1
    assert report == AdaptationReport(missing=("o.param_groups.0.new",), extra=("o.param_groups.0.dropped",))


# -- rename ------------------------------------------------------------------------------------------------------------


def test_names_change_by_pattern() -> None:
    old = torch.nn.ModuleDict({"encoder": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 2)})
    new = torch.nn.ModuleDict({"backbone": torch.nn.Linear(3, 3), "head": torch.nn.Linear(3, 2)})
    report = restored({"model": old}, {"model": new}, Rename({"model.encoder.*": "model.backbone.*"}))
    assert torch.equal(new["backbone"].weight, old["encoder"].weight)
    assert torch.equal(new["head"].weight, old["head"].weight)
    assert report.renamed == (
        ("model.encoder.weight", "model.backbone.weight"),
        ("model.encoder.bias", "model.backbone.bias"),
    )


@pytest.mark.parametrize("names", [{"net": "model"}, {"net.*": "model.*"}, {"n*t": "mod*l"}])
def test_an_item_changes_its_name_with_all_that_is_in_it(names: dict[str, str]) -> None:
    saved = {"net": {"x": torch.ones(1), "y": {"z": 3}}}
    live: State = {"model": {"x": torch.zeros(1), "y": {"z": 0}}}
    restored(saved, live, Rename(names))
    assert live["model"]["x"].item() == 1
    assert live["model"]["y"] == {"z": 3}


def test_a_name_inside_a_renamed_container_changes_as_well() -> None:
    live = {"model": {"outer": {"deep": {"w": torch.zeros(1)}}}}
    report = restored(
        {"model": {"inner": {"d": {"w": torch.ones(1)}}}},
        live,
        Rename({"model.inner.d": "model.outer.deep", "model.inner": "model.outer"}),
    )
    assert live["model"]["outer"]["deep"]["w"].item() == 1
    assert report.renamed == (("model.inner", "model.outer"), ("model.inner.d", "model.outer.deep"))


def test_ties_and_views_survive_a_new_name() -> None:
    weight = torch.arange(6.0)
    live = {"b": torch.zeros(6), "tied": torch.zeros(6), "part": torch.zeros(2)}
    restored({"a": weight, "tied": weight, "part": weight[2:4]}, live, Rename({"a": "b"}))
    assert torch.equal(live["b"], weight)
    assert torch.equal(live["tied"], weight)
    assert torch.equal(live["part"], weight[2:4])


def test_all_three_together_and_the_selection_goes_by_the_new_names() -> None:
    saved = {"net": {"w": torch.ones(2), "old": torch.ones(2)}, "other": torch.ones(1)}
    live = {"model": {"w": torch.zeros(2).half(), "new": torch.zeros(2)}, "other": torch.zeros(1)}
    report = restored(saved, live, Rename({"net": "model"}), Cast("model.w"), Partial("model.*"), items=["model"])
    assert live["model"]["w"].tolist() == [1, 1]  # type: ignore[index]
    assert live["other"].item() == 0  # type: ignore[union-attr]
    assert report == AdaptationReport(
        cast=(("model.w", "float32", "float16"),),
        missing=("model.new",),
        extra=("model.old",),
        renamed=(("net", "model"),),
    )


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ({"modle.*": "x.*"}, "nothing in the step matches"),
        ({"model.a": "model.b"}, "two parts"),
        ({"model.a": "other"}, "out of its container"),
        ({"model.a": "model."}, "out of its container"),
    ],
)
def test_a_rename_that_cannot_be_is_refused(names: dict[str, str], told: str) -> None:
    saved = {"model": {"a": torch.ones(1), "b": torch.ones(1)}}
    with pytest.raises(InvalidArgumentError, match=told):
        restored(saved, {"model": {"a": torch.ones(1), "b": torch.ones(1)}}, Rename(names))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rename({"a.*": "b"}),
        lambda: Rename({"": "b"}),
        lambda: Rename([("a", "b")]),  # type: ignore[arg-type]
        lambda: Rename({"a": 3}),  # type: ignore[dict-item]
        lambda: Cast(3),  # type: ignore[arg-type]
        lambda: Partial(None),  # type: ignore[arg-type]
    ],
)
def test_adaptations_that_say_nothing_are_refused(make: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        make()


def test_they_have_good_names() -> None:
    assert repr(Cast("model.*")) == "Cast('model.*')"
    assert repr(Partial()) == "Partial('*')"
    assert Cast("a") == Cast("a") != Partial("a")
    assert len({Cast("a"), Cast("a"), Partial("a")}) == 2


def test_the_manager_adapts_and_reports(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"net": torch.ones(3), "old": 3})
        live: State = {"model": torch.zeros(3).double(), "new": 4}
        with pytest.raises(StructureMismatchError):
            manager.restore_latest(live)
        result = manager.restore_latest(live, adapt=[Rename({"net": "model"}), Cast(), Partial("old", "new")])
        assert result is not None
        assert result.adapted == AdaptationReport(
            cast=(("model", "float32", "float64"),), missing=("new",), extra=("old",), renamed=(("net", "model"),)
        )
        assert live["model"].tolist() == [1, 1, 1]
        assert manager.restore(1, {"net": torch.zeros(3), "old": 0}).adapted == AdaptationReport()
        for wrong in (Cast(), [3], "cast"):
            with pytest.raises(InvalidArgumentError):
                manager.restore(1, live, adapt=wrong)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError, match="there is none"):
            manager.restore(1, adapt=[Cast()])
