"""Restoring what the real Orbax wrote into torch, without JAX in this process."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING, Any

import pytest
import tensorstore as ts
import torch

from safepoint.manager import Partial, Rename
from safepoint.manager.errors import CorruptDataError, InvalidArgumentError, StructureMismatchError
from safepoint.manager.foreign import restore_foreign

from support.orbax_process import digest_of, needs_orbax, run_orbax

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import ProcessPool

KINDS = ["ocdbt-zarr3", "ocdbt-zarr2", "files-zarr3", "files-zarr2", "manager", "items", "v1"]
pytestmark = needs_orbax


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """All kinds, written once in one process."""
    root = tmp_path_factory.mktemp("orbax")
    answers = run_orbax(*({"do": "write", "root": str(root / kind), "name": kind} for kind in KINDS))
    assert not [answer for answer in answers if "error" in answer]
    return root, dict(zip(KINDS, answers, strict=True))


def step_of(root: Path, kind: str) -> Path:
    return root / kind / "3" if kind in ("manager", "items") else root / kind


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def leaves(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {name: leaf for key, child in pairs for name, leaf in leaves(child, f"{prefix}{key}.").items()}
    return {prefix[:-1]: tree}


@pytest.mark.parametrize("kind", KINDS)
def test_every_layout_of_orbax_is_read_bit_for_bit(written: tuple[Path, dict[str, Any]], kind: str) -> None:
    root, described = written
    state = restore_foreign(step_of(root, kind)).state
    if kind == "items":
        assert state.pop("two") == {"n": [1, None]}
        state = state["one"]
    found = leaves(state)
    arrays = {name: leaf for name, leaf in described[kind].items() if name not in ("step", "lr", "list.1.x", "text")}
    for name, leaf in arrays.items():
        assert str(found[name].dtype) == f"torch.{leaf['dtype']}"
        assert list(found[name].shape) == leaf["shape"]
        assert digest_of(bits(found[name])) == leaf["digest"], name
    assert (found["step"], found["lr"], found["list.1.x"]) == (7, 2.5, 1)
    assert state["empty"] == {}
    assert found.get("text", "实验") == "实验"
    assert not {"jax", "orbax"} & set(sys.modules)


def target() -> dict[str, Any]:
    return {
        "model": {"weight": torch.zeros(12, 8), "bias": torch.zeros(7, dtype=torch.bfloat16)},
        "step": 0,
    }


NAMES = Rename({"params.w": "model.weight", "params.b": "model.bias"})


@pytest.mark.parametrize("kind", ["ocdbt-zarr2", "files-zarr3"])
def test_names_and_transposed_kernels_follow_the_table_of_the_caller(
    written: tuple[Path, dict[str, Any]], kind: str
) -> None:
    state = target()
    result = restore_foreign(written[0] / kind, state, adapt=[NAMES, Partial()], transposed=["model.weight"])
    assert result.kind == "orbax"
    assert torch.equal(state["model"]["weight"].T, torch.arange(96.0).reshape(8, 12))
    assert torch.equal(state["model"]["bias"], torch.arange(7).to(torch.bfloat16))
    assert state["step"] == 7
    assert "params.small" in result.adapted.extra


def test_differences_are_listed_and_nothing_is_changed(written: tuple[Path, dict[str, Any]]) -> None:
    state = target()
    with pytest.raises(StructureMismatchError) as caught:
        restore_foreign(written[0] / "ocdbt-zarr3", state, adapt=[NAMES])
    assert any("model.weight" in text and "shape" in text for text in caught.value.mismatches or ())
    assert any("lr: extra" in text for text in caught.value.mismatches or ())
    assert state["step"] == 0
    assert not state["model"]["weight"].any()


def sharded_case(rank: int, path: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415, TID251
    from torch.distributed.tensor import Shard, distribute_tensor  # noqa: PLC0415, TID251

    mesh = init_device_mesh("cpu", (2,))
    state = {"params": {"w": distribute_tensor(torch.zeros(8, 12), mesh, [Shard(1)])}}
    restore_foreign(path, state, adapt=[Partial()])
    wanted = torch.arange(96.0).reshape(8, 12)[:, 6 * rank : 6 * rank + 6]
    assert torch.equal(state["params"]["w"].to_local(), wanted)


@pytest.mark.parametrize("kind", ["ocdbt-zarr3", "files-zarr2"])
def test_each_process_reads_what_its_shards_hold(
    written: tuple[Path, dict[str, Any]], process_pool: ProcessPool, kind: str
) -> None:
    process_pool.run(sharded_case, str(written[0] / kind), num_processes=2)


@pytest.mark.parametrize(
    ("kind", "damage"),
    [
        ("files-zarr3", "params.w/c/0/1"),
        ("files-zarr3", "params.w/zarr.json"),
        ("files-zarr2", "params.w/1.2"),
        ("ocdbt-zarr3", "manifest.ocdbt"),
        ("ocdbt-zarr3", "ocdbt.process_0/d"),
    ],
)
def test_what_is_missing_is_named(written: tuple[Path, dict[str, Any]], tmp_path: Path, kind: str, damage: str) -> None:
    shutil.copytree(written[0] / kind, tmp_path / "x")
    lost = tmp_path / "x" / damage
    shutil.rmtree(lost) if lost.is_dir() else lost.unlink()
    with pytest.raises(CorruptDataError) as caught:
        restore_foreign(tmp_path / "x")
    assert str(tmp_path) in str(caught.value.path)


def test_what_one_process_did_not_merge_is_missed(written: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(written[0] / "ocdbt-zarr3", tmp_path / "x")
    base = {"driver": "file", "path": f"{tmp_path}/x/"}
    merged = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    lost = next(key for key in merged.list().result() if key.startswith(b"params.w/c/"))
    merged.write(lost, None).result()
    with pytest.raises(CorruptDataError, match=r"missing.*params\.w"):
        restore_foreign(tmp_path / "x")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tree_metadata": []}', '{"tree_metadata": {"a": {}}}'])
def test_damaged_metadata_are_a_typed_error(written: tuple[Path, dict[str, Any]], tmp_path: Path, text: str) -> None:
    shutil.copytree(written[0] / "files-zarr3", tmp_path / "x")
    (tmp_path / "x" / "_METADATA").write_text(text)
    with pytest.raises(CorruptDataError):
        restore_foreign(tmp_path / "x")


def test_a_directory_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="no checkpoint"):
        restore_foreign(tmp_path)
