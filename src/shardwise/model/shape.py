"""The sizes of a decoder in one form for all families: readers return a `Decoder`, `build` takes it.

All sizes are in elements. `bias` fields are true where the named matmuls have bias vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.inputs import Fields

Norm = Literal["rms", "layer", "scale", "plain"]
"""RMSNorm with a scale, LayerNorm with scale and shift, LayerNorm with a scale alone, or a norm without
weights."""

NormPlacement = Literal["pre", "post", "output", "sandwich", "parallel", "parallel_shared"]
"""Placement of a layer's norms: before attention and MLP (`pre`), after the residual additions (`post`), on
the outputs of both before the additions (`output`, OLMo 2), or before and after both (`sandwich`, Gemma). In
`parallel`, attention and MLP run in parallel on the same input with a norm each; in `parallel_shared` they
share one norm."""

QkNorm = Literal["head", "head_bias", "full", "plain"]
"""Weights of the norms of queries and keys: one vector for all heads, the same with a shift, a weight for
each element of all heads, or none."""


OutputGate = Literal["none", "head", "element"]
"""Gate of the output of attention by a projection of its input: none, one for each head, or one for each
element of all heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttentionShape:
    """Multi-head, grouped-query and multi-query attention.

    `window` limits the keys of a query. `softcap` is true where scores are soft-capped. With `shared_kv` keys
    and values come from one projection."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    qk_norm_kind: QkNorm = "head"
    rotary: bool = True
    sinks: bool = False
    softcap: bool = False
    gate: OutputGate = "none"
    shared_kv: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Keys and values come from a latent vector of `kv_rank` elements. Queries come from a latent vector of
    `q_rank` elements, or from the hidden state where it is None. A head's query and key have
    `nope_dim + rope_dim` elements, its value `v_dim`. The down projections and the output projection have
    biases where `bias` is true.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def kv_heads(self) -> int:
        """Number of heads: each has its own keys and values after the up projection."""
        return self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """`activation_weights` is the number of trained elements of the activation function (xIELU: 2)."""

    ffn: int
    gated: bool
    bias: bool = False
    activation_weights: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedMlp:
    """`experts` MLPs, `top_k` of them per token, and an optional `shared` MLP for all tokens.

    With `shared_gate`, a projection to one element gates the output of the shared MLP (Qwen2-MoE).
    `capacity_factor` is None for dropless routing; else the capacity of an expert is that multiple of its
    even share of tokens.
    """

    experts: int
    top_k: int
    expert: Mlp
    shared: Mlp | None = None
    shared_gate: bool = False
    groups: int = 1
    groups_per_token: int = 1
    router_bias: bool = False
    capacity_factor: float | None = None


def capacity_factor(fields: Fields) -> float | None:
    """`expert_capacity_factor`, as in Megatron-LM; None (dropless) where it is absent."""
    key = "expert_capacity_factor"
    return fields.number(key, low=0.01, high=100.0) if fields.has(key) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    hidden: int
    norm: Norm
    norm_placement: NormPlacement
    attention: GroupedQueryAttentionShape | LatentAttentionShape
    mlp: Mlp | RoutedMlp
    dropout: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes of a whole model, with one `LayerShape` per decoder layer.

    `positions` is the number of learned position embeddings (0: none). `embedding_width` differs from
    `hidden` where the embeddings are projected (OPT-350m). `mtp_modules` is the number of
    multi-token-prediction modules, each with a decoder layer like the last. `labels` is the number of outputs
    of a classifier or reward model, None for a language model, whose outputs are the vocabulary. `notes` say
    what the sizes leave out and which keys of a config were ignored.
    """

    family: str
    hidden: int
    vocab: int
    layers: tuple[LayerShape, ...]
    tied: bool
    positions: int = 0
    embedding_width: int
    embedding_norm: bool = False
    embedding_dropout: bool = False
    final_norm: bool = True
    labels: int | None = None
    output_bias: bool = False
    logit_softcap: bool = False
    mtp_modules: int = 0
    max_seq_len: int | None = None
    notes: tuple[str, ...] = ()
