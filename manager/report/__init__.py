"""A root as one page for people: what was saved, how long it took, why it stays, what failed."""

from __future__ import annotations

from safepoint.manager.report.facts import RootFacts, collect
from safepoint.manager.report.page import render

__all__ = ["RootFacts", "collect", "render"]
