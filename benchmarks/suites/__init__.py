"""The suites, by name. Each is a function of settings and workspace that returns a report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.suites import behind, incremental, listing, processes, restore, save, small, xla

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from benchmarks.measuring import Report
    from benchmarks.settings import Settings, Workspace

__all__ = ["SUITES"]

SUITES: Mapping[str, Callable[[Settings, Workspace], Report]] = {
    "save": save.measure,
    "async": behind.measure,
    "restore": restore.measure,
    "small": small.measure,
    "incremental": incremental.measure,
    "listing": listing.measure,
    "processes": processes.measure,
    "xla": xla.measure,
}
