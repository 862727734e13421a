"""A state with a part of each common kind, known from one number."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["assert_same_state", "make_full_state"]


def make_full_state(seed: int) -> dict[str, Any]:
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


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Check a restored state; without a target, its model is what `state_dict` gave."""
    model = actual["model"]
    values = model.state_dict() if isinstance(model, torch.nn.Module) else model
    for key, value in expected["model"].state_dict().items():
        assert torch.equal(values[key], value), key
    assert actual["half"].dtype == torch.bfloat16
    assert torch.equal(actual["half"], expected["half"])
    assert actual["table"].dtype == expected["table"].dtype
    assert np.array_equal(actual["table"], expected["table"])
    assert actual["tokens"] == expected["tokens"]
    assert actual["notes"] == expected["notes"]
