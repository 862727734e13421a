"""Turns live arrays into leaves: global shape, regions held here, host bytes in and out.

Owns the choice of the adapter for a value. One module a kind: plain tensors on any device, `DTensor`, XLA, numpy.
Must not know the state tree, files, plans or processes.
"""

from __future__ import annotations

from safepoint.manager.adapters.base import ArrayLeaf, ArraySpec

__all__ = ["ArrayLeaf", "ArraySpec"]
