"""Layers without attention: their work, traffic and saved tensors, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from shardwise.errors import ConfigError
from shardwise.model import (
    Layer,
    lora_of_text,
    model_flop_per_token,
    model_from_config,
    parameters,
    with_lora,
)
from shardwise.model.recurrent import forward_elements, recurrent_operators, scan_flop
from shardwise.model.shape import RecurrentShape
from shardwise.operators import Extent, Operator, Scan

MAMBA2 = RecurrentShape(
    kind="ssd", heads=6, head_dim=8, key_heads=2, key_dim=16, kernel=4, chunk=32, norm="full", conv_bias=True
)
DELTA = RecurrentShape(
    kind="delta", heads=4, head_dim=8, key_heads=2, key_dim=16, kernel=4, chunk=64, norm="head"
)
KIMI = RecurrentShape(
    kind="channel_delta", heads=4, head_dim=16, key_heads=4, key_dim=16, kernel=4, chunk=64, norm="head",
    gate_rank=16,
)  # fmt: skip
LIGHTNING = RecurrentShape(
    kind="lightning", heads=4, head_dim=8, key_heads=4, key_dim=8, chunk=32, norm="full"
)
MAMBA = RecurrentShape(
    kind="selective", heads=48, head_dim=1, key_dim=16, kernel=4, conv_bias=True, dt_rank=2
)
SHORT = RecurrentShape(kind="convolution", heads=3, head_dim=8, kernel=3)
HIDDEN = 24


def elements(shape: RecurrentShape) -> int:
    operators = recurrent_operators(shape, HIDDEN, (), "mixer")
    return sum(weight.parameters for operator in operators for weight in operator.weights)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        # in 24 * (2 * 48 + 2 * 32 + 6), convolution (48 + 64) * (4 + 1), three vectors, norm 48, out 48 * 24
        (MAMBA2, 24 * 166 + 112 * 5 + 3 * 6 + 48 + 48 * 24),
        # in 24 * (2 * 32 + 2 * 4 + 2 * 32), convolution (32 + 64) * 4, two vectors, norm 8, out 32 * 24
        (DELTA, 24 * 136 + 96 * 4 + 2 * 4 + 8 + 32 * 24),
        # in 24 * (3 * 64 + 4), decay and gate 24 * 16 + 16 * 64 each, convolution 192 * 4, vectors 64 and 4
        (KIMI, 24 * 196 + 2 * (24 * 16 + 16 * 64) + 192 * 4 + 68 + 16 + 64 * 24),
        (LIGHTNING, 24 * 4 * 32 + 32 + 32 * 24),
        # in 24 * 96, convolution 48 * 5, selection 48 * (2 + 32), step 2 * 48 + 48, A 48 * 16, D 48, out
        (MAMBA, 24 * 96 + 48 * 5 + 48 * 34 + 3 * 48 + 48 * 16 + 48 + 48 * 24),
        (SHORT, 24 * 72 + 24 * 3 + 24 * 24),
    ],
    ids=["mamba-2", "gated-delta-net", "kimi", "lightning", "mamba-1", "convolution"],
)
def test_parameters(shape: RecurrentShape, expected: int) -> None:
    assert elements(shape) == expected


def test_work_of_a_chunk() -> None:
    """Products over a whole chunk of Q tokens, by the lines of each algorithm, divided by Q."""
    q, n, p = 32, 16, 8
    # Mamba-2: scores of 2 groups [Q,N][N,Q]; for 6 heads the values [Q,Q][Q,P], the state [N,Q][Q,P] and the
    # output of the state before [Q,N][N,P].
    chunk = 2 * 2 * q * n * q + 6 * (2 * q * q * p + 2 * n * q * p + 2 * q * n * p)
    assert scan_flop(MAMBA2) == chunk / q
    q = 64
    # Delta rule for 4 heads: scores of keys, corrected keys, scores of queries; corrected values, values;
    # the state's part of the values, of the output, and the new state.
    chunk = 4 * (3 * 2 * q * q * n + 2 * 2 * q * q * p + 3 * 2 * q * n * p)
    assert scan_flop(DELTA) == chunk / q
    assert scan_flop(LIGHTNING) == 4 * (2 * 32 * 16 + 4 * 64)
    assert scan_flop(MAMBA) == scan_flop(SHORT) == 0


def test_traffic_of_a_scan() -> None:
    """Mamba-2: x twice, z, the output, and four passes over fp32 states of 16 * 8 elements per 32 tokens."""
    assert forward_elements(MAMBA2) == 6 * (4 * 8 + 4 * 2 * 16 * 8 // 32)
    assert forward_elements(MAMBA) == 4 * 48


def saved(operators: tuple[Operator, ...]) -> dict[str, int]:
    return {one.name: one.width.size for operator in operators for one in operator.saved}


def test_saved_tensors() -> None:
    """Mamba-2 computes its convolution again; the delta rule saves what goes into it, and the triangle of
    each chunk."""
    assert saved(recurrent_operators(MAMBA2, HIDDEN, (), "mixer")) == {
        "mixer.in.output": 166,
        "mixer.scan.output": 48,
        "mixer.output_norm.output": 48,
    }
    assert saved(recurrent_operators(DELTA, HIDDEN, (), "mixer")) == {
        "mixer.in.output": 136,
        "mixer.conv.output": 96,
        "mixer.scan.keys": 2 * 4 * 16,
        "mixer.scan.triangle": 4 * 64,
        "mixer.scan.decays": 8,
        "mixer.scan.output": 32,
        "mixer.output_norm.output": 32,
    }


def test_keys_of_one_head_are_on_every_rank() -> None:
    one = RecurrentShape(kind="ssd", heads=6, head_dim=8, key_heads=1, key_dim=16, kernel=4, norm="full")
    operators = {operator.name: operator for operator in recurrent_operators(one, HIDDEN, (), "mixer")}
    keys, scan = operators["mixer.in_keys"], operators["mixer.scan"]
    assert isinstance(scan, Scan)
    assert keys.weights[0].shape == (Extent(24), Extent(32)) and scan.key_heads == Extent(1)


PATTERN = "M-M*-E"
NEMOTRON: dict[str, Any] = {
    "model_type": "nemotron_h", "hidden_size": 384, "vocab_size": 5000, "num_attention_heads": 12,
    "num_key_value_heads": 4, "head_dim": 32, "intermediate_size": 1152, "mamba_num_heads": 12,
    "mamba_head_dim": 64, "n_groups": 4, "ssm_state_size": 16, "n_routed_experts": 6,
    "moe_intermediate_size": 96, "moe_shared_expert_intermediate_size": 192, "num_experts_per_tok": 2,
    "hybrid_override_pattern": PATTERN,
}  # fmt: skip


def blocks(layer: Layer) -> set[str]:
    return {operator.name.partition(".")[0] for operator in layer.operators}


def test_layers_of_one_block() -> None:
    """One all-reduce each; of experts alone the shared one's."""
    model = model_from_config(NEMOTRON)
    kinds = [model.kinds[index] for index in model.pattern]
    assert [kind.name for kind in kinds] == [
        "mamba2", "dense-only", "mamba2", "attention", "dense-only", "moe-only",
    ]  # fmt: skip
    assert [kind.tensor_syncs for kind in kinds] == [1] * 6
    assert blocks(kinds[0]) == {"mixer"} and blocks(kinds[1]) == {"mlp"}
    assert blocks(kinds[3]) == {"attention"} and blocks(kinds[5]) == {"mlp", "router", "experts", "shared"}


def test_flop_of_scans_count() -> None:
    """The numerator of MFU has three times the forward work of a scan; it does not depend on the length."""
    alone = {key: value for key, value in NEMOTRON.items() if key != "hybrid_override_pattern"}
    model = model_from_config({**alone, "hybrid_override_pattern": "MM"})
    norms = 2 * 384 + 384  # of both layers and of the head, which count as is usual for 6 N
    table = 5000 * 384
    of_scans = 2 * scan_flop(
        RecurrentShape(kind="ssd", heads=12, head_dim=64, key_heads=4, key_dim=16, chunk=128)
    )
    assert norms < parameters(model)
    for seq_len in (512, 8192):
        found = model_flop_per_token(model, seq_len)
        assert found == pytest.approx(6 * (parameters(model) - table) + 3 * of_scans, rel=1e-12)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"hybrid_override_pattern": PATTERN, "num_hidden_layers": 7}, "num_hidden_layers"),
        ({"n_groups": 5}, "n_groups"),
        ({"moe_latent_size": 64}, "moe_latent_size"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers"),
        ({"layers_block_type": ["mamba", "convolution"]}, "layers_block_type[1]"),
        ({"hybrid_override_pattern": "M-X*"}, "hybrid_override_pattern"),
    ],
)
def test_what_a_family_does_not_have_is_named(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model_from_config({**NEMOTRON, **changes})
    assert caught.value.key == key


def test_adapters_of_attention_alone() -> None:
    model = model_from_config(NEMOTRON)
    adapted = with_lora(model, lora_of_text("r=4,targets=q_proj+v_proj"))
    assert adapted.lora is not None
    with pytest.raises(ConfigError, match="layers that adapters do not support"):
        with_lora(model, lora_of_text("r=4,targets=all-linear"))
