"""Named modules: the bytes that a set saves, the seconds that it repeats, and the recomputed tensors at the
peak, worked out by hand.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwise.cluster import load_cluster
from shardwise.cost import Problem, bind
from shardwise.cost.layers import grid_cost
from shardwise.cost.module_costs import RECOMPUTED, SAVED, SECONDS, SelectiveRows
from shardwise.cost.operators import operator_times
from shardwise.model import Model, load_model, model_from_config, modules_of_layer, modules_of_layers
from shardwise.strategy import Job, StrategyTable, complete, parse_fields

TOKENS = 4096


def problem_of(model: Model, **job: Any) -> Problem:
    requested: dict[str, Any] = {
        "seq_len": TOKENS,
        "global_batch_size": 64,
        "dtype": "bf16",
        "expert_imbalance": 1.0,
    } | job
    return bind(model, load_cluster("8x8xH100-SXM"), Job(**requested))


def columns_of(problem: Problem, modules: str, text: str = "") -> Any:
    """The columns of a strategy under these modules; shape (fields, blocks)."""
    experts = problem.model.experts
    fields = parse_fields(",".join(filter(None, (text, f"recompute_modules={modules}" if modules else ""))))
    strategy = complete(
        {"recompute": "selective", **fields},
        devices=64,
        layers=problem.model.layers,
        experts=None if experts is None else experts.experts,
        global_batch_size=64,
    )
    table = StrategyTable.of([strategy])
    return SelectiveRows(problem, table, grid_cost(problem, table), np.zeros(1, dtype=int)).columns[..., 0]


def elements(problem: Problem, modules: str, kind: int = 0, field: int = SAVED) -> float:
    """Elements of two bytes per token of a layer, without tensor parallelism."""
    return float(columns_of(problem, modules)[field, kind]) / 2 / TOKENS


LLAMA_70B = {"layer input": 8192, "attention norm": 8192, "q": 8192, "k and v": 2048, "core output": 8192,
             "log-sum-exp": 128, "MLP norm input": 8192, "MLP norm": 8192, "gate and up": 57344,
             "activation": 28672}  # fmt: skip
"""Saved by a layer of Llama-3.1-70B, in elements per token: hidden 8192, 64 heads and 8 key-value heads of
128, MLP 28672. The log-sum-exp is 64 numbers of 4 bytes.
"""


@pytest.mark.parametrize(
    ("modules", "dropped"),
    [
        # Its own set: 8192 + 8192 + 57344 + 8192 + 2048 = 83968 are left.
        ("", ("attention norm", "MLP norm", "core output", "log-sum-exp", "activation")),
        ("core_attn", ("log-sum-exp",)),
        # 137216 - 2 x 8192 = 120832: the output of core attention and of the activation stay.
        ("core_attn+layernorm", ("log-sum-exp", "attention norm", "MLP norm")),
        ("layernorm", ("attention norm", "MLP norm")),
        ("mlp", ("gate and up", "activation")),
        ("layernorm+mlp", ("attention norm", "MLP norm", "gate and up", "activation")),
    ],
)
def test_a_dense_layer(modules: str, dropped: tuple[str, ...]) -> None:
    problem = problem_of(load_model("llama-3.1-70b"))
    expected = sum(size for name, size in LLAMA_70B.items() if name not in dropped)
    assert elements(problem, modules) == pytest.approx(expected, rel=1e-12)


def test_the_numbers_of_the_notes() -> None:
    problem = problem_of(load_model("llama-3.1-70b"))
    assert elements(problem, "") == pytest.approx(83_968, rel=1e-12)
    assert elements(problem, "core_attn+layernorm") == pytest.approx(120_832, rel=1e-12)


MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral", "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 8192,
    "num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "tie_word_embeddings": True, "sliding_window": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("modules", "dropped"),
    [
        ("moe_act", 2 * 512),  # 2 experts per token
        # router: 8 numbers of 4 bytes; inputs, gate and up, activations of 2 experts
        ("moe", 2 * 8 + 2 * (256 + 2 * 512 + 512)),
        ("moe+moe_act", 2 * 8 + 2 * (256 + 2 * 512 + 512)),  # moe contains moe_act
        ("layernorm+moe_act", 2 * 256 + 2 * 512),
    ],
)
def test_a_layer_of_experts(modules: str, dropped: int) -> None:
    problem = problem_of(model_from_config(MIXTRAL, name="small"))
    # input, norm, q, core output, MLP input, norm: 6 x 256; k and v 2 x 64; log-sum-exp 8 x 4 bytes
    whole = 6 * 256 + 128 + 16 + 16 + 2 * (256 + 1024 + 512)
    assert elements(problem, modules) == pytest.approx(whole - dropped, rel=1e-12)


def test_one_half_of_a_layer_exists_at_once() -> None:
    """The MLP half is the larger one: a norm's output with gate, up and activation."""
    problem = problem_of(load_model("llama-3.1-70b"))
    assert elements(problem, "layernorm+mlp", field=RECOMPUTED) == pytest.approx(8192 + 86_016, rel=1e-12)
    assert elements(problem, "core_attn+layernorm", field=RECOMPUTED) == pytest.approx(8192 + 128, rel=1e-12)
    assert elements(problem, "", field=RECOMPUTED) == 0.0


def test_a_set_repeats_the_forward_pass_of_its_modules() -> None:
    """Without tensor parallelism nothing is sent; else one of the layer's two collectives is the MLP's."""
    problem = problem_of(load_model("llama-3.1-70b"))
    layer = problem.model.kinds[0]
    (mlp,) = (module for module in modules_of_layer(layer.operators) if module.name == "mlp")
    for text in ("tp=1", "tp=8"):
        strategy = complete(parse_fields(text), devices=64, layers=80, experts=None, global_batch_size=64)
        table = StrategyTable.of([strategy])
        times = [operator_times(problem, table, layer.operators[i], None) for i in mlp.repeated]
        sent_s = float(grid_cost(problem, table).kinds[0].forward.tensor_s[0]) / 2
        expected = sum(float(one.forward_s[0]) for one in times) + sent_s
        assert (sent_s > 0.0) == (text == "tp=8")
        assert columns_of(problem, "mlp", text)[SECONDS, 0] == pytest.approx(expected, rel=1e-12)


def test_unfused_scores_go_with_core_attention() -> None:
    """2 bytes per score of 64 heads and 4096 keys."""
    software = problem_of(load_model("llama-3.1-70b")).job.profile
    unfused = problem_of(load_model("llama-3.1-70b"), profile=replace(software, attention=()))
    scores = 2 * 64 * 4096 / 2
    assert elements(unfused, "mlp") - elements(unfused, "core_attn+mlp") == pytest.approx(scores + 128)


def test_the_modules_of_models() -> None:
    def modules(name: str) -> tuple[str, ...]:
        return modules_of_layers(kind.operators for kind in load_model(name).kinds)

    assert modules("llama-3.1-8b") == ("core_attn", "layernorm", "mlp")
    assert modules("mixtral-8x7b") == ("core_attn", "layernorm", "moe", "moe_act")
    assert modules("deepseek-v3") == (
        "core_attn", "mla_up_proj", "layernorm", "mlp", "moe", "moe_act", "shared_experts",
    )  # fmt: skip
