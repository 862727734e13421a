"""The public names of safepoint; everything else is internal."""

from __future__ import annotations

from safepoint.manager.adapting import AdaptationReport, Cast, Partial, Rename
from safepoint.manager.checkpoint_manager import CheckpointManager
from safepoint.manager.converting import ConvertedStep, ConvertResult, convert
from safepoint.manager.errors import CheckpointError
from safepoint.manager.foreign import ForeignResult, restore_foreign
from safepoint.manager.per_process import PerProcess
from safepoint.manager.policies import KeepAll, KeepBest, KeepEvery, KeepLast, Policy, StepInfo
from safepoint.manager.preemption import Preemption
from safepoint.manager.results import RestoreResult, SaveResult
from safepoint.manager.rng import RNGState

__all__ = [
    "AdaptationReport",
    "Cast",
    "CheckpointError",
    "CheckpointManager",
    "ConvertResult",
    "ConvertedStep",
    "ForeignResult",
    "KeepAll",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "Partial",
    "PerProcess",
    "Policy",
    "Preemption",
    "RNGState",
    "Rename",
    "RestoreResult",
    "SaveResult",
    "StepInfo",
    "convert",
    "restore_foreign",
]
