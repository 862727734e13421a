"""The page: one file without any other, that asks for nothing from anywhere, and says everything without its script."""

from __future__ import annotations

import base64
import hashlib
import os
import statistics
from importlib.resources import files
from typing import TYPE_CHECKING

from safepoint.manager.report.charts import PHASES, legend, phase_chart, save_text, size_chart
from safepoint.manager.report.markup import Markup, duration, join, json_script, moment, size, tag
from safepoint.manager.report.sections import (
    faults_section,
    others_section,
    restores_section,
    runs_section,
    steps_section,
)
from safepoint.manager.report.step_section import step_section

if TYPE_CHECKING:
    from safepoint.manager.report.facts import RootFacts

__all__ = ["render"]

_MAX_SHOWN = 1000
"""Columns of a chart: more could not be told apart."""


def render(facts: RootFacts) -> str:
    """Return the page of a root."""
    name = os.path.basename(facts.root) or facts.root
    sections = [section for section in _sections(facts) if section is not None]
    script = _resource("page.js")
    body = tag(
        "body",
        tag("a", "Skip to the content", href="#content", class_="skip"),
        tag(
            "header",
            tag("h1", f"Checkpoints of {name}"),
            tag("p", tag("code", facts.root), " · looked at ", moment(facts.time), " UTC", class_="where"),
            _numbers(facts),
            tag(
                "nav",
                tag("ul", *(tag("li", tag("a", title, href=f"#{identity}")) for identity, title, _ in sections)),
                aria_label="Sections",
            ),
        ),
        tag("main", *(_section(*section) for section in sections), id="content", tabindex="-1"),
        tag("footer", tag("p", "Made by ", tag("code", "safepoint report"), ". Times are UTC.")),
        json_script("save-texts", [save_text(save) for save in facts.saves[-_MAX_SHOWN:]]),
        Markup(f"<script>{script}</script>"),
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"Checkpoints of {name}"),
        Markup(f"<style>{_resource('page.css')}</style>"),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _resource(name: str) -> str:
    return files("safepoint.manager.report").joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"


def _section(identity: str, title: str, content: Markup) -> Markup:
    return tag(
        "section", tag("h2", title, id=f"{identity}-title"), content, id=identity, aria_labelledby=f"{identity}-title"
    )


def _sections(facts: RootFacts) -> list[tuple[str, str, Markup] | None]:
    sized_chart, names = size_chart(facts.saves[-_MAX_SHOWN:])
    return [
        ("saves", "How long saves took", _saves(facts)) if facts.saves else None,
        ("sizes", "Size by item", _sizes(facts, sized_chart, names)) if names else None,
        ("steps", "Steps, and why each stays", steps_section(facts)),
        ("latest", f"What is in step {facts.latest.step}", step_section(facts.latest, names)) if facts.latest else None,
        ("runs", "Runs", runs_section(facts)) if facts.runs else None,
        ("restores", "Restores", restores_section(facts)),
        ("faults", "Faults seen", faults_section(facts)),
        ("others", "What else lies there", others_section(facts)) if facts.others else None,
    ]


def _numbers(facts: RootFacts) -> Markup:
    kept = facts.kept
    took = [save.secs for save in facts.saves if save.secs]
    blocked = [save.blocked_secs for save in facts.saves if save.secs]
    numbers = [
        ("steps", f"{len(kept):,}"),
        ("latest", "none" if not kept else str(kept[-1].step)),
        ("on disk", size(sum(save.own_bytes for save in kept))),
        ("a save takes", duration(statistics.median(took)) if took else "unknown"),
        ("and holds up for", duration(statistics.median(blocked)) if blocked else "unknown"),
        ("faults seen", str(len(facts.faults))),
    ]
    return tag("dl", *(tag("div", tag("dt", label), tag("dd", value)) for label, value in numbers), class_="numbers")


def _saves(facts: RootFacts) -> Markup:
    shown = facts.saves[-_MAX_SHOWN:]
    entries = [*PHASES, *([("mark", "held up the training until here")] if _has_async(facts) else [])]
    left_out = len(facts.saves) - len(shown)
    more = f" The newest {len(shown):,} of {len(facts.saves):,}." if left_out else ""
    return join(
        tag("p", f"From the call to the commit, on the process that commits; one column a save, in their order.{more}"),
        legend(entries),
        phase_chart(shown),
        tag(
            "div",
            tag("label", "Save", for_="pick"),
            tag("input", type="range", id="pick", min=0, max=max(0, len(shown) - 1), value=max(0, len(shown) - 1)),
            tag("output", save_text(shown[-1]), for_="pick", id="picked"),
            class_="pick",
            id="picker",
            hidden=True,
        ),
    )


def _has_async(facts: RootFacts) -> bool:
    return any(save.is_blocking is False for save in facts.saves)


def _sizes(facts: RootFacts, chart: Markup, names: list[str]) -> Markup:
    known = sum(save.items is not None for save in facts.saves)
    text = "Bytes of the data of each top-level key."
    if known < len(facts.kept):
        text += f" Of the {known:,} newest steps, whose manifests were read."
    return join(tag("p", text), legend([(f"c{index}", name) for index, name in enumerate(names)]), chart)
