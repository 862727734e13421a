"""Policies as text, as a run leaves its own in each commit record, and back: so that others can say why a step stays.

Only what our own policies print is read; nothing is looked up by name, and nothing is run.
"""

from __future__ import annotations

import ast
import re
from functools import reduce
from operator import or_
from typing import TYPE_CHECKING

from safepoint.manager.errors import CheckpointError
from safepoint.manager.policies import KeepAll, KeepBest, KeepEvery, KeepLast

if TYPE_CHECKING:
    from safepoint.formats.commit_record import CommitRecord
    from safepoint.manager.policies import Policy

__all__ = ["POLICY_TEXT_CHARS", "policy_from_text", "policy_text", "recorded_policy"]

POLICY_TEXT_CHARS = 500
"""What a policy's text may take of a commit record; one that is longer is cut, and cannot be read back."""

_SEPARATOR = " | "
_TEXT = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*\""""
_PART = re.compile(
    r"KeepLast\((?P<last>\d{1,18})\)|KeepEvery\((?P<every>\d{1,18})\)|(?P<all>KeepAll\(\))"
    rf"|KeepBest\((?P<best>\d{{1,18}}), metric=(?P<metric>{_TEXT}), order='(?P<order>min|max)'\)",
    re.ASCII,
)


def policy_text(policy: Policy) -> str:
    """Return a policy as text."""
    text = repr(policy)
    return text if len(text) <= POLICY_TEXT_CHARS else text[: POLICY_TEXT_CHARS - 1] + "…"


def policy_from_text(text: str) -> Policy | None:
    """Return the policy that `policy_text` described; None where it is not one of ours, or not all of it is."""
    parts: list[Policy] = []
    position = 0
    while (match := _PART.match(text, position)) is not None:
        try:
            parts.append(_part(match))
        except (CheckpointError, ValueError, SyntaxError):
            return None
        position = match.end()
        if position == len(text):
            return reduce(or_, parts)
        if not text.startswith(_SEPARATOR, position):
            return None
        position += len(_SEPARATOR)
    return None


def recorded_policy(record: CommitRecord) -> Policy | None:
    """Return the policy under which a step was saved; None where its record tells none that is understood."""
    text = record.extra.get("keep")
    return policy_from_text(text) if isinstance(text, str) else None


def _part(match: re.Match[str]) -> Policy:
    if match["last"] is not None:
        return KeepLast(int(match["last"]))
    if match["every"] is not None:
        return KeepEvery(int(match["every"]))
    if match["best"] is not None:
        metric = str(ast.literal_eval(match["metric"]))  # a quoted string, as the pattern saw to
        return KeepBest(int(match["best"]), metric=metric, order="min" if match["order"] == "min" else "max")
    return KeepAll()
