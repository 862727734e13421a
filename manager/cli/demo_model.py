"""The demonstration's model and its task: a small transformer that learns to continue sequences. Pure torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Transformer", "draw_batch"]

VOCABULARY, CONTEXT = 64, 32
WIDTH, HEADS, DEPTH = 384, 6, 2
DROPOUT = 0.1


class Block(nn.Module):
    """Attention and a perceptron, each behind a norm and beside a residual path."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.query_key_value = nn.Linear(WIDTH, 3 * WIDTH)
        self.projection = nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return hidden states of the same shape, (batch, context, width)."""
        batch, context, _ = hidden.shape
        split = self.query_key_value(self.attention_norm(hidden)).view(batch, context, 3, HEADS, WIDTH // HEADS)
        query, key, value = split.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.dropout(self.projection(mixed.transpose(1, 2).reshape(batch, context, WIDTH)))
        result: Tensor = hidden + self.dropout(self.perceptron(hidden))
        return result


class Transformer(nn.Module):
    """Predicts the next token at each place."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    @property
    def parts(self) -> Sequence[nn.Module]:
        """The parts that are sharded one by one."""
        return list(self.blocks)

    def forward(self, sequences: Tensor) -> Tensor:
        """Return the mean loss over sequences of shape (batch, context + 1)."""
        seen, wanted = sequences[:, :-1], sequences[:, 1:]
        hidden = self.tokens(seen) + self.places.weight[: seen.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())


def draw_batch(num_sequences: int, generator: torch.Generator | None) -> Tensor:
    """Draw sequences that walk round the vocabulary in steps of their own, on the CPU, from torch's RNG by default."""
    starts = torch.randint(VOCABULARY, (num_sequences, 1), generator=generator)
    strides = torch.randint(1, 8, (num_sequences, 1), generator=generator)
    return (starts + strides * torch.arange(CONTEXT + 1)) % VOCABULARY
