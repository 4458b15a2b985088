"""Builds the operators of a decoder layer from its sizes: attention, MLP or experts, norms, residuals.

Saved activations are those of a fused implementation: the inputs of the matmuls (for weight gradients),
queries, keys and values as attention reads them, its output, and the log-sum-exp of every row of scores
(Dao 2023, arXiv 2307.08691). Scores are never saved. Statistics of norms (4 or 8 bytes per token) and seeds
of fused attention dropout are neglected. `layer_from_shape` builds a layer from `attention_operators` and
`mlp_operators`.
"""

from __future__ import annotations

from dataclasses import replace

from shardwise.model.model import DROPOUT, Experts, Layer
from shardwise.model.recurrent import recurrent_operators
from shardwise.model.shape import (
    EagerModules,
    GroupedQueryAttentionShape,
    LatentAttentionShape,
    LayerShape,
    Mlp,
    Norm,
    RecurrentShape,
    RoutedMlp,
)
from shardwise.operators import (
    Attention,
    Dtype,
    Extent,
    GroupedMatmul,
    Matmul,
    Operator,
    Pointwise,
    Role,
    Rows,
    Saved,
    Weight,
)


# Attention
def attention_operators(
    shape: GroupedQueryAttentionShape | LatentAttentionShape,
    hidden: int,
    input_saved: tuple[Saved, ...],
    prefix: str,
) -> tuple[Operator, ...]:
    """The operators of attention, from the block's input (saved as `input_saved`) to the output projection.

    Input and output have width `hidden`."""
    if isinstance(shape, LatentAttentionShape):
        return _latent(shape, hidden, input_saved, prefix)
    return _grouped_query(shape, hidden, input_saved, prefix)


def linear_weights(
    name: str, k: Extent, n: Extent, *, bias: bool = False, experts: int = 0
) -> tuple[Weight, ...]:
    """A matrix [k, n], and its bias [n], which is sharded like n (replicated where the matmul shards k)."""
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
    keys = linear_weights(f"{at}.k", whole, kv, bias=shape.qkv_bias)
    values = () if shape.shared_kv else linear_weights(f"{at}.v", whole, kv, bias=shape.qkv_bias)
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
            n=kv if shape.shared_kv else both,
            weights=keys + values,
        ),
    ]
    if shape.qk_norm:
        operators.append(_qk_norm(at, shape, q, kv))
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
    if shape.gate != "none":
        gate = q if shape.gate == "element" else heads
        operators += _output_gate(at, whole, q, gate, bias=shape.gate_bias)
    operators.append(_out(at, q, whole, bias=shape.out_bias))
    return tuple(operators)


def _output_gate(at: str, whole: Extent, q: Extent, gate: Extent, *, bias: bool) -> tuple[Operator, ...]:
    """The sigmoid of a projection of the input multiplies the output of attention. The gate and the product
    are saved; the output is already."""
    traffic = (Extent(2 * q.size + gate.size, "heads"),)
    return (
        Matmul(
            name=f"{at}.output_gate",
            k=whole,
            n=gate,
            weights=linear_weights(f"{at}.output_gate", whole, gate, bias=bias),
        ),
        Pointwise(
            name=f"{at}.gating",
            forward=traffic,
            backward=traffic,
            saved=(
                Saved(name=f"{at}.output_gate.output", width=gate),
                Saved(name=f"{at}.gating.output", width=q, selective=True, dtype="operand"),
            ),
            selective=True,
        ),
    )


def _latent(
    shape: LatentAttentionShape, hidden: int, input_saved: tuple[Saved, ...], prefix: str
) -> tuple[Operator, ...]:
    """Multi-head latent attention. Tensor parallelism does not shard the down projections and their norms;
    they work on the sharded sequence."""
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
    # Queries are rotated in place; keys are concatenated from the latent part and the shared rotary part.
    rotary = Extent(2 * shape.heads * shape.rope_dim + 2 * q.size, "heads")
    return (
        *queries,
        *keys,
        Pointwise(name=f"{at}.rotary", forward=(rotary,), backward=(rotary,)),
        *(_indexer(shape, whole, at) if shape.index_heads else ()),
        Attention(
            name=f"{at}.core",
            heads=Extent(shape.heads, "heads"),
            kv_heads=Extent(shape.heads, "heads"),
            qk_dim=shape.qk_dim,
            v_dim=shape.v_dim,
            window=shape.index_topk,
            saved=(
                Saved(name=f"{at}.q", width=q),
                Saved(name=f"{at}.k", width=q),
                Saved(name=f"{at}.v", width=v),
                *_core_saved(at, v, shape.heads),
            ),
        ),
        _out(at, v, whole, bias=shape.bias),
    )


def _indexer(shape: LatentAttentionShape, whole: Extent, at: str) -> tuple[Operator, ...]:
    """The indexer of sparse attention: scores of all keys by a few small heads, and the chosen keys of each
    query, whose 32-bit indices are saved (DeepSeek-V3.2-Exp report, section 2.1). Every tensor-parallel rank
    computes it in whole."""
    queries, keys = Extent(shape.index_heads * shape.index_dim), Extent(shape.index_dim)
    heads, k = Extent(shape.index_heads), whole if shape.q_rank is None else Extent(shape.q_rank)
    rotary = (Extent(2 * (queries.size + keys.size)),)
    return (
        Matmul(name=f"{at}.index_q", k=k, n=queries, weights=linear_weights(f"{at}.index_q", k, queries)),
        Matmul(name=f"{at}.index_k", k=whole, n=keys, weights=linear_weights(f"{at}.index_k", whole, keys)),
        Matmul(
            name=f"{at}.index_weights",
            k=whole,
            n=heads,
            weights=linear_weights(f"{at}.index_weights", whole, heads),
        ),
        Pointwise(
            name=f"{at}.index_norm",
            forward=rotary,
            backward=rotary,
            weights=tuple(
                Weight(name=f"{at}.index_norm.{tensor}", shape=(keys,)) for tensor in ("weight", "bias")
            ),
            saved=(Saved(name=f"{at}.index_k.output", width=keys),),
        ),
        Attention(
            name=f"{at}.index_scores",
            heads=heads,
            kv_heads=Extent(1),
            qk_dim=shape.index_dim,
            v_dim=0,
            saved=(
                Saved(name=f"{at}.index_q.output", width=queries),
                Saved(name=f"{at}.index_weights.output", width=heads),
                Saved(name=f"{at}.indices", width=Extent(shape.index_topk or 0), dtype="fp32"),
            ),
        ),
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
    """Down projection to `rank` (and `rope_elements` elements that skip the norm), norm, up projection to
    `n`."""
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


def _qk_norm(at: str, shape: GroupedQueryAttentionShape, q: Extent, kv: Extent) -> Pointwise:
    """Norm of the queries and keys. Attention saves its output, so it is not recomputed."""
    tensors = {"plain": (), "head_bias": ("weight", "bias")}.get(shape.qk_norm_kind, ("weight",))
    return Pointwise(
        name=f"{at}.qk_norm",
        forward=(Extent(2 * q.size, "heads"), Extent(2 * kv.size, "kv_heads")),
        backward=(Extent(3 * q.size, "heads"), Extent(3 * kv.size, "kv_heads")),
        weights=tuple(
            Weight(
                name=f"{at}.{which}_norm.{tensor}",
                shape=(extent if shape.qk_norm_kind == "full" else Extent(shape.head_dim),),
            )
            for which, extent in (("q", q), ("k", kv))
            for tensor in tensors
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


# MLPs and experts
def mlp_operators(
    shape: Mlp | RoutedMlp, hidden: int, input_saved: tuple[Saved, ...], prefix: str
) -> tuple[Operator, ...]:
    """The operators of an MLP, from the block's input (saved as `input_saved`) to its output, both of width
    `hidden`."""
    if isinstance(shape, RoutedMlp):
        return _routed(shape, hidden, input_saved, prefix)
    return _dense(shape, hidden, input_saved, f"{prefix}mlp")


def _dense(shape: Mlp, hidden: int, input_saved: tuple[Saved, ...], at: str) -> tuple[Operator, ...]:
    whole, ffn = Extent(hidden), Extent(shape.ffn, "ffn")
    return (
        Matmul(
            name=f"{at}.up",
            k=whole,
            n=_up_extent(shape, "ffn"),
            weights=_up_weights(at, shape, whole, ffn),
            saved=input_saved,
        ),
        _activation(at, shape, "tokens", "ffn"),
        Matmul(
            name=f"{at}.down",
            k=ffn,
            n=whole,
            weights=linear_weights(f"{at}.down", ffn, whole, bias=shape.bias),
            saved=(_activated(at, shape, "tokens", "ffn"),),
        ),
    )


def _routed(
    shape: RoutedMlp, hidden: int, input_saved: tuple[Saved, ...], prefix: str
) -> tuple[Operator, ...]:
    """Router, token dispatch, experts, combine, and the shared experts.

    The router works on the sharded sequence. Its probabilities multiply the experts' activations before the
    down projection, so the combine needs no saved expert outputs.
    """
    whole = Extent(hidden)
    shared = _dense(shape.shared, hidden, (), f"{prefix}shared") if shape.shared else ()
    gate = _shared_gate(whole, f"{prefix}shared") if shape.shared_gate else ()
    return (*_router(shape, whole, input_saved, prefix), *_experts(shape, whole, prefix), *shared, *gate)


def _shared_gate(whole: Extent, at: str) -> tuple[Operator, ...]:
    """The sigmoid of one projection multiplies the output of the shared experts, which it saves."""
    traffic = (Extent(2 * whole.size),)
    saved = (Saved(name=f"{at}.down.output", width=whole, rows="sequence"),)
    weights = linear_weights(f"{at}.output_gate", whole, Extent(1))
    return (
        Matmul(name=f"{at}.output_gate", rows="sequence", k=whole, n=Extent(1), weights=weights),
        Pointwise(name=f"{at}.gating", rows="sequence", forward=traffic, backward=traffic, saved=saved),
    )


def _router(
    shape: RoutedMlp, whole: Extent, input_saved: tuple[Saved, ...], prefix: str
) -> tuple[Operator, ...]:
    at, experts = f"{prefix}router", Extent(shape.experts)
    return (
        Matmul(
            name=f"{at}.logits",
            rows="sequence",
            k=whole,
            n=experts,
            weights=linear_weights(at, whole, experts, bias=shape.router_bias),
            saved=input_saved,
        ),
        Pointwise(  # softmax (read, write), then top-k (read) of fp32 scores, counted in elements
            name=f"{at}.top_k",
            rows="sequence",
            forward=(Extent(3 * shape.experts + 2 * shape.top_k),),
            backward=(Extent(3 * shape.experts + 2 * shape.top_k),),
            saved=(Saved(name=f"{at}.probabilities", width=experts, rows="sequence", dtype="fp32"),),
        ),
    )


def _experts(shape: RoutedMlp, whole: Extent, prefix: str) -> tuple[Operator, ...]:
    at, mlp = f"{prefix}experts", shape.expert
    ffn = Extent(mlp.ffn, "expert_ffn")
    traffic = (Extent(2 * whole.size),)
    return (
        Pointwise(name=f"{at}.dispatch", rows="routed", forward=traffic, backward=traffic),
        GroupedMatmul(
            name=f"{at}.up",
            experts=shape.experts,
            k=whole,
            n=_up_extent(mlp, "expert_ffn"),
            weights=_up_weights(at, mlp, whole, ffn, experts=shape.experts),
            saved=(Saved(name=f"{at}.input", width=whole, rows="routed", dtype="operand"),),
        ),
        _activation(at, mlp, "routed", "expert_ffn"),
        GroupedMatmul(
            name=f"{at}.down",
            experts=shape.experts,
            k=ffn,
            n=whole,
            weights=linear_weights(f"{at}.down", ffn, whole, bias=mlp.bias, experts=shape.experts),
            saved=(_activated(at, mlp, "routed", "expert_ffn"),),
        ),
        Pointwise(name=f"{at}.combine", rows="routed", forward=traffic, backward=traffic),
    )


def _up_extent(shape: Mlp, role: Role) -> Extent:
    """Output extent of the gate and up projections, which are one matmul."""
    return Extent(shape.ffn * (2 if shape.gated else 1), role)


def _up_weights(at: str, shape: Mlp, whole: Extent, ffn: Extent, experts: int = 0) -> tuple[Weight, ...]:
    up = linear_weights(f"{at}.up", whole, ffn, bias=shape.bias, experts=experts)
    if not shape.gated:
        return up
    return linear_weights(f"{at}.gate", whole, ffn, bias=shape.bias, experts=experts) + up


def _activation(at: str, shape: Mlp, rows: Rows, role: Role) -> Pointwise:
    """The activation. Forward reads gate and up and writes their product; backward reads both and a gradient
    and writes two gradients."""
    inputs = 2 if shape.gated else 1
    return Pointwise(
        name=f"{at}.activation",
        rows=rows,
        forward=(Extent((inputs + 1) * shape.ffn, role),),
        backward=(Extent((2 * inputs + 1) * shape.ffn, role),),
        weights=(Weight(name=f"{at}.activation.weight", shape=(Extent(shape.activation_weights),)),)
        if shape.activation_weights
        else (),
        saved=(Saved(name=f"{at}.up.output", width=Extent(inputs * shape.ffn, role), rows=rows),),
        selective=True,
    )


def _activated(at: str, shape: Mlp, rows: Rows, role: Role) -> Saved:
    return Saved(
        name=f"{at}.activation.output",
        width=Extent(shape.ffn, role),
        rows=rows,
        selective=True,
        dtype="operand",
    )


# Layers
def layer_from_shape(shape: LayerShape, *, prefix: str = "") -> Layer:
    """The layer of a shape; the names of its operators start with `prefix`."""
    routed = shape.mlp if isinstance(shape.mlp, RoutedMlp) else None
    is_parallel = shape.norm_placement.startswith("parallel")
    operators = _parallel(shape, prefix) if is_parallel else _sequential(shape, prefix)
    operators = tuple(_with_eager(operator, shape) for operator in operators)
    mlp_syncs = not is_parallel and (routed is None or routed.shared is not None) and shape.mlp is not None
    tensor_syncs = mlp_syncs + (shape.attention is not None)
    if routed is None:
        return Layer(name=_name(shape), operators=operators, tensor_syncs=tensor_syncs)
    experts = Experts(
        experts=routed.experts,
        top_k=routed.top_k,
        groups=routed.groups,
        groups_per_token=routed.groups_per_token,
        capacity_factor=routed.capacity_factor,
    )
    return Layer(name=_name(shape), operators=operators, experts=experts, tensor_syncs=tensor_syncs)


def norm_operator(
    name: str, norm: Norm, hidden: int, saved: tuple[Saved, ...], *, selective: bool = False
) -> Pointwise:
    """A norm of the residual stream. The traffic is two tensors forward, three backward (the input and two
    gradients)."""
    tensors = {"rms": ("weight",), "scale": ("weight",), "layer": ("weight", "bias"), "plain": ()}[norm]
    return Pointwise(
        name=name,
        rows="sequence",
        forward=(Extent(2 * hidden),),
        backward=(Extent(3 * hidden),),
        weights=tuple(Weight(name=f"{name}.{tensor}", shape=(Extent(hidden),)) for tensor in tensors),
        saved=saved,
        selective=selective,
    )


def dropout_operator(name: str, hidden: int) -> Pointwise:
    """Dropout of the output of block `name`. It saves its mask, one byte per element."""
    mask = Saved(name=f"{name}.{DROPOUT}.mask", width=Extent(hidden), rows="sequence", dtype="mask")
    traffic = (Extent(2 * hidden),)
    return Pointwise(
        name=f"{name}.{DROPOUT}", rows="sequence", forward=traffic, backward=traffic, saved=(mask,)
    )


def saved_residual(name: str, hidden: int, *, selective: bool = False, dtype: Dtype = "compute") -> Saved:
    """A saved tensor with the width of the residual stream, on the (sharded) sequence."""
    return Saved(name=name, width=Extent(hidden), rows="sequence", selective=selective, dtype=dtype)


def _with_eager(operator: Operator, shape: LayerShape) -> Operator:
    """The operator with what Transformers' modules save of it in addition."""
    if not isinstance(operator, Pointwise) or shape.eager == EagerModules():
        return operator
    eager, (block, name) = shape.eager, operator.name.split(".")[-2:]
    found: tuple[Extent, ...] = ()
    if name in ("norm", "post_norm"):
        found = _widths(eager.norm, (Extent(shape.hidden),))
    elif name == "qk_norm":
        halves = tuple(Extent(one.size // 2, one.role) for one in operator.forward)
        found = _widths(eager.qk_norm, halves)
    elif name == "activation" and block != "experts":
        parts = 3 if isinstance(shape.mlp, Mlp | RoutedMlp) and _is_gated(shape.mlp) else 2
        traffic = operator.forward[0]
        found = _widths(eager.activation, (Extent(traffic.size // parts, traffic.role),))
    elif block == "router":
        found = _widths(eager.router, (Extent(shape.hidden),))
    elif name == "rotary":
        queries, *keys = (Extent(one.size // 2, one.role) for one in operator.forward)
        # A view of the values keeps the joined output of the projection.
        found = (queries, *keys) if eager.fused_qkv else ()
        found += (queries,) if eager.copied_output else ()
    return replace(operator, eager=found)


def _widths(number: int, extents: tuple[Extent, ...]) -> tuple[Extent, ...]:
    return tuple(Extent(number * one.size, one.role) for one in extents) if number else ()


def _is_gated(mlp: Mlp | RoutedMlp) -> bool:
    return mlp.gated if isinstance(mlp, Mlp) else mlp.expert.gated


_RECURRENCES = {
    "ssd": "mamba2", "selective": "mamba", "delta": "gated-delta-net",
    "channel_delta": "kimi-delta-attention", "lightning": "lightning-attention",
    "convolution": "short-convolution",
}  # fmt: skip
"""Names of layers without attention, by what mixes their tokens."""


def _name(shape: LayerShape) -> str:
    kind = "moe" if isinstance(shape.mlp, RoutedMlp) else "dense"
    if isinstance(shape.attention, RecurrentShape):
        mixer = _RECURRENCES[shape.attention.kind]
        return mixer if shape.mlp is None else f"{kind}-{mixer}"
    if shape.attention is None:
        return f"{kind}-only"
    if shape.mixer is not None:
        return f"{kind}-attention-and-{_RECURRENCES[shape.mixer.kind]}"
    window = shape.attention.window if isinstance(shape.attention, GroupedQueryAttentionShape) else None
    return "attention" if shape.mlp is None else kind if window is None else f"{kind}-window-{window}"


def _sequential(shape: LayerShape, prefix: str) -> tuple[Operator, ...]:
    hidden, at = shape.hidden, f"{prefix}{_mixer(shape)}"
    layer_input = (saved_residual(f"{prefix}layer.input", hidden),)
    if shape.norm_placement == "post":
        # Each norm follows a residual addition; its output is the next block's input and the next residual.
        mlp_input = (saved_residual(f"{at}.norm.output", hidden, selective=True),)
        return (
            *_mixer_operators(shape, layer_input, prefix),
            *_residual(shape, at),
            _norm(shape, f"{at}.norm", selective=True),
            *_mlp_operators(shape, mlp_input, prefix),
            *_residual(shape, f"{prefix}mlp"),
            _norm(shape, f"{prefix}mlp.norm"),
        )
    if shape.norm_placement == "output":
        mlp_input = (saved_residual(f"{prefix}mlp.input", hidden),)
        return (
            *_mixer_operators(shape, layer_input, prefix),
            *_residual(shape, at),
            *_mlp_operators(shape, mlp_input, prefix),
            *_residual(shape, f"{prefix}mlp"),
        )
    operators: list[Operator] = []
    if shape.attention is not None:
        operators += [
            norm_operator(f"{at}.norm", shape.norm, hidden, layer_input, selective=True),
            *_mixer_operators(shape, _normed(f"{at}.norm", hidden), prefix),
            *_second_mixer(shape, prefix),
            *_residual(shape, at),
        ]
    if shape.mlp is not None:
        operators += [
            _norm(shape, f"{prefix}mlp.norm", selective=True),
            *_mlp_operators(shape, _normed(f"{prefix}mlp.norm", hidden), prefix),
            *_residual(shape, f"{prefix}mlp"),
        ]
    return tuple(operators)


def _mixer(shape: LayerShape) -> str:
    """The first word of the names of the operators that mix tokens."""
    return "mixer" if isinstance(shape.attention, RecurrentShape) else "attention"


def _mixer_operators(shape: LayerShape, input_saved: tuple[Saved, ...], prefix: str) -> tuple[Operator, ...]:
    if shape.attention is None:
        return ()
    if isinstance(shape.attention, RecurrentShape):
        return recurrent_operators(shape.attention, shape.hidden, input_saved, f"{prefix}{_mixer(shape)}")
    return attention_operators(shape.attention, shape.hidden, input_saved, prefix)


def _second_mixer(shape: LayerShape, prefix: str) -> tuple[Operator, ...]:
    """A mixer that reads the same input as attention; its output is added to the residual stream as well."""
    if shape.mixer is None:
        return ()
    return recurrent_operators(shape.mixer, shape.hidden, (), f"{prefix}mixer")


def _mlp_operators(shape: LayerShape, input_saved: tuple[Saved, ...], prefix: str) -> tuple[Operator, ...]:
    return () if shape.mlp is None else mlp_operators(shape.mlp, shape.hidden, input_saved, prefix)


def _parallel(shape: LayerShape, prefix: str) -> tuple[Operator, ...]:
    """Attention and MLP on the same input, with a norm each or a shared norm; one addition of three tensors
    at the end."""
    hidden = shape.hidden
    own_norm = shape.norm_placement == "parallel"
    first = f"{prefix}attention.norm"
    operators: list[Operator] = [
        norm_operator(
            first, shape.norm, hidden, (saved_residual(f"{prefix}layer.input", hidden),), selective=True
        )
    ]
    if own_norm:
        operators.append(norm_operator(f"{prefix}mlp.norm", shape.norm, hidden, (), selective=True))
    operators += _mixer_operators(shape, _normed(first, hidden), prefix)
    mlp_input = _normed(f"{prefix}mlp.norm", hidden) if own_norm else ()
    operators += _mlp_operators(shape, mlp_input, prefix)
    if shape.dropout:
        operators += [dropout_operator(f"{prefix}{block}", hidden) for block in ("attention", "mlp")]
    traffic = (Extent(4 * hidden),)
    operators.append(
        Pointwise(name=f"{prefix}layer.residual", rows="sequence", forward=traffic, backward=traffic)
    )
    return tuple(operators)


def _residual(shape: LayerShape, at: str) -> tuple[Operator, ...]:
    """The operators that add a block's output to the residual stream: second norm, dropout, addition."""
    hidden = shape.hidden
    after: list[Operator] = []
    if shape.norm_placement in ("sandwich", "output"):
        saved = (saved_residual(f"{at}.post_norm.input", hidden),)
        after.append(norm_operator(f"{at}.post_norm", shape.norm, hidden, saved))
    if shape.dropout:
        after.append(dropout_operator(at, hidden))
    shared = isinstance(shape.mlp, RoutedMlp) and shape.mlp.shared is not None and at.endswith("mlp")
    second = shape.mixer is not None and at.endswith("attention")
    traffic = (Extent((4 if shared or second else 3) * hidden),)
    after.append(Pointwise(name=f"{at}.residual", rows="sequence", forward=traffic, backward=traffic))
    return tuple(after)


def _norm(shape: LayerShape, name: str, *, selective: bool = False) -> Pointwise:
    saved = (saved_residual(f"{name}.input", shape.hidden),)
    return norm_operator(name, shape.norm, shape.hidden, saved, selective=selective)


def _normed(name: str, hidden: int) -> tuple[Saved, ...]:
    return (saved_residual(f"{name}.output", hidden, selective=True, dtype="operand"),)
