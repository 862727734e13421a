"""A checkpoint is input from anywhere: it runs no code, leads nowhere else, and takes no more than its files hold."""

from __future__ import annotations

import copy
import json
import os
import pickle  # noqa: TID251 - to show that nothing reads it
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from safepoint.manager import CheckpointManager
from safepoint.manager.errors import CheckpointError, CorruptDataError

from support.hostile_steps import HostileStep, make_state, restore_in_every_way

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def assert_refused(step: HostileStep, text: str = "") -> None:
    for error in restore_in_every_way(step.root):
        assert error is not None
        assert text in str(error)
    with CheckpointManager(step.root) as manager:
        restored = manager.restore_latest(make_state(0))
    assert restored is not None
    assert restored.step == 1


# -- code -----------------------------------------------------------------------------------------------------------


class Payload:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def every_text(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every text in a JSON value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from every_text(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from every_text(item, (*path, index))
    elif isinstance(value, str):
        yield path


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(value)
    place = changed
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = new
    return changed


def test_no_code_of_a_checkpoint_runs_wherever_it_stands(step: HostileStep, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    pickled = pickle.dumps(Payload(str(mark)), protocol=0).decode("latin-1")
    payloads = (pickled, f"__import__('os').system('touch {mark}')", "os.system", "subprocess.Popen", "builtins.eval")
    tried = 0
    for path in every_text(step.manifest):
        for payload in payloads[tried % 2 :: 2]:
            step.rewrite(put(step.manifest, path, payload))
            restore_in_every_way(step.root)
            tried += 1
    for index in range(len(step.manifest["files"])):
        data = step.folder / step.manifest["files"][index]["path"]
        original = data.read_bytes()
        step.rewrite(step.rewrite_file(index, pickle.dumps(Payload(str(mark)))))
        restore_in_every_way(step.root)
        data.write_bytes(original)
    for name in ("data.pkl", "model.pt", ".metadata", "__init__.py", "conftest.py", "sitecustomize.py"):
        (step.folder / name).write_bytes(pickle.dumps(Payload(str(mark))))
    step.rewrite(step.manifest)
    assert restore_in_every_way(step.root) == [None, None]
    assert tried > 200
    assert not mark.exists()


# -- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/etc/hostname",
        "../1/model/model.safetensors",
        "model/../../1/model/model.safetensors",
        "..",
        ".",
        "",
        "model//model.safetensors",
        "model\\model.safetensors",
        "C:/x",
        "model/\0",
        "commit.json",
        "manifest.json",
        "model",
        "x" * 5000,
        "/".join("x" * 3000),
        "\ud800",
    ],
)
def test_paths_that_are_no_file_of_the_step_are_refused(step: HostileStep, path: str) -> None:
    step.rewrite(put(step.manifest, ("files", 0, "path"), path))
    assert_refused(step)


@pytest.mark.parametrize("kind", ["file", "directory", "dangling", "pipe"])
def test_links_out_of_the_step_are_not_followed(step: HostileStep, kind: str, tmp_path: Path) -> None:
    data = step.folder / step.manifest["files"][0]["path"]
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / data.name).write_bytes(data.read_bytes())  # the very bytes: only the way there is wrong
    data.unlink()
    if kind == "file":
        data.symlink_to(outside / data.name)
    elif kind == "dangling":
        data.symlink_to(outside / "nothing")
    elif kind == "pipe":
        os.mkfifo(data)
    else:
        data.parent.rmdir()
        data.parent.symlink_to(outside)
    assert_refused(step)
    if kind == "pipe":
        data.unlink()


@pytest.mark.parametrize("name", ["commit.json", "manifest.json"])
def test_records_that_are_links_are_not_followed(step: HostileStep, name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes((step.folder / name).read_bytes())
    (step.folder / name).unlink()
    (step.folder / name).symlink_to(tmp_path / name)
    assert_refused(step)


def test_a_step_that_is_a_link_is_no_step(step: HostileStep) -> None:
    (step.root / "9").symlink_to(step.folder)
    with CheckpointManager(step.root) as manager:
        assert [info.step for info in manager.steps()] == [1, 2]
    (step.root / "9").unlink()


# -- sizes ----------------------------------------------------------------------------------------------------------

HUGE = 1 << 40
NUMBERS = (-1, 2**31, 2**63 - 1, 2**63, 2**64, 10**400, 1e300, 0.5, True, None, "1", [], {})


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: repr(number)[:12])
@pytest.mark.parametrize(
    "path",
    [
        ("files", 0, "num_bytes"),
        ("files", 0, "block_bytes"),
        ("leaves", 0, "shape", 0),
        ("leaves", 0, "shards", 0, "offset"),
        ("leaves", 0, "shards", 0, "num_bytes"),
        ("leaves", 0, "shards", 0, "region", 0, 0),
        ("leaves", 0, "shards", 0, "region", 1, 0),
        ("leaves", 0, "shards", 0, "file"),
        ("leaves", 0, "node"),
        ("structure", 1, 0),
    ],
    ids=lambda path: ".".join(map(str, path)),
)
def test_numbers_out_of_their_range_are_refused(step: HostileStep, path: tuple[Any, ...], number: Any) -> None:
    step.rewrite(put(step.manifest, path, number))
    errors = restore_in_every_way(step.root)
    assert all(isinstance(error, CheckpointError) for error in errors)


def child(step: HostileStep, code: str) -> subprocess.CompletedProcess[str]:
    """Run a restore in a process that may take 1 GiB more than it has after its imports."""
    script = f"""
import resource, sys, torch
from safepoint.manager import CheckpointManager
from safepoint.manager.errors import CheckpointError
torch.empty(1 << 20)
manager = CheckpointManager({str(step.root)!r})
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), -1))
try:
    {code}
except CheckpointError as error:
    print(type(error).__name__, error)
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)


def owners(leaf: dict[str, Any], manifest: dict[str, Any]) -> int:
    """Return how many leaves lie in the file of this one."""
    file = leaf["shards"][0]["file"]
    return sum(shard["file"] == file for other in manifest["leaves"] for shard in other["shards"])


def huge_leaf(step: HostileStep, *, partial: bool) -> dict[str, Any]:
    """Return a manifest that claims a leaf of a terabyte."""
    manifest: dict[str, Any] = copy.deepcopy(step.manifest)
    leaf = next(leaf for leaf in manifest["leaves"] if owners(leaf, manifest) == 1)
    leaf["dtype"], leaf["shape"] = "uint8", [HUGE]
    shard = leaf["shards"][0]
    if partial:
        manifest["partial"] = True
        shard["region"], shard["num_bytes"] = [[0], [4]], 4
    else:
        shard["region"], shard["num_bytes"] = [[0], [HUGE]], HUGE
        entry = manifest["files"][shard["file"]]
        entry["num_bytes"], entry["block_bytes"] = HUGE + 8192, 8 << 20
        entry["digests"] = ["0" * 32] * -(-(HUGE + 8192) // (8 << 20))
    return manifest


@pytest.mark.parametrize("partial", [True, False], ids=["partial", "without such a file"])
def test_a_leaf_of_a_terabyte_that_no_file_backs_takes_no_memory(step: HostileStep, *, partial: bool) -> None:
    step.rewrite(huge_leaf(step, partial=partial), scope="per_process" if partial else "shared")
    ended = child(step, "manager.restore(2)")
    assert "Error" in ended.stdout
    assert int(ended.stdout.split()[-1]) < 1 << 20  # KiB


def test_a_terabyte_of_hole_in_a_file_is_a_typed_error(step: HostileStep) -> None:
    manifest = huge_leaf(step, partial=False)
    entry = next(entry for entry in manifest["files"] if entry["num_bytes"] > HUGE)
    with (step.folder / entry["path"]).open("r+b") as file:
        file.truncate(HUGE + 8192)
    step.rewrite(manifest)
    ended = child(step, "manager.restore(2)")
    assert "InvalidArgumentError there is no memory" in ended.stdout


@pytest.mark.parametrize("name", ["manifest.json", "commit.json"])
def test_huge_control_files_are_refused_before_they_are_read(step: HostileStep, name: str) -> None:
    with (step.folder / name).open("r+b") as file:
        file.truncate(1 << 40)
    ended = child(step, "manager.restore(2)")
    assert "CorruptDataError" in ended.stdout


def rows_without_end(step: HostileStep) -> Iterator[tuple[str, bytes]]:
    text = json.dumps(step.manifest)
    yield "nested lists", f'{{"x": {"[" * 100_000}{"]" * 100_000}, {text[1:]}'.encode()
    objects = '{"a":' * 100_000
    yield "nested objects", f'{{"x": {objects}1{"}" * 100_000}, {text[1:]}'.encode()
    yield "duplicate keys", f'{{"step": 2, {text[1:]}'.encode()
    yield "NaN", text.replace('"process_count": 1', '"process_count": NaN').encode()
    yield "Infinity", text.replace('"process_count": 1', '"process_count": Infinity').encode()
    yield "a number of a million digits", text.replace('"process_count": 1', f'"process_count": {"9" * 10**6}').encode()
    yield "no UTF-8", text.encode() + b"\xff"
    yield "UTF-16", text.encode("utf-16")
    yield "empty", b""
    yield "null", b"null"
    yield "a list", b"[]"
    deep = copy.deepcopy(step.manifest)
    last = len(deep["structure"])
    deep["structure"] += [[0 if i == 0 else last + i - 1, f"d{i}", "dict", None] for i in range(50_000)]
    yield "a tree without end", json.dumps(deep).encode()
    looped = copy.deepcopy(step.manifest)
    looped["structure"][1][0] = 1
    yield "a node that is its own parent", json.dumps(looped).encode()


def test_shapeless_manifests_are_refused(step: HostileStep) -> None:
    for what, data in rows_without_end(step):
        step.rewrite(data)
        for error in restore_in_every_way(step.root):
            assert isinstance(error, CheckpointError), what


@pytest.mark.parametrize("kind", ["list", "tuple"])
def test_containers_that_claim_a_length_take_none_of_it(step: HostileStep, kind: str) -> None:
    manifest = copy.deepcopy(step.manifest)
    manifest["structure"] += [[0, f"claim{n}", kind, {"length": n}] for n in (10**9, 2**63, -1, 10**30)]
    step.rewrite(manifest)
    assert int(child(step, "manager.restore(2)").stdout.split()[-1]) < 1 << 20


@pytest.mark.parametrize(
    "rows",
    [
        [(0, "l", "list", {"length": 1}), (1, -1, "list", {"length": 0})],
        [(0, "l", "list", {"length": 2}), (1, 1, "value", 1), (1, 0, "value", 1)],
        [(0, "l", "deque", {"length": 1, "maxlen": "x"}), (1, 0, "value", 1)],
        [(0, "l", "deque", {"length": 1, "maxlen": 0}), (1, 0, "value", 1)],
        [(0, "l", "value", 1), (1, "below", "value", 1)],
        [(0, "l", "dataclass", None), (1, 0, "value", 1)],
        [(0, "l", "per_process", None), (1, "zero", "value", 1)],
        [(0, "l", "array", None)],
    ],
    ids=lambda rows: f"{rows[0][2]} {rows[-1][1]}",
)
def test_containers_with_children_that_they_cannot_have_are_refused(step: HostileStep, rows: list[Any]) -> None:
    manifest = copy.deepcopy(step.manifest)
    first = len(manifest["structure"])
    manifest["structure"] += [[first if parent else 0, key, kind, data] for parent, key, kind, data in rows]
    step.rewrite(manifest)
    for error in restore_in_every_way(step.root):
        assert isinstance(error, CheckpointError)


VALUES = [
    {"int": "0x" + "f" * 10_000_000},
    {"int": "x"},
    {"decimal": "1e999999999999"},
    {"fraction": "1/0"},
    {"bytes": "?"},
    {"enum": ["os", "system"]},
    {"range": [0, 10**30, 1]},
    {"set": [[1], {"set": []}]},
    {"datetime": "9999-99-99"},
    {"path": "\0"},
    {"dtype": "torch.load"},
    {"device": "__import__"},
    {"float": "7ff800000000000g"},
    {"float": "0"},
    {"float": "00"},
    {"complex": [{"float": "00"}, 0.0]},
    {"numpy": ["object", "AAAA"]},
    {"numpy": {"dtype": "O", "data": "AAAA"}},
    {"unknown": 1},
    {"set": 1, "int": 2},
    [1, 2],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: repr(value)[:24])
def test_values_that_nobody_saves_are_values_or_typed_errors(step: HostileStep, value: Any) -> None:
    for kind in ("value", "array", "stateful", "alias", "view", "per_process", "namedtuple", "dataclass", "enum", "zz"):
        manifest = copy.deepcopy(step.manifest)
        manifest["structure"].append([0, "more", kind, value])
        step.rewrite(manifest)
        restore_in_every_way(step.root)


def test_the_record_that_vouches_is_checked_too(step: HostileStep) -> None:
    step.rewrite(step.manifest, num_bytes=2**63)
    with CheckpointManager(step.root) as manager, pytest.raises(CorruptDataError):
        manager.restore(2)
