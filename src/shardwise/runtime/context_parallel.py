"""Context parallelism: attention over a sequence that is sharded over the ranks of a group.

- Ring attention (`RingAttention`): rank r of n has chunks r and 2n-1-r of 2n, so that all ranks have equal
  work under a causal mask. Keys and values, and their gradients, travel around the ring (Liu et al. 2023,
  arXiv 2310.01889).
- All-to-all attention (`AllToAllAttention`): an all-to-all turns a shard of the tokens with all heads into
  all tokens with a shard of the heads (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, distributed
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.nn import functional

from shardwise.runtime.private import attention_part, attention_part_backward


class ContextParallelAttention(Protocol):
    """How the ranks of a context-parallel group compute attention together."""

    def positions(self, tokens: int) -> Tensor:
        """Positions of this rank's tokens in a sequence of `tokens`."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Causal attention of this rank's queries on all keys, each (batch, heads, tokens, elements); scores
        are products times `scale`."""


class RingAttention:
    """Ring attention: keys and values travel around the ring of ranks."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._ranks: Sequence[int] = distributed.get_process_group_ranks(group)
        self._rank = distributed.get_rank(group)

    def positions(self, tokens: int) -> Tensor:
        """Positions of this rank's two chunks."""
        chunks = torch.arange(tokens).chunk(2 * len(self._ranks))
        return torch.cat((chunks[self._rank], chunks[-1 - self._rank]))

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Attention on one rank's keys at a time, merged by log-sum-exp."""
        return _RingAttention.apply(q, k, v, scale, self)

    def ring_shift(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Send `tensors` to the next rank of the ring; returns those of the previous one."""
        size = len(self._ranks)
        after, before = self._ranks[(self._rank + 1) % size], self._ranks[(self._rank - 1) % size]
        sent = [tensor.contiguous() for tensor in tensors]
        received = [torch.empty_like(tensor) for tensor in sent]
        sends = [distributed.P2POp(distributed.isend, tensor, after, self._group) for tensor in sent]
        receives = [distributed.P2POp(distributed.irecv, tensor, before, self._group) for tensor in received]
        for work in distributed.batch_isend_irecv(sends + receives):
            work.wait()
        return tuple(received)

    def key_owners(self) -> list[int]:
        """Rank whose keys are here at each step of the ring."""
        size = len(self._ranks)
        return [(self._rank - ring_step) % size for ring_step in range(size)]

    def part(self, owner: int, tokens: int) -> tuple[slice, slice, bool]:
        """Of `tokens` queries of this rank and the keys of `owner`: those that attend, those attended to, and
        whether a causal mask is needed.

        Queries attend to the first chunk of an earlier rank, and not to its second. Of a later rank, only the
        second half of the queries attends, to both chunks.
        """
        half, whole = tokens // 2, slice(0, tokens)
        if owner == self._rank:
            return whole, whole, True
        return (whole, slice(0, half), False) if owner < self._rank else (slice(half, tokens), whole, False)


class _RingAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float, ring: RingAttention) -> Tensor:
        tokens, groups = q.shape[2], q.shape[1] // k.shape[1]
        out = torch.zeros_like(q, dtype=torch.float32)
        sums = q.new_full(q.shape[:3], -torch.inf, dtype=torch.float32)  # log-sum-exp of scores so far
        local_kv = (k, v)
        for ring_step, owner in enumerate(ring.key_owners()):
            if ring_step:
                local_kv = ring.ring_shift(*local_kv)
            queries, keys, is_causal = ring.part(owner, tokens)
            local_keys, local_values = (_repeat_kv(tensor[:, :, keys], groups) for tensor in local_kv)
            part, part_sums = attention_part(
                q[:, :, queries], local_keys, local_values, is_causal=is_causal, scale=scale
            )
            _merge(out[:, :, queries], sums[:, :, queries], part, part_sums)
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, sums)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, sums = ctx.saved_tensors
        ring: RingAttention = ctx.ring
        tokens, groups = q.shape[2], q.shape[1] // k.shape[1]
        dq = torch.zeros_like(q, dtype=torch.float32)
        local_kv = (k, v, torch.zeros_like(k, dtype=torch.float32), torch.zeros_like(v, dtype=torch.float32))
        for ring_step, owner in enumerate(ring.key_owners()):
            if ring_step:
                local_kv = ring.ring_shift(*local_kv)
            queries, keys, is_causal = ring.part(owner, tokens)
            local_keys, local_values = (_repeat_kv(tensor[:, :, keys], groups) for tensor in local_kv[:2])
            parts = attention_part_backward(
                grads[0][:, :, queries].contiguous(),
                q[:, :, queries],
                local_keys,
                local_values,
                out[:, :, queries],
                sums[:, :, queries],
                is_causal=is_causal,
                scale=ctx.scale,
            )
            dq[:, :, queries] += parts[0]
            for total, part in zip(local_kv[2:], parts[1:], strict=True):
                total[:, :, keys] += part.unflatten(1, (-1, groups)).sum(2)
        dk, dv = ring.ring_shift(*local_kv[2:])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None


def _repeat_kv(tensor: Tensor, groups: int) -> Tensor:
    """Repeat each key-value head for the query heads that share it."""
    return tensor.repeat_interleave(groups, dim=1)


def _merge(out: Tensor, sums: Tensor, part: Tensor, part_sums: Tensor) -> None:
    """Merge the attention on further keys into `out` and `sums` (log-sum-exp), as in online softmax."""
    both = torch.logaddexp(sums, part_sums)
    out.mul_((sums - both).exp().unsqueeze(-1)).add_(part * (part_sums - both).exp().unsqueeze(-1))
    sums.copy_(both)


class AllToAllAttention:
    """All-to-all attention: all-to-alls before and after attention convert between sharded tokens and sharded
    heads."""

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group

    def positions(self, tokens: int) -> Tensor:
        """Positions of this rank's tokens: one contiguous chunk."""
        return torch.arange(tokens).chunk(distributed.get_world_size(self._group))[
            distributed.get_rank(self._group)
        ]

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Tensor:
        """Attention on all tokens with a shard of the heads."""
        q, k, v = (_AllToAll.apply(tensor, 1, 2, self._group) for tensor in (q, k, v))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        return _AllToAll.apply(heads, 2, 1, self._group)


class _AllToAll(Function):
    """Shards dim `split` and gathers dim `joined`; the backward pass does the reverse."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, split: int, joined: int, group: ProcessGroup) -> Tensor:
        ctx.dims, ctx.group = (split, joined), group
        return _all_to_all(x, split, joined, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        split, joined = ctx.dims
        return _all_to_all(grads[0], joined, split, ctx.group), None, None, None


def _all_to_all(x: Tensor, split: int, joined: int, group: ProcessGroup) -> Tensor:
    size = distributed.get_world_size(group)
    sent = torch.stack([part.contiguous() for part in x.chunk(size, dim=split)])
    received = torch.empty_like(sent)
    distributed.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(), dim=joined)
