"""Sizes of a decoder, family by family different, in one form: what readers return and operators are built
from.

All sizes are in elements. `bias` fields say whether the matmuls named have bias vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shardwise.inputs import Fields

Norm = Literal["rms", "layer", "plain"]
"""RMSNorm with a scale, LayerNorm with scale and shift, or a norm without weights."""

NormPlacement = Literal["pre", "post", "sandwich", "parallel", "parallel_shared"]
"""Where a layer's norms stand: before attention and MLP, after the residuals, before and after both (Gemma),
or before an attention and an MLP that run side by side on the same input, with a norm each or one norm for
both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedQueryAttentionShape:
    """Multi-head, grouped-query and multi-query attention; `window` limits the keys of a query, `softcap`
    says whether scores are kept below a cap."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    rotary: bool = True
    sinks: bool = False
    softcap: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): keys and values from a latent of
    `kv_rank`.

    Queries come from a latent of `q_rank`, or straight from the hidden state where it is None. A head's
    query and key have `nope_dim + rope_dim` elements, its value `v_dim`. `bias` is on the down projections
    and the output.
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
        """Every head has keys and values of its own once the latent is expanded."""
        return self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    ffn: int
    gated: bool
    bias: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedMlp:
    """`experts` MLPs of which a token takes `top_k`, beside an optional MLP that all take (`shared`).

    `capacity_factor` is None for dropless routing; else every expert takes so many times its even share.
    """

    experts: int
    top_k: int
    expert: Mlp
    shared: Mlp | None = None
    groups: int = 1
    groups_per_token: int = 1
    router_bias: bool = False
    capacity_factor: float | None = None


def capacity_factor(fields: Fields) -> float | None:
    """What `expert_capacity_factor` says, Megatron-LM's word; None, dropless, where it is absent."""
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
    """A whole model: one `LayerShape` per decoder layer.

    `positions` rows of learned position embeddings (0: none). `embedding_width` differs from `hidden` where
    the embeddings are projected (OPT-350m). `mtp_modules` multi-token-prediction modules end in a layer like
    the last.
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
    logit_softcap: bool = False
    mtp_modules: int = 0
    max_seq_len: int | None = None
