"""Mixing along sentences: ResMLP's matrix over positions, self-attention, attention of one sentence over another.

Letters: B sentences, T positions, C channels, H heads, N rows that are decoded together. Sentences begin at position 0
and are padded at their end. Whatever mixes has two ways: `forward` takes whole sentences, `step` the next position of
N rows, with a cache of the positions before.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from patchloom.layers.attention import Attend, Attention
from patchloom.layers.residual import Branch
from patchloom.layers.token_mixing import AcrossPositions, mix_tokens


class StepCache:
    """What the positions decoded so far have left behind, in a buffer that is large enough for all of them."""

    def __init__(self, buffer: Tensor, rows: int, positions: int, *, rows_first: bool) -> None:
        """Rows stand before positions in memory, or after them."""
        self.positions, self.rows_first = positions, rows_first
        self.channels = buffer.numel() // (rows * positions)
        self._take(buffer, rows)

    def _take(self, buffer: Tensor, rows: int) -> None:
        self.buffer = buffer
        shape = (rows, self.positions) if self.rows_first else (self.positions, rows)
        self.states = buffer[: rows * self.positions * self.channels].view(*shape, self.channels)

    def reorder(self, rows: Tensor, length: int, spare: Tensor) -> Tensor:
        """Row i becomes what row rows[i] was, in `spare`; returns the buffer that is free now.

        `length` positions are filled.
        """
        buffer, states = self.buffer, self.states
        self._take(spare, rows.shape[0])
        if self.rows_first:
            torch.index_select(states[:, :length], 0, rows, out=self.states[:, :length])
        else:
            torch.index_select(states[:length], 1, rows, out=self.states[:length])
        return buffer


class PositionLinear(AcrossPositions):
    """One matrix across positions, the same for all channels; the part of it that a sentence fills is used.

    With `causal` it is triangular: position t reads positions 0 to t. What stands above the diagonal is never used.
    """

    kept = 1  # vectors a position, in the cache

    def __init__(self, max_length: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.causal, self.dropout = causal, dropout
        self.weight = nn.Parameter(torch.empty(max_length, max_length))
        self.bias = nn.Parameter(torch.zeros(max_length))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        """(B, T, C), (B, T) False at padding → (B, T, C)."""
        length = x.shape[1]
        weight = self.weight[:length, :length]
        # Here and not once at the beginning: norms, biases and MLPs put something into padding again.
        x = x.masked_fill(~keep.unsqueeze(-1), 0.0)
        y = mix_tokens(weight.tril() if self.causal else weight, x, self.bias[:length])
        return F.dropout(y, self.dropout) if self.dropout and self.training else y

    def start(self, buffer: Tensor, rows: int, positions: int) -> StepCache:
        """An empty cache; positions stand first, so that a step is one product."""
        return StepCache(buffer, rows, positions, rows_first=False)

    def step(self, x: Tensor, cache: StepCache, position: int) -> Tensor:
        """(N, C) at `position`, which joins the cache → (N, C)."""
        cache.states[position] = x
        past = cache.states[: position + 1].flatten(1)  # (t, N·C)
        return torch.addmv(self.bias[position], past.T, self.weight[position, : position + 1]).view_as(x)


class SequenceAttention(Attention):
    """Multi-head self-attention of a sentence; with `causal` a position sees itself and those before."""

    kept = 2  # vectors a position, in the cache: key and value

    def __init__(self, dim: int, heads: int, *, causal: bool, dropout: float = 0.0) -> None:
        super().__init__(dim, heads, dropout=dropout)
        self.causal = causal

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]
        """(B, T, C), (B, T) False at padding → (B, T, C)."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # (B, H, T, d) each
        # Padding comes after all words, so a causal mask hides it too.
        seen = None if self.causal else keep[:, None, None]
        y = self.proj(self.attend(q, k, v, seen=seen, causal=self.causal))
        return F.dropout(y, self.dropout) if self.dropout and self.training else y

    def start(self, buffer: Tensor, rows: int, positions: int) -> StepCache:
        """An empty cache."""
        return StepCache(buffer, rows, positions, rows_first=True)

    def step(self, x: Tensor, cache: StepCache, position: int) -> Tensor:
        """(N, C) at `position`, which joins the cache → (N, C)."""
        q, keys_values = self.qkv(x).split([x.shape[1], 2 * x.shape[1]], dim=1)
        cache.states[:, position] = keys_values
        past = cache.states[:, : position + 1].view(x.shape[0], position + 1, 2, self.heads, -1)
        k, v = past.permute(2, 0, 3, 1, 4)  # (N, H, t, d) each
        return self.proj(self.attend(q.view(x.shape[0], self.heads, 1, -1), k, v).squeeze(1))


class AttendedSource(NamedTuple):
    """A sentence as cross-attention looks at it."""

    k: Tensor  # (B, H, S, d)
    v: Tensor  # (B, H, S, d)
    seen: Tensor | None  # (B, 1, 1, S), False at padding; None where there is none


class CrossAttention(Attend):
    """Multi-head attention of one sentence over another."""

    def __init__(self, dim: int, heads: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.proj = nn.Linear(dim, dim)

    def look(self, states: Tensor, seen: Tensor | None) -> AttendedSource:
        """Keys and values of the sentence that is looked at, (B, S, C)."""
        k, v = self.kv(states).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return AttendedSource(k, v, seen)

    def forward(self, x: Tensor, looked: AttendedSource) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        q = self.q(x).view(*x.shape[:2], self.heads, -1).transpose(1, 2)  # (B, H, T, d)
        y = self.proj(self.attend(q, looked.k, looked.v, seen=looked.seen))
        return F.dropout(y, self.dropout) if self.dropout and self.training else y

    def step(self, x: Tensor, looked: AttendedSource) -> Tensor:
        """(N, C) → (N, C): the rows of a sentence stand together and share its keys and values."""
        return self(x.view(looked.k.shape[0], -1, x.shape[1]), looked).flatten(0, 1)


class SequenceResidual(Branch):
    """x + scale · mix(norm(x), …): a branch whose mixer reads more than x."""

    def forward(self, x: Tensor, *read: object) -> Tensor:
        """(B, T, C) → (B, T, C)."""
        return self.add_to(x, self.mix(self.norm(x), *read))

    def step(self, x: Tensor, *read: object) -> Tensor:
        """(N, C) → (N, C)."""
        return self.add_to(x, self.mix.step(self.norm(x), *read))  # type: ignore[operator]


def few_rows_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x (N, C) · weightᵀ (C, V) → (N, V), where N may be small and V large.

    On a CPU a product with two to eight rows is twice as fast with the large matrix on its left (32,768 × 512 on one
    core: 5 ms for 10), and one row is faster as two (3 ms for 6).
    """
    rows = x.shape[0]
    if rows > 8 or x.device.type != "cpu":
        return F.linear(x, weight)
    several = x if rows > 1 else x.repeat(2, 1)
    return (weight @ several.T).T[:rows].contiguous()
