"""What the benchmarks draw can be drawn again from the samples that they kept."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from support.source_tree import ROOT


def race(title: str, **millis: float) -> dict[str, Any]:
    samples = {name: [{"secs": value / 1000, "cpu_secs": 0.0, "extra_bytes": 0}] * 3 for name, value in millis.items()}
    return {
        "title": title,
        "samples": samples,
        "keeps": dict.fromkeys(millis, ""),
        "num_bytes": dict.fromkeys(millis, 1 << 30),
        "absent": {},
    }


def test_tables_and_chart_are_drawn_from_kept_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    measuring, plot = (importlib.import_module(f"benchmarks.{name}") for name in ("measuring", "plot"))
    goal = {"name": "a save / DCP", "target": 1.5, "measured": 2.0, "at_most": False, "unit": "×", "usual": None}
    goal["is_reached"] = True
    races = [race("Save of 1024 MiB", safepoint=500, DCP=1000), race("Blocked time of an async save", safepoint=20)]
    kept = {"suite": "save", "races": races, "goals": [goal], "notes": []}
    report = measuring.Report.from_json(json.loads(json.dumps(kept)))
    assert report.to_json() == kept
    assert plot.goals_table([report]).splitlines()[-1] == "| a save / DCP | ≥ 1.5× | 2.00× | reached |"
    assert plot.summary_table([report]).splitlines() == [
        "| | safepoint | DCP |",
        "|---|---|---|",
        "| save, GiB/s | 2.00 | 1.00 |",
        "| async save: the loop stops for, ms | 20 |  |",
    ]
    nothing = race("Save of 10,000 leaves", safepoint=20) | {"num_bytes": {"safepoint": 0}}
    small = measuring.Report.from_json({"suite": "small", "races": [nothing], "goals": [], "notes": []})
    chart = plot.speed_chart([report, small])
    assert "2.00 GiB/s" in chart
    assert "10,000" not in chart


@pytest.mark.parametrize(("measured", "is_far_off"), [(5.0, False), (0.63, False), (0.62, True), (None, False)])
def test_the_guard_lets_pass_what_is_within_its_margin(
    monkeypatch: pytest.MonkeyPatch, *, measured: float | None, is_far_off: bool
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    goal = importlib.import_module("benchmarks.measuring").Goal(name="a", target=5.0, measured=measured)
    assert goal.is_far_off(8) is is_far_off


def test_a_ratio_that_is_known_to_be_short_is_held_to_what_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    goal = importlib.import_module("benchmarks.measuring").Goal(name="a", target=5.0, measured=0.5, usual=0.6)
    assert not goal.is_reached
    assert not goal.is_far_off(8)
    assert goal.is_far_off(1.1)


@pytest.mark.parametrize(
    ("arguments", "services"),
    [([], ["s3", "gs"]), (["--service", "gs"], ["gs"]), (["--s3-address", "a:1"], ["s3", "gs"])],
)
def test_object_stores_of_both_services_are_measured_in_one_run_or_the_one_that_is_named(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], services: list[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT))
    store = importlib.import_module("benchmarks.object_store")
    assert list(store.chosen_servers(store.parser().parse_args(arguments))) == services
