"""The tables of the page: steps, runs, restores, faults, and what else lies in the root."""

from __future__ import annotations

from typing import TYPE_CHECKING

from safepoint.manager.report.markup import Markup, duration, join, moment, size, tag

if TYPE_CHECKING:
    from collections.abc import Sequence

    from safepoint.manager.report.facts import RootFacts, SaveFacts

__all__ = [
    "data_table",
    "faults_section",
    "others_section",
    "restores_section",
    "runs_section",
    "steps_section",
]

_MAX_ROWS = 2000
_LONG = 12
_KINDS = {
    "no record": "has a number for a name and no commit record: not a step",
    "unfinished": "a save that has not committed: under way, or left by a run that was killed",
    "replaced": "replaced by another save of the same step",
    "deleted": "being deleted",
    "not ours": "not ours: never touched",
}


def data_table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, right: str = "") -> Markup:
    """Return a table; a long one scrolls in itself, by keyboard too.

    Args:
        caption: what it is.
        headings: of the columns.
        rows: their cells; the first one heads its row.
        right: numbers of the columns that hold numbers, as digits.
    """
    classes = ["n" if str(index) in right else None for index in range(len(headings))]
    head = tag("tr", *(tag("th", text, scope="col", class_=c) for text, c in zip(headings, classes, strict=True)))
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row", class_=classes[0]),
            *(tag("td", cell, class_=c) for cell, c in zip(row[1:], classes[1:], strict=True)),
        )
        for row in rows[:_MAX_ROWS]
    ]
    table = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    is_long = len(rows) > _LONG
    note = tag("p", f"{len(rows) - _MAX_ROWS:,} more are left out.", class_="note") if len(rows) > _MAX_ROWS else None
    box = tag(
        "div", table, class_="scroll long" if is_long else "scroll", role="region", aria_label=caption, tabindex=0
    )
    return join(box, note)


def steps_section(facts: RootFacts) -> Markup:
    """Return every commit that is known, the newest first."""
    if not facts.saves:
        return tag("p", "Nothing was committed here yet.")
    said = "No policy is known: why a step stays is told of the latest and of pinned ones only."
    if facts.policy:
        said = f"The policy: {facts.policy}."
    return join(
        tag("p", said),
        tag(
            "div",
            tag("label", "Show rows with", for_="find"),
            tag("input", type="search", id="find", autocomplete="off", spellcheck="false"),
            tag("output", for_="find", id="found"),
            class_="pick",
            id="finder",
            hidden=True,
        ),
        data_table(
            "Steps, the newest commit first",
            ("step", "committed", "size", "written", "metrics", "took", "held up", "stays because"),
            [_step_row(save, has_policy=bool(facts.policy)) for save in reversed(facts.saves)],
            right="0256",
        ),
    )


def _step_row(save: SaveFacts, *, has_policy: bool) -> list[str]:
    took = duration(save.secs) if save.secs else ""
    held = duration(save.blocked_secs) if save.secs else ""
    why = ", ".join(save.kept) or ("no policy keeps it" if has_policy else "")
    if save.left_by is not None:
        why = f"{why}; " if why else ""
        why += f"left by going back to {save.left_by}"
    if not save.is_there:
        why = tag("i", "removed since")
    written = f"{save.mode}, {save.format}" if save.mode else ""
    held_bytes = size(save.num_bytes)
    if save.is_there and save.own_bytes != save.num_bytes:
        held_bytes += f", {size(save.own_bytes)} its own"
    return [str(save.step), moment(save.time), held_bytes, written, save.metrics, took, held, why]


def runs_section(facts: RootFacts) -> Markup:
    """Return who committed what, and from where each went on."""
    rows = []
    there = {save.step for save in facts.kept}
    for run in reversed(facts.runs):
        start = "a fresh start" if run.is_fresh else "not known any more"
        if run.continued_from is not None:
            start = f"step {run.continued_from}" + ("" if run.continued_from in there else ", gone since")
        steps = str(run.first_step) if run.num_commits == 1 else f"{run.first_step} to {run.last_step}"
        rows.append([tag("code", run.run), start, steps, f"{run.num_commits:,}", moment(run.since), moment(run.until)])
    return join(
        tag("p", "A run is one opening of a manager. Of each, the commits that are still there."),
        data_table(
            "Runs, the newest first", ("run", "went on from", "steps", "commits", "first", "last"), rows, right="3"
        ),
    )


def restores_section(facts: RootFacts) -> Markup:
    """Return the restores of runs that went on to save."""
    if not facts.restores:
        return tag("p", "None is recorded: a run that only restores leaves no trace." + _no_history(facts))
    rows = [
        [
            moment(found.time),
            f"step {found.step}",
            size(found.num_bytes),
            duration(found.secs),
            str(found.passed_over) if found.passed_over else "",
            tag("code", found.run),
        ]
        for found in reversed(facts.restores)
    ]
    headings = ("when", "restored", "read by process 0", "took", "newer steps passed over", "run")
    return data_table("Restores, the newest first", headings, rows, right="234")


def faults_section(facts: RootFacts) -> Markup:
    """Return what failed, and what is damaged."""
    if not facts.faults:
        return tag("p", "None." + _no_history(facts))
    rows = [
        [
            tag("b", "now") if fault.time is None else moment(fault.time),
            fault.kind,
            "" if fault.step is None else str(fault.step),
            fault.text,
        ]
        for fault in sorted(facts.faults, key=lambda fault: -(fault.time or facts.time))
    ]
    return data_table("Faults, the newest first", ("when", "what", "step", "which"), rows, right="2")


def _no_history(facts: RootFacts) -> str:
    return "" if facts.has_history else " This root has no history; a manager that saves to it begins one."


def others_section(facts: RootFacts) -> Markup:
    """Return what is no step."""
    rows = [[name, _KINDS.get(kind, kind), size(num_bytes)] for name, kind, num_bytes in facts.others]
    return data_table("Everything in the root that is no step", ("name", "what it is", "size"), rows, right="2")
