"""Checkpoints that the real Orbax wrote, its version beside them: read for ever, and refused when they are damaged."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import tensorstore as ts
import torch

from safepoint.manager import CheckpointManager, Partial
from safepoint.manager.converting import convert
from safepoint.manager.errors import CheckpointError, CorruptDataError, StructureMismatchError, UnsupportedValueError
from safepoint.manager.foreign import restore_foreign

from support.orbax_process import digest_of

if TYPE_CHECKING:
    from collections.abc import Callable

FOREIGN = Path(__file__).parent / "foreign" / "orbax"
KINDS = ("ocdbt-zarr3", "ocdbt-zarr2", "files-zarr3", "files-zarr2", "manager", "items", "v1")


def step_of(root: Path) -> Path:
    return root / "3" if (root / "3").is_dir() else root


def described(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Return each leaf by its dotted name: a tensor as dtype, shape and digest, a value as it is."""
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: leaf for key, child in pairs for name, leaf in described(child, f"{prefix}{key}.").items()}
    if not isinstance(tree, torch.Tensor):
        return {prefix[:-1]: tree}
    data = tree.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()
    return {prefix[:-1]: [str(tree.dtype).removeprefix("torch."), list(tree.shape), digest_of(data)]}


@pytest.mark.parametrize("kind", KINDS)
def test_each_is_read_bit_for_bit_and_becomes_a_step_of_ours(tmp_path: Path, kind: str) -> None:
    leaves = json.loads((FOREIGN / kind / "leaves.json").read_text())
    read = restore_foreign(step_of(FOREIGN / kind)).state
    found = described(read["one"] if kind == "items" else read)
    values = {"step": 7, "lr": 2.5, "list.1.x": 1, "text": "实验"}
    for name, leaf in leaves.items():
        assert found[name] == (values[name] if name in values else [leaf["dtype"], leaf["shape"], leaf["digest"]])
    convert(step_of(FOREIGN / kind), tmp_path / "root", format="orbax_zstd")
    with CheckpointManager(tmp_path / "root") as manager:
        back = manager.restore_latest()
    assert back is not None
    assert described(back.state) == described(read)
    assert not {"jax", "orbax"} & set(sys.modules)


def test_what_two_processes_of_jax_saved_is_whole() -> None:
    state = restore_foreign(FOREIGN / "two-processes" / "3").state
    assert torch.equal(state["params"]["w"], torch.arange(8 * 600).reshape(8, 600) / 8)
    assert state["step"] == 7


@pytest.mark.parametrize("all_chunks_are_stored", [True, False])
def test_a_database_that_one_process_was_not_merged_into_is_refused(
    tmp_path: Path,
    all_chunks_are_stored: bool,  # noqa: FBT001 - what `_METADATA` says
) -> None:
    """Its merge does not notice; and where chunks of zeros are left out, the lost ones would be read as such."""
    item = tmp_path / "3" / "default"
    shutil.copytree(FOREIGN / "two-processes" / "3", tmp_path / "3")
    (item / "manifest.ocdbt").unlink()
    shutil.rmtree(item / "d")
    context = ts.Context()
    merge(item, "ocdbt.process_0", context)
    if not all_chunks_are_stored:
        edit(item / "_METADATA", store_array_data_equal_to_fill_value=False)
    with pytest.raises(CorruptDataError) as caught:
        restore_foreign(tmp_path / "3")
    assert caught.value.leaf == "params.w"
    assert all_chunks_are_stored or caught.value.path == str(item / "ocdbt.process_1")
    merge(item, "ocdbt.process_1", context)
    assert restore_foreign(tmp_path / "3").state["params"]["w"].any()


def merge(item: Path, process: str, context: Any) -> None:
    """Merge what a process wrote, as Orbax does."""
    stores = [
        ts.KvStore.open({"driver": "ocdbt", "base": {"driver": "file", "path": path}}, context=context).result()
        for path in (f"{item}/{process}/", f"{item}/")
    ]
    transaction = ts.Transaction(atomic=True)
    stores[0].experimental_copy_range_to(stores[1].with_transaction(transaction)).result()
    transaction.commit_sync()


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def edited(**changes: Any) -> Callable[[Path], None]:
    return lambda path: edit(path, **changes)


@pytest.mark.parametrize(
    ("kind", "file", "damage", "error", "leaf"),
    [
        ("files-zarr3", "params.w/c/0/1", halve, CorruptDataError, "params.w"),
        ("files-zarr2", "params.w/0.1", halve, CorruptDataError, "params.w"),
        ("files-zarr3", "params.w/zarr.json", halve, CorruptDataError, "params.w"),
        ("ocdbt-zarr3", "manifest.ocdbt", halve, CorruptDataError, "a.b"),
        ("ocdbt-zarr2", "d/*", halve, CorruptDataError, "a.b"),
        ("files-zarr3", "params.w/zarr.json", edited(codecs=[{"name": "lz99"}]), UnsupportedValueError, "params.w"),
        ("files-zarr2", "params.w/.zarray", edited(compressor={"id": "lz99"}), UnsupportedValueError, "params.w"),
        ("files-zarr2", "params.w/.zarray", edited(dtype="<U8"), UnsupportedValueError, "params.w"),
        ("files-zarr3", "params.w/zarr.json", edited(zarr_format=4), UnsupportedValueError, "params.w"),
        ("files-zarr3", "params.w/zarr.json", edited(chunk_grid={"name": "x"}), UnsupportedValueError, "params.w"),
    ],
)
def test_damage_and_what_tensorstore_does_not_know_are_errors_that_name_file_and_leaf(
    tmp_path: Path, kind: str, file: str, damage: Callable[[Path], None], error: type[CheckpointError], leaf: str
) -> None:
    root = tmp_path / kind
    shutil.copytree(FOREIGN / kind, root)
    (path,) = root.glob(file)
    damage(path)
    with pytest.raises(error) as caught:
        restore_foreign(root)
    assert (caught.value.path, caught.value.leaf) == (str(path), leaf)


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("files-zarr3", {"use_zarr3": False}, "a.b/.zarray"),
        ("files-zarr2", {"use_zarr3": True}, "a.b/zarr.json"),
        ("ocdbt-zarr3", {"use_ocdbt": False}, "a.b/zarr.json"),
        ("files-zarr3", {"use_ocdbt": True}, ""),
    ],
)
def test_metadata_of_another_version_than_the_arrays_name_what_they_look_for_in_vain(
    tmp_path: Path, kind: str, changes: dict[str, bool], named: str
) -> None:
    root = tmp_path / kind
    shutil.copytree(FOREIGN / kind, root)
    edit(root / "_METADATA", **changes)
    with pytest.raises(CorruptDataError) as caught:
        restore_foreign(root)
    assert caught.value.path == str(root / named)


@pytest.mark.parametrize("dtype", ["int4", "float8_e3m4"])
def test_a_dtype_that_torch_does_not_have_is_refused_by_leaf_where_it_is_wanted(tmp_path: Path, dtype: str) -> None:
    shutil.copytree(FOREIGN / "files-zarr3", tmp_path / "x")
    edit(tmp_path / "x" / "params.w" / "zarr.json", data_type=dtype)
    with pytest.raises(UnsupportedValueError, match=dtype) as caught:
        restore_foreign(tmp_path / "x")
    assert caught.value.leaf == "params.w"
    wanted: dict[str, Any] = {"params": {"b": torch.zeros(7, dtype=torch.bfloat16)}}
    restore_foreign(tmp_path / "x", wanted, adapt=[Partial()])
    assert torch.equal(wanted["params"]["b"], torch.arange(7).to(torch.bfloat16))
    wanted["params"] = {"b": torch.zeros(7, dtype=torch.bfloat16), "w": torch.zeros(8, 12)}
    with pytest.raises(UnsupportedValueError, match=dtype):
        restore_foreign(tmp_path / "x", wanted, adapt=[Partial()])
    assert not wanted["params"]["b"].any()


def test_a_dtype_that_the_target_does_not_have_is_refused_and_nothing_changes() -> None:
    target = {"params": {"w": torch.zeros(8, 600, dtype=torch.float16)}, "step": 0}
    with pytest.raises(StructureMismatchError) as caught:
        restore_foreign(FOREIGN / "two-processes" / "3", target)
    assert [text for text in caught.value.mismatches or () if "params.w" in text and "float16" in text]
    assert target["step"] == 0
    assert not target["params"]["w"].any()
