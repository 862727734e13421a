"""Files of torch.save with objects of somebody's in them: refused where the objects are wanted, and read where not."""

from __future__ import annotations

import collections
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import Partial, Rename, convert, restore_foreign
from safepoint.manager.errors import StructureMismatchError, UnsupportedValueError

if TYPE_CHECKING:
    from pathlib import Path

TRACE: list[str] = []


class Config:
    """As people put one among their hyper-parameters."""

    def __init__(self) -> None:
        self.width = 5

    def __setstate__(self, state: Any) -> None:
        TRACE.append("made")


class Many(dict[str, int]):
    """With items that a pickle sets one after another."""


class Grown(list[int]):
    """The same for a list."""


def module() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3))


@pytest.fixture
def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = module()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture
def path(tmp_path: Path, trained: tuple[torch.nn.Module, torch.optim.Optimizer]) -> Path:
    model, optimizer = trained
    base = torch.arange(24.0).reshape(4, 6)
    content = {
        "state_dict": model.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "views": {"turned": base.T, "part": base[1:3, 2:5], "row": base[2], "half": base.bfloat16()},
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "plain": {"n": 2**70, "z": 1 + 2j, "raw": b"\xff\x00", "size": torch.Size([2, 3]), "set": {1, 2}, "none": None},
        "hyper_parameters": {
            "sizes": [1, 2],
            "config": Config(),
            "many": Many(a=1, b=2),
            "grown": Grown([1, 2]),
            "counts": collections.Counter("aab"),
            "kind": Config,
            "folder": PurePosixPath("x"),
        },
    }
    torch.save(content, tmp_path / "trainer.ckpt")
    TRACE.clear()
    return tmp_path / "trainer.ckpt"


def test_the_first_object_is_named_where_all_is_asked_for(path: Path, tmp_path: Path) -> None:
    for take_all in (restore_foreign, lambda path: convert(path, tmp_path / "root")):
        with pytest.raises(UnsupportedValueError, match=r"Config, and \d more objects") as caught:
            take_all(path)
        assert caught.value.leaf == "hyper_parameters.config"
        assert caught.value.path == str(path)
    assert TRACE == []


def test_what_is_no_object_is_restored_and_the_objects_are_left_out_by_name(
    path: Path, trained: tuple[torch.nn.Module, torch.optim.Optimizer]
) -> None:
    model = module()
    optimizer = torch.optim.AdamW(model.parameters())
    views = {"turned": torch.zeros(6, 4), "part": torch.zeros(2, 3), "row": torch.zeros(6)}
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "views": {**views, "half": torch.zeros(4, 6, dtype=torch.bfloat16)},
        "parameter": torch.zeros(2),
        "plain": {"n": 0, "z": 0j, "raw": b"", "set": {3}, "none": 1},
    }
    names = Rename({"state_dict.*": "model.*", "optimizer_states.0.*": "optimizer.*"})
    with pytest.raises(StructureMismatchError, match=r"hyper_parameters\.config") as caught:
        restore_foreign(path, state, adapt=[names, Partial("plain.size*")])
    assert caught.value.path == str(path)
    restore_foreign(path, state, adapt=[names, Partial("plain.size*", "hyper_parameters*")])
    for name, value in trained[0].state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name
    assert str(optimizer.state_dict()) == str(trained[1].state_dict())
    base = torch.arange(24.0).reshape(4, 6)
    assert torch.equal(state["views"]["turned"], base.T)
    assert torch.equal(state["views"]["part"], base[1:3, 2:5])
    assert torch.equal(state["views"]["row"], base[2])
    assert torch.equal(state["views"]["half"], base.bfloat16())
    assert torch.equal(state["parameter"], torch.ones(2))
    assert state["plain"] == {"n": 2**70, "z": 1 + 2j, "raw": b"\xff\x00", "set": {1, 2}, "none": None}
    assert TRACE == []


def test_an_object_that_the_target_wants_is_refused(path: Path) -> None:
    state = {"hyper_parameters": {"config": 5}}
    with pytest.raises(UnsupportedValueError, match="Config") as caught:
        restore_foreign(path, state, adapt=[Partial()])
    assert caught.value.leaf == "hyper_parameters.config"
    assert state == {"hyper_parameters": {"config": 5}}
