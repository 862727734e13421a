"""What a manager refuses by name, on a root of any kind, before anything is written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from safepoint.manager.errors import InvalidArgumentError

if TYPE_CHECKING:
    from support.roots import Root


def test_a_step_that_is_none_is_refused(root: Root) -> None:
    steps: list[Any] = [-1, 1.5, "7", None, True, float("nan"), 1 << 80]
    with root.manager() as manager:
        for step in steps:
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


def test_options_that_make_no_sense_are_refused(root: Root) -> None:
    refused: list[dict[str, Any]] = [
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
    ]
    for options in refused:
        with pytest.raises(InvalidArgumentError):
            root.manager(**options)
    root.check_holds()


def test_metrics_that_a_listing_could_not_read_are_refused_before_anything_is_written(root: Root) -> None:
    refused: dict[str, Any] = {
        "text": {"loss": "3"},
        "beyond floats": {"loss": 10**400},
        "two numbers": {"loss": torch.zeros(2)},
        "no name": {7: 1.0},
        "long name": {"m" * (1 << 20): 1.0},
        "many": {f"metric {number}": number / 3 for number in range(50_000)},
        "no mapping": ["loss"],
    }
    with root.manager() as manager:
        for metrics in refused.values():
            with pytest.raises(InvalidArgumentError):
                manager.save(0, {"n": 1}, metrics=metrics)
        assert manager.steps() == []
    root.check_holds()


def test_thousands_of_metrics_can_be_listed(root: Root) -> None:
    with root.manager() as manager:
        manager.save(0, {"n": 1}, metrics={f"metric {number}": number / 3 for number in range(5_000)})
        assert len(manager.steps()[0].metrics) == 5_000
