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
    gate_bias: bool = False
    shared_kv: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttentionShape:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

    Keys and values come from a latent vector of `kv_rank` elements. Queries come from a latent vector of
    `q_rank` elements, or from the hidden state where it is None. A head's query and key have
    `nope_dim + rope_dim` elements, its value `v_dim`. The down projections and the output projection have
    biases where `bias` is true. Sparse attention (DeepSeek-V3.2) is over `index_topk` keys (None: all), which
    an indexer of `index_heads` heads of `index_dim` elements chooses; a layer with 0 heads takes those of the
    layer before.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    bias: bool = False
    index_topk: int | None = None
    index_heads: int = 0
    index_dim: int = 0

    @property
    def qk_dim(self) -> int:
        return self.nope_dim + self.rope_dim

    @property
    def kv_heads(self) -> int:
        """Number of heads: each has its own keys and values after the up projection."""
        return self.heads


Recurrence = Literal["ssd", "selective", "delta", "channel_delta", "lightning", "convolution"]
"""What mixes the tokens of a layer without attention: state-space duality (Mamba-2), a selective scan
(Mamba-1), the gated delta rule with a decay for each head (Gated DeltaNet) or for each channel of a key (Kimi
Delta Attention), linear attention with fixed decays (Lightning), or a short convolution alone (LFM2)."""

MixerNorm = Literal["none", "head", "full"]
"""Weights of the norm of the output: no norm, one vector for all heads, or one for all elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentShape:
    """A state-space, linear-attention or convolution layer in the place of attention.

    `heads` values of `head_dim` elements; `key_heads` keys and queries of `key_dim` elements (of Mamba: the
    groups of B and C, and the size of the state). A convolution over `kernel` tokens comes first (0: none).
    `chunk` tokens are computed at once. `gate_rank` is the low rank of the gate's projection, 0: full.
    `bias` is of the projections in and out. Selective scans have `dt_rank`, and with `has_inner_norms` norms
    of the step size, B and C (Jamba).
    """

    kind: Recurrence
    heads: int
    head_dim: int
    key_heads: int = 1
    key_dim: int = 0
    kernel: int = 0
    chunk: int = 1
    norm: MixerNorm = "none"
    gate_rank: int = 0
    bias: bool = False
    conv_bias: bool = False
    dt_rank: int = 0
    has_inner_norms: bool = False

    @property
    def inner(self) -> int:
        """Elements of the values of all heads."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of the keys of all heads."""
        return self.key_heads * self.key_dim

    @property
    def kv_heads(self) -> int:
        """Number of heads: all that differs by head is sharded with the values."""
        return self.heads


AttentionShape = GroupedQueryAttentionShape | LatentAttentionShape


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
class EagerModules:
    """What Transformers' modules of a layer save in addition to the usual ones, in widths of the compute
    dtype: per `norm` and `qk_norm` (products with weights in fp32), per `activation` (functions of several
    steps, such as `gelu_new`), per `router` (its input in fp32: 2), and of joined projections, of which
    values alone are saved elsewhere, queries and keys (`fused_qkv`). With `copied_output`, queries that are
    joined from rotated and other elements are laid out by heads, and so the output of attention is copied."""

    norm: int = 0
    qk_norm: int = 0
    activation: int = 0
    router: int = 0
    fused_qkv: bool = False
    copied_output: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """`attention` is what mixes tokens. A layer may have only one of it and of the MLP (Nemotron-H), or a
    second mixer that reads the same input (`mixer`, Falcon-H1)."""

    hidden: int
    norm: Norm
    norm_placement: NormPlacement
    attention: AttentionShape | RecurrentShape | None
    mlp: Mlp | RoutedMlp | None
    mixer: RecurrentShape | None = None
    dropout: bool = False
    eager: EagerModules = EagerModules()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProjectorStep:
    """A norm over `k` elements, a product from `k` to `n`, or an activation of `k` elements, on the patches
    or on the image tokens (`rows`), `times` times."""

    kind: Literal["norm", "product", "activation"]
    k: int
    n: int = 0
    norm: Norm = "layer"
    bias: bool = False
    rows: Literal["patches", "images"] = "images"
    times: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionTower:
    """An encoder of images and its projector, in front of a decoder of width `text_hidden`.

    A sequence has `images`, each of `patches` (with a class token where the tower has one) that become
    `tokens` of the sequence. A patch has `patch_elements` numbers. `layers` are shapes, each with how many
    patches attend to each other and how many such layers there are. `positions` rows of learned embeddings;
    `unused` weights that no product reads.
    """

    hidden: int
    text_hidden: int
    images: int
    patches: int
    tokens: int
    patch_elements: int
    patch_bias: bool
    norm: Norm
    layers: tuple[tuple[LayerShape, int, int], ...]
    layer_scale: bool
    positions: int
    class_token: bool
    first_norm: bool
    last_norm: bool
    unused: int
    projector: tuple[ProjectorStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The sizes of a whole model, with one `LayerShape` per decoder layer.

    `positions` is the number of learned position embeddings (0: none). `embedding_width` differs from
    `hidden` where the embeddings are projected (OPT-350m). `mtp_modules` is the number of
    multi-token-prediction modules, each with a decoder layer like the last. `labels` is the number of outputs
    of a classifier or reward model, None for a language model, whose outputs are the vocabulary. `vision` is
    the tower in front of it. `notes` say what the sizes leave out and which keys of a config were ignored.
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
    vision: VisionTower | None = None
    notes: tuple[str, ...] = ()
