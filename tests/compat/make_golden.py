"""Write the golden steps of the current layout version: `python tests/compat/make_golden.py`.

Run for each version of the layout and each format, by the release that brings it. What is there is never written again:
it stands for the steps that users have.
"""

from __future__ import annotations

import datetime
import decimal
import shutil
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from safepoint.formats.layout import LAYOUT_VERSION, MARKER_VERSION
from safepoint.manager import CheckpointManager, PerProcess

GOLDEN = Path(__file__).parent / "golden"
KINDS: dict[str, dict[str, Any]] = {
    "consolidated": {"mode": "consolidated"},
    "sharded": {"mode": "sharded"},
    "torch": {"mode": "consolidated", "format": "torch"},
    "orbax": {"mode": "sharded", "format": "orbax"},  # from before items of many arrays became databases
    "orbax_ocdbt": {"mode": "sharded", "format": "orbax"},
    "orbax_zstd": {"mode": "consolidated", "format": "orbax_zstd"},
    "marker": {"mode": "consolidated", "commit": "marker"},
    "linked": {"mode": "consolidated", "unchanged": "link"},  # with a file of the step before
}
STEP = 12


def version_of(kind: str) -> int:
    """Return the version of the layout that a kind is written in."""
    return MARKER_VERSION if kind == "marker" else LAYOUT_VERSION


def make_state(kind: str) -> dict[str, Any]:
    """Return the state of the golden steps; made anew it is equal, bit for bit."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2, dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()  # makes the state; its values are set below, since arithmetic differs between machines
    optimizer.zero_grad()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            for offset, tensor in enumerate((parameter, *optimizer.state[parameter].values())):
                tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape) / 8 - index + 10 * offset)
    base = torch.arange(12, dtype=torch.int16)
    state: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "arrays": {"tied": base, "again": base, "scalar": torch.tensor(2.5), "flags": torch.tensor([True, False])},
        "numpy": {"table": np.arange(6, dtype=np.float64).reshape(2, 3), "count": np.int8(-3)},
        "values": OrderedDict(
            big=2**100,
            negative_zero=-0.0,
            infinite=float("inf"),
            text="naïve 实验",
            raw=b"\x00\xff",
            nothing=None,
            pair=(1, [2, {"three": 3}]),
            when=datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC),
            price=decimal.Decimal("1.10"),
        ),
        "own": PerProcess({"position": 7}),
    }
    if kind in ("consolidated", "sharded"):  # readers of the other formats know neither
        state["more"] = {"complex": torch.tensor([1 + 2j]), "window": base[2:8:2], 5: "five", "5": "a string"}
    if kind == "linked":
        state["arrays"]["frozen"] = torch.arange(6000, dtype=torch.uint8)  # more than a header: worth a link
    return state


def main() -> None:
    for kind, options in KINDS.items():
        root = GOLDEN / f"v{version_of(kind)}" / kind
        if root.exists():  # golden steps are never written again
            continue
        with CheckpointManager(root, **options) as manager:
            if kind == "linked":
                manager.save(STEP - 1, make_state(kind))
            manager.save(STEP, make_state(kind), metrics={"loss": 0.5})
        shutil.rmtree(root / str(STEP - 1), ignore_errors=True)
        shutil.rmtree(root / ".safepoint")


if __name__ == "__main__":
    main()
