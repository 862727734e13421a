"""`RNGState`: the global random generators of this process as one item of a state.

Owns which global generators there are, and that a restore makes the next draws those that followed the save. Never
initialises a device runtime. Generators that a program made itself are saved as they are.
"""

from __future__ import annotations

import logging
import random
import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from safepoint.manager.errors import CorruptDataError
from safepoint.manager.generators import generator_state, set_generator_state

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["RNGState"]

logger = logging.getLogger("safepoint")


class RNGState:
    """The state of Python's, numpy's and torch's global generators; CUDA's and XLA's where they are initialised.

    It holds nothing: it reads the generators when a state is saved and sets them when one is restored. They differ
    between processes, so with more than one, mark it: `PerProcess(RNGState())`.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of all generators, without drawing from one."""
        state: dict[str, Any] = {
            "python": generator_state(random._inst),  # noqa: SLF001  # the global one
            "numpy": generator_state(np.random.mtrand._rand),  # noqa: SLF001
            "torch": torch.get_rng_state(),
        }
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            state["cuda"] = torch.cuda.get_rng_state_all()
        if (seed := _xla_seed()) is not None:
            state["xla"] = seed
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the generators.

        What the step has and this machine has not (CUDA or XLA states) is skipped with a warning: another kind of
        device draws other numbers anyway.

        Raises:
            CorruptDataError: it is no state that `state_dict` returned.
        """
        try:
            set_generator_state(random._inst, state["python"])  # noqa: SLF001
            set_generator_state(np.random.mtrand._rand, state["numpy"])  # noqa: SLF001
            torch.set_rng_state(state["torch"].cpu())
        except (KeyError, TypeError, AttributeError, RuntimeError) as error:
            raise CorruptDataError(f"this is no state of the random generators: {error}") from error
        if "cuda" in state:
            _set_cuda(state["cuda"])
        if "xla" in state:
            _set_xla_seed(state["xla"])

    def __repr__(self) -> str:
        return "RNGState()"


def _set_cuda(states: list[torch.Tensor]) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < len(states):
        logger.warning("the step has the random state of %d CUDA devices; this process sees %d", len(states), count)
    for index, state in enumerate(states[:count]):
        torch.cuda.set_rng_state(state.cpu(), index)


def _xla_is_initialized() -> bool:
    runtime = sys.modules.get("torch_xla.runtime")
    if runtime is None or "torch_xla" not in sys.modules:
        return False
    import torch_xla  # noqa: PLC0415  # loaded by the program already

    return bool(torch_xla._XLAC._xla_runtime_is_initialized())  # noqa: SLF001


def _xla_seed() -> int | None:
    if not _xla_is_initialized():
        return None
    import torch_xla.core.xla_model as xm  # noqa: PLC0415

    return int(xm.get_rng_state())


def _set_xla_seed(seed: int) -> None:
    if not _xla_is_initialized():
        logger.warning("the step has the random state of an XLA device; this process has not initialised one")
        return
    import torch_xla.core.xla_model as xm  # noqa: PLC0415

    xm.set_rng_state(seed)
