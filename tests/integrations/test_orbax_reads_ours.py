"""What the real Orbax makes of our steps in the format `orbax`, whoever wrote them and how."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.dtypes import ITEM_BYTES
from safepoint.formats.storage import open_storage
from safepoint.manager import CheckpointManager
from safepoint.manager.copying import copy_steps
from safepoint.manager.errors import CorruptDataError, UnsupportedValueError
from safepoint.manager.step_reading import StepReader

from support.matrix import cases
from support.orbax_process import digest_of, needs_orbax, run_orbax
from support.orbax_states import expected_items, make_both

if TYPE_CHECKING:
    from pathlib import Path

    from support.process_pool import ProcessPool

MESHES = {1: (1,), 2: (2,), 4: (2, 2)}
BOTH_KNOW = [
    *("bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex64", "complex128"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes()


def leaf_of(tensor: torch.Tensor) -> tuple[str, list[int], str]:
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), digest_of(bits(tensor))


def found(described: dict[str, Any]) -> dict[str, tuple[str, list[int], str]]:
    assert "error" not in described, described
    return {name: (leaf["dtype"], leaf["shape"], leaf["digest"]) for name, leaf in described.items()}


def save_case(_rank: int, root: str, file_format: str, mode: Any, mesh: tuple[int, ...], how: str) -> None:
    with CheckpointManager(root, format=file_format, mode=mode, deadline_secs=20.0) as manager:
        for step, loss in ((2, 3.0), (7, 1.0), (10, 2.0)):
            manager.save(step, make_both(mesh), metrics={"loss": loss}, blocking=how == "blocking")


def mesh_request(path: str, leaves: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "do": "mesh",
        "path": path,
        "shapes": {name: list(leaf.shape) for name, leaf in leaves.items()},
        "dtypes": {name: str(leaf.dtype).removeprefix("torch.") for name, leaf in leaves.items()},
    }


@needs_orbax
@pytest.mark.parametrize(
    ("file_format", "mode", "count"),
    cases("tests/integrations/test_orbax_reads_ours.py::test_every_reader_of_orbax_restores_what_some_processes_saved"),
)
def test_every_reader_of_orbax_restores_what_some_processes_saved(
    process_pool: ProcessPool, tmp_path: Path, file_format: str, mode: str, count: int
) -> None:
    how = "behind" if count == 4 else "blocking"
    process_pool.run(save_case, str(tmp_path), file_format, mode, MESHES[count], how, num_processes=count)
    step = tmp_path / "7"
    (whole,) = run_orbax({"do": "v1", "path": str(step)})
    for item, leaves in expected_items().items():
        path = str(step / item)
        assert (step / item / "manifest.ocdbt").exists() == (item == "blocks" or file_format == "orbax_zstd")
        by_standard, by_pytree, by_load, on_mesh = run_orbax(
            {"do": "standard", "path": path},
            {"do": "pytree", "path": path},
            {"do": "v1_item", "path": str(step), "item": item},
            mesh_request(path, leaves),
        )
        wanted = {name: leaf_of(leaf) for name, leaf in leaves.items()}
        for answer in (by_standard, by_pytree, by_load, whole[item]):
            assert found(answer) == wanted
        # JAX has no float64 but by an option of its own.
        assert {name: leaf for name, leaf in found(on_mesh).items() if wanted[name][0] != "float64"} == {
            name: leaf for name, leaf in wanted.items() if leaf[0] != "float64"
        }
        assert {leaf["num_devices"] for leaf in on_mesh.values()} == {8}


@needs_orbax
@pytest.mark.parametrize(
    ("file_format", "mode", "count"),
    cases("tests/integrations/test_orbax_reads_ours.py::test_the_manager_of_orbax_opens_our_root"),
)
def test_the_manager_of_orbax_opens_our_root(
    process_pool: ProcessPool, tmp_path: Path, file_format: str, mode: str, count: int
) -> None:
    process_pool.run(save_case, str(tmp_path), file_format, mode, MESHES[count], "blocking", num_processes=count)
    latest, older = run_orbax(
        {"do": "manager", "root": str(tmp_path)}, {"do": "manager", "root": str(tmp_path), "step": 2}
    )
    assert (latest["all_steps"], latest["latest_step"], latest["best_step"]) == ([2, 7, 10], 10, 7)
    assert (latest["metrics"], older["metrics"]) == ({"loss": 2.0}, {"loss": 3.0})
    assert {"leaves", "blocks", "plain"} <= set(latest["metadata"])
    for answer in (latest, older):
        assert found(answer["items"]["plain"]) == {"": leaf_of(torch.arange(20))}
        for item, leaves in expected_items().items():
            assert found(answer["items"][item]) == {name: leaf_of(leaf) for name, leaf in leaves.items()}


@needs_orbax
def test_orbax_reads_what_was_saved_in_a_bucket_once_it_is_copied_down(tmp_path: Path) -> None:
    tensors = {"w": torch.arange(12.0).reshape(3, 4), "b": torch.ones(3, dtype=torch.bfloat16)}
    bucket = "memory://orbax/run"
    with CheckpointManager(bucket, format="orbax") as manager:
        manager.save(7, {"x": tensors}, metrics={"loss": 1.0})
    assert copy_steps(open_storage(bucket), tmp_path / "copied").copied == (7,)
    (step,) = StepReader(open_storage(bucket)).list_steps()
    download(bucket, step.files_prefix, tmp_path / "by a tool")
    copied, as_it_lies = run_orbax(
        {"do": "manager", "root": str(tmp_path / "copied")},
        {"do": "standard", "path": str(tmp_path / "by a tool" / "x")},
    )
    expected = {name: leaf_of(tensor) for name, tensor in tensors.items()}
    assert found(copied["items"]["x"]) == found(as_it_lies) == expected


def download(url: str, below: str, target: Path) -> None:
    """Copy as a tool does that knows nothing of steps."""
    storage = open_storage(url)
    for entry in storage.list(below):
        path = f"{below}/{entry.name}"
        if entry.is_dir:
            download(url, path, target / entry.name)
        else:
            target.mkdir(parents=True, exist_ok=True)
            (target / entry.name).write_bytes(storage.get(path, max_bytes=1 << 24))


@needs_orbax
@pytest.mark.parametrize("file_format", ["orbax", "orbax_zstd"])
def test_every_dtype_that_both_know_is_restored_bit_for_bit_and_others_as_their_bytes(
    tmp_path: Path, file_format: str
) -> None:
    tensors = {}
    for name, size in ITEM_BYTES.items():
        if hasattr(torch, name):
            raw = torch.arange(6 * size, dtype=torch.uint8) * 7 % (2 if name == "bool" else 251)
            tensors[name] = raw.view(getattr(torch, name)).reshape(2, 3)
    with CheckpointManager(tmp_path, format=file_format) as manager:
        manager.save(1, {"x": tensors})
    (answer,) = run_orbax({"do": "standard", "path": str(tmp_path / "1" / "x")})
    for name, leaf in found(answer).items():
        as_bytes = tensors[name].view(torch.uint8).reshape(2, 3, ITEM_BYTES[name])
        assert leaf == (leaf_of(tensors[name]) if name in BOTH_KNOW else leaf_of(as_bytes)), name
    assert set(answer) == set(tensors)


@needs_orbax
def test_after_a_rollback_orbax_takes_the_highest_number_and_we_the_last_commit(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, format="orbax") as manager:
        for step in (1, 5):
            manager.save(step, {"x": {"w": torch.ones(step)}}, metrics={"loss": 1.0})
        manager.restore(1)
        manager.save(3, {"x": {"w": torch.ones(3)}}, metrics={"loss": 2.0})
        assert manager.latest_step() == 3
    (answer,) = run_orbax({"do": "manager", "root": str(tmp_path)})
    assert (answer["all_steps"], answer["latest_step"]) == ([1, 3, 5], 5)


@needs_orbax
def test_a_model_an_optimizer_and_plain_values_are_what_orbax_shows(tmp_path: Path) -> None:
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    tied = torch.randn(3)
    plain = {"i": 5, "f": 2.5, "flag": True, "text": "实验", "none": None, "list": [1, {"x": 2}], "t": (), "e": {}}
    state = {"model": model, "optimizer": optimizer, "plain": {"w": tied, **plain}, "tied": [tied, tied], "json": plain}
    with CheckpointManager(tmp_path, format="orbax") as manager:
        manager.save(1, state)
        back = manager.restore(1).state
    assert back is not None
    assert back["json"] == plain
    (answer,) = run_orbax({"do": "v1", "path": str(tmp_path / "1")})
    assert found(answer["model"]) == {name: leaf_of(value) for name, value in model.state_dict().items()}
    first = optimizer.state_dict()["state"][0]
    assert answer["optimizer"]["state.0.exp_avg"]["digest"] == leaf_of(first["exp_avg"])[2]
    assert answer["optimizer"]["param_groups.0.lr"]["kind"] in ("float", "float64", "ndarray")
    assert found(answer["tied"]) == {"0": leaf_of(tied), "1": leaf_of(tied)}
    shown = answer["plain"]
    assert shown["text"] == "实验"
    assert shown["i"]["digest"] == leaf_of(torch.tensor(5))[2]
    assert json.loads((tmp_path / "1" / "json" / "metadata").read_text()) == {**plain, "t": []}


@needs_orbax
@pytest.mark.parametrize(
    ("file_format", "count", "file", "position"),
    [
        ("orbax", 1, "w0/c/0", 100),
        ("orbax", 20, "ocdbt.process_0/d/*", 40_100),
        ("orbax", 20, "manifest.ocdbt", 30),
        ("orbax", 20, "d/*", 60),
        ("orbax_zstd", 1, "ocdbt.process_0/d/*", 100),
    ],
)
def test_a_flipped_byte_is_an_error_in_orbax_and_in_ours(
    tmp_path: Path, file_format: str, count: int, file: str, position: int
) -> None:
    with CheckpointManager(tmp_path, format=file_format) as manager:
        manager.save(1, {"x": {f"w{index}": torch.randn(1000) for index in range(count)}})
        (path,) = (tmp_path / "1" / "x").glob(file)
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)
        (answer,) = run_orbax({"do": "standard", "path": str(tmp_path / "1" / "x")})
        assert "error" in answer, answer
        assert [problem.path for problem in manager.verify()] == [str(path)]
        if "process" in file or count == 1:
            with pytest.raises(CorruptDataError) as caught:
                manager.restore(1)
            assert (caught.value.path, str(caught.value.leaf)[:3]) == (str(path), "x.w")


@pytest.mark.parametrize("file", ["ocdbt.process_0/d/*", "d/*", "manifest.ocdbt", "_METADATA"])
def test_a_part_of_a_database_that_is_lost_is_missed_and_named(tmp_path: Path, file: str) -> None:
    with CheckpointManager(tmp_path, format="orbax") as manager:
        manager.save(1, {"x": {f"w{index}": torch.randn(10) for index in range(20)}})
        (path,) = (tmp_path / "1" / "x").glob(file)
        path.unlink()
        with pytest.raises(CorruptDataError, match="missing") as caught:
            manager.restore(1)
        assert caught.value.path == str(path)


@needs_orbax
def test_a_parameter_that_is_tied_within_an_item_is_there_once_and_under_both_names(tmp_path: Path) -> None:
    tied = torch.randn(100)
    arrays = {f"w{index}": torch.randn(3) for index in range(20)}
    with CheckpointManager(tmp_path, format="orbax") as manager:
        manager.save(1, {"x": {"one": tied, "two": tied, **arrays}, "y": {"three": tied, **arrays}})
    answers = run_orbax(*({"do": "standard", "path": str(tmp_path / "1" / item)} for item in "xy"))
    names = [("one", answers[0]), ("two", answers[0]), ("three", answers[1])]
    assert all(found(answer)[name] == leaf_of(tied) for name, answer in names)
    (data,) = (tmp_path / "1" / "x" / "ocdbt.process_0" / "d").iterdir()
    assert data.stat().st_size == 4 * 100 + 4 + 20 * (4 * 3 + 4)


@pytest.mark.parametrize(
    ("state", "leaf"),
    [
        ({"x": {"a.b": torch.ones(1), "a": {"b": torch.ones(1)}}}, "x.a.b"),
        ({"x": {"1": torch.ones(1), 1: torch.ones(1)}}, "x.1"),
        ({"x": {"a/b": torch.ones(1)}}, "x.a/b"),
        ({"x": {"": torch.ones(1)}}, "x"),
        ({"x": {"..": torch.ones(1)}}, "x..."),
        ({"x": {"_METADATA": torch.ones(1)}}, "x._METADATA"),
        ({"x": {"k" * 300: torch.ones(1)}}, "x." + "k" * 300),
        ({"metrics": {"a": torch.ones(1)}}, "metrics"),
    ],
)
def test_names_that_orbax_would_mix_up_are_refused_before_anything_is_written(
    tmp_path: Path, state: dict[str, Any], leaf: str
) -> None:
    with CheckpointManager(tmp_path, format="orbax") as manager:
        with pytest.raises(UnsupportedValueError) as caught:
            manager.save(1, state)
        assert caught.value.leaf == leaf
        assert caught.value.outcome == "not_committed"
        assert manager.latest_step() is None
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith(".")] == []


def test_empty_arrays_and_empty_containers_come_back_through_us(tmp_path: Path) -> None:
    state = {"x": {"none": torch.zeros(0, 3), "scalar": torch.tensor(3.0), "e": {}, "l": []}, "y": {}}
    with CheckpointManager(tmp_path, format="orbax") as manager:
        manager.save(1, state)
        back = manager.restore(1).state
    assert back is not None
    assert back["x"]["none"].shape == (0, 3)
    assert (back["x"]["scalar"], back["x"]["e"], back["x"]["l"], back["y"]) == (3.0, {}, [], {})


def test_no_process_that_saves_or_restores_imports_jax_or_orbax(tmp_path: Path) -> None:
    script = (
        "import sys, torch\n"
        "class Refuse:\n"
        "    def find_spec(self, name, *_):\n"
        "        assert name.split('.')[0] not in ('jax', 'jaxlib', 'orbax', 'flax'), name\n"
        "sys.meta_path.insert(0, Refuse())\n"
        "from safepoint.manager import CheckpointManager\n"
        "for step, name in enumerate(('orbax', 'orbax_zstd')):\n"
        "    with CheckpointManager(sys.argv[1], format=name) as manager:\n"
        "        many = {str(index): torch.ones(index) for index in range(20)}\n"
        "        manager.save(step, {'x': {'w': torch.ones(100_000)}, 'many': many}, blocking=False)\n"
        "        manager.wait()\n"
        "        assert manager.restore(step).state['x']['w'].sum() == 100_000\n"
        "        assert manager.verify() == []\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "COVERAGE_PROCESS_START"}
    ended = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr
