"""Restoring what torch.save, torch.distributed.checkpoint, safetensors and Hugging Face's layout hold."""

from __future__ import annotations

import json
import os
import pickle  # noqa: TID251 - makes the files that must be refused
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp  # noqa: TID251 - the peer
from safetensors.torch import save_file

from safepoint.formats.foreign.dcp_metadata import read_metadata
from safepoint.manager import Cast, Partial, Rename
from safepoint.manager.errors import CheckpointError, CorruptDataError, UnsupportedValueError
from safepoint.manager.foreign import restore_foreign

from support.sharded_states import LEAVES, check_state, expected, make_state

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import ProcessPool

pytestmark = [  # the peer's own
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


class Evil:
    """Leaves a trace if its pickle is run."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    return model, optimizer


# -- torch.save ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("new_format", [True, False], ids=["zip", "before zip"])
def test_files_of_torch_save_fill_a_model_and_an_optimizer_that_has_not_stepped(
    tmp_path: Path,
    new_format: bool,  # noqa: FBT001 - a parameter
) -> None:
    model, optimizer = trained()
    saved = {"state_dict": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "betas": (1, 2)}
    torch.save(saved, tmp_path / "x.ckpt", _use_new_zipfile_serialization=new_format)
    other = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
    other_optimizer = torch.optim.AdamW(other.parameters())
    state = {"model": other, "optimizer": other_optimizer, "epoch": 0}
    result = restore_foreign(tmp_path / "x.ckpt", state, adapt=[Rename({"state_dict.*": "model.*"}), Partial("betas*")])
    assert result.kind == "torch"
    assert state["epoch"] == 3
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), other.state_dict().values(), strict=True))
    assert str(optimizer.state_dict()) == str(other_optimizer.state_dict())


def test_dtypes_change_only_where_that_is_asked_for(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(4.0)}, tmp_path / "x.pt")
    state = {"w": torch.zeros(4, dtype=torch.bfloat16)}
    with pytest.raises(CheckpointError, match="float32"):
        restore_foreign(tmp_path / "x.pt", state)
    assert restore_foreign(tmp_path / "x.pt", state, adapt=[Cast()]).adapted.cast == (("w", "float32", "bfloat16"),)
    assert torch.equal(state["w"], torch.arange(4).to(torch.bfloat16))


def test_a_pickle_that_is_more_than_tensors_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(1), "x": Evil(tmp_path / "trace")}, tmp_path / "x.pt")
    with pytest.raises(UnsupportedValueError, match="more than tensors"):
        restore_foreign(tmp_path / "x.pt")
    assert not (tmp_path / "trace").exists()


@pytest.mark.parametrize("keep", [4, 100, -1, -100])
def test_a_file_that_is_cut_short_is_a_typed_error(tmp_path: Path, keep: int) -> None:
    torch.save({"w": torch.ones(1000)}, tmp_path / "x.pt")
    data = (tmp_path / "x.pt").read_bytes()
    (tmp_path / "x.pt").write_bytes(data[:keep])
    with pytest.raises(CheckpointError):
        restore_foreign(tmp_path / "x.pt")


# -- torch.distributed.checkpoint ------------------------------------------------------------------------------------


def dcp_save_case(_rank: int, path: str, mesh: tuple[int, ...]) -> None:
    state = make_state(mesh)
    dcp.save({"leaves": state["leaves"], "step_count": 17, "nested": [{"x": "text"}]}, checkpoint_id=path)


def dcp_restore_case(_rank: int, path: str, mesh: tuple[int, ...]) -> None:
    state = make_state(mesh, zeros=True)
    restore_foreign(path, state, adapt=[Partial("nested*", "plain")])
    check_state(state)
    assert state["step_count"] == 17


@pytest.mark.parametrize(("saved", "restored"), [(4, 1), (4, 3), (2, 4)])
def test_what_dcp_saved_on_some_processes_is_restored_on_others(
    process_pool: ProcessPool, tmp_path: Path, saved: int, restored: int
) -> None:
    meshes = {1: (1,), 2: (2,), 3: (3,), 4: (2, 2)}
    process_pool.run(dcp_save_case, str(tmp_path), meshes[saved], num_processes=saved)
    process_pool.run(dcp_restore_case, str(tmp_path), meshes[restored], num_processes=restored)
    state = restore_foreign(tmp_path).state
    assert state["nested"] == [{"x": "text"}]
    for name in LEAVES:
        assert torch.equal(state["leaves"][name], expected(name)), name


def dcp_directory(path: Path) -> Path:
    dcp.save({"w": torch.arange(1000.0), "n": 5}, checkpoint_id=str(path), no_dist=True)
    return path


def test_metadata_that_name_anything_else_are_refused_and_not_run(tmp_path: Path) -> None:
    path = dcp_directory(tmp_path / "x")
    (path / ".metadata").write_bytes(pickle.dumps({"a": Evil(tmp_path / "trace")}))
    with pytest.raises(UnsupportedValueError, match=r"(posix|nt|os)\.mkdir"):
        restore_foreign(path)
    assert not (tmp_path / "trace").exists()


def test_every_cut_of_the_metadata_is_a_typed_error(tmp_path: Path) -> None:
    data = (dcp_directory(tmp_path / "x") / ".metadata").read_bytes()
    for keep in range(0, len(data), 7):
        with pytest.raises((CorruptDataError, UnsupportedValueError)):
            read_metadata(data[:keep], path="x")
    for position in range(0, len(data), 5):
        changed = bytearray(data)
        changed[position] ^= 0x15
        try:
            read_metadata(bytes(changed), path="x")
        except CheckpointError:
            continue


def test_missing_and_short_files_of_dcp_are_named(tmp_path: Path) -> None:
    path = dcp_directory(tmp_path / "x")
    (file,) = path.glob("*.distcp")
    data = file.read_bytes()
    file.write_bytes(data[:-10])
    with pytest.raises(CorruptDataError, match="cut short"):
        restore_foreign(path)
    file.unlink()
    with pytest.raises(CorruptDataError, match="missing"):
        restore_foreign(path)


def test_files_outside_the_directory_are_refused(tmp_path: Path) -> None:
    path = dcp_directory(tmp_path / "x")
    data = (path / ".metadata").read_bytes()
    (path / ".metadata").write_bytes(data.replace(b"__0_0.distcp", b"../../../etc"))
    with pytest.raises(CorruptDataError, match="leaves its folder"):
        restore_foreign(path)


# -- safetensors -----------------------------------------------------------------------------------------------------


def test_a_safetensors_file_and_a_directory_with_an_index_are_read(tmp_path: Path) -> None:
    model = trained()[0]
    tensors = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(tensors, tmp_path / "one.safetensors")
    directory = tmp_path / "hf"
    directory.mkdir()
    weight_map = {}
    for index, (name, tensor) in enumerate(tensors.items()):
        file = f"model-{index + 1:05d}-of-{len(tensors):05d}.safetensors"
        save_file({name: tensor}, directory / file)
        weight_map[name] = file
    (directory / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )
    for path in (tmp_path / "one.safetensors", directory):
        other = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4))
        result = restore_foreign(path, {"model": other}, adapt=[Rename({"*": "model.*"})])
        assert result.kind == "safetensors"
        assert all(torch.equal(tensors[name], value) for name, value in other.state_dict().items())


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"w": "../out.safetensors"}, "leaves its folder"),
        ({"w": "/etc/passwd"}, "absolute"),
        ({"w": "missing.safetensors"}, "missing"),
        ({"v": "a.safetensors"}, "does not have"),
        ({"w": 5}, "no file"),
    ],
)
def test_an_index_that_lies_is_refused(tmp_path: Path, weight_map: dict[str, Any], message: str) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CorruptDataError, match=message):
        restore_foreign(tmp_path)


def test_tied_weights_are_found_under_any_of_their_names(tmp_path: Path) -> None:
    shared = torch.nn.Linear(4, 4, bias=False)
    save_file({"lm_head.weight": torch.arange(16.0).reshape(4, 4)}, tmp_path / "model.safetensors")
    model = torch.nn.ModuleDict({"embed": shared, "lm_head": shared})
    restore_foreign(tmp_path, {"model": model}, adapt=[Rename({"*": "model.*"})])
    assert torch.equal(shared.weight, torch.arange(16.0).reshape(4, 4))
