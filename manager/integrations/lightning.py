"""Lightning: a callback for the Trainer that saves and resumes, and `CheckpointIO` plugins for Trainer and Fabric.

For the package `lightning`; its older twin `pytorch_lightning` has classes of its own, which these are not.
"""

from __future__ import annotations

from safepoint.manager.integrations.lightning_callback import SafepointCallback
from safepoint.manager.integrations.lightning_io import SafepointCheckpointIO, SafepointXLACheckpointIO

__all__ = ["SafepointCallback", "SafepointCheckpointIO", "SafepointXLACheckpointIO"]
