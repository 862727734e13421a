"""What a report says of a root, and that nothing in a root can become part of its page but as text."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from safepoint.formats.storage import LocalStorage
from safepoint.manager import CheckpointManager, KeepEvery, KeepLast
from safepoint.manager.errors import UnsupportedValueError
from safepoint.manager.report import RootFacts, collect, render
from safepoint.manager.report.facts import SaveFacts
from safepoint.manager.report.markup import duration, json_script, tag
from safepoint.manager.report.treemap import Box, squarify

from support.command import commit_sharded, flip_byte, run
from support.page_elements import Elements
from support.report_root import make_root

if TYPE_CHECKING:
    from pathlib import Path

HOSTILE = "</script><script>alert(1)</script><img src=x onerror='alert(2)'>\"' onload=x"


def facts_of(root: Path) -> RootFacts:
    return collect(LocalStorage(root))


def page_of(root: Path) -> Elements:
    return Elements(render(facts_of(root)))


def test_a_real_run_is_told_from_its_records(tmp_path: Path) -> None:
    state = {"model": torch.zeros(100), "optimizer": {"m": torch.zeros(200), "step": 3}}
    with CheckpointManager(tmp_path, keep=KeepLast(2) | KeepEvery(4)) as manager:
        for step in range(6):
            manager.save(step, state, blocking=step % 2 == 0, metrics={"loss": 1 / (step + 1)})
        with pytest.raises(UnsupportedValueError):
            manager.save(6, {"model": print})
    with CheckpointManager(tmp_path) as manager:
        manager.restore_latest()
        manager.save(7, state)

    facts = collect(LocalStorage(tmp_path), KeepLast(2))
    assert [(save.step, save.is_there) for save in facts.saves] == [
        (0, True),
        (1, False),
        (2, False),
        (3, False),
        (4, True),
        (5, True),
        (7, True),
    ]
    assert [save.is_blocking for save in facts.saves] == [True, False, True, False, True, False, True]
    assert all(save.secs >= save.blocked_secs > 0 for save in facts.saves)
    assert facts.saves[0].items == {"model": 400, "optimizer": 800}
    assert facts.saves[-1].kept == ("latest", "last 2")
    assert [(run.continued_from, run.is_fresh, run.num_commits) for run in facts.runs] == [
        (None, True, 3),
        (5, False, 1),
    ]
    assert [(found.step, found.passed_over) for found in facts.restores] == [(5, 0)]
    assert [(fault.kind, fault.step) for fault in facts.faults] == [("save failed", 6)]
    assert "UnsupportedValueError" in facts.faults[0].text
    assert facts.latest is not None
    assert [leaf.path for leaf in facts.latest.leaves] == ["optimizer.m", "model"]
    assert [writer.process_index for writer in facts.latest.writers] == [0]


def test_where_a_run_went_on_is_told_also_when_that_step_is_gone_and_never_guessed(tmp_path: Path) -> None:
    state = {"w": torch.zeros(3)}
    for steps in ((1, 2, 3), (4, 5), (6, 7, 8)):
        with CheckpointManager(tmp_path, keep=KeepLast(2)) as manager:
            manager.restore_latest(dict(state))
            for step in steps:
                manager.save(step, state)
    facts = facts_of(tmp_path)
    assert [(run.first_step, run.continued_from, run.is_fresh) for run in facts.runs] == [(7, 5, False)]
    assert "step 5, gone since" in Elements(render(facts)).text

    (tmp_path / ".safepoint" / "history.jsonl").unlink()
    facts = facts_of(tmp_path)
    assert [(run.continued_from, run.is_fresh) for run in facts.runs] == [(None, False)]
    assert "not known any more" in Elements(render(facts)).text


def test_the_policy_is_the_one_that_the_latest_save_left_in_its_record(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=KeepLast(1) | KeepEvery(2)) as manager:
        for step in (1, 2, 3):
            manager.save(step, {"w": torch.zeros(3)})
    facts = facts_of(tmp_path)

    assert facts.policy == "KeepLast(1) | KeepEvery(2)"
    assert [save.kept for save in facts.kept] == [("every 2",), ("latest", "last 1")]


def test_of_incremental_saves_it_is_told_what_is_their_own(tmp_path: Path) -> None:
    state = {"frozen": torch.zeros(5000), "head": torch.zeros(10)}
    with CheckpointManager(tmp_path, unchanged="link", mode="consolidated") as manager:
        for step in (1, 2):
            state["head"] += 1
            manager.save(step, state)
    first, second = facts_of(tmp_path).saves

    assert first.own_bytes == first.num_bytes == second.num_bytes
    assert second.own_bytes < 10_000
    assert "kB its own" in page_of(tmp_path).text


def test_damage_is_told_and_does_not_stop_the_report(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        commit_sharded(tmp_path / "run", step, {"w": torch.zeros(8, 2)})
    flip_byte(tmp_path / "run" / "1" / "commit.json")
    (tmp_path / "run" / "3" / "manifest.json").write_text("{}")
    facts = facts_of(tmp_path / "run")

    assert sorted((fault.kind, fault.step) for fault in facts.faults) == [("unreadable now", 1), ("unreadable now", 3)]
    assert facts.latest is None
    assert "unreadable now" in page_of(tmp_path / "run").text


def test_a_step_that_goes_meanwhile_is_no_fault(tmp_path: Path) -> None:
    for step in (1, 2):
        commit_sharded(tmp_path / "run", step, {"w": torch.zeros(8, 2)})

    class Deleting:
        def begin(self, what: str, total_bytes: int) -> None:
            del what, total_bytes
            shutil.rmtree(tmp_path / "run" / "1")

        def advance(self, num_bytes: int) -> None:
            del num_bytes

    facts = collect(LocalStorage(tmp_path / "run"), progress=Deleting())

    assert facts.faults == []
    assert [save.step for save in facts.saves] == [2]


def test_an_empty_root_has_a_page(tmp_path: Path) -> None:
    (tmp_path / ".safepoint").mkdir()
    text = page_of(tmp_path).text

    assert "Nothing was committed here yet." in text
    assert "has no history" in text


def test_hostile_names_are_text_wherever_they_come_from(tmp_path: Path) -> None:
    root = tmp_path / "<b>run"
    state = {HOSTILE: {HOSTILE: torch.zeros(64, 64), "\u202e\x1b[2J": torch.zeros(64)}}
    extra = {"keep": HOSTILE, "blocking": HOSTILE}
    timings = {"begin_secs": HOSTILE, "write_secs": float(10**300), "elapsed_secs": [HOSTILE]}
    commit_sharded(
        root, 1, state, metrics={HOSTILE: 1.0}, created=HOSTILE, extra=extra, timings=timings, run="x", parent="y"
    )
    (root / "<script>alert(3)<").mkdir()
    lines = [
        {
            "event": kind,
            "time": 1.0,
            "step": 1,
            "run": HOSTILE,
            "attempt": HOSTILE,
            "message": HOSTILE,
            "error": HOSTILE,
        }
        for kind in ("SaveFailed", "RestoreDone", "SaveCommitted", "Preempted", HOSTILE)
    ]
    lines += [{"event": "SaveCommitted", "time": HOSTILE}, {"event": "RestoreDone", "time": 1, "step": HOSTILE}]
    (root / ".safepoint").mkdir(exist_ok=True)
    (root / ".safepoint" / "history.jsonl").write_text("\n".join(map(json.dumps, lines)))
    page = render(facts_of(root))
    elements = Elements(page)

    assert {name for name, _ in elements.found if name in ("img", "b", "iframe", "object")} <= {"b"}
    assert [attributes.get("type") for name, attributes in elements.found if name == "script"] == [
        "application/json",
        None,
    ]
    assert [name for _, attributes in elements.found for name in attributes if name.startswith("on")] == []
    assert "alert(1)</script>" not in page
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert elements.text.count("<img src=x onerror=") > 5  # as text


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    make_root(tmp_path / "run", 3, process_count=2, state={"w": torch.zeros(8, 4)})
    page = render(facts_of(tmp_path / "run"))
    elements = Elements(page)

    addresses = [
        value for _, attributes in elements.found for name, value in attributes.items() if name in ("src", "href")
    ]
    assert all(value is not None and value.startswith("#") for value in addresses)
    assert re.search(r"url\(|@import|fetch\(|XMLHttpRequest", page) is None
    policy = next(str(attributes["content"]) for _, attributes in elements.found if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'; ")


def test_a_thousand_saves_are_a_page_of_reasonable_size() -> None:
    one = SaveFacts(step=1, attempt="a", run="r", time=1e9, num_bytes=10**9, mode="sharded ×8", format="safetensors")
    one = replace(one, begin_secs=0.1, stage_secs=1.0, write_secs=5.0, commit_secs=0.2, items={"model": 10, "opt": 20})
    facts = RootFacts(root="/runs/x", saves=[replace(one, step=step) for step in range(1000)])
    page = render(facts)

    assert page.count("<g>") == 2000
    assert len(page) < 2_000_000


def test_what_no_column_can_show_is_cut_and_said() -> None:
    saves = [SaveFacts(step=step, attempt="", run="", write_secs=1.0) for step in range(30)]
    saves[3].write_secs = 1e6
    page = render(RootFacts(root="/x", saves=saves))

    assert page.count('class="cut"') == 1
    assert "Columns with a jagged top are cut" in page


@given(st.lists(st.floats(min_value=1e-6, max_value=1e12), min_size=1, max_size=60))
def test_a_treemap_has_the_areas_of_its_numbers_and_stays_in_its_box(values: list[float]) -> None:
    values.sort(reverse=True)
    whole = Box(3.0, 5.0, 200.0, 100.0)
    boxes = squarify(values, whole)

    assert len(boxes) == len(values)
    for value, box in zip(values, boxes, strict=True):
        assert box.width * box.height == pytest.approx(200.0 * 100.0 * value / sum(values), abs=0.5)
        assert box.x >= 3.0 - 1e-6
        assert box.y >= 5.0 - 1e-6
        assert box.x + box.width <= 203.0 + 1e-6
        assert box.y + box.height <= 105.0 + 1e-6


def test_markup_escapes_all_that_is_text() -> None:
    assert tag("p", "<&>", tag("b", "x"), title='"<', class_="a", hidden=True, id=None) == (
        '<p title="&quot;&lt;" class="a" hidden>&lt;&amp;&gt;<b>x</b></p>'
    )
    assert (
        json_script("d", "</script>&")
        == '<script type="application/json" id="d">"\\u003c/script\\u003e\\u0026"</script>'
    )
    assert [duration(secs) for secs in (0.0, 0.0123, 0.25, 12.34, 100.0, 7300.0)] == [
        "0 ms",
        "12.3 ms",
        "0.25 s",
        "12.3 s",
        "1 min 40 s",
        "2 h 01 min",
    ]


def test_the_command_writes_the_page_and_says_what_is_in_it(tmp_path: Path) -> None:
    make_root(tmp_path / "run", 3, process_count=2, state={"w": torch.zeros(8, 4)})
    page = tmp_path / "page.html"
    page.write_text("an older one")
    done = run("report", tmp_path / "run", "-o", page)
    listed = run("report", tmp_path / "run", "-o", page, "--json", "--keep-last", 1).json

    assert (done.code, done.err) == (0, "")
    assert done.out.endswith("page.html: 3 steps, 2 restores, 3 faults")
    assert page.read_text().startswith("<!doctype html>")
    assert [one["step"] for one in listed["saves"] if one["is_there"]] == [1000, 2000, 3000]
    assert listed["policy"] == "KeepLast(1)"
    assert listed["num_bytes"] == page.stat().st_size
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_a_page_that_cannot_be_written_is_an_error_of_the_storage(tmp_path: Path) -> None:
    make_root(tmp_path / "run", 1, process_count=1, state={"w": torch.zeros(8, 4)})
    (tmp_path / "taken").mkdir()
    for target in (tmp_path / "no" / "such" / "page.html", tmp_path / "taken"):
        failed = run("report", tmp_path / "run", "-o", target)
        assert failed.code == 4
        assert "cannot write the page" in failed.err
    assert {path.name for path in tmp_path.iterdir()} == {"run", "taken"}
