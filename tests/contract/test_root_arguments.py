"""What a manager refuses by name, on a root of any kind, before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from safepoint.manager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from support.roots import Root


@pytest.mark.parametrize("step", [-1, 1.5, "7", None, True, float("nan"), 1 << 80])
def test_a_step_that_is_none_is_refused(root: Root, step: Any) -> None:
    with root.manager() as manager:
        with pytest.raises(InvalidArgumentError, match="whole number"):
            manager.save(step, {"x": 1})
        assert manager.steps() == []


def test_no_step_is_not_the_latest_one(root: Root) -> None:
    with root.manager() as manager:
        for _ in range(2):
            with pytest.raises(InvalidArgumentError, match="got None"):
                manager.restore(None, {"n": 0})  # type: ignore[arg-type]
            manager.save(0, {"n": 1})


def test_numpy_integers_are_steps(root: Root) -> None:
    with root.manager() as manager:
        assert manager.save(np.int64(4), {"x": 1}).step == 4  # type: ignore[arg-type]


def test_a_closed_manager_refuses(root: Root) -> None:
    manager = root.manager()
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
def test_options_that_make_no_sense_are_refused(root: Root, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError):
        root.manager(**options)
    root.check_holds()


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
def test_metrics_that_a_listing_could_not_read_are_refused_before_anything_is_written(root: Root, metrics: Any) -> None:
    with root.manager() as manager:
        with pytest.raises(InvalidArgumentError):
            manager.save(0, {"n": 1}, metrics=metrics)
        assert manager.steps() == []


def test_thousands_of_metrics_can_be_listed(root: Root) -> None:
    with root.manager() as manager:
        manager.save(0, {"n": 1}, metrics={f"metric {number}": number / 3 for number in range(5_000)})
        assert len(manager.steps()[0].metrics) == 5_000
