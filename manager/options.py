"""The choices a user makes when a manager is opened, checked once. Knows no storage and no process."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from safepoint.formats.commit_record import METRICS_MAX_BYTES
from safepoint.formats.fields import canonical_json
from safepoint.formats.registry import get_format
from safepoint.formats.storage import open_storage
from safepoint.formats.storage.opening import is_url
from safepoint.manager.errors import InvalidArgumentError
from safepoint.manager.policies import KeepAll, OnExists, Policy

if TYPE_CHECKING:
    from safepoint.formats.base import Format
    from safepoint.formats.storage import StorageOptions
    from safepoint.manager.events import Observer

__all__ = [
    "CheckReplicas",
    "CommitChoice",
    "ManagerOptions",
    "OnExists",
    "RequestedMode",
    "RootScope",
    "ShowProgress",
    "Unchanged",
    "check_choice",
    "check_metrics",
    "check_step",
    "full_root",
    "is_step",
    "make_options",
]

RequestedMode = Literal["auto", "consolidated", "sharded"]
RootScope = Literal["shared", "per_process"]
CheckReplicas = Literal["trust", "error"]
ShowProgress = Literal["auto", "off"]
Unchanged = Literal["write", "link"]
CommitChoice = Literal["auto", "rename", "marker"]


@dataclass(frozen=True, kw_only=True)
class ManagerOptions:
    """Options of a `CheckpointManager`; see there for what each means."""

    root: str
    keep: Policy
    save_every: int
    mode: RequestedMode
    format: str
    deadline_secs: float
    root_scope: RootScope
    check_replicas: CheckReplicas
    unchanged: Unchanged = "write"
    commit: CommitChoice = "auto"
    storage: StorageOptions | None = None
    progress: ShowProgress = "auto"
    observers: tuple[Observer, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.keep, Policy):
            raise InvalidArgumentError(
                f"keep must be a policy, got {self.keep!r}", hint="For example keep=KeepLast(3) | KeepEvery(10_000)."
            )
        if not _is_int(self.save_every) or self.save_every < 1:
            raise InvalidArgumentError(f"save_every must be an int of at least 1, got {self.save_every!r}")
        if not _is_duration(self.deadline_secs):
            raise InvalidArgumentError(
                f"deadline_secs must be a positive, finite number of seconds, got {self.deadline_secs!r}"
            )
        check_choice("mode", self.mode, get_args(RequestedMode))
        check_choice("root_scope", self.root_scope, get_args(RootScope))
        check_choice("check_replicas", self.check_replicas, get_args(CheckReplicas))
        check_choice("commit", self.commit, get_args(CommitChoice))
        check_choice("unchanged", self.unchanged, get_args(Unchanged))
        check_choice("progress", self.progress, get_args(ShowProgress))
        for observer in self.observers:
            if not callable(observer):
                raise InvalidArgumentError(
                    f"an observer must be a function of one event, got {observer!r}",
                    hint="For example observers=[print].",
                )
        if self.root_scope == "per_process" and self.mode == "consolidated":
            raise InvalidArgumentError(
                "per-process roots cannot hold consolidated steps: only process 0 would have one",
                hint='Use mode="auto" or "sharded", or a root that all processes share.',
            )
        self._check_format(get_format(self.format))

    def _check_format(self, file_format: Format) -> None:
        modes = file_format.modes
        if self.mode != "auto" and self.mode not in modes:
            raise InvalidArgumentError(
                f"the format {self.format} cannot be written in mode {self.mode!r}",
                hint=f'Use mode="auto" or {modes[0]!r}, or the format "safetensors".',
            )
        if self.root_scope == "per_process" and not file_format.allows_private_roots:
            raise InvalidArgumentError(
                f"the format {self.format} needs one root that all processes see",
                hint='Use the format "safetensors" with root_scope="per_process".',
            )
        if self.unchanged == "link" and not file_format.allows_parts:
            raise InvalidArgumentError(
                f"the leaves of a step in the format {self.format} cannot lie in the files of several steps",
                hint='Use the format "safetensors" with unchanged="link", or leave it away.',
            )

    @property
    def grace_secs(self) -> float:
        """How much longer than the deadline a process waits for the word of the primary, in seconds."""
        return min(1.5, 0.25 * self.deadline_secs)


def make_options(root: str | os.PathLike[str], *, keep: Policy | None, **choices: Any) -> ManagerOptions:
    """Return checked options; `keep=None` keeps every step."""
    given: object = root
    text: object = os.fspath(given) if isinstance(given, str | os.PathLike) else None
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgumentError(f"root must be a non-empty path, got {root!r}")
    return ManagerOptions(
        root=full_root(text, choices.get("storage")), keep=KeepAll() if keep is None else keep, **choices
    )


def full_root(root: str, storage: StorageOptions | None = None) -> str:
    """Return a root as it is known from anywhere: an absolute path, or a URL in its one spelling. Touches nothing.

    Raises:
        InvalidArgumentError: a URL that names no storage, or what is no path.
    """
    if not root or "\0" in root:
        raise InvalidArgumentError(f"{root!r} is no path of a directory")
    return open_storage(root, storage).location if is_url(root) else os.path.abspath(root)


def _is_duration(value: object) -> bool:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value) and value > 0
    except OverflowError:  # an int beyond every float
        return False


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise InvalidArgumentError unless `value` is one of `choices`."""
    if value not in choices:
        raise InvalidArgumentError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")


def check_step(step: Any) -> int:
    """Return `step` as an int.

    Raises:
        InvalidArgumentError: it is not a whole number of at least 0.
    """
    if isinstance(step, bool) or not hasattr(type(step), "__index__"):
        raise InvalidArgumentError(f"a step is a whole number of at least 0, got {step!r} ({type(step).__name__})")
    try:
        number = int(step.__index__())
    except (TypeError, ValueError, RuntimeError):
        raise InvalidArgumentError(f"a step is a whole number of at least 0, got {step!r}") from None
    if not 0 <= number < 1 << 63:
        raise InvalidArgumentError(f"a step is a whole number from 0 to 2**63 - 1, got {number}")
    return number


def is_step(step: object) -> bool:
    """Say whether `check_step` takes it."""
    try:
        check_step(step)
    except InvalidArgumentError:
        return False
    return True


def check_metrics(metrics: Mapping[str, float] | None) -> dict[str, float]:
    """Return metrics as floats by name.

    Raises:
        InvalidArgumentError: a name is not a string, a value is not a number, or there are so many that the
            step's record would hold more of them than a listing reads.
    """
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise InvalidArgumentError(f"metrics are numbers by name, got {type(metrics).__name__}")
    checked: dict[str, float] = {}
    given: Mapping[Any, object] = metrics
    for name, value in given.items():
        if not isinstance(name, str):
            raise InvalidArgumentError(f"the name of a metric is a string, got {name!r}")
        checked[name] = _as_float(name, value)
    num_bytes = len(canonical_json({name: repr(value) for name, value in checked.items()}))
    if num_bytes > METRICS_MAX_BYTES:
        raise InvalidArgumentError(
            f"the metrics take {num_bytes} bytes of the step's record, and may take {METRICS_MAX_BYTES}",
            hint="Give those that policies and people choose steps by; keep others in the state.",
        )
    return checked


def _as_float(name: str, value: Any) -> float:
    detach = getattr(value, "detach", None)
    try:
        if isinstance(value, str | bytes | bytearray):  # which float() would read
            raise TypeError
        return float(value if detach is None else detach())  # a loss still has its graph, which torch would warn of
    except Exception:  # noqa: BLE001 - whatever the conversion of somebody's type raises
        raise InvalidArgumentError(f"metric {name[:80]!r} is not one number: {type(value).__name__}") from None
