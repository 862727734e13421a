"""Tensors that hold no plain memory of values: each refused by name, with the way out.

Owns the order of the questions: some of these tensors fail at the next one. Must not know regions or leaves.
"""

from __future__ import annotations

import torch

from safepoint.formats.errors import UnsupportedValueError

__all__ = ["check_plain", "check_type", "problem_of"]


def check_type(value: torch.Tensor, name: str) -> None:
    """Refuse subclasses that this package does not know: what they add would be lost.

    Raises:
        UnsupportedValueError: `value` is neither a tensor nor a parameter of torch itself.
    """
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return
    if kind.__name__.startswith("Uninitialized"):
        raise UnsupportedValueError(
            f"{kind.__name__} has no values yet",
            leaf=name,
            hint="Run one forward pass, so that the lazy module makes its parameters, before the save or restore.",
        )
    if kind.__name__ == "FakeTensor":
        raise UnsupportedValueError(
            "FakeTensor has no memory", leaf=name, hint="Save and restore outside FakeTensorMode."
        )
    raise UnsupportedValueError(
        f"{kind.__module__}.{kind.__qualname__} is a tensor subclass that safepoint does not know",
        leaf=name,
        hint="Save the plain tensors that it is made of, or give its owner a `state_dict` and `load_state_dict`.",
    )


def check_plain(value: torch.Tensor, name: str) -> None:
    """Refuse tensors whose values are not simply in their memory.

    Raises:
        UnsupportedValueError: nested, sparse, quantised, meta, or inside a functorch transform.
    """
    problem = problem_of(value)
    if problem is not None:
        what, way_out = problem
        raise UnsupportedValueError(f"{what} cannot be kept", leaf=name, hint=way_out)


def problem_of(value: torch.Tensor) -> tuple[str, str] | None:
    """Return what kind of tensor `check_plain` refuses it for, and a way out; None for nearly all."""
    if torch._C._functorch.is_functorch_wrapped_tensor(value):  # noqa: SLF001 - there is no public way to ask
        return "a tensor inside vmap, grad or functionalize", "Save outside the transformed function."
    if value.is_nested:
        return "a nested tensor", "Save its parts: `value.unbind()`, or `value.values()` and `value.offsets()`."
    if value.layout is not torch.strided:
        layout = str(value.layout).removeprefix("torch.")
        return f"a tensor of layout {layout}", "Save its parts (indices and values), or `value.to_dense()`."
    if value.is_quantized:
        return "a quantised tensor", "Save `value.int_repr()` with its scales and zero points, or `value.dequantize()`."
    if value.is_meta:
        return "a meta tensor, which has no values,", "Materialise it first: `module.to_empty(device=…)`."
    if value._is_zerotensor():  # noqa: SLF001 - there is no public way to ask
        return "a tensor of forward-mode differentiation", "Save `value.clone()`."
    return None
