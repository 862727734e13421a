"""Which steps are saved and kept: promises of safepoint.manager.policies."""

from __future__ import annotations

import math

import pytest

from safepoint.formats.errors import InvalidArgumentError
from safepoint.manager.policies import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    Policy,
    StepInfo,
    Union,
    decide_existing,
    is_due,
    steps_to_delete,
)


def committed(*steps: int, losses: dict[int, float] | None = None) -> list[StepInfo]:
    """Steps in the order of their commits."""
    return [
        StepInfo(
            step, sequence, f"{sequence:016x}", {} if losses is None or step not in losses else {"loss": losses[step]}
        )
        for sequence, step in enumerate(steps, start=1)
    ]


def deleted(steps: list[StepInfo], policy: Policy, *protected: str) -> list[int]:
    return [info.step for info in steps_to_delete(steps, policy, protected=protected)]


def test_keep_last_goes_by_the_order_of_commits_and_not_by_number() -> None:
    steps = committed(500, 600, 700, 510)
    assert set(KeepLast(2).keep(steps)) == {700, 510}
    assert set(KeepLast(2).keep(steps[::-1])) == {700, 510}


def test_steps_of_an_abandoned_branch_age_out_first() -> None:
    assert deleted(committed(500, 600, 700, 510, 520), KeepLast(3)) == [500, 600]


def test_keep_every_keeps_multiples_and_step_0_for_good() -> None:
    assert set(KeepEvery(100).keep(committed(0, 50, 100, 150, 200))) == {0, 100, 200}


def test_keep_best_orders_by_metric_and_takes_the_newer_of_equals() -> None:
    steps = committed(1, 2, 3, 4, losses={1: 0.5, 2: 0.1, 3: 0.5, 4: 0.9})
    assert set(KeepBest(2, metric="loss", order="min").keep(steps)) == {2, 3}
    assert set(KeepBest(1, metric="loss", order="max").keep(steps)) == {4}


@pytest.mark.parametrize("order", ["min", "max"])
def test_nan_is_worse_than_any_number_and_a_missing_metric_worse_still(order: str) -> None:
    worst = -math.inf if order == "max" else math.inf
    steps = committed(1, 2, 3, losses={1: worst, 2: math.nan})
    for n, kept in ((1, {1}), (2, {1, 2}), (3, {1, 2, 3})):
        assert set(KeepBest(n, metric="loss", order=order).keep(steps)) == kept  # type: ignore[arg-type]


def test_policies_combine_and_give_all_reasons() -> None:
    policy = KeepLast(1) | KeepEvery(10) | KeepBest(1, metric="loss", order="min")
    kept = policy.keep(committed(10, 11, 12, losses={10: 3.0, 11: 1.0, 12: 2.0}))
    assert kept == {12: "last 1", 10: "every 10", 11: "best 1 by loss"}
    assert (KeepLast(1) | KeepAll()).keep(committed(7)) == {7: "last 1; all"}


def test_unions_are_flat_and_print_as_they_are_written() -> None:
    text = "KeepLast(3) | KeepEvery(10000) | KeepBest(2, metric='val_loss', order='min')"
    policy = KeepLast(3) | (KeepEvery(10_000) | KeepBest(2, metric="val_loss", order="min"))
    assert isinstance(policy, Union)
    assert len(policy.policies) == 3
    assert repr(policy) == text
    assert repr(KeepAll()) == "KeepAll()"


def test_a_policy_combines_with_nothing_else() -> None:
    with pytest.raises(TypeError):
        KeepLast(1) | 3  # type: ignore[operator]


@pytest.mark.parametrize("n", [0, -1, 1.0, True, "3", None])
def test_counts_that_make_no_sense_are_refused_by_name(n: object) -> None:
    for make in (KeepLast, KeepEvery, lambda n: KeepBest(n, metric="loss", order="min")):
        with pytest.raises(InvalidArgumentError, match="whole number above 0"):
            make(n)  # type: ignore[arg-type]


def test_keep_best_refuses_another_order_and_no_metric() -> None:
    with pytest.raises(InvalidArgumentError, match="order"):
        KeepBest(1, metric="loss", order="lowest")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="metric"):
        KeepBest(1, metric="", order="min")


def test_protected_attempts_stay_whatever_the_policy_says() -> None:
    steps = committed(1, 2, 3, 4)
    assert deleted(steps, KeepLast(1)) == [1, 2, 3]
    assert deleted(steps, KeepLast(1), steps[1].attempt) == [1, 3]


def test_the_latest_step_is_never_deleted() -> None:
    steps = committed(1, 2, 3, losses={1: 0.1, 2: 0.2, 3: math.nan})
    assert deleted(steps, KeepBest(1, metric="loss", order="min")) == [2]
    assert deleted([], KeepLast(1)) == []


def test_last_best_and_pinned_survive_a_worsening_run() -> None:
    losses = {step: float(step) for step in range(10)} | {9: math.nan}
    steps = committed(*range(10), losses=losses)
    policy = KeepLast(2) | KeepBest(2, metric="loss", order="min")
    assert deleted(steps, policy, steps[5].attempt) == [2, 3, 4, 6, 7]


@pytest.mark.parametrize(
    ("on_exists", "run", "restored", "answer"),
    [
        ("auto", "ours", None, "skip"),
        ("auto", "ours", (50, 3), "skip"),
        ("auto", "theirs", None, "error"),
        ("auto", "theirs", (100, 5), "error"),  # the very step that we were restored from
        ("auto", "theirs", (200, 9), "error"),  # before it, by number and by commit
        ("auto", "theirs", (90, 4), "replace"),  # committed after it: a branch that our restore left
        ("auto", "theirs", (150, 4), "replace"),  # so is this, though its number is lower
        ("auto", "theirs", (51, 8), "replace"),  # left by an earlier restore, and we were restored from the new branch
        ("error", "ours", (50, 3), "error"),
        ("skip", "theirs", (50, 3), "skip"),
        ("replace", "theirs", None, "replace"),
    ],
)
def test_what_happens_to_a_step_that_is_there(
    on_exists: str, run: str, restored: tuple[int, int] | None, answer: str
) -> None:
    existing = StepInfo(100, 5, "a" * 16, run=run)
    source = None if restored is None else StepInfo(*restored, "b" * 16)
    assert decide_existing(on_exists, existing, run="ours", restored=source) == answer  # type: ignore[arg-type]


def test_an_unknown_on_exists_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="on_exists"):
        decide_existing("overwrite", StepInfo(1, 1, "a"), run="r", restored=None)  # type: ignore[arg-type]


def test_multiples_are_due_and_force_saves_the_rest() -> None:
    assert [step for step in range(10) if is_due(step, 4, force=False)] == [0, 4, 8]
    assert is_due(3, 4, force=True)
