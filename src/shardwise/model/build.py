"""Builds the operators of a whole model from the sizes of its decoder."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

from shardwise.model.layers import (
    dropout_operator,
    layer_from_shape,
    linear_weights,
    norm_operator,
    saved_residual,
)
from shardwise.model.model import MTP_PREFIX, Layer, Model
from shardwise.model.shape import Decoder, LayerShape, RecurrentShape
from shardwise.model.vision_operators import vision_operators
from shardwise.operators import Extent, Lookup, Loss, Matmul, Operator, Pointwise, Saved, Weight


def model_from_decoder(decoder: Decoder, *, name: str, config: Mapping[str, object]) -> Model:
    """The model of a decoder. Equal layers are one kind; kinds are numbered by first appearance."""
    index: dict[LayerShape, int] = {}
    pattern = tuple(index.setdefault(shape, len(index)) for shape in decoder.layers)
    modules = [_mtp_module(decoder, i) for i in range(decoder.mtp_modules)]
    mixers = [one for shape in index for one in (shape.attention, shape.mixer) if one is not None]
    vision = decoder.vision
    attentions = [mixer for mixer in mixers if not isinstance(mixer, RecurrentShape)]
    return Model(
        name=name,
        family=decoder.family,
        hidden=decoder.hidden,
        vocab=decoder.vocab,
        heads=gcd(*(mixer.heads for mixer in attentions or mixers)),
        kv_heads=gcd(*(mixer.kv_heads for mixer in attentions or mixers)),
        kinds=tuple(layer_from_shape(shape) for shape in index),
        pattern=pattern,
        embedding=_embedding(decoder),
        patches=0 if vision is None else vision.images * vision.patches,
        image_tokens=0 if vision is None else vision.images * vision.tokens,
        head=_head(decoder) + tuple(operator for operators, _ in modules for operator in operators),
        head_experts=modules[0][1].experts if modules else None,
        head_layers=len(modules),
        head_tensor_syncs=sum(layer.tensor_syncs for _, layer in modules),
        tied_embeddings=decoder.tied,
        max_seq_len=decoder.max_seq_len,
        labels=decoder.labels,
        notes=decoder.notes,
        config=config,
    )


def _embedding(decoder: Decoder) -> tuple[Operator, ...]:
    hidden, width = Extent(decoder.hidden), Extent(decoder.embedding_width)
    vocab = Extent(decoder.vocab, "vocab")
    table = Weight(name="embedding.tokens.weight", shape=(vocab, width))
    operators: list[Operator] = [] if decoder.vision is None else list(vision_operators(decoder.vision))
    operators.append(Lookup(name="embedding.tokens", width=width, weights=(table,)))
    if width != hidden:
        operators.append(
            Matmul(
                name="embedding.project",
                k=width,
                n=hidden,
                weights=linear_weights("embedding.project", width, hidden),
                saved=(Saved(name="embedding.tokens.output", width=width),),
            )
        )
    if decoder.positions:
        positions = Weight(name="embedding.positions.weight", shape=(Extent(decoder.positions), hidden))
        operators.append(Lookup(name="embedding.positions", width=hidden, weights=(positions,)))
    if decoder.embedding_norm:
        saved = (saved_residual("embedding.norm.input", decoder.hidden),)
        operators.append(norm_operator("embedding.norm", decoder.layers[0].norm, decoder.hidden, saved))
    if decoder.embedding_dropout:
        operators.append(dropout_operator("embedding", decoder.hidden))
    return tuple(operators)


def _head(decoder: Decoder) -> tuple[Operator, ...]:
    """Final norm, output projection (with the embedding's weight where it is tied), and loss."""
    hidden, width = decoder.hidden, Extent(decoder.embedding_width)
    operators: list[Operator] = []
    saved = (saved_residual("head.input", hidden),)
    if decoder.final_norm:
        operators.append(norm_operator("head.norm", decoder.layers[-1].norm, hidden, saved))
        saved = (saved_residual("head.norm.output", hidden),)
    if width.size != hidden:
        whole = Extent(hidden)
        operators.append(
            Matmul(
                name="head.project",
                rows="head",
                k=whole,
                n=width,
                weights=linear_weights("head.project", whole, width),
                saved=saved,
            )
        )
        saved = (Saved(name="head.project.output", width=width, rows="head"),)
    return (*operators, *_output(decoder, "head", saved, owns_weight=not decoder.tied))


def _output(
    decoder: Decoder, at: str, saved: tuple[Saved, ...], *, owns_weight: bool
) -> tuple[Operator, ...]:
    width = Extent(decoder.embedding_width)
    vocab = Extent(decoder.vocab, "vocab") if decoder.labels is None else Extent(decoder.labels)
    weights = linear_weights(f"{at}.output", width, vocab, bias=decoder.output_bias)
    output = Matmul(
        name=f"{at}.output",
        rows="head",
        k=width,
        n=vocab,
        weights=weights if owns_weight else weights[1:],
        saved=saved,
    )
    cap = Pointwise(
        name=f"{at}.softcap",
        rows="head",
        forward=(Extent(2 * vocab.size, vocab.role),),
        backward=(Extent(3 * vocab.size, vocab.role),),
    )
    logits = Saved(name=f"{at}.logits", width=vocab, rows="head", dtype="fp32")
    loss = Loss(name=f"{at}.loss", classes=vocab, saved=(logits,))
    return (output, cap, loss) if decoder.logit_softcap else (output, loss)


def _mtp_module(decoder: Decoder, module: int) -> tuple[tuple[Operator, ...], Layer]:
    """The operators and the decoder layer of a multi-token-prediction module (DeepSeek-V3 report, arXiv
    2412.19437, section 2.2).

    It normalises the hidden state and the next token's embedding and joins them by a projection. One decoder
    layer like the model's last, a norm, the output projection and the loss follow. It shares the embedding
    and the output projection with the model.
    """
    at = f"{MTP_PREFIX}{module}"
    hidden, norm = decoder.hidden, decoder.layers[-1].norm
    whole, joined = Extent(hidden), Extent(2 * hidden)
    layer = layer_from_shape(decoder.layers[-1], prefix=f"{at}.")
    token = (saved_residual(f"{at}.embedding.output", hidden),)
    operators = (
        norm_operator(f"{at}.hidden_norm", norm, hidden, ()),  # the operator that makes its input saves it
        Lookup(name=f"{at}.embedding", width=whole),
        norm_operator(f"{at}.embedding_norm", norm, hidden, token),
        Matmul(
            name=f"{at}.project",
            rows="sequence",
            k=joined,
            n=whole,
            weights=linear_weights(f"{at}.project", joined, whole),
            saved=(Saved(name=f"{at}.joined", width=joined, rows="sequence"),),
        ),
        *layer.operators,
        norm_operator(f"{at}.norm", norm, hidden, (saved_residual(f"{at}.norm.input", hidden),)),
        *_output(decoder, at, (saved_residual(f"{at}.norm.output", hidden),), owns_weight=False),
    )
    return operators, layer
