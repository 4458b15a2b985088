"""From a Hugging Face config to the sizes of its decoder: LayerNorm families with a plain MLP.

Keys, defaults and shapes are those of the configuration and modelling files of Transformers 5, `model_type`
by `model_type`; the parameter counts are held against what it builds. A key without a default here must be
in the file.
"""

from __future__ import annotations

from shardwise.model.config_fields import ConfigFields
from shardwise.model.config_sizes import grouped, head_dim, layer_count, max_seq_len, vocab
from shardwise.model.shape import Decoder, GroupedQueryAttentionShape, LayerShape, Mlp, Norm, NormPlacement


def gpt2(fields: ConfigFields) -> Decoder:
    """GPT-2 and GPT-3: LayerNorm, biases, learned positions, tied embeddings."""
    fields.require("add_cross_attention", False, "is not supported")
    hidden = fields.count("n_embd", "hidden_size")
    heads = fields.count("n_head", "num_attention_heads")
    layer = LayerShape(
        hidden=hidden,
        norm="layer",
        norm_placement="pre",
        attention=GroupedQueryAttentionShape(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim(fields, hidden, heads, "n_head"),
            qkv_bias=True,
            out_bias=True,
            rotary=False,
        ),
        mlp=Mlp(ffn=fields.count("n_inner", default=4 * hidden), gated=False, bias=True),
        dropout=fields.is_positive("resid_pdrop", default=0.1),
    )
    positions = fields.count("n_positions", "max_position_embeddings")
    return Decoder(
        family="gpt2",
        hidden=hidden,
        vocab=vocab(fields),
        layers=(layer,) * layer_count(fields, "n_layer", "num_hidden_layers"),
        tied=fields.boolean("tie_word_embeddings", default=True),
        positions=positions,
        embedding_width=hidden,
        embedding_dropout=fields.is_positive("embd_pdrop", default=0.1),
        max_seq_len=positions,
    )


def gpt_neox(fields: ConfigFields) -> Decoder:
    """GPT-NeoX and Pythia: attention and MLP in parallel, a norm each; rotary."""
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    bias = fields.boolean("attention_bias", default=True)
    parallel = fields.boolean("use_parallel_residual", default=True)
    dropout = fields.is_positive("hidden_dropout")
    layer = LayerShape(
        hidden=hidden,
        norm="layer",
        norm_placement="parallel" if parallel else "pre",
        attention=GroupedQueryAttentionShape(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim(fields, hidden, heads, "num_attention_heads"),
            qkv_bias=bias,
            out_bias=bias,
        ),
        mlp=Mlp(ffn=fields.count("intermediate_size"), gated=False, bias=True),
        dropout=dropout,
    )
    return Decoder(
        family="gpt_neox",
        hidden=hidden,
        vocab=vocab(fields),
        layers=(layer,) * layer_count(fields),
        tied=fields.boolean("tie_word_embeddings", default=False),
        embedding_width=hidden,
        embedding_dropout=dropout,
        max_seq_len=max_seq_len(fields),
    )


def opt(fields: ConfigFields) -> Decoder:
    """OPT: GPT-like; the 350m has norms after the residuals and embeddings of half the width."""
    hidden = fields.count("hidden_size")
    heads = fields.count("num_attention_heads")
    bias = fields.boolean("enable_bias", default=True)
    pre_norm = fields.boolean("do_layer_norm_before", default=True)
    norm: Norm = "layer" if fields.boolean("layer_norm_elementwise_affine", default=True) else "plain"
    positions = fields.count("max_position_embeddings")
    layer = LayerShape(
        hidden=hidden,
        norm=norm,
        norm_placement="pre" if pre_norm else "post",
        attention=GroupedQueryAttentionShape(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim(fields, hidden, heads, "num_attention_heads"),
            qkv_bias=bias,
            out_bias=bias,
            rotary=False,
        ),
        mlp=Mlp(ffn=fields.count("ffn_dim"), gated=False, bias=bias),
        dropout=fields.is_positive("dropout", default=0.1),
    )
    return Decoder(
        family="opt",
        hidden=hidden,
        vocab=vocab(fields),
        layers=(layer,) * layer_count(fields),
        tied=fields.boolean("tie_word_embeddings", default=True),
        positions=positions + 2,  # OPT's position table is offset by two rows.
        embedding_width=fields.count("word_embed_proj_dim", default=hidden),
        final_norm=pre_norm and not fields.boolean("_remove_final_layer_norm", default=False),
        max_seq_len=positions,
    )


def bloom(fields: ConfigFields) -> Decoder:
    """BLOOM: ALiBi, so no weights for positions; a norm after the embedding."""
    hidden = fields.count("hidden_size", "n_embed")
    heads = fields.count("n_head", "num_attention_heads")
    layer = LayerShape(
        hidden=hidden,
        norm="layer",
        norm_placement="pre",
        attention=GroupedQueryAttentionShape(
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim(fields, hidden, heads, "n_head"),
            qkv_bias=True,
            out_bias=True,
            rotary=False,
        ),
        mlp=Mlp(ffn=4 * hidden, gated=False, bias=True),
        dropout=fields.is_positive("hidden_dropout"),
    )
    return Decoder(
        family="bloom",
        hidden=hidden,
        vocab=vocab(fields),
        layers=(layer,) * layer_count(fields, "n_layer", "num_hidden_layers"),
        tied=fields.boolean("tie_word_embeddings", default=True),
        embedding_width=hidden,
        embedding_norm=True,
        max_seq_len=fields.nullable_count("seq_length", absent=None),
    )


def falcon(fields: ConfigFields) -> Decoder:
    """Falcon: multi-query or grouped-query attention, in parallel with the MLP behind one norm or two."""
    hidden = fields.count("hidden_size", "n_embed")
    heads = fields.count("num_attention_heads", "n_head")
    bias = fields.boolean("bias", default=False)
    is_new = fields.boolean("new_decoder_architecture", default=False)
    multi_query = fields.boolean("multi_query", default=True)
    kv_heads = fields.count("num_kv_heads", "n_head_kv", default=heads)
    layer = LayerShape(
        hidden=hidden,
        norm="layer",
        norm_placement=_falcon_norm_placement(fields, is_new),
        attention=GroupedQueryAttentionShape(
            heads=heads,
            kv_heads=grouped(
                fields, heads, kv_heads if is_new else 1 if multi_query else heads, "num_kv_heads"
            ),
            head_dim=head_dim(fields, hidden, heads, "num_attention_heads"),
            qkv_bias=bias,
            out_bias=bias,
            rotary=not fields.boolean("alibi", default=False),
        ),
        mlp=Mlp(ffn=fields.count("ffn_hidden_size", default=4 * hidden), gated=False, bias=bias),
        dropout=fields.is_positive("hidden_dropout"),
    )
    return Decoder(
        family="falcon",
        hidden=hidden,
        vocab=vocab(fields),
        layers=(layer,) * layer_count(fields, "num_hidden_layers", "n_layer"),
        tied=fields.boolean("tie_word_embeddings", default=True),
        embedding_width=hidden,
        max_seq_len=max_seq_len(fields),
    )


def _falcon_norm_placement(fields: ConfigFields, is_new: bool) -> NormPlacement:
    norms = fields.integer("num_ln_in_parallel_attn", low=1, high=2, default=2 if is_new else 1)
    if fields.boolean("parallel_attn", default=True):
        return "parallel" if norms == 2 else "parallel_shared"
    if is_new:
        raise fields.error(
            "parallel_attn", "contradicts new_decoder_architecture", found="false", allowed="true"
        )
    return "pre"
