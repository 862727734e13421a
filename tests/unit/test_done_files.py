"""What is noted is there after a kill; what cannot be read counts as nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from safepoint.formats.storage import MemoryStorage
from safepoint.manager.done_files import DoneFiles

if TYPE_CHECKING:
    from safepoint.formats.storage import Storage


@pytest.fixture
def storage() -> Storage:
    made = MemoryStorage()
    made.make_dir("")
    return made


def test_the_first_note_is_kept_at_once_and_all_are_when_the_block_ends(storage: Storage) -> None:
    with DoneFiles(storage, "done.json") as done:
        done.add("a", {"n": 1})
        assert DoneFiles(storage, "done.json").get("a") == {"n": 1}
        done.add("b", [2])
    again = DoneFiles(storage, "done.json")
    assert (again.get("a"), again.get("b"), again.get("c")) == ({"n": 1}, [2], None)


def test_what_is_removed_is_not_written_again(storage: Storage) -> None:
    with DoneFiles(storage, "done.json") as done:
        done.add("a", 1)
        done.add("b", 2)
        done.remove()
    assert storage.size("done.json") is None


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b"{}", json.dumps({"digest": "0" * 32, "notes": '{"a": 1}'}).encode(), b"\xff"]
)
def test_notes_that_are_damaged_are_none(storage: Storage, data: bytes) -> None:
    storage.put("done.json", data)
    assert DoneFiles(storage, "done.json").get("a") is None
