"""Objects that give and take a state: modules, optimizers, random generators, anything with a pair of methods.

Owns the recognition of such objects and the call that asks for the state, which must not alter it. How a state goes
back belongs to `modules`, `optimizers` and `targets`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias, cast

import torch

from safepoint.manager.errors import CheckpointError
from safepoint.manager.generators import generator_state, is_generator, set_generator_state

__all__ = ["Form", "load_state", "metadata_of", "state_of", "stateful_form"]

Form: TypeAlias = Literal["module", "optimizer", "generator", "object"]
"""How the state goes back: by filling tensors, with torch's rules for optimizers, …, or by `load_state_dict`."""


def stateful_form(value: Any) -> Form | None:
    """Return how an object gives and takes its state, or None where it does not."""
    if isinstance(value, type):
        return None
    if isinstance(value, torch.nn.Module):
        return "module"
    if isinstance(value, torch.optim.Optimizer) and type(value).state_dict is torch.optim.Optimizer.state_dict:
        return "optimizer"
    if is_generator(value):
        return "generator"
    if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
        return "object"
    return None


def state_of(value: Any, form: Form, *, leaf: str) -> Any:
    """Return the state of an object. It is a view where the object gives one: read it, never change it.

    Raises:
        CheckpointError: the object's own method failed.
    """
    if form == "generator":
        return generator_state(value)
    try:
        return value.state_dict()
    except CheckpointError as error:
        raise error.with_context(leaf=leaf) from None
    except Exception as error:
        raise CheckpointError(
            f"state_dict() of the {type(value).__name__} raised {type(error).__name__}: {error}", leaf=leaf
        ) from error


def load_state(value: Any, state: Any, form: Form, *, leaf: str) -> None:
    """Give an object a state, through its own method.

    Raises:
        CheckpointError: the object refused it.
    """
    if form == "generator":
        try:
            set_generator_state(value, state)
        except CheckpointError as error:
            raise error.with_context(leaf=leaf) from None
        return
    try:
        value.load_state_dict(state)
    except CheckpointError as error:
        raise error.with_context(leaf=leaf) from None
    except Exception as error:
        raise CheckpointError(
            f"load_state_dict() of the {type(value).__name__} raised {type(error).__name__}: {error}",
            leaf=leaf,
            hint="The data was read; this object, and others of the state, may be restored in part.",
        ) from error


def metadata_of(state: object) -> Mapping[str, Any] | None:
    """Return the versions that torch keeps beside a module's state dict."""
    metadata = getattr(state, "_metadata", None)
    return cast("Mapping[str, Any]", metadata) if isinstance(metadata, Mapping) else None
