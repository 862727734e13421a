"""Files by rank that are damaged, mixed or incomplete."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.foreign.opening import open_foreign
from safepoint.formats.region import Region
from safepoint.manager.errors import CorruptDataError, InvalidArgumentError
from safepoint.manager.foreign import restore_foreign

if TYPE_CHECKING:
    from collections.abc import Callable

REAL = Path(__file__).parent.parent / "compat" / "foreign" / "xlafsdp"
FIRST, SECOND = (f"checkpoint_rank-{rank:08d}-of-00000002.pth" for rank in range(2))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copytree(REAL / "flattened", tmp_path / "x")
    return tmp_path / "x"


def change(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    tree = torch.load(path, weights_only=True)
    edit(tree)
    torch.save(tree, path)


def shard_info(tree: dict[str, Any]) -> dict[str, Any]:
    (info,) = tree["shard_metadata"]["shard_info"][""].values()
    return info  # type: ignore[no-any-return]


def test_a_missing_rank_is_named(folder: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(CorruptDataError, match="ranks 1 are missing"):
        restore_foreign(folder)


def test_a_file_under_another_ranks_name_is_named(folder: Path) -> None:
    shutil.copy(folder / FIRST, folder / SECOND)
    with pytest.raises(CorruptDataError, match="rank 0 of 2, and its name says 1") as caught:
        restore_foreign(folder)
    assert caught.value.path == str(folder / SECOND)


@pytest.mark.parametrize("kind", ["parameters", "rows"])
def test_files_of_two_saves_are_not_mixed(folder: Path, kind: str) -> None:
    shutil.copy(REAL / kind / SECOND, folder / SECOND)
    with pytest.raises(CorruptDataError, match="not of one save") as caught:
        restore_foreign(folder)
    assert caught.value.path == str(folder / SECOND)


def test_two_checkpoints_in_a_directory_are_told_apart_by_a_file(folder: Path) -> None:
    for name in (FIRST, SECOND):
        shutil.copy(folder / name, folder / name.replace("checkpoint", "older"))
    with pytest.raises(InvalidArgumentError, match="several checkpoints"):
        restore_foreign(folder)
    assert restore_foreign(folder / FIRST).kind == "xlafsdp"


@pytest.mark.parametrize("keep", [3, 100, -100])
def test_a_file_that_is_cut_short_is_named(folder: Path, keep: int) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:keep])
    with pytest.raises(CorruptDataError) as caught:
        restore_foreign(folder)
    assert caught.value.path == str(folder / SECOND)


EDITS: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no metadata": (lambda tree: tree.pop("shard_metadata"), "no shard_metadata"),
    "metadata of another kind": (lambda tree: tree.update(shard_metadata=[1]), "rank \\? of"),
    "tables of another kind": (lambda tree: tree["shard_metadata"].update(shard_info=5), "no table shard_info"),
    "no such shard": (lambda tree: tree["shard_metadata"]["shard_info"].clear(), "not in the metadata"),
    "a larger parameter": (lambda tree: shard_info(tree).update(_orig_size=[10**6]), "smaller than"),
    "no shape": (lambda tree: shard_info(tree).update(_orig_size=[-1, "x"]), "has the shape"),
    "no flattening": (lambda tree: tree["shard_metadata"]["flatten_info"].clear(), "do not tell how"),
    "another flattening": (
        lambda tree: tree["shard_metadata"]["flatten_info"]["_fsdp_wrapped_module.flat_param_0"][2].append(1),
        "other sizes",
    ),
    "fewer parameters": (lambda tree: tree.update(model={}), "other names|not of one save"),
}


@pytest.mark.parametrize("name", EDITS)
def test_metadata_that_make_no_sense_are_a_typed_error(folder: Path, name: str) -> None:
    edit, message = EDITS[name]
    change(folder / FIRST, edit)
    if "metadata" not in name and name != "fewer parameters":
        change(folder / SECOND, edit)
    with pytest.raises(CorruptDataError, match=message):
        restore_foreign(folder)


def test_a_shard_of_another_shape_is_named(folder: Path) -> None:
    name = next(name for name in torch.load(folder / SECOND, weights_only=True)["model"] if "shard" in name)
    change(folder / SECOND, lambda tree: tree["model"].update({name: torch.zeros(5)}))
    with pytest.raises(CorruptDataError, match="not like that of rank 0") as caught:
        restore_foreign(folder)
    assert caught.value.path == str(folder / SECOND)


def test_a_buffer_comes_in_the_dtype_that_it_had_before_it_was_cast(folder: Path) -> None:
    info = {"_fsdp_wrapped_module.1.running_mean": {"_orig_dtype": torch.float32}}
    for name in (FIRST, SECOND):
        change(folder / name, lambda tree: tree["shard_metadata"].update(buffer_info=info))
    model = restore_foreign(folder).state["model"]
    assert model["1.running_mean"].dtype == torch.float32
    assert model["1.running_var"].dtype == torch.bfloat16


def test_tensors_outside_the_model_come_by_rank(folder: Path) -> None:
    for rank, name in enumerate((FIRST, SECOND)):
        change(folder / name, lambda tree, rank=rank: tree.update(optimizer={"state": {0: torch.full((2,), rank)}}))
    found = restore_foreign(folder).state["optimizer"]
    assert [found[rank]["state"][0].tolist() for rank in range(2)] == [[0, 0], [1, 1]]


def test_a_region_is_read_across_the_files_of_the_ranks() -> None:
    array = open_foreign(REAL / "parameters").arrays["model", "0.weight"]
    out = bytearray(2 * 3 * 4)
    array.read_into(Region((1, 2), (2, 3)), memoryview(out))
    expected = (torch.arange(15.0).reshape(3, 5) / 8)[1:3, 2:5]
    assert torch.equal(torch.frombuffer(out, dtype=torch.float32).reshape(2, 3), expected)
