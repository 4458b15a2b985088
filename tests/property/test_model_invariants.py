"""Laws of models over random sizes and random damage."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.model import (
    Model,
    active_matmul_parameters,
    active_parameters,
    attention_flop_per_token,
    catalogue,
    catalogue_names,
    load_model,
    model_from_config,
    parameters,
)
from shardwise.model.counts import keys_per_query
from shardwise.operators import Matmul, Operator

CATALOGUE = {name: dict(entry.config) for name, entry in catalogue().items()}
KEYS = sorted({key for config in CATALOGUE.values() for key in config})

llama_configs = st.builds(
    lambda layers, kv, group, dim, width, ffn, vocab, tied: {
        "model_type": "llama",
        "num_hidden_layers": layers,
        "num_attention_heads": kv * group,
        "num_key_value_heads": kv,
        "head_dim": dim,
        "hidden_size": width,
        "intermediate_size": ffn,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
    },
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 5),
    st.integers(1, 130),
    st.integers(1, 500),
    st.integers(1, 900),
    st.integers(1, 999),
    st.booleans(),
)

damage = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 10**13),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(0, 3), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=2),
)


def operators_of(model: Model) -> list[Operator]:
    return [*model.embedding, *(o for kind in model.kinds for o in kind.operators), *model.head]


def model_or_line(config: dict[str, Any]) -> Model | str:
    """The model, or the error's text where the config is refused; any other exception propagates."""
    try:
        return model_from_config(config)
    except ConfigError as error:
        return str(error)


@given(llama_configs)
def test_llama_parameters_follow_the_closed_form(config: dict[str, Any]) -> None:
    h, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    per_layer = 2 * h * q + 2 * h * kv + 3 * h * ffn + 2 * h
    tables = vocab * h * (1 if config["tie_word_embeddings"] else 2)
    model = model_from_config(config)
    assert (
        parameters(model) == active_parameters(model) == config["num_hidden_layers"] * per_layer + tables + h
    )
    assert active_matmul_parameters(model) == config["num_hidden_layers"] * per_layer + vocab * h + h


@given(llama_configs)
def test_config_rebuilds_the_model(config: dict[str, Any]) -> None:
    model = model_from_config(config, name="x")
    assert model_from_config(model.config) == model


@given(st.integers(1, 200), st.one_of(st.none(), st.integers(1, 250)))
def test_keys_per_query_is_the_mean_over_positions(seq_len: int, window: int | None) -> None:
    # The sum of min(i, w) over i = 1..s is s w - w (w - 1) / 2: w / (2 s) more than the convention, which
    # counts half of the square and not the other half of the diagonal.
    width = min(window or seq_len, seq_len)
    counted = sum(min(position, width) for position in range(1, seq_len + 1)) / seq_len
    assert abs(keys_per_query(seq_len, window, causal_half=True) - (counted - width / (2 * seq_len))) < 1e-9


@given(st.sampled_from(catalogue_names()), st.integers(1, 1 << 20))
def test_half_of_full_attention_is_the_least_and_windows_only_save(name: str, seq_len: int) -> None:
    model = load_model(name)
    half = attention_flop_per_token(model, seq_len, causal_half=True)
    full = attention_flop_per_token(model, seq_len, causal_half=False)
    assert full / 2 <= half <= full


def test_every_tensor_is_split_along_one_dim_at_most_and_listed_once() -> None:
    for name in catalogue_names():
        model = load_model(name)
        groups = [model.embedding, model.head, *(kind.operators for kind in model.kinds)]
        for operators in groups:
            weights = [weight for operator in operators for weight in operator.weights]
            saved_names = [tensor.name for operator in operators for tensor in operator.saved]
            assert len({weight.name for weight in weights}) == len(weights), name
            assert len(set(saved_names)) == len(saved_names), name
            for weight in weights:
                assert sum(extent.role != "whole" for extent in weight.shape) <= 1, (name, weight.name)


def test_matmul_weights_fill_their_matmul() -> None:
    for name in catalogue_names():
        for operator in operators_of(load_model(name)):
            if not isinstance(operator, Matmul) or not operator.weights:
                continue
            matrices = [weight for weight in operator.weights if len(weight.shape) == 2]
            assert sum(weight.parameters for weight in matrices) == operator.k.size * operator.n.size
            assert all(weight.shape[0] == operator.k for weight in matrices)
            assert {weight.shape[1].role for weight in matrices} == {operator.n.role}


def test_sizes_with_a_role_divide_by_the_count_of_that_role() -> None:
    for name in catalogue_names():
        model = load_model(name)
        counts = {"heads": model.heads, "kv_heads": model.kv_heads}
        for operator in operators_of(model):
            for extent in (e for weight in operator.weights for e in weight.shape):
                assert extent.size % counts.get(extent.role, 1) == 0


@pytest.mark.slow
@settings(max_examples=300)
@given(st.sampled_from(catalogue_names()), st.sampled_from(KEYS), damage, st.booleans())
def test_damaged_configs_give_a_model_or_one_line(name: str, key: str, value: object, drop: bool) -> None:
    config = dict(CATALOGUE[name])
    if drop:
        config.pop(key, None)
    else:
        config[key] = value
    model = model_or_line(config)
    if isinstance(model, str):
        assert "\n" not in model
    else:
        assert 0 < active_parameters(model) <= parameters(model)
