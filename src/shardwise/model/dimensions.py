"""Reads models given by plain dimensions, in the terms of Megatron-LM."""

from __future__ import annotations

from shardwise.inputs import Fields
from shardwise.model.config_keys import MAX_COUNT, MAX_LAYERS
from shardwise.model.shape import (
    Decoder,
    GroupedQueryAttentionShape,
    LayerShape,
    Mlp,
    Norm,
    RoutedMlp,
    capacity_factor,
)

NORMS = ("layernorm", "rmsnorm")
POSITIONS = ("learned", "rope", "none")


def decoder_from_dimensions(fields: Fields) -> Decoder:
    """The decoder of `layers, hidden, ffn, heads, vocab, seq_len` and optional keys with Megatron-LM's
    defaults.

    The defaults are those of a GPT: `kv_heads` equals `heads`, `head_dim` is hidden / heads, `gated` no,
    `bias` yes, `qkv_bias` equals `bias`, `norm` layernorm, `positions` learned (`seq_len` of them), `tied`
    yes, `dropout` 0.1, no `window`. Keys of mixtures of experts, with defaults: `experts`, `top_k`,
    `expert_ffn` (`ffn`), `shared_ffn` (0), `dense_layers` (number of leading dense layers, 0) and
    `expert_capacity_factor` (dropless). Raises ConfigError for missing, unknown and wrong keys.
    """
    hidden = fields.integer("hidden", low=1, high=MAX_COUNT)
    layers = fields.integer("layers", low=1, high=MAX_LAYERS)
    seq_len = fields.integer("seq_len", low=1, high=MAX_COUNT)
    norm: Norm = "rms" if fields.choice("norm", NORMS, default="layernorm") == "rmsnorm" else "layer"
    positions = fields.choice("positions", POSITIONS, default="learned")
    has_dropout = fields.number("dropout", low=0.0, high=1.0, default=0.1) > 0
    bias = fields.boolean("bias", default=True)
    dense = Mlp(
        ffn=fields.integer("ffn", low=1, high=MAX_COUNT),
        gated=fields.boolean("gated", default=False),
        bias=bias,
    )
    attention = _attention(fields, hidden, bias=bias, rotary=positions == "rope")
    mlps = _mlps(fields, dense, layers)
    decoder = Decoder(
        family="megatron",
        hidden=hidden,
        vocab=fields.integer("vocab", low=1, high=MAX_COUNT),
        layers=tuple(
            LayerShape(
                hidden=hidden,
                norm=norm,
                norm_placement="pre",
                attention=attention,
                mlp=mlp,
                dropout=has_dropout,
            )
            for mlp in mlps
        ),
        tied=fields.boolean("tied", default=True),
        positions=seq_len if positions == "learned" else 0,
        embedding_width=hidden,
        embedding_dropout=has_dropout,
        max_seq_len=seq_len if positions == "learned" else None,
    )
    fields.finish(allowed=("name",))
    return decoder


def _attention(fields: Fields, hidden: int, *, bias: bool, rotary: bool) -> GroupedQueryAttentionShape:
    heads = fields.integer("heads", low=1, high=MAX_COUNT)
    kv_heads = fields.integer("kv_heads", low=1, high=MAX_COUNT, default=heads)
    if heads % kv_heads:
        raise fields.error(
            "kv_heads",
            "does not divide the number of heads",
            found=str(kv_heads),
            allowed=f"a divisor of {heads}",
        )
    if not fields.has("head_dim") and hidden % heads:
        raise fields.error(
            "heads", "does not divide the hidden size", found=str(heads), allowed=f"a divisor of {hidden}"
        )
    return GroupedQueryAttentionShape(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=fields.integer("head_dim", low=1, high=MAX_COUNT, default=max(hidden // heads, 1)),
        window=fields.integer("window", low=1, high=MAX_COUNT) if fields.has("window") else None,
        qkv_bias=fields.boolean("qkv_bias", default=bias),
        out_bias=bias,
        rotary=rotary,
    )


def _mlps(fields: Fields, dense: Mlp, layers: int) -> list[Mlp | RoutedMlp]:
    """The MLP of each layer: first the leading dense layers, then layers with experts, if any."""
    if not fields.has("experts"):
        return [dense] * layers
    experts = fields.integer("experts", low=1, high=MAX_COUNT)
    leading = fields.integer("dense_layers", low=0, high=layers, default=0)
    shared = fields.integer("shared_ffn", low=0, high=MAX_COUNT, default=0)
    expert_ffn = fields.integer("expert_ffn", low=1, high=MAX_COUNT, default=dense.ffn)
    routed = RoutedMlp(
        experts=experts,
        top_k=fields.integer("top_k", low=1, high=experts),
        expert=Mlp(ffn=expert_ffn, gated=dense.gated, bias=dense.bias),
        shared=Mlp(ffn=shared, gated=dense.gated, bias=dense.bias) if shared else None,
        capacity_factor=capacity_factor(fields),
    )
    return [dense] * leading + [routed] * (layers - leading)
