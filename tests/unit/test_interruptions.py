"""What a save leaves that is interrupted, called twice at once, or called from inside itself."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.manager import CheckpointManager, part_writing
from safepoint.manager.errors import AttemptLostError, CheckpointError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


class Calling:
    """Calls something when it is asked for its state."""

    def __init__(self, what: Callable[[], object]) -> None:
        self.what = what

    def state_dict(self) -> dict[str, Any]:
        self.what()
        return {"n": 1}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        self.what()


def names_of(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} - {".safepoint"}


@pytest.mark.parametrize("blocking", [True, False])
@pytest.mark.parametrize(
    "place",
    [
        "safepoint.manager.saving.lay_out_files",
        "safepoint.manager.saving.LiveSource",
        "safepoint.manager.saving.plan_together",
        "safepoint.manager.planning.Planned",
    ],
)
def test_an_interrupted_save_leaves_nothing_and_the_next_one_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, *, blocking: bool
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with CheckpointManager(tmp_path) as manager:
        manager.save(0, {"w": torch.ones(3)})
        with monkeypatch.context() as patched:
            patched.setattr(place, interrupt)
            with pytest.raises(KeyboardInterrupt):
                manager.save(1, {"w": torch.ones(3)}, blocking=blocking)
        assert names_of(tmp_path) == {"0"}
        manager.save(1, {"w": torch.ones(3)})
        assert names_of(tmp_path) == {"0", "1"}


def test_a_save_that_others_gave_up_while_this_one_wrote_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files = part_writing.write_files

    def write_late(storage: Any, prefix: str, *rest: Any, **named: Any) -> Any:
        assert manager._session.committer.abandon(1, prefix.partition("-")[2])
        return write_files(storage, prefix, *rest, **named)

    with CheckpointManager(tmp_path) as manager:
        monkeypatch.setattr(part_writing, "write_files", write_late)
        with pytest.raises(AttemptLostError) as caught:
            manager.save(1, {"w": torch.ones(3)})
        assert caught.value.outcome == "not_committed"
        assert names_of(tmp_path) == set()


def test_a_second_thread_is_refused_while_a_save_is_under_way(tmp_path: Path) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def wait() -> None:
        inside.set()
        assert go_on.wait(30)

    with CheckpointManager(tmp_path) as manager:
        thread = threading.Thread(target=manager.save, args=(0, {"slow": Calling(wait)}), name="first")
        thread.start()
        assert inside.wait(30)
        calls: list[Callable[[], object]] = [
            lambda: manager.save(1, {"n": 1}),
            lambda: manager.restore(0),
            manager.restore_latest,
            manager.wait,
            manager.close,
            lambda: manager.preemption(signals=()),
        ]
        for call in calls:
            with pytest.raises(InvalidArgumentError, match="under way on thread first"):
                call()
        assert manager.steps() == []
        go_on.set()
        thread.join(30)
        manager.save(1, {"n": 1})
        assert [info.step for info in manager.steps()] == [0, 1]


def test_a_save_in_the_middle_of_a_save_or_restore_is_refused(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path) as manager:
        state = {"inner": Calling(lambda: manager.save(5, {"n": 1}))}
        with pytest.raises(CheckpointError, match=r"save\(\) is under way"):
            manager.save(0, state)
        manager.save(0, {"inner": Calling(lambda: None)})
        with pytest.raises(CheckpointError, match=r"restore\(\) is under way"):
            manager.restore(0, state)
        assert [info.step for info in manager.steps()] == [0]


def test_a_signal_handler_that_saves_in_the_middle_of_a_save_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []
    with CheckpointManager(tmp_path) as manager:

        def handle(*_: object) -> None:
            try:
                manager.save(1, {"n": 1})
            except InvalidArgumentError as error:
                refused.append(str(error))

        before = signal.signal(signal.SIGUSR1, handle)
        try:
            manager.save(0, {"signal": Calling(lambda: signal.raise_signal(signal.SIGUSR1))})
            assert len(refused) == 1
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        assert [info.step for info in manager.steps()] == [0, 1]
