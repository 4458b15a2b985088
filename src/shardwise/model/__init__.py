"""What is trained: transformers and mixtures of experts, as typed operators."""

from shardwise.model.counts import (
    active_matmul_parameters,
    active_parameters,
    attention_flop_per_token,
    keys_per_query,
    model_flop_per_token,
    mtp_parameters,
    parameters,
)
from shardwise.model.entries import CatalogueEntry, catalogue, catalogue_entry, catalogue_names
from shardwise.model.families import FAMILIES
from shardwise.model.load import decoder_of, load_model, model_from_config, scores_are_plain
from shardwise.model.model import MTP_PREFIX, Experts, Layer, Model
from shardwise.model.shape import Decoder, GroupedQuery, Latent, LayerShape, Mlp, Norm, Order, RoutedMlp

__all__ = [
    "FAMILIES",
    "MTP_PREFIX",
    "CatalogueEntry",
    "Decoder",
    "Experts",
    "GroupedQuery",
    "Latent",
    "Layer",
    "LayerShape",
    "Mlp",
    "Model",
    "Norm",
    "Order",
    "RoutedMlp",
    "active_matmul_parameters",
    "active_parameters",
    "attention_flop_per_token",
    "catalogue",
    "catalogue_entry",
    "catalogue_names",
    "decoder_of",
    "keys_per_query",
    "load_model",
    "model_flop_per_token",
    "model_from_config",
    "mtp_parameters",
    "parameters",
    "scores_are_plain",
]
