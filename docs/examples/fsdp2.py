"""FSDP2 as torchtitan does it: blocks made on the meta device, sharded, then filled; saved behind the training.

    torchrun --nproc-per-node 2 docs/examples/fsdp2.py runs/fsdp2

Kill it, and run the line again, with as many processes as you like.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from safepoint.manager import CheckpointManager, KeepEvery, KeepLast, PerProcess, RNGState

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTH = 32
VOCABULARY = 64


class Block(nn.Module):
    """Attention and a small network, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        self.norm = nn.LayerNorm(WIDTH)
        self.network = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states, of shape (batch, length, WIDTH)."""
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return hidden + self.network(self.norm(hidden))


class Transformer(nn.Module):
    """A language model."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits, of shape (batch, length, VOCABULARY)."""
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


class Tokens:
    """Batches of this process, and the place in them."""

    def __init__(self, rank: int) -> None:
        self._drawn = torch.Generator().manual_seed(rank)

    def next(self) -> torch.Tensor:
        """Return tokens, of shape (4, 9)."""
        return torch.randint(0, VOCABULARY, (4, 9), generator=self._drawn)

    def state_dict(self) -> dict[str, Any]:
        """Return the place."""
        return {"drawn": self._drawn.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place."""
        self._drawn.set_state(state["drawn"])


def make_model(num_blocks: int) -> nn.Module:
    """Return a sharded model; no process ever holds all of it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    with torch.device("meta"):
        model = Transformer(num_blocks)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device="cpu")
    torch.manual_seed(dist.get_rank())
    for parameter in model.parameters():
        nn.init.normal_(parameter.to_local(), std=0.05)
    return model


def of_another(parts: Sequence[Any], process_index: int, process_count: int) -> Any:
    """Choose what a process goes on from when their number has changed."""
    del process_count
    return parts[process_index % len(parts)]


def train(root: str, *, num_steps: int, num_blocks: int = 2) -> dict[int, float]:
    """Train, from the latest step if there is one; return the losses by step."""
    model = make_model(num_blocks)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    tokens = Tokens(dist.get_rank())
    state = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": scheduler,
        "tokens": PerProcess(tokens, merge=of_another),
        "rng": PerProcess(RNGState(), merge=of_another),
        "seen": 0,
    }
    losses = {}
    with (
        CheckpointManager(root, mode="sharded", keep=KeepLast(2) | KeepEvery(100), save_every=5) as manager,
        manager.preemption() as preemption,
    ):
        start = manager.restore_latest(state)
        for step in range(0 if start is None else start.step + 1, num_steps):
            batch = tokens.next()
            logits = model(batch[:, :-1])
            loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            state["seen"] += batch.numel() * dist.get_world_size()
            losses[step] = loss.item()
            stop = preemption.should_stop(step)
            manager.save(step, state, metrics={"loss": loss}, force=stop or step == num_steps - 1, blocking=False)
            if stop:
                break
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    for step, loss in train(sys.argv[1], num_steps=50).items():
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}")
    dist.destroy_process_group()
