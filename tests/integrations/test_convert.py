"""From any checkpoint to a step in any format, and to what other libraries load."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp  # noqa: TID251 - the peer
from safetensors.torch import load_file, save_file

from safepoint.manager import CheckpointManager
from safepoint.manager.converting import convert
from safepoint.manager.errors import (
    CorruptDataError,
    InvalidArgumentError,
    StepExistsError,
    StepNotFoundError,
    UnsupportedValueError,
)

from support.orbax_process import digest_of, needs_orbax, run_orbax
from support.sharded_states import LEAVES, check_state, expected, make_state

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import ProcessPool

pytestmark = [  # the peer's own
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
FORMATS = ["safetensors", "orbax", "torch"]


class Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 6, bias=False)
        self.norm = torch.nn.BatchNorm1d(6)
        self.head = torch.nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.embed(x)) + self.head(x)  # type: ignore[no-any-return]


def training_state(*, steps: int) -> dict[str, Any]:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    for _ in range(steps):
        model(torch.randn(5, 4)).sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer, "plain": {"n": steps, "when": (1, b"x"), "big": 2**70}}


def saved(root: Path, file_format: str = "safetensors") -> dict[str, Any]:
    state = training_state(steps=2)
    with CheckpointManager(root, format=file_format) as manager:
        manager.save(7, state, metrics={"loss": 1.5})
    return state


@pytest.mark.parametrize("one", FORMATS)
@pytest.mark.parametrize("other", FORMATS)
def test_a_step_in_any_format_becomes_one_in_any_other(tmp_path: Path, one: str, other: str) -> None:
    state = saved(tmp_path / "a", one)
    convert(tmp_path / "a", tmp_path / "b", format=other)
    target = training_state(steps=0)
    with CheckpointManager(tmp_path / "b") as manager:
        result = manager.restore_latest(target)
        assert result is not None
        assert (result.step, result.metrics) == (7, {"loss": 1.5})
    for name, value in state["model"].state_dict().items():
        assert torch.equal(target["model"].state_dict()[name], value)
    assert str(target["optimizer"].state_dict()) == str(state["optimizer"].state_dict())
    assert target["plain"] == state["plain"]


def sharded_case(_rank: int, root: str) -> None:
    with CheckpointManager(root, mode="sharded", deadline_secs=20.0) as manager:
        manager.save(3, make_state((2, 2)))


def test_a_sharded_step_becomes_whole_leaves(process_pool: ProcessPool, tmp_path: Path) -> None:
    process_pool.run(sharded_case, str(tmp_path / "a"), num_processes=4)
    convert(tmp_path / "a" / "3", tmp_path / "b", format="torch", to_step=5)
    found = torch.load(tmp_path / "b" / "5" / "leaves" / "leaves.pt", weights_only=True)
    for name in LEAVES:
        assert torch.equal(found[name], expected(name)), name


def test_damage_in_the_source_is_found_and_nothing_is_committed(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    path = tmp_path / "a" / "7" / "model" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptDataError):
        convert(tmp_path / "a", tmp_path / "b")
    with CheckpointManager(tmp_path / "b") as manager:
        assert manager.latest_step() is None


def test_views_of_shared_memory_are_refused_where_they_cannot_be_kept(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    with CheckpointManager(tmp_path / "a") as manager:
        manager.save(1, {"x": {"whole": whole, "part": whole[2:5]}})
    convert(tmp_path / "a", tmp_path / "same")
    with CheckpointManager(tmp_path / "same") as manager:
        back = manager.restore(1).state
    assert back is not None
    assert torch.equal(back["x"]["part"], whole[2:5])
    for export in (
        lambda: convert(tmp_path / "a", tmp_path / "b", format="torch"),
        lambda: convert(tmp_path / "a", tmp_path / "dcp", format="dcp"),
        lambda: convert(tmp_path / "a", tmp_path / "hf", format="huggingface", item="x"),
    ):
        with pytest.raises(UnsupportedValueError, match="view of memory"):
            export()


def test_what_is_there_is_not_replaced_and_what_is_not_there_is_named(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    convert(tmp_path / "a", tmp_path / "b")
    assert convert(tmp_path / "a", tmp_path / "b").steps[0].outcome == "present"
    with pytest.raises(StepExistsError):
        convert(tmp_path / "a", tmp_path / "b", format="torch")
    with pytest.raises(StepNotFoundError) as caught:
        convert(tmp_path / "a", tmp_path / "b", step=8)
    assert caught.value.available == (7,)
    (tmp_path / "hf").mkdir()
    with pytest.raises(InvalidArgumentError, match="already"):
        convert(tmp_path / "a", tmp_path / "hf", format="huggingface")


def test_what_others_wrote_becomes_a_step(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(5.0), "n": [1, (2, "x")]}, tmp_path / "x.pt")
    save_file({"v": torch.ones(2)}, tmp_path / "y.safetensors")
    dcp.save({"u": torch.zeros(3), "k": 5}, checkpoint_id=str(tmp_path / "z"), no_dist=True)
    for number, name in enumerate(("x.pt", "y.safetensors", "z")):
        convert(tmp_path / name, tmp_path / "root", to_step=number)
    with CheckpointManager(tmp_path / "root") as manager:
        states = [manager.restore(number).state for number in range(3)]
    assert str(states) == str(
        [{"w": torch.arange(5.0), "n": [1, (2, "x")]}, {"v": torch.ones(2)}, {"u": torch.zeros(3), "k": 5}]
    )


@needs_orbax
def test_orbax_reads_what_was_converted_from_orbax(tmp_path: Path) -> None:
    run_orbax({"do": "write", "root": str(tmp_path / "theirs"), "name": "manager"})
    convert(tmp_path / "theirs" / "3", tmp_path / "ours", format="orbax")
    theirs, ours = run_orbax(
        {"do": "standard", "path": str(tmp_path / "theirs" / "3" / "default")},
        {"do": "standard", "path": str(tmp_path / "ours" / "3" / "params")},
    )
    assert {f"params.{name}": leaf["digest"] for name, leaf in ours.items()} == {
        name: leaf["digest"] for name, leaf in theirs.items() if name.startswith("params.")
    }
    assert digest_of(b"") != ours["w"]["digest"]


@needs_orbax
@pytest.mark.parametrize("file_format", ["orbax", "orbax_zstd"])
def test_orbax_reads_an_item_of_many_arrays_that_was_converted(tmp_path: Path, file_format: str) -> None:
    layers = {f"layer{n}": torch.full((5,), float(n)) for n in range(300)}
    with CheckpointManager(tmp_path / "a") as manager:
        manager.save(7, {"model": layers})
    convert(tmp_path / "a", tmp_path / "b", format=file_format)
    assert (tmp_path / "b" / "7" / "model" / "manifest.ocdbt").is_file()
    (found,) = run_orbax({"do": "standard", "path": str(tmp_path / "b" / "7" / "model")})
    assert {name: leaf["digest"] for name, leaf in found.items()} == {
        name: digest_of(value.numpy().tobytes()) for name, value in layers.items()
    }


# -- exports ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_file_bytes", [10**9, 100])
def test_hugging_face_files_hold_each_weight_once(tmp_path: Path, max_file_bytes: int) -> None:
    model = saved(tmp_path / "a")["model"]
    (made,) = convert(tmp_path / "a", tmp_path / "hf", format="huggingface", max_file_bytes=max_file_bytes).steps
    names = list(made.files)
    files = [name for name in names if name.endswith(".safetensors")]
    found = {key: value for name in files for key, value in load_file(tmp_path / "hf" / name).items()}
    wanted = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    if len(files) == 1:
        assert names == ["model.safetensors"]
    else:
        index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == set(wanted)
        assert index["metadata"]["total_size"] == sum(value.nbytes for value in wanted.values())


@pytest.mark.parametrize("file_format", ["safetensors", "orbax"])
def test_dcp_loads_what_was_exported(tmp_path: Path, file_format: str) -> None:
    state = saved(tmp_path / "a", file_format)
    convert(tmp_path / "a", tmp_path / "dcp", format="dcp")
    model = {name: torch.zeros_like(value) for name, value in state["model"].state_dict().items()}
    target = {"model": model, "plain": {"n": 0}}
    dcp.load(target, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    assert target["plain"]["n"] == 2
    assert all(torch.equal(model[name], value) for name, value in state["model"].state_dict().items())


def dcp_load_case(_rank: int, path: str) -> None:
    state = make_state((2,), zeros=True)
    dcp.load(state, checkpoint_id=path)
    check_state(state)


def test_dcp_loads_it_onto_shards(process_pool: ProcessPool, tmp_path: Path) -> None:
    process_pool.run(sharded_case, str(tmp_path / "a"), num_processes=4)
    convert(tmp_path / "a", tmp_path / "dcp", format="dcp", max_file_bytes=500)
    assert len(list((tmp_path / "dcp").glob("*.distcp"))) > 1
    process_pool.run(dcp_load_case, str(tmp_path / "dcp"), num_processes=2)
