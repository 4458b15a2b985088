"""Models to train: transformers and mixtures of experts, as typed operators."""

from shardwise.model.counts import (
    active_matmul_parameters,
    active_parameters,
    attention_flop_per_token,
    model_flop_per_token,
    mtp_parameters,
    parameters,
)
from shardwise.model.load import (
    catalogue,
    catalogue_entry,
    catalogue_names,
    decoder_of,
    has_plain_causal_attention,
    load_model,
    model_from_config,
)
from shardwise.model.model import Experts, Layer, Model
from shardwise.model.shape import (
    Decoder,
    GroupedQueryAttentionShape,
    LatentAttentionShape,
    LayerShape,
    Mlp,
    RoutedMlp,
)

__all__ = [
    "Decoder",
    "Experts",
    "GroupedQueryAttentionShape",
    "LatentAttentionShape",
    "Layer",
    "LayerShape",
    "Mlp",
    "Model",
    "RoutedMlp",
    "active_matmul_parameters",
    "active_parameters",
    "attention_flop_per_token",
    "catalogue",
    "catalogue_entry",
    "catalogue_names",
    "decoder_of",
    "has_plain_causal_attention",
    "load_model",
    "model_flop_per_token",
    "model_from_config",
    "mtp_parameters",
    "parameters",
]
