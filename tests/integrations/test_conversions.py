"""Conversions between any two kinds: what comes out, what an interruption leaves, and what a conversion takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed.checkpoint as dcp  # noqa: TID251 - the peer
from safetensors.torch import save_file

from safepoint.manager import CheckpointManager
from safepoint.manager.converting import convert
from safepoint.manager.errors import CorruptDataError, InvalidArgumentError, StepNotFoundError
from safepoint.manager.foreign import restore_foreign
from safepoint.manager.foreign_names import flat_names

from support.command import flip_byte
from support.interrupting import Interrupting

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = [  # the peer's own
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]
SHARED = Path(__file__).parent.parent / "compat" / "foreign"


def tensors() -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(40, dtype=torch.float32).reshape(8, 5),
        "b": torch.arange(7).to(torch.bfloat16),
        "n": torch.tensor(5),
        "none": torch.zeros(0, 3),
        "mask": torch.tensor([True, False, True]),
    }


def tree() -> dict[str, Any]:
    return {"model": tensors(), "plain": {"epoch": 3, "text": "x", "pair": [1, 2.5]}}


def ours(path: Path, **options: Any) -> None:
    with CheckpointManager(path, **options) as manager:
        manager.save(7, tree(), metrics={"loss": 1.5})


SOURCES: dict[str, Callable[[Path], object]] = {
    "safetensors, whole": lambda path: ours(path, mode="consolidated"),
    "safetensors, sharded": lambda path: ours(path, mode="sharded"),
    "torch": lambda path: ours(path, format="torch"),
    "orbax": lambda path: ours(path, format="orbax"),
    "dcp": lambda path: dcp.save(tree(), checkpoint_id=str(path), no_dist=True),
    "a file of torch.save": lambda path: torch.save(tree(), path),
    "a file of safetensors": lambda path: save_file(tensors(), path.with_suffix(".safetensors")),
}
TARGETS: dict[str, dict[str, Any]] = {
    "safetensors, whole": {"format": "safetensors"},
    "safetensors, sharded": {"format": "safetensors", "mode": "sharded"},
    "torch": {"format": "torch"},
    "orbax": {"format": "orbax"},
    "orbax_zstd": {"format": "orbax_zstd"},
    "dcp": {"format": "dcp"},
    "huggingface": {"format": "huggingface"},
}


def found_in(path: Path) -> dict[str, Any]:
    """Return what is there by dotted name, items apart."""
    if (path / "7").exists() or (path / "0").exists():
        with CheckpointManager(path) as manager:
            result = manager.restore_latest()
        assert result is not None
        names = flat_names(result.state)
    else:
        names = flat_names(restore_foreign(path).state)
    return {name.removeprefix("model."): value for name, value in names.items()}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_any_kind_becomes_any_other_bit_for_bit(tmp_path: Path, source: str, target: str) -> None:
    SOURCES[source](tmp_path / "from")
    path = next(tmp_path.glob("from*"))
    (made,) = convert(path, tmp_path / "to", **TARGETS[target]).steps
    assert made.outcome == "written"
    number = 7 if (path / "7").is_dir() else 0
    assert made.step == (None if target in ("dcp", "huggingface") else number)
    found = found_in(tmp_path / "to")
    for name, value in tensors().items():
        assert found[name].dtype == value.dtype
        assert torch.equal(found[name], value), name
    if target != "huggingface" and source != "a file of safetensors":
        plain = {name: value for name, value in found.items() if name.startswith("plain.")}
        assert plain == flat_names({"plain": tree()["plain"]})
    assert convert(path, tmp_path / "to", **TARGETS[target]).steps[0].outcome == "present"


@pytest.mark.parametrize(
    "kind", ["lightning/trainer.ckpt", "xlafsdp/parameters", "xla_manager/12", "huggingface/several"]
)
@pytest.mark.parametrize("target", ["orbax", "dcp", "huggingface"])
def test_what_other_tools_wrote_becomes_any_kind(tmp_path: Path, kind: str, target: str) -> None:
    wanted = flat_names(restore_foreign(SHARED / kind).state)
    convert(SHARED / kind, tmp_path / "to", format=target, to_step=None if target != "orbax" else 0)
    found = found_in(tmp_path / "to")
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor) and (target != "huggingface" or kind != "xlafsdp/parameters"):
            assert torch.equal(found[name.removeprefix("model.")], value), name


# -- interruptions ---------------------------------------------------------------------------------------------------


def several_items(path: Path) -> None:
    with CheckpointManager(path) as manager:
        manager.save(7, {f"item{n}": {"w": torch.full((50, 3), float(n))} for n in range(4)} | {"plain": {"n": 5}})


FILES: dict[str, dict[str, Any]] = {
    "safetensors": {"format": "safetensors"},
    "torch": {"format": "torch"},
    "orbax": {"format": "orbax"},
    "orbax_zstd": {"format": "orbax_zstd"},
    "dcp": {"format": "dcp", "max_file_bytes": 1},
    "huggingface": {"format": "huggingface", "max_file_bytes": 1},
}


def inodes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): path.stat().st_ino for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("target", FILES)
def test_an_interruption_anywhere_shows_nothing_and_what_is_done_is_not_done_again(tmp_path: Path, target: str) -> None:
    several_items(tmp_path / "from")
    kept = 0
    for at in (0, 2, 5, 7):
        to = tmp_path / f"to{at}"
        with pytest.raises(KeyboardInterrupt):
            convert(tmp_path / "from", to, progress=Interrupting(at), **FILES[target])
        assert not (to / "7").exists()
        assert not (to / ".metadata").exists()
        assert not list(to.glob("*.safetensors"))
        (begun,) = (*tmp_path.glob(f"to{at}.tmp-*"), *to.glob("7.tmp-*"))
        before = inodes(begun)
        (made,) = convert(tmp_path / "from", to, **FILES[target]).steps
        assert made.outcome == "resumed"
        after = inodes(Path(made.path))
        kept = max(kept, len([name for name, inode in after.items() if before.get(name) == inode]))
        assert not list(tmp_path.glob("*.tmp-*"))
        assert not list(to.glob("*.tmp-*"))
        assert not list(Path(made.path).glob("converting.json"))
        found = found_in(to)
        assert all(torch.equal(found[f"item{n}.w"], torch.full((50, 3), float(n))) for n in range(4))
    assert kept >= 4  # of the last one, which was interrupted while it was read back


KILLED = """
import json, os, signal, sys
from safepoint.manager.converting import convert
class Killing:
    left = 3
    def begin(self, what, total_bytes): pass
    def advance(self, num_bytes):
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], format=sys.argv[3], progress=Killing(), **json.loads(sys.argv[4]))
"""


def test_a_kill_leaves_what_the_next_one_goes_on_with(tmp_path: Path) -> None:
    several_items(tmp_path / "from")
    options: dict[str, dict[str, Any]] = {"safetensors": {}, "dcp": {"max_file_bytes": 1}}
    killed = [
        subprocess.Popen(
            [sys.executable, "-c", KILLED, str(tmp_path / "from"), str(tmp_path / name), name, json.dumps(given)]
        )
        for name, given in options.items()
    ]
    assert [process.wait(timeout=90) for process in killed] == [-signal.SIGKILL] * 2
    for name, given in options.items():
        (made,) = convert(tmp_path / "from", tmp_path / name, format=name, **given).steps
        assert made.outcome == "resumed"
        found = found_in(tmp_path / name)
        assert all(torch.equal(found[f"item{n}.w"], torch.full((50, 3), float(n))) for n in range(4))


@pytest.mark.parametrize("target", FILES)
def test_what_is_begun_of_another_content_is_not_gone_on_with(tmp_path: Path, target: str) -> None:
    several_items(tmp_path / "from")
    with pytest.raises(KeyboardInterrupt):
        convert(tmp_path / "from", tmp_path / "to", progress=Interrupting(2), **FILES[target])
    with CheckpointManager(tmp_path / "from") as manager:
        manager.save(7, {"item0": {"w": torch.ones(2)}}, on_exists="replace")
    (made,) = convert(tmp_path / "from", tmp_path / "to", **FILES[target]).steps
    assert made.outcome == "written"
    assert not list(tmp_path.glob("*.tmp-*"))
    assert torch.equal(found_in(tmp_path / "to")["item0.w"], torch.ones(2))


# -- the end of it ---------------------------------------------------------------------------------------------------


class Damaging(Interrupting):
    """Flips a byte of the largest file before what was written is read back."""

    def __init__(self, folder: Path) -> None:
        super().__init__(0)
        self.folder = folder

    def begin(self, what: str, total_bytes: int) -> None:
        del total_bytes
        if what == "read back":
            files = [path for path in self.folder.rglob("*") if path.is_file() and "from" not in str(path)]
            flip_byte(max(files, key=lambda path: path.stat().st_size), -1400)

    def advance(self, num_bytes: int) -> None:
        pass


@pytest.mark.parametrize("target", ["safetensors", "orbax", "dcp", "huggingface"])
def test_what_came_out_wrong_is_found_and_nothing_is_left(tmp_path: Path, target: str) -> None:
    with CheckpointManager(tmp_path / "from") as manager:
        manager.save(7, {"model": {"w": torch.arange(900.0)}})
    with pytest.raises(CorruptDataError):
        convert(tmp_path / "from", tmp_path / "to", format=target, progress=Damaging(tmp_path))
    assert not (tmp_path / "to" / "7").exists()
    assert not list(tmp_path.glob("*.tmp-*"))
    assert convert(tmp_path / "from", tmp_path / "to", format=target).steps[0].outcome == "written"


class Measuring(Interrupting):
    """Remembers the most memory of its own that this process had."""

    def __init__(self) -> None:
        super().__init__(0)
        self.start = self.peak = self._now()

    def _now(self) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))

    def advance(self, num_bytes: int) -> None:
        del num_bytes
        self.peak = max(self.peak, self._now())


@pytest.mark.parametrize("target", ["safetensors", "dcp"])
def test_no_more_than_one_leaf_or_one_batch_is_in_memory(tmp_path: Path, target: str) -> None:
    size = 12 << 20
    with CheckpointManager(tmp_path / "from") as manager:
        manager.save(1, {"model": {str(n): torch.full((size // 4,), float(n)) for n in range(20)}})
    measured = Measuring()
    convert(tmp_path / "from", tmp_path / "to", format=target, progress=measured)
    assert measured.peak - measured.start < 20 * size / 2


# -- all steps -------------------------------------------------------------------------------------------------------


def root_with_steps(path: Path) -> None:
    with CheckpointManager(path) as manager:
        for number in (10, 20, 15):
            manager.save(number, {"model": {"w": torch.full((300,), float(number))}}, metrics={"loss": number})


@pytest.mark.parametrize("target", ["orbax", "dcp"])
def test_all_steps_of_a_root_are_converted_in_their_order_and_a_damaged_one_is_named(
    tmp_path: Path, target: str
) -> None:
    root_with_steps(tmp_path / "from")
    flip_byte(tmp_path / "from" / "20" / "model" / "model.safetensors")
    result = convert(tmp_path / "from", tmp_path / "to", format=target, step="all")
    assert [(type(error), error.step) for error in result.errors] == [(CorruptDataError, 20)]
    assert [Path(made.path).name for made in result.steps] == ["10", "15"]
    if target == "orbax":
        with CheckpointManager(tmp_path / "to") as manager:
            assert manager.latest_step() == 15
    again = convert(tmp_path / "from", tmp_path / "to", format=target, step="all")
    assert [made.outcome for made in again.steps] == ["present", "present"]
    third = convert(tmp_path / "to", tmp_path / "back", step="all")
    assert [made.step for made in third.steps] == [10, 15]
    with CheckpointManager(tmp_path / "back") as manager:
        state = manager.restore(10).state
    assert state is not None
    assert torch.equal(state["model"]["w"], torch.full((300,), 10.0))


def test_a_step_of_a_directory_of_others_is_chosen_by_its_number(tmp_path: Path) -> None:
    for number in (3, 12):
        dcp.save({"n": torch.tensor(number)}, checkpoint_id=str(tmp_path / "from" / str(number)), no_dist=True)
    (tmp_path / "from" / "99").mkdir()  # unfinished: without metadata
    assert convert(tmp_path / "from", tmp_path / "a").steps[0].step == 12
    assert convert(tmp_path / "from", tmp_path / "b", step=3).steps[0].step == 3
    with pytest.raises(StepNotFoundError) as caught:
        convert(tmp_path / "from", tmp_path / "c", step=4)
    assert caught.value.available == (3, 12)


# -- what makes no sense ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"format": "nope"}, "Formats: dcp, huggingface, orbax, "),
        ({"format": "torch", "mode": "sharded"}, "no mode 'sharded'"),
        ({"format": "dcp", "mode": "sharded"}, "no modes"),
        ({"format": "dcp", "to_step": 5}, "to_step"),
        ({"step": "all", "to_step": 5}, "to_step"),
        ({"item": "model"}, "huggingface"),
        ({"format": "huggingface", "item": "nope"}, "Items: model, plain"),
    ],
)
def test_options_that_do_not_go_together_are_named(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    ours(tmp_path / "from")
    with pytest.raises(InvalidArgumentError, match=message):
        convert(tmp_path / "from", tmp_path / "to", **options)
    assert not (tmp_path / "to").exists()


def test_a_directory_that_was_changed_since_is_not_taken_for_done(tmp_path: Path) -> None:
    ours(tmp_path / "from")
    (made,) = convert(tmp_path / "from", tmp_path / "to", format="dcp").steps
    os.truncate(tmp_path / "to" / made.files[-1], 10)
    with pytest.raises(InvalidArgumentError, match="already"):
        convert(tmp_path / "from", tmp_path / "to", format="dcp")


def test_two_conversions_to_one_name_are_told_apart(tmp_path: Path) -> None:
    ours(tmp_path / "from")

    class Second(Interrupting):
        def advance(self, num_bytes: int) -> None:
            del num_bytes
            with pytest.raises(InvalidArgumentError, match="another process"):
                convert(tmp_path / "from", tmp_path / "to", format="dcp")

    assert convert(tmp_path / "from", tmp_path / "to", format="dcp", progress=Second(0)).steps[0].outcome == "written"


def test_a_directory_of_others_is_not_written_to_a_url(tmp_path: Path) -> None:
    ours(tmp_path / "from")
    with pytest.raises(InvalidArgumentError, match="local directory"):
        convert(tmp_path / "from", "memory://somewhere/x", format="dcp")
