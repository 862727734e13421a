"""Checkpoints that the tools of others wrote, with the versions beside them, are read for as long as we read any."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from safepoint.manager import Cast, CheckpointManager, Partial, Rename
from safepoint.manager.converting import convert
from safepoint.manager.foreign import restore_foreign

FOREIGN = Path(__file__).parent / "foreign"
_spec = importlib.util.spec_from_file_location("make_foreign_golden", Path(__file__).parent / "make_foreign_golden.py")
assert _spec is not None
assert _spec.loader is not None
made = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(made)
filled = made.filled

PATHS = {
    "torch/zip.pt": "torch",
    "torch/before-zip.pt": "torch",
    "torch/xm-save.pt": "torch",
    "lightning/trainer.ckpt": "torch",
    "xlafsdp/flattened": "xlafsdp",
    "xlafsdp/parameters": "xlafsdp",
    "xlafsdp/rows": "xlafsdp",
    "xla_manager/12": "dcp",
    "dcp/dcp": "dcp",
    "huggingface/one": "safetensors",
    "huggingface/several": "safetensors",
}


def emptied() -> torch.nn.Module:
    model = made.net()
    with torch.no_grad():
        for value in model.state_dict().values():
            value.zero_()
    return model  # type: ignore[no-any-return]


def same(model: torch.nn.Module, other: torch.nn.Module) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize("path", PATHS)
def test_each_is_read_and_becomes_a_step_of_ours(tmp_path: Path, path: str) -> None:
    read = restore_foreign(FOREIGN / path)
    assert read.kind == PATHS[path]
    convert(FOREIGN / path, tmp_path / "root")
    with CheckpointManager(tmp_path / "root") as manager:
        found = manager.restore_latest()
    assert found is not None
    assert str(found.state) == str(read.state)
    assert json.loads((FOREIGN / path.partition("/")[0] / "versions.json").read_text()).keys() == set(made.TOOLS)


@pytest.mark.parametrize("name", ["zip.pt", "before-zip.pt", "xm-save.pt"])
def test_files_of_torch_save_and_xm_save_fill_a_model(name: str) -> None:
    state: dict[str, Any] = {"model": emptied(), "epoch": 0, "half": torch.zeros(3, dtype=torch.bfloat16)}
    restore_foreign(FOREIGN / "torch" / name, state, adapt=[Partial("betas*")])
    assert same(state["model"], made.net())
    assert state["epoch"] == 3
    assert torch.equal(state["half"], filled((3,), torch.bfloat16))


def test_a_trainers_checkpoint_fills_a_model_and_an_optimizer_that_has_not_stepped() -> None:
    model = torch.nn.ModuleDict({"net": torch.nn.Linear(5, 3)})
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "global_step": 0, "hyper_parameters": {"width": 0}}
    names = Rename({"state_dict.*": "model.*", "optimizer_states.0.*": "optimizer.*"})
    restore_foreign(FOREIGN / "lightning" / "trainer.ckpt", state, adapt=[names, Partial()])
    assert torch.equal(model["net"].weight, filled((3, 5)))
    assert torch.equal(optimizer.state[model["net"].weight]["exp_avg"], filled((3, 5), start=100))
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert (state["global_step"], state["hyper_parameters"]["width"]) == (2, 3)


@pytest.mark.parametrize("kind", ["flattened", "parameters", "rows"])
@pytest.mark.parametrize("given", ["the directory", "one rank's file"])
def test_shards_of_fsdp_become_whole_parameters_under_their_own_names(kind: str, given: str) -> None:
    path = FOREIGN / "xlafsdp" / kind
    state = {"model": emptied(), "epoch": 0}
    if given != "the directory":
        path /= "checkpoint_rank-00000001-of-00000002.pth"
    restore_foreign(path, state, items=["model", "epoch"], adapt=[Cast("model.1.running_*")])
    assert same(state["model"], made.net())
    assert state["epoch"] == 3
    assert restore_foreign(path).state["rank_seed"] == {0: 100, 1: 101}


def test_a_directory_of_torch_xlas_experimental_manager_is_read() -> None:
    state: dict[str, Any] = {
        "leaves": {
            "even": torch.zeros(8, 4),
            "uneven": torch.zeros(7, 5, dtype=torch.bfloat16),
            "replicated": torch.zeros(3),
        },
        "host": torch.zeros(2, 2),
        "epoch": 0,
    }
    restore_foreign(FOREIGN / "xla_manager" / "12", state)
    for name, value in state["leaves"].items():
        assert torch.equal(value, filled(tuple(value.shape), value.dtype)), name
    assert torch.equal(state["host"], filled((2, 2)))
    assert state["epoch"] == 3


def test_a_directory_of_dcp_is_read() -> None:
    state = restore_foreign(FOREIGN / "dcp" / "dcp").state
    assert torch.equal(state["model"]["rows"], filled((5, 3)))
    assert torch.equal(state["model"]["whole"], filled((3,), torch.bfloat16))
    assert state["nested"] == [{"x": "text", "n": 5}]
    assert state["epoch"] == 3


@pytest.mark.parametrize("kind", ["one", "several"])
def test_directories_of_hugging_face_are_read(kind: str) -> None:
    found = restore_foreign(FOREIGN / "huggingface" / kind).state
    assert len(found) == 16
    for name, value in found.items():
        start = round(float(value.flatten()[0]) * 8)  # its place in the state dict; of a tied one, the last
        assert torch.equal(value, filled(tuple(value.shape), start=start)), name
