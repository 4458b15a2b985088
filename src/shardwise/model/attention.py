"""The operators of an attention block, from its sizes.

Saved tensors are what a fused implementation keeps for the backward pass: the inputs of the matmuls' weight
gradients, queries, keys and values as attention reads them, its output and the log-sum-exp of every row of
scores (Dao 2023, arXiv 2307.08691); never the scores.
"""

from __future__ import annotations

from shardwise.model.shape import GroupedQueryAttentionShape, LatentAttentionShape
from shardwise.operators import Attention, Extent, Matmul, Operator, Pointwise, Saved, Weight


def attention_operators(
    shape: GroupedQueryAttentionShape | LatentAttentionShape,
    hidden: int,
    input_saved: tuple[Saved, ...],
    prefix: str,
) -> tuple[Operator, ...]:
    """From the block's input (kept as `input_saved`) to the output projection, `hidden` wide on both ends."""
    if isinstance(shape, LatentAttentionShape):
        return _latent(shape, hidden, input_saved, prefix)
    return _grouped_query(shape, hidden, input_saved, prefix)


def linear_weights(
    name: str, k: Extent, n: Extent, *, bias: bool = False, experts: int = 0
) -> tuple[Weight, ...]:
    """A [k, n] matrix, and its bias of n: whole where the matmul is split over k, split as n is otherwise."""
    matrix = Weight(name=f"{name}.weight", shape=(k, n), experts=experts)
    return (matrix, Weight(name=f"{name}.bias", shape=(n,), experts=experts)) if bias else (matrix,)


def _grouped_query(
    shape: GroupedQueryAttentionShape, hidden: int, input_saved: tuple[Saved, ...], prefix: str
) -> tuple[Operator, ...]:
    at = f"{prefix}attention"
    whole, heads = Extent(hidden), Extent(shape.heads, "heads")
    q = Extent(shape.heads * shape.head_dim, "heads")
    kv = Extent(shape.kv_heads * shape.head_dim, "kv_heads")
    both = Extent(2 * kv.size, "kv_heads")
    operators: list[Operator] = [
        Matmul(
            name=f"{at}.q",
            k=whole,
            n=q,
            weights=linear_weights(f"{at}.q", whole, q, bias=shape.qkv_bias),
            saved=input_saved,
        ),
        Matmul(
            name=f"{at}.kv",
            k=whole,
            n=both,
            weights=linear_weights(f"{at}.k", whole, kv, bias=shape.qkv_bias)
            + linear_weights(f"{at}.v", whole, kv, bias=shape.qkv_bias),
        ),
    ]
    if shape.qk_norm:
        operators.append(_qk_norm(at, shape.head_dim, q, kv))
    if shape.rotary:
        traffic = (Extent(2 * q.size, "heads"), Extent(2 * kv.size, "kv_heads"))
        operators.append(Pointwise(name=f"{at}.rotary", forward=traffic, backward=traffic))
    operators.append(
        Attention(
            name=f"{at}.core",
            heads=heads,
            kv_heads=Extent(shape.kv_heads, "kv_heads"),
            qk_dim=shape.head_dim,
            v_dim=shape.head_dim,
            window=shape.window,
            weights=(Weight(name=f"{at}.sinks", shape=(Extent(shape.heads, "heads"),)),)
            if shape.sinks
            else (),
            saved=(
                Saved(name=f"{at}.q", width=q),
                Saved(name=f"{at}.kv", width=both),
                *_core_saved(at, q, shape.heads),
            ),
        )
    )
    operators.append(_out(at, q, whole, bias=shape.out_bias))
    return tuple(operators)


def _latent(
    shape: LatentAttentionShape, hidden: int, input_saved: tuple[Saved, ...], prefix: str
) -> tuple[Operator, ...]:
    """Down projections and their norms are not split by tp, and work on the sharded sequence."""
    at = f"{prefix}attention"
    whole = Extent(hidden)
    q = Extent(shape.heads * shape.qk_dim, "heads")
    v = Extent(shape.heads * shape.v_dim, "heads")
    queries: tuple[Operator, ...]
    if shape.q_rank is None:
        queries = (
            Matmul(
                name=f"{at}.q", k=whole, n=q, weights=linear_weights(f"{at}.q", whole, q), saved=input_saved
            ),
        )
    else:
        queries = _low_rank(f"{at}.q", whole, shape.q_rank, 0, q, shape.bias, input_saved)
    expanded = Extent(shape.heads * (shape.nope_dim + shape.v_dim), "heads")
    keys = _low_rank(f"{at}.kv", whole, shape.kv_rank, shape.rope_dim, expanded, shape.bias, ())
    # Queries are rotated in place; keys are put together from the latent's part and the shared rotary part.
    rotary = Extent(2 * shape.heads * shape.rope_dim + 2 * q.size, "heads")
    return (
        *queries,
        *keys,
        Pointwise(name=f"{at}.rotary", forward=(rotary,), backward=(rotary,)),
        Attention(
            name=f"{at}.core",
            heads=Extent(shape.heads, "heads"),
            kv_heads=Extent(shape.heads, "heads"),
            qk_dim=shape.qk_dim,
            v_dim=shape.v_dim,
            saved=(
                Saved(name=f"{at}.q", width=q),
                Saved(name=f"{at}.k", width=q),
                Saved(name=f"{at}.v", width=v),
                *_core_saved(at, v, shape.heads),
            ),
        ),
        _out(at, v, whole, bias=shape.bias),
    )


def _low_rank(
    name: str,
    whole: Extent,
    rank: int,
    rope_elements: int,
    n: Extent,
    bias: bool,
    input_saved: tuple[Saved, ...],
) -> tuple[Operator, ...]:
    """Down to `rank` (and `rope_elements` elements that skip the norm), norm, up to `n`."""
    down, latent = Extent(rank + rope_elements), Extent(rank)
    return (
        Matmul(
            name=f"{name}_down",
            rows="sequence",
            k=whole,
            n=down,
            weights=linear_weights(f"{name}_down", whole, down, bias=bias),
            saved=input_saved,
        ),
        Pointwise(
            name=f"{name}_norm",
            rows="sequence",
            forward=(Extent(2 * rank),),
            backward=(Extent(3 * rank),),
            weights=(Weight(name=f"{name}_norm.weight", shape=(latent,)),),
            saved=(Saved(name=f"{name}_down.output", width=latent, rows="sequence"),),
            selective=True,
        ),
        Matmul(
            name=f"{name}_up",
            k=latent,
            n=n,
            weights=linear_weights(f"{name}_up", latent, n),
            saved=(
                Saved(
                    name=f"{name}_norm.output", width=latent, rows="sequence", selective=True, dtype="operand"
                ),
            ),
        ),
    )


def _qk_norm(at: str, head_dim: int, q: Extent, kv: Extent) -> Pointwise:
    """RMSNorm of every head's query and key; its output is what attention keeps, so it is not recomputed."""
    return Pointwise(
        name=f"{at}.qk_norm",
        forward=(Extent(2 * q.size, "heads"), Extent(2 * kv.size, "kv_heads")),
        backward=(Extent(3 * q.size, "heads"), Extent(3 * kv.size, "kv_heads")),
        weights=tuple(
            Weight(name=f"{at}.{which}_norm.weight", shape=(Extent(head_dim),)) for which in ("q", "k")
        ),
        saved=(
            Saved(name=f"{at}.q_norm.input", width=q),
            Saved(name=f"{at}.k_norm.input", width=kv),
        ),
    )


def _core_saved(at: str, output: Extent, heads: int) -> tuple[Saved, ...]:
    return (
        Saved(name=f"{at}.core.output", width=output, selective=True),
        Saved(name=f"{at}.core.log_sum_exp", width=Extent(heads, "heads"), dtype="fp32", selective=True),
    )


def _out(at: str, k: Extent, whole: Extent, *, bias: bool) -> Matmul:
    return Matmul(
        name=f"{at}.out",
        k=k,
        n=whole,
        weights=linear_weights(f"{at}.out", k, whole, bias=bias),
    )
