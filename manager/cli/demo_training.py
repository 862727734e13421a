"""The training script of the demonstration: what a user's own would look like, on a small scale.

Runs in processes of its own (`python -m safepoint.manager.cli.demo_training PLAN`) and tells what happens through a
pipe. With one process everything that makes the run what it is comes from the state: weights, optimizer, schedule, and
the random numbers behind data and dropout. With several the model is sharded by FSDP2, and the batch of a step depends
on the step alone, so that another number of processes can go on with it.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from safepoint.manager import CheckpointManager, KeepLast, PerProcess, RNGState
from safepoint.manager.cli.demo_kill import kill_while_writing
from safepoint.manager.cli.demo_model import Transformer, draw_batch
from safepoint.manager.cli.demo_plan import Event, Plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

BATCH = 8
SEED = 20


def main() -> None:
    """Train as the plan in the first argument says."""
    plan = Plan.from_json(sys.argv[1])
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // plan.process_count))
    if plan.kill_in_step is not None:
        kill_while_writing(plan.kill_in_step)
    with process_group(plan), open(plan.events if plan.process_index == 0 else os.devnull, "w") as events:

        def tell(event: Event) -> None:
            events.write(event.to_line())
            events.flush()

        run = Training(plan)
        if plan.root is None:
            tell(Event(kind="started", text=run.description))
            for step in range(1, plan.steps + 1):
                tell(Event(kind="trained", step=step, loss=run.train(step)))
        else:
            train_with_checkpoints(plan, plan.root, run, tell)
        tell(Event(kind="finished"))


def train_with_checkpoints(plan: Plan, root: str, run: Training, tell: Callable[[Event], None]) -> None:
    """Train from the newest step on, or from the start, and save on the way."""
    state = run.state
    with CheckpointManager(root, keep=KeepLast(2), save_every=plan.save_every, deadline_secs=60) as manager:
        start = manager.restore_latest(state)
        restored = None if start is None else start.step
        tell(Event(kind="started", step=restored, text=run.description))
        if restored is not None:
            tell(Event(kind="digest", step=restored, text=run.digest()))
        for step in range((restored or 0) + 1, plan.steps + 1):
            loss = run.train(step)
            tell(Event(kind="trained", step=step, loss=loss))
            result = manager.save(step, state, metrics={"loss": loss})
            if result.saved:
                tell(Event(kind="saved", step=step, text=result.mode or ""))
                tell(Event(kind="digest", step=step, text=run.digest()))


class Training:
    """A model and what trains it."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        torch.manual_seed(SEED)
        self._device, self.description = open_device(plan)
        model = Transformer().to(self._device)
        if plan.process_count > 1:
            mesh = init_device_mesh("cpu", (plan.process_count,))
            for part in (*model.parts, model):
                fully_shard(part, mesh=mesh)
            model.eval()  # dropout would depend on the number of processes
        self._model = model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self._scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self._optimizer, T_max=plan.steps)
        self.state: dict[str, Any] = {"model": model, "optimizer": self._optimizer, "scheduler": self._scheduler}
        if plan.process_count == 1:
            self.state["rng"] = PerProcess(RNGState())

    def train(self, step: int) -> float:
        """Take one step and return its loss."""
        loss = self._model(self._batch(step).to(self._device))
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._scheduler.step()
        if self._plan.device == "xla":
            run_recorded_step()
        loss = loss.detach()
        if self._plan.process_count > 1:
            dist.all_reduce(loss)
            loss = loss / self._plan.process_count
        return float(loss)

    def digest(self) -> str:
        """Return a digest over every bit of model and optimizer, the same for any number of processes.

        Called by: all processes.
        """
        digest = xxhash.xxh3_128()
        optimizer = {str(key): value for key, value in self._optimizer.state_dict()["state"].items()}
        for name, value in (*sorted(self._model.state_dict().items()), *sorted(flat(optimizer))):
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            digest.update(name.encode())
            digest.update(whole.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def _batch(self, step: int) -> Tensor:
        if self._plan.process_count == 1:
            return draw_batch(BATCH, None)
        whole = draw_batch(BATCH, torch.Generator().manual_seed(SEED + step))
        return whole.chunk(self._plan.process_count)[self._plan.process_index]


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of nested dicts with their dotted names."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        elif isinstance(value, Tensor):
            yield prefix + key, value


def open_device(plan: Plan) -> tuple[torch.device, str]:
    """Return what to train on, and its name for people."""
    if plan.device == "cpu":
        processes = f", {plan.process_count} processes with FSDP2" if plan.process_count > 1 else ""
        return torch.device("cpu"), f"torch {torch.__version__} on the CPU{processes}"
    import torch_xla  # noqa: PLC0415  # only where it is installed and asked for

    torch_xla.manual_seed(SEED)
    return torch_xla.device(), f"torch_xla {torch_xla.__version__} on its CPU device"


def run_recorded_step() -> None:
    """Let XLA run what it has recorded of the step; it compiles the first two, and the rest run as the second did."""
    import torch_xla  # noqa: PLC0415  # only where it is installed and asked for

    torch_xla.sync()


@contextmanager
def process_group(plan: Plan) -> Iterator[None]:
    """Keep torch's process group open, where there is more than one process."""
    if plan.process_count == 1:
        yield
        return
    address = f"tcp://127.0.0.1:{plan.port}"
    dist.init_process_group("gloo", init_method=address, rank=plan.process_index, world_size=plan.process_count)
    try:
        yield
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
