"""Several groups of one host: each is served in its turn, and a failure in one reaches the members of all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch

from safepoint.formats.errors import StorageError
from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager
from safepoint.manager.adapters import ArrayLeaf, wrap_array
from safepoint.manager.fetching import plan_fetches
from safepoint.manager.host_plan import Group, blocks_touched
from safepoint.manager.host_sharing import HostReading

from support.faulty_storage import Fail, FaultyStorage
from support.thread_transport import Switchboard, ThreadTransport

if TYPE_CHECKING:
    from pathlib import Path

    from safepoint.formats.manifest import Manifest

NUM_ITEMS = 3 << 20  # as float32: two blocks
WANTS = ("ab", "abc", "bcd")
MEMBERS = {"a": (0, 1), "b": (0, 1, 2), "c": (1, 2)}
VALUES = {name: torch.arange(NUM_ITEMS, dtype=torch.float32) + number for number, name in enumerate("abcd")}


class Restore:
    """One restore by three processes, each a thread."""

    def __init__(self, root: Path) -> None:
        with CheckpointManager(root) as manager:
            manager.save(1, VALUES)
            (step,) = manager._session.committer.list_steps()
            self.manifest: Manifest = manager._session.committer.load_manifest(step)
        self.prefix = step.files_prefix
        self.storages = [FaultyStorage(LocalStorage(root)) for _ in WANTS]
        self.targets = [{name: torch.zeros(NUM_ITEMS) for name in wants} for wants in WANTS]
        self.told: list[list[int]] = [[] for _ in WANTS]

    def run(self) -> list[Any]:
        """Return what each read, or the error that it raised."""
        board = Switchboard()
        files = self.manifest.files
        leaves: list[dict[tuple[str, ...], ArrayLeaf]] = [
            {(name,): wrap_array(value, (name,)) for name, value in target.items()} for target in self.targets
        ]
        fetches = [plan_fetches(self.manifest, own) for own in leaves]
        runs = {fetch.leaf.name: blocks_touched(fetch, files) for own in fetches for fetch in own}
        groups = sorted(
            (Group(members, (run,)) for name, members in MEMBERS.items() if (run := runs[name]) is not None),
            key=lambda group: group.members,
        )

        def restore(own: int) -> Any:
            reading = HostReading(
                transport=ThreadTransport(board, own),
                process_index=own,
                groups=tuple((group, 30.0) for group in groups if own in group.members),
                patience_secs=30.0,
            )
            try:
                return reading.fetch(
                    self.storages[own], self.prefix, self.manifest, fetches[own], progress=self.told[own].append
                )
            except Exception as error:  # noqa: BLE001 - looked at by the test
                return error

        with ThreadPoolExecutor(len(WANTS)) as pool:
            return list(pool.map(restore, range(len(WANTS))))


def test_each_gets_what_it_wants_and_each_thing_is_read_once(tmp_path: Path) -> None:
    restore = Restore(tmp_path)
    sizes = {file.path: file.num_bytes for file in restore.manifest.files}
    assert len(sizes) == len(VALUES)  # a file each
    assert sum(restore.run()) == sum(sizes.values())
    for wants, target, told in zip(WANTS, restore.targets, restore.told, strict=True):
        assert all(torch.equal(value, VALUES[name]) for name, value in target.items())
        assert sum(told) == sum(size for path, size in sizes.items() if path[0] in wants)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_reaches_the_members_of_every_group(tmp_path: Path, failing: int) -> None:
    restore = Restore(tmp_path)
    inner = restore.storages[failing].inner
    restore.storages[failing] = FaultyStorage(inner, at=1, times=None, fault=Fail(), only={"reader.read_into"})
    for error in restore.run():
        assert isinstance(error, StorageError)
        assert error.process_index == failing
        assert error.leaf in set("abcd")
