"""Layers as operators: saved activations, traffic, and how each part is split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from shardwise.model import Model, load_model, model_from_config
from shardwise.model.model import Layer
from shardwise.operators import Attention, GroupedMatmul, Loss, Matmul, Operator, Pointwise, Saved, Weight

ELEMENT_BYTES = {"compute": 2, "operand": 2, "fp32": 4, "mask": 1}

GPT = {"layers": 2, "hidden": 64, "ffn": 256, "heads": 4, "vocab": 100, "seq_len": 32}


def saved(operators: tuple[Operator, ...]) -> list[Saved]:
    return [tensor for operator in operators for tensor in operator.saved]


def bytes_per_token(layer: Layer, *, selective: bool = False) -> int:
    """Bytes that one layer saves per token and per copy of a token, in 16 bits, not split."""
    return sum(
        tensor.width.size * ELEMENT_BYTES[tensor.dtype]
        for tensor in saved(layer.operators)
        if not (selective and tensor.selective)
    )


def named(operators: tuple[Operator, ...], name: str) -> Operator:
    return next(operator for operator in operators if operator.name == name)


def weights_of(model: Model) -> list[Weight]:
    operators = [*model.embedding, *(o for kind in model.kinds for o in kind.operators), *model.head]
    return [weight for operator in operators for weight in operator.weights]


def test_gpt_layer_saves_34_bytes_per_hidden_element_and_the_log_sum_exp() -> None:
    # Korthikanti et al. 2022 (arXiv 2205.05198, equation 1) give s b h (34 + 5 a s / h) bytes for a layer;
    # the second term is the attention scores and their dropout, which fused attention does not save. The 34,
    # in bytes per hidden element: norm inputs 2 + 2, norm outputs 2 + 2, q k v 6, attention output 2, two
    # dropout masks 1 + 1, GeLU input 8 and output 8. The same tensors are listed here, with the log-sum-exp
    # in place of the scores: 4 bytes per head.
    layer = model_from_config(GPT).kinds[0]
    assert bytes_per_token(layer) == 34 * 64 + 4 * 4


def test_selective_recompute_of_a_gpt_layer_saves_the_expensive_tensors() -> None:
    # Without norm outputs 2 + 2, attention output 2, log-sum-exp and GeLU output 8: 34 - 14 = 20 per element.
    assert bytes_per_token(model_from_config(GPT).kinds[0], selective=True) == 20 * 64


def test_llama_layer_bytes_per_token() -> None:
    # Llama-3.1-70B, h = 8192, ffn = 28672, 8 of 64 key-value heads of 128. Bytes at 2 per element:
    #   norm inputs 2 x 2 h         = 32768     norm outputs 2 x 2 h = 32768 (selective)
    #   q 2 h                       = 16384     k and v 2 x 2 x 1024 =  4096
    #   attention output 2 h        = 16384 (selective), log-sum-exp 4 x 64 = 256 (selective)
    #   gate and up 2 x 2 x 28672   = 114688    their product 2 x 28672 = 57344 (selective)
    # Sum 274688 = 33.53 h. Compared with the 34 h of a GPT layer: no dropout masks (-2), keys and values of 8
    # heads (-3.5), and a gated MLP of 3.5 h that saves 6 x 3.5 = 21 where the plain one of 4 h saves 16 (+5).
    layer = load_model("llama-3.1-70b").kinds[0]
    assert bytes_per_token(layer) == 274_688
    assert bytes_per_token(layer, selective=True) == 274_688 - 32_768 - 16_384 - 256 - 57_344


def test_llama_matmuls_and_their_roles() -> None:
    operators = load_model("llama-3.1-70b").kinds[0].operators
    matmuls = {o.name: (o.k.size, o.k.role, o.n.size, o.n.role) for o in operators if isinstance(o, Matmul)}
    assert matmuls == {
        "attention.q": (8192, "whole", 8192, "heads"),
        "attention.kv": (8192, "whole", 2048, "kv_heads"),
        "attention.out": (8192, "heads", 8192, "whole"),
        "mlp.up": (8192, "whole", 57344, "ffn"),
        "mlp.down": (28672, "ffn", 8192, "whole"),
    }


def test_pointwise_traffic_of_a_llama_layer() -> None:
    # Per row, in elements, forward and backward. Norm: read, write; read input and gradient, write gradient.
    # Gated activation of 28672: reads 2, writes 1; reads 3, writes 2. Residual: reads 2, writes 1, both ways.
    # Rotary: queries (8192) and keys (1024) read and written.
    operators = load_model("llama-3.1-70b").kinds[0].operators
    traffic = {
        o.name: (o.rows, sum(e.size for e in o.forward), sum(e.size for e in o.backward), o.selective)
        for o in operators
        if isinstance(o, Pointwise)
    }
    assert traffic == {
        "attention.norm": ("sequence", 2 * 8192, 3 * 8192, True),
        "attention.rotary": ("tokens", 2 * 9216, 2 * 9216, False),
        "attention.residual": ("sequence", 3 * 8192, 3 * 8192, False),
        "mlp.norm": ("sequence", 2 * 8192, 3 * 8192, True),
        "mlp.activation": ("tokens", 3 * 28672, 5 * 28672, True),
        "mlp.residual": ("sequence", 3 * 8192, 3 * 8192, False),
    }


@pytest.mark.parametrize(
    ("name", "syncs"),
    [
        ("llama-3.1-8b", {2}),
        ("opt-350m", {2}),
        ("gpt-neox-20b", {1}),  # parallel attention and MLP
        ("falcon-40b", {1}),
        ("mixtral-8x7b", {1}),  # routed MLP: joined over etp
        ("gpt-oss-20b", {1}),
        ("deepseek-v3", {2}),  # shared experts
    ],
)
def test_tensor_syncs(name: str, syncs: set[int]) -> None:
    assert {kind.tensor_syncs for kind in load_model(name).kinds} == syncs


def test_routed_experts() -> None:
    model = load_model("mixtral-8x7b")
    operators = model.kinds[0].operators
    up, down = named(operators, "experts.up"), named(operators, "experts.down")
    assert isinstance(up, GroupedMatmul) and isinstance(down, GroupedMatmul)
    assert (up.experts, up.k.size, up.n.size, up.n.role) == (8, 4096, 2 * 14336, "expert_ffn")
    assert (down.k.size, down.k.role, down.n.size) == (14336, "expert_ffn", 4096)
    assert sum(weight.parameters for weight in up.weights) == 8 * 2 * 4096 * 14336
    routed = {o.name for o in operators if o.rows == "routed"}
    assert routed == {f"experts.{x}" for x in ("dispatch", "up", "activation", "down", "combine")}
    assert model.experts is not None
    assert (model.experts.experts, model.experts.top_k, model.experts.groups) == (8, 2, 1)


def test_deepseek_v3_pattern_routing_and_shared_experts() -> None:
    model = load_model("deepseek-v3")
    assert model.pattern == (0,) * 3 + (1,) * 58
    dense, routed = model.kinds
    assert dense.experts is None and routed.experts is not None
    assert (routed.experts.experts, routed.experts.top_k) == (256, 8)
    assert (routed.experts.groups, routed.experts.groups_per_token) == (8, 4)
    shared = named(routed.operators, "shared.up")
    assert isinstance(shared, Matmul)
    assert (shared.n.size, shared.n.role) == (2 * 2048, "ffn")
    attention = named(dense.operators, "attention.core")
    assert isinstance(attention, Attention)
    assert (attention.heads.size, attention.qk_dim, attention.v_dim) == (128, 192, 128)


def test_multi_token_prediction_is_a_layer_and_a_loss_in_the_head() -> None:
    model = load_model("deepseek-v3")
    names = [operator.name for operator in model.head]
    assert (model.head_layers, model.head_tensor_syncs, model.head_experts) == (1, 2, model.kinds[1].experts)
    assert sum(isinstance(operator, Loss) for operator in model.head) == 2
    layer = [f"mtp.0.{operator.name}" for operator in model.kinds[1].operators]
    assert [name for name in names if name in layer] == layer
    output = named(model.head, "mtp.0.output")
    assert isinstance(output, Matmul) and output.weights == ()  # shared with the model's own


def test_tied_head_has_no_weight_of_its_own() -> None:
    tied, untied = load_model("gemma-2-9b"), load_model("llama-3.1-8b")
    assert tied.tied_embeddings and not untied.tied_embeddings
    assert named(tied.head, "head.output").weights == ()
    assert [weight.name for weight in named(untied.head, "head.output").weights] == ["head.output.weight"]


def test_logits_are_saved_in_fp32_and_split_over_the_vocabulary() -> None:
    loss = named(load_model("llama-3.1-8b").head, "head.loss")
    (logits,) = loss.saved
    assert (logits.width.size, logits.width.role, logits.rows, logits.dtype) == (
        128256,
        "vocab",
        "head",
        "fp32",
    )


def test_windows_follow_the_pattern() -> None:
    model = load_model("gemma-3-27b")  # five sliding layers, then a full one
    assert model.pattern == tuple(1 if (layer + 1) % 6 == 0 else 0 for layer in range(62))
    windows = [
        operator.window
        for kind in model.kinds
        for operator in kind.operators
        if isinstance(operator, Attention)
    ]
    assert windows == [1024, None]
    assert load_model("gpt-oss-20b").pattern == (0, 1) * 12


def test_gemma_norms_stand_before_and_after() -> None:
    names = [
        operator.name for operator in load_model("gemma-2-9b").kinds[0].operators if "norm" in operator.name
    ]
    assert names == ["attention.norm", "attention.post_norm", "mlp.norm", "mlp.post_norm"]


def test_opt_350m_norms_after_residuals_and_projects_its_embeddings() -> None:
    model = load_model("opt-350m")
    names = [operator.name for operator in model.kinds[0].operators]
    assert names.index("attention.residual") + 1 == names.index("attention.norm")
    assert names.index("mlp.residual") + 1 == names.index("mlp.norm") == len(names) - 1
    project = named(model.embedding, "embedding.project")
    assert isinstance(project, Matmul) and (project.k.size, project.n.size) == (512, 1024)
    assert not any("norm" in operator.name for operator in model.head)


def test_parallel_layer_shares_its_input_and_norm() -> None:
    two = load_model("falcon-40b").kinds[0].operators
    sizes = {"vocab_size": 9, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    one = model_from_config({"model_type": "falcon", **sizes}).kinds[0].operators
    assert [t.name for t in saved(two) if t.name == "layer.input"] == ["layer.input"]
    assert [o.name for o in two if "norm" in o.name] == ["attention.norm", "mlp.norm"]
    assert [o.name for o in one if "norm" in o.name] == ["attention.norm"]
    assert "mlp.norm.output" not in {t.name for t in saved(one)}


def test_dropout_masks_appear_only_with_dropout() -> None:
    with_dropout = saved(model_from_config(GPT).kinds[0].operators)
    without = saved(model_from_config(GPT | {"dropout": 0.0}).kinds[0].operators)
    assert [t.name for t in with_dropout if t.dtype == "mask"] == [
        "attention.dropout.mask",
        "mlp.dropout.mask",
    ]
    assert not [t for t in without if t.dtype == "mask"]


@pytest.mark.parametrize(
    ("config", "switched_off"),
    [
        (GPT, {"dropout": 0.0}),
        (load_model("gpt2").config, {"resid_pdrop": 0.0, "embd_pdrop": 0.0}),
        (load_model("opt-66b").config, {"dropout": 0.0}),
    ],
)
def test_a_model_without_its_dropout_is_that_of_a_config_without(
    config: Mapping[str, object], switched_off: dict[str, object]
) -> None:
    model = model_from_config(config)
    off = model_from_config({**config, **switched_off})
    assert model.without_dropout() == replace(off, config=model.config, name=model.name)
    assert off.without_dropout() == off != replace(model, config=off.config, name=off.name)


def test_biases_are_split_with_the_outputs_of_their_matmul() -> None:
    model = model_from_config(GPT)
    roles = {
        w.name: w.shape[0].role
        for w in weights_of(model)
        if w.name.endswith(".bias") and "norm" not in w.name
    }
    assert roles == {
        "attention.q.bias": "heads",
        "attention.k.bias": "kv_heads",
        "attention.v.bias": "kv_heads",
        "attention.out.bias": "whole",
        "mlp.up.bias": "ffn",
        "mlp.down.bias": "whole",
    }


def test_node_limited_routing_needs_groups_that_divide() -> None:
    assert load_model("deepseek-v2").experts == load_model("deepseek-v2").kinds[1].experts
    limited = load_model("deepseek-v2").experts
    assert limited is not None and (limited.groups, limited.groups_per_token) == (8, 3)


def traffic(operators: tuple[Operator, ...]) -> dict[str, tuple[int, int]]:
    """Elements read or written per row, forward and backward, by operator."""
    return {
        o.name: (sum(e.size for e in o.forward), sum(e.size for e in o.backward))
        for o in operators
        if isinstance(o, Pointwise)
    }


def test_pointwise_traffic_of_a_deepseek_v3_layer() -> None:
    # h = 7168, 128 heads of 128 + 64, latents of 1536 and 512, 256 experts of 2048 of which 8, shared 2048.
    # Rotary: the 64 of every query read and written, 2 x 8192; keys of 24576 concatenated, read and written.
    # Top-k: 256 scores read, written by the softmax, read by the choice; 8 pairs of weight and index written.
    # Last residual: the stream, routed and shared outputs read, one written.
    assert traffic(load_model("deepseek-v3").kinds[1].operators) == {
        "attention.norm": (2 * 7168, 3 * 7168),
        "attention.q_norm": (2 * 1536, 3 * 1536),
        "attention.kv_norm": (2 * 512, 3 * 512),
        "attention.rotary": (2 * 8192 + 2 * 24576, 2 * 8192 + 2 * 24576),
        "attention.residual": (3 * 7168, 3 * 7168),
        "mlp.norm": (2 * 7168, 3 * 7168),
        "router.top_k": (3 * 256 + 2 * 8, 3 * 256 + 2 * 8),
        "experts.dispatch": (2 * 7168, 2 * 7168),
        "experts.activation": (3 * 2048, 5 * 2048),
        "experts.combine": (2 * 7168, 2 * 7168),
        "shared.activation": (3 * 2048, 5 * 2048),
        "mlp.residual": (4 * 7168, 4 * 7168),
    }


def test_pointwise_traffic_that_other_families_add() -> None:
    # Parallel layer: residual stream, attention and MLP outputs read, one written. Query and key norms: as
    # any norm. Capped logits: read and written; backward reads them and a gradient and writes one.
    assert traffic(load_model("falcon-40b").kinds[0].operators)["layer.residual"] == (4 * 8192, 4 * 8192)
    assert traffic(load_model("qwen3-8b").kinds[0].operators)["attention.qk_norm"] == (2 * 5120, 3 * 5120)
    assert traffic(load_model("gemma-2-9b").head)["head.softcap"] == (2 * 256_000, 3 * 256_000)
    assert traffic(load_model("gpt2").kinds[0].operators)["mlp.dropout"] == (2 * 768, 2 * 768)
    assert traffic(load_model("gpt2").embedding) == {"embedding.dropout": (2 * 768, 2 * 768)}


def test_deepseek_v3_layer_saves() -> None:
    # Elements per token outside the experts: stream 2 x 7168, norm outputs 2 x 7168, latents
    # 2 x (1536 + 512), q and k 24576 each, v and attention output 16384 each, shared 4096 + 2048. In fp32:
    # 128 log-sum-exps and 256 probabilities. Per routed token: its copy 7168, gate and up 4096, their
    # product 2048.
    saved_bytes = saved(load_model("deepseek-v3").kinds[1].operators)
    here = [tensor for tensor in saved_bytes if tensor.rows != "routed"]
    # Operands, which only a matmul reads: norm outputs, normed latents, the shared product.
    operands = 2 * 7168 + 1536 + 512 + 2048
    assert sum(t.width.size for t in here if t.dtype == "operand") == operands
    compute = 2 * 7168 + 1536 + 512 + 81920 + 4096
    assert sum(t.width.size for t in here if t.dtype == "compute") == compute
    assert operands + compute == 4 * 7168 + 4096 + 81920 + 6144
    assert sum(t.width.size for t in here if t.dtype == "fp32") == 128 + 256
    routed = {t.name: (t.width.size, t.dtype) for t in saved_bytes if t.rows == "routed"}
    assert sum(size for size, _ in routed.values()) == 7168 + 4096 + 2048
    assert sum(size for size, dtype in routed.values() if dtype == "operand") == 7168 + 2048


def test_a_shared_projection_of_keys_and_values_is_one_matrix() -> None:
    config: dict[str, object] = {
        "model_type": "gemma4_text", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
        "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "global_head_dim": 32,
    }  # fmt: skip
    model = model_from_config(config)
    assert model.pattern == (0, 0, 0, 0, 0, 1) and model.kv_heads == 1
    windowed, full = (
        sum(weight.parameters for weight in kind.weights if ".k." in weight.name or ".v." in weight.name)
        for kind in model.kinds
    )
    assert windowed == 2 * 64 * 2 * 16  # keys and values of two heads of 16
    assert full == 64 * 1 * 32  # one projection for both, of one head of 32


def test_a_gate_of_attention_has_its_projection_and_saves_the_gate() -> None:
    config: dict[str, object] = {
        "model_type": "afmoe", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_dense_layers": 1,
    }  # fmt: skip
    layer = model_from_config(config).kinds[0]
    gate = next(operator for operator in layer.operators if operator.name == "attention.output_gate")
    assert sum(weight.parameters for weight in gate.weights) == 64 * 4 * 16
    gating = next(operator for operator in layer.operators if operator.name == "attention.gating")
    assert {saved.name: saved.width.size for saved in gating.saved} == {
        "attention.output_gate.output": 64, "attention.gating.output": 64,
    }  # fmt: skip


def test_norms_on_outputs_save_no_normed_inputs() -> None:
    config: dict[str, object] = {
        "model_type": "olmo2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 100,
    }  # fmt: skip
    layer = model_from_config(config).kinds[0]
    norms = [operator.name for operator in layer.operators if "norm" in operator.name]
    assert norms == ["attention.qk_norm", "attention.post_norm", "mlp.post_norm"]
    saved = [one.name for operator in layer.operators for one in operator.saved]
    assert "layer.input" in saved and "mlp.input" in saved and "attention.norm.output" not in saved
    # Norms over all 64 elements of queries and keys, not over a head of 16.
    qk = next(operator for operator in layer.operators if operator.name == "attention.qk_norm")
    assert sum(weight.parameters for weight in qk.weights) == 128
