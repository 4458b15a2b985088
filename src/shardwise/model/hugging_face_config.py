"""Reads Hugging Face configs: key spellings, and sizes that several families share.

`ConfigFields` records the keys that were read. `refuse_unread_sizes` rejects a config with a key that may
change sizes and was not read. `grouped_query`, `gated_mlp` and `gated_decoder` read common shapes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from shardwise.errors import ConfigError
from shardwise.inputs import REQUIRED, Fields, join_key, nearest, short_repr
from shardwise.model.shape import (
    Decoder,
    GroupedQueryAttentionShape,
    LatentAttentionShape,
    LayerShape,
    Mlp,
    NormPlacement,
    RoutedMlp,
)

# Keys
MAX_COUNT: Final = 10_000_000
MAX_LAYERS: Final = 10_000

# A key with one of these words may change sizes; it is an error where its family does not read it.
SIZE_WORD: Final = re.compile(
    r"(?:^|_)(?:num|n|d|sizes?|dims?|rank|channels|width|depth|heads?|layers?|experts?|moe|lora|bias|vocab"
    r"|window|kv|qk|norm|layernorms?|shared|mtp|nextn|mamba|ssm|conv|state|gated?|inner|embed|embd|hidden|ffn"
    r"|feed|intermediate|tie|tied|config|altup|laurel|types|adapter)(?:_|$)"
)

# Keys with such a word that do not change sizes.
# fmt: off
HARMLESS: Final = frozenset({
    "_name_or_path", "apply_residual_connection_post_layernorm", "bias_dropout_fusion",
    "chunk_size_feed_forward", "compression_config", "cross_attention_hidden_size", "embd_pdrop",
    "encoder_no_repeat_ngram_size", "ep_size", "generation_config", "hidden_act", "hidden_activation",
    "hidden_dropout", "hidden_dropout_prob", "layer_norm_eps", "layer_norm_epsilon", "n_ctx",
    "no_repeat_ngram_size", "norm_eps", "norm_epsilon", "norm_topk_prob", "num_beam_groups", "num_beams",
    "num_labels", "num_logits_to_keep", "num_return_sequences", "output_hidden_states",
    "quantization_config", "rms_norm_eps", "rms_norm_epsilon", "scale_attn_by_inverse_layer_idx",
    "skip_bias_add", "skip_bias_add_qkv",
})
# fmt: on


class ConfigFields(Fields):
    """Fields of a config. Null counts as absent, except in `nullable_count`."""

    def spelling(self, *names: str) -> str:
        """The spelling that the config has, else the first; all spellings count as read.

        Raises ConfigError where the config has two spellings with different values.
        """
        given = [name for name in names if self.has(name)]
        for other in given[1:]:
            if self.any(other) != self.any(given[0]):
                raise self.error(
                    other,
                    f"contradicts {given[0]}",
                    found=short_repr(self.any(other)),
                    allowed=short_repr(self.any(given[0])),
                )
        return given[0] if given else names[0]

    def count(self, *names: str, default: int | None = None, high: int = MAX_COUNT) -> int:
        """An integer from 1 to `high` under one of the spellings; required where `default` is None."""
        name = self.spelling(*names)
        if default is None and not self.has(name):
            raise self._missing(names)
        return self.integer(name, low=1, high=high, default=REQUIRED if default is None else default)

    def nullable_count(self, name: str, *, absent: int | None, high: int = MAX_COUNT) -> int | None:
        """A count; None where the key is null, and `absent` where the key is absent."""
        if not self.has(name):
            return None if name in self.names else absent
        return self.count(name, high=high)

    def is_positive(self, name: str, *, default: float = 0.0, high: float = 1.0) -> bool:
        """Whether a number, such as a dropout rate or a soft cap, is above 0."""
        return self.number(name, low=0.0, high=high, default=default) > 0

    def require(self, name: str, value: bool | int, why: str) -> None:
        """Raises ConfigError where the key is given with a value other than `value`."""
        found = self.any(name, default=value)
        if found != value:
            raise self.error(name, why, found=short_repr(found), allowed=short_repr(value))

    def item_error(self, name: str, index: int, message: str, *, found: object, allowed: str) -> ConfigError:
        """A ConfigError located at item `index` of the list at `name`."""
        key = f"{join_key(self.key, name)}[{index}]"
        return ConfigError(message, file=self.file, key=key, found=short_repr(found), allowed=allowed)

    def refuse_unread_sizes(self, family: str) -> None:
        """Raises ConfigError for a key that may change sizes and was not read, unless it is null, false, 0 or
        empty."""
        for name in self.unread:
            if name in HARMLESS or not self._mapping[name]:
                continue
            if SIZE_WORD.search(name.lower()):
                guess = nearest(name, [known for known in self._read if known not in self.names])
                hint = f" (did you mean {guess}?)" if guess else ""
                raise self.error(
                    name,
                    f"may change sizes and is not supported for {family}{hint}",
                    found=short_repr(self._mapping[name]),
                    allowed="the sizes that this family has in Transformers",
                )

    def _missing(self, names: tuple[str, ...]) -> ConfigError:
        guess = nearest(names[0], [name for name in self.unread if name not in HARMLESS])
        hint = f" (is {guess} meant?)" if guess else ""
        return self.error(names[0], f"is missing{hint}", allowed="an integer under " + " or ".join(names))


# Sizes that families share
MAX_SEQ_LEN = 10**9
LAYER_TYPES = ("full_attention", "sliding_attention")


def vocab(fields: ConfigFields, *, default: int | None = None) -> int:
    """Rows of the embedding, with padding where the config includes it."""
    return fields.count("vocab_size", default=default)


def layer_count(fields: ConfigFields, *names: str) -> int:
    return fields.count(*(names or ("num_hidden_layers",)), high=MAX_LAYERS)


def max_seq_len(fields: ConfigFields) -> int | None:
    return fields.nullable_count("max_position_embeddings", absent=None, high=MAX_SEQ_LEN)


def head_dim(fields: ConfigFields, hidden: int, heads: int, key: str) -> int:
    """Elements of a head: hidden size / heads. ConfigError where the heads do not divide it."""
    if hidden % heads:
        raise fields.error(
            fields.spelling(key, "num_attention_heads"),
            "does not divide the hidden size",
            found=str(heads),
            allowed=f"a divisor of {hidden}",
        )
    return hidden // heads


def grouped(fields: ConfigFields, heads: int, kv_heads: int, key: str) -> int:
    """`kv_heads`. ConfigError where they do not divide the number of heads."""
    if heads % kv_heads:
        raise fields.error(
            key, "does not divide the number of heads", found=str(kv_heads), allowed=f"a divisor of {heads}"
        )
    return kv_heads


def grouped_query(
    fields: ConfigFields,
    *,
    default_heads: tuple[int | None, int | None] = (None, None),
    default_head_dim: int | None = None,
    window: int | None = None,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
    sinks: bool = False,
    softcap: bool = False,
) -> GroupedQueryAttentionShape:
    """Attention from `num_attention_heads`, `num_key_value_heads` and `head_dim`.

    Null `num_key_value_heads` mean as many as heads. `default_heads` has the defaults of heads and key-value
    heads; None means required, and 0 key-value heads mean as many as heads.
    """
    heads = fields.count("num_attention_heads", default=default_heads[0])
    dim = fields.nullable_count("head_dim", absent=default_head_dim)
    if dim is None:
        dim = head_dim(fields, fields.count("hidden_size"), heads, "num_attention_heads")
    null = "num_key_value_heads" in fields.names and not fields.has("num_key_value_heads")
    kv_default = heads if null or default_heads[1] == 0 else default_heads[1]
    kv_heads = fields.count("num_key_value_heads", default=kv_default)
    return GroupedQueryAttentionShape(
        heads=heads,
        kv_heads=grouped(fields, heads, kv_heads, "num_key_value_heads"),
        head_dim=dim,
        window=window,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        qk_norm=qk_norm,
        sinks=sinks,
        softcap=softcap,
    )


def gated_mlp(fields: ConfigFields, *, bias: bool = False) -> Mlp:
    return Mlp(ffn=fields.count("intermediate_size"), gated=True, bias=bias)


def qwen_window(fields: ConfigFields) -> int | None:
    window = fields.nullable_count("sliding_window", absent=4096)
    return window if fields.boolean("use_sliding_window", default=False) else None


def qwen_sliding(fields: ConfigFields) -> tuple[bool, ...]:
    """Whether each layer has the sliding window: by `layer_types`, else from layer `max_window_layers` on."""
    first = fields.integer("max_window_layers", low=0, high=MAX_LAYERS, default=28)
    return sliding_layers(fields, [layer >= first for layer in range(layer_count(fields))])


def sliding_layers(fields: ConfigFields, otherwise: Sequence[bool]) -> tuple[bool, ...]:
    """Whether each layer has a sliding window: by `layer_types`, else `otherwise`."""
    if not fields.has("layer_types"):
        return tuple(otherwise)
    types = fields.sequence("layer_types")
    if len(types) != len(otherwise):
        raise fields.error(
            "layer_types", "needs one type per layer", found=f"{len(types)}", allowed=f"{len(otherwise)}"
        )
    for index, kind in enumerate(types):
        if kind not in LAYER_TYPES:
            raise fields.item_error(
                "layer_types", index, "is not supported", found=kind, allowed=", ".join(LAYER_TYPES)
            )
    return tuple(kind == "sliding_attention" for kind in types)


def gated_decoder(
    fields: ConfigFields,
    family: str,
    *,
    attention: GroupedQueryAttentionShape | LatentAttentionShape,
    mlp: Mlp | Sequence[Mlp | RoutedMlp],
    sliding: Sequence[bool] | None = None,
    norm_placement: NormPlacement = "pre",
    dropout: bool = False,
    tied: bool = False,
    default_vocab: int | None = None,
    logit_softcap: bool = False,
    mtp_modules: int = 0,
) -> Decoder:
    """A decoder of RMSNorm layers with one MLP for all layers or one per layer; `sliding` layers have the
    window."""
    hidden = fields.count("hidden_size")
    layers = layer_count(fields)
    mlps = (mlp,) * layers if isinstance(mlp, Mlp) else mlp
    full = replace(attention, window=None) if isinstance(attention, GroupedQueryAttentionShape) else attention
    attentions = [attention if is_sliding else full for is_sliding in sliding or (True,) * layers]
    return Decoder(
        family=family,
        hidden=hidden,
        vocab=vocab(fields, default=default_vocab),
        layers=tuple(
            LayerShape(
                hidden=hidden,
                norm="rms",
                norm_placement=norm_placement,
                attention=here,
                mlp=one,
                dropout=dropout,
            )
            for here, one in zip(attentions, mlps, strict=True)
        ),
        tied=fields.boolean("tie_word_embeddings", default=tied),
        embedding_width=hidden,
        logit_softcap=logit_softcap,
        mtp_modules=mtp_modules,
        max_seq_len=max_seq_len(fields),
    )
