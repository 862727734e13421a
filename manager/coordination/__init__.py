"""The processes that save together: finding out who they are, meeting with deadlines, moving host memory."""

from __future__ import annotations

from safepoint.manager.coordination.base import Coordinator, Decide, Transport, run_together
from safepoint.manager.coordination.detect import detect_coordinator
from safepoint.manager.coordination.single import SingleProcess

__all__ = ["Coordinator", "Decide", "SingleProcess", "Transport", "detect_coordinator", "run_together"]
