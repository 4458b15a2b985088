"""Published parameter counts, and flop per token computed by hand."""

from __future__ import annotations

import pytest

from shardwise.model import (
    active_matmul_parameters,
    active_parameters,
    attention_flop_per_token,
    catalogue_names,
    load_model,
    model_flop_per_token,
    model_from_config,
    mtp_parameters,
    parameters,
)
from shardwise.model.counts import keys_per_query

# Totals of the public weights, without buffers.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "opt-350m": 331_196_416,
    "bloom-176b": 176_247_271_424,
    "gpt-neox-20b": 20_554_567_680,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "phi-3-medium": 13_960_238_080,
    "deepseek-v2": 235_741_434_880,
}

# Billions of active parameters, rounded as in the reports, with embeddings.
ACTIVE_BILLIONS = {
    "qwen3-30b-a3b": 3.3,  # model card
    "qwen3-235b-a22b": 22,  # model card
    "mixtral-8x7b": 13,  # arXiv 2401.04088
    "mixtral-8x22b": 39,  # announcement of the model
    "deepseek-v2": 21,  # arXiv 2405.04434
    "deepseek-v3": 37,  # arXiv 2412.19437
    "jamba-1.5-mini": 12,  # model card
    "nemotron-3-nano-30b-a3b": 3.6,  # model card
}

CATALOGUE = """
    gpt2 gpt2-xl gpt3-175b opt-350m opt-66b bloom-176b gpt-neox-20b falcon-40b llama-2-7b llama-2-13b
    llama-2-70b llama-3.1-8b llama-3.1-70b llama-3.1-405b mistral-7b mixtral-8x7b mixtral-8x22b qwen2.5-7b
    qwen2.5-32b qwen2.5-72b qwen3-8b qwen3-32b qwen3-30b-a3b qwen3-235b-a22b gemma-2-9b gemma-2-27b
    gemma-3-27b phi-3-medium deepseek-v2 deepseek-v3 gpt-oss-20b gpt-oss-120b
    bamba-9b granite-4.0-h-small jamba-1.5-mini kimi-linear-48b-a3b nemotron-3-nano-30b-a3b nemotron-h-8b
    nemotron-h-56b qwen2.5-vl-7b qwen3-next-80b-a3b
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_totals(name: str) -> None:
    assert parameters(load_model(name)) == PUBLISHED[name]


def test_catalogue_has_every_name() -> None:
    assert set(catalogue_names()) == set(CATALOGUE.split())


def test_gpt3_is_175_billion() -> None:
    assert parameters(load_model("gpt3-175b")) == pytest.approx(175e9, rel=0.003)


def test_deepseek_v3_total_and_prediction_module() -> None:
    # The repository's weight notes: 671B in the main model; its index also holds the routing bias of the 58
    # routed layers (256 each), which is a buffer and not trained by gradient: 671,026,419,200 with it.
    model = load_model("deepseek-v3")
    assert parameters(model) + 58 * 256 == 671_026_419_200
    # One module: a routed layer, three norms of 7168, and a projection [2 x 7168, 7168].
    routed_layer = sum(weight.parameters for weight in model.kinds[1].weights)
    assert mtp_parameters(model) == routed_layer + 3 * 7168 + 2 * 7168 * 7168
    assert mtp_parameters(model) == pytest.approx(11.5e9, rel=0.02)  # the notes: 11.5B unique parameters


@pytest.mark.parametrize("name", ACTIVE_BILLIONS)
def test_active_parameters(name: str) -> None:
    assert active_parameters(load_model(name)) / 1e9 == pytest.approx(ACTIVE_BILLIONS[name], rel=0.02)


def test_gpt_oss_counts_of_its_model_card() -> None:
    # arXiv 2508.10925, table 1: total 116.83B and 20.91B; active 5.13B and 3.61B, the embedding left out.
    large, small = load_model("gpt-oss-120b"), load_model("gpt-oss-20b")
    assert [round(parameters(model) / 1e9, 2) for model in (large, small)] == [116.83, 20.91]
    assert [round(active_matmul_parameters(model) / 1e9, 2) for model in (large, small)] == [5.13, 3.61]


def test_active_is_total_for_dense_models() -> None:
    for name in ("llama-3.1-8b", "gpt2", "gemma-2-9b", "opt-350m"):
        model = load_model(name)
        assert active_parameters(model) == parameters(model)


def test_active_matmul_parameters_leave_out_the_input_tables() -> None:
    # Untied: total minus the embedding, 8,030,261,248 - 128256 x 4096 = 7,504,924,672.
    assert active_matmul_parameters(load_model("llama-3.1-8b")) == 7_504_924_672
    # Tied: minus the positions (1024 x 768) only, since the token table is the output projection.
    assert active_matmul_parameters(load_model("gpt2")) == 124_439_808 - 1024 * 768
    # OPT-350m: the 512-wide table is tied; positions (2050 x 1024) are not multiplied.
    assert active_matmul_parameters(load_model("opt-350m")) == 331_196_416 - 2050 * 1024


def test_prediction_modules_count_in_the_training_flop() -> None:
    # Active (37.55e9) minus the embedding, plus the module's active part and its own output projection.
    model = load_model("deepseek-v3")
    table = 129_280 * 7168
    experts = 3 * 7168 * 2048 * (256 - 8)  # those of the prediction module, which a token skips
    expected = active_parameters(model) - table + mtp_parameters(model) - experts + table
    assert active_matmul_parameters(model) == expected


def test_keys_per_query() -> None:
    assert keys_per_query(4096, None, causal_half=True) == 2048
    assert keys_per_query(4096, None, causal_half=False) == 4096
    # 1000 queries, window 100: 100 - 100^2 / 2000 = 95.
    assert keys_per_query(1000, 100, causal_half=True) == 95
    assert keys_per_query(1000, 100, causal_half=False) == 100
    assert keys_per_query(64, 100, causal_half=True) == 32  # a window wider than the sequence has no effect


def test_attention_flop_of_llama() -> None:
    # 80 layers x 2 x 64 heads x (128 + 128) x 4096 keys (half of 8192) = 10,737,418,240.
    model = load_model("llama-3.1-70b")
    assert attention_flop_per_token(model, 8192, causal_half=True) == 80 * 2 * 64 * 256 * 4096
    assert attention_flop_per_token(model, 8192, causal_half=False) == 80 * 2 * 64 * 256 * 8192


def test_attention_flop_respects_windows_layer_by_layer() -> None:
    # gpt-oss-20b: 12 layers of window 128, 12 full; 64 heads of 64: 2 x 64 x 128 = 16384 flop per key.
    # At 4096: 128 - 128^2 / 8192 = 126 keys in the window, 2048 without.
    flop = attention_flop_per_token(load_model("gpt-oss-20b"), 4096, causal_half=True)
    assert flop == 12 * 16384 * (126 + 2048)


def test_latent_attention_flop_counts_both_widths_and_the_module() -> None:
    # 61 layers and one prediction module, 128 heads, 192 wide scores and 128 wide values, 2048 keys.
    flop = attention_flop_per_token(load_model("deepseek-v3"), 4096, causal_half=True)
    assert flop == 62 * 2 * 128 * (192 + 128) * 2048


def test_model_flop_per_token() -> None:
    # Llama-3.1-8B at 8192: 6 x 7,504,924,672 = 45,029,548,032; attention forward, half:
    # 32 x 2 x 32 x 256 x 4096 = 2,147,483,648, three times = 6,442,450,944.
    model = load_model("llama-3.1-8b")
    assert model_flop_per_token(model, 8192) == 45_029_548_032 + 6_442_450_944
    assert model_flop_per_token(model, 8192, causal_half=False) == 45_029_548_032 + 2 * 6_442_450_944


def test_megatron_parameter_formula() -> None:
    # Narayanan et al. 2021 (arXiv 2104.04473, equation 2): 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h)),
    # which leaves out the final norm (2 h).
    layers, hidden, vocab, seq_len = 24, 2304, 51200, 2048
    model = model_from_config(
        {
            "layers": layers,
            "hidden": hidden,
            "ffn": 4 * hidden,
            "heads": 24,
            "vocab": vocab,
            "seq_len": seq_len,
        }
    )
    formula = 12 * layers * hidden**2 + 13 * layers * hidden + (vocab + seq_len) * hidden
    assert parameters(model) == formula + 2 * hidden
