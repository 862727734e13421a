from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from safepoint.manager.errors import CorruptDataError, StructureMismatchError
from safepoint.manager.per_process import PerProcess
from safepoint.manager.rng import RNGState

from support.round_trip import save_step


def draws() -> list[Any]:
    return [
        random.random(),  # noqa: S311
        random.gauss(0, 1),
        np.random.rand(),  # noqa: NPY002  # the global generator
        np.random.standard_normal(),  # noqa: NPY002
        torch.rand(3).tolist(),
        torch.randn(1).item(),
    ]


def test_the_next_draws_are_those_that_followed_the_save() -> None:
    draws()  # leaves the second half of a gauss pair behind, in Python's and numpy's generator
    step = save_step({"rng": RNGState(), "own": PerProcess(RNGState())})
    followed = draws()
    assert draws() != followed
    step.restore({"rng": RNGState(), "own": PerProcess(RNGState())})
    assert draws() == followed


def test_telling_the_state_draws_nothing() -> None:
    step = save_step({"rng": RNGState()})
    save_step({"rng": RNGState()})
    followed = draws()
    step.restore({"rng": RNGState()})
    assert draws() == followed


def test_the_states_are_arrays_so_that_they_cost_the_manifest_little() -> None:
    step = save_step({"rng": RNGState()})
    assert len(step.structure) < 20
    assert {path[1] for path in step.data} == {"python", "numpy", "torch"}


GENERATORS: dict[str, Any] = {
    "torch": (torch.Generator, lambda g: torch.rand(3, generator=g).tolist()),
    "python": (random.Random, lambda g: [g.random(), g.gauss(0, 1)]),
    "numpy": (np.random.default_rng, lambda g: g.random(3).tolist()),
    "philox": (lambda: np.random.Generator(np.random.Philox()), lambda g: g.random(3).tolist()),
    "legacy": (np.random.RandomState, lambda g: [g.standard_normal(), g.rand()]),
    "bits": (np.random.MT19937, lambda g: g.random_raw(3).tolist()),
}


@pytest.mark.parametrize("name", GENERATORS)
def test_a_generator_goes_on(name: str) -> None:
    make, draw = GENERATORS[name]
    source, live = make(), make()
    draw(source)
    step = save_step({"g": source})
    followed = draw(source)
    step.restore({"g": live})
    assert draw(live) == followed


def test_a_generator_of_another_kind_is_a_mismatch() -> None:
    step = save_step({"g": np.random.default_rng()})
    for other in (torch.Generator(), random.Random(), np.random.Generator(np.random.Philox())):  # noqa: S311
        with pytest.raises(StructureMismatchError):
            step.restore({"g": other})


def test_a_state_that_is_none_is_corrupt() -> None:
    before = RNGState().state_dict()
    for state in ({}, {**before, "torch": torch.zeros(3)}, {**before, "python": {"words": np.zeros(1)}}):
        with pytest.raises(CorruptDataError):
            RNGState().load_state_dict(state)
