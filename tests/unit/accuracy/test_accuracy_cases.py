"""From rows to problems and strategies: stated values are used, and a stated rule fills blank ones."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import replace

import pytest
from tests.unit.accuracy.tables import case_of, row_of, rows_of

from shardwise.accuracy import SHIPPED, read_rows
from shardwise.accuracy.case import Case, CaseBuilder, cases_of, model_of
from shardwise.accuracy.predict import Prediction, chosen_row, predicted, predictions_of
from shardwise.cost import ProblemShapes
from shardwise.errors import ConfigError
from shardwise.model import parameters
from shardwise.search.answer import step_time_s
from shardwise.search.step_times import step_figures


def test_a_complete_row_needs_no_assumptions_but_defaults() -> None:
    case = case_of(notes="no sequence parallelism")
    (strategy,) = case.strategies
    assert (strategy.tp, strategy.pp, strategy.dp, strategy.micro_batch_size) == (2, 2, 4, 4)
    assert (strategy.schedule, strategy.recompute, strategy.sequence_parallel) == ("1f1b", "full", False)
    assert case.problem.cluster.devices == 16
    assert case.problem.job.dtype == "fp16"
    assert case.problem.profile.name == "megatron-2022"
    assert case.assumed == ()


def test_the_prediction_is_the_planners_own() -> None:
    case = case_of()
    problem = case.problem
    (strategy,) = case.strategies
    alone = step_time_s(problem.model, problem.cluster, problem.job, strategy)
    prediction = predicted(case)
    assert prediction.strategy == strategy
    # The profile is another kind of software than the planner's default.
    assert prediction.step_time_s == pytest.approx(alone, rel=0.5)
    assert 0 < prediction.allocated_bytes < prediction.reserved_bytes < prediction.device_bytes


def assert_predicted_as_alone(cases: Sequence[Case]) -> list[Prediction]:
    together = predictions_of(cases)
    for one, case in zip(together, cases, strict=True):
        alone = step_figures(case.problem, case.strategies)
        row = chosen_row(case.problem, alone, slice(0, len(case.strategies)))
        assert one.case is case and one.strategy == case.strategies[row]
        assert one.step_time_s == pytest.approx(alone.step_time_s[row], rel=1e-12)
        assert one.allocated_bytes == pytest.approx(alone.allocated_bytes[row], rel=1e-12)
        assert one.device_bytes == pytest.approx(alone.device_bytes[row], rel=1e-12)
    return together


@pytest.mark.slow
def test_published_rows_of_every_shape_are_predicted_as_alone() -> None:
    cases = [case for case in cases_of(read_rows(str(SHIPPED))[0])[0] if case.mixed is None]
    shapes = ProblemShapes()
    of_shape: dict[Hashable, list[Case]] = {}
    for case in cases:
        of_shape.setdefault(shapes.of(case.problem), []).append(case)
    assert len(of_shape) < 100  # of 874 rows: otherwise they are not predicted together
    assert_predicted_as_alone(
        [case for same_shape in of_shape.values() for case in (same_shape[0], same_shape[-1])]
    )


def test_cases_predicted_together_are_predicted_as_alone() -> None:
    """Rows with other batches, clusters, links and strategies are predicted as one problem."""
    cases, faults = cases_of(
        rows_of(
            {}, {"gpus": "32", "dp": "8"}, {"global_batch": "128"}, {"tp": "4", "dp": "2"},
            {"interconnect": ""}, {"micro_batch": ""}, {"recompute": ""}, {"seq_len": "1024"},
            {"framework": "OneFlow"}, {"gpu": "H100", "dtype": "bf16"}, {"notes": "comm overlap off"},
            {"gpu": "A100-80GB 250W"},
        )
    )  # fmt: skip
    assert faults == []
    together = assert_predicted_as_alone(cases)
    # The default network is the stated one; without overlap, and with less power, it takes longer.
    assert together[0].step_time_s == together[4].step_time_s
    assert len({one.step_time_s for one in together}) == 11
    assert min(together[10].step_time_s, together[11].step_time_s) > together[0].step_time_s


def test_equal_rows_share_one_problem() -> None:
    ready = CaseBuilder()
    first, second, third = (
        ready.of(row) for row in rows_of({}, {"tp": "4", "dp": "2"}, {"global_batch": "128"})
    )
    assert first.problem is second.problem
    assert first.problem is not third.problem
    assert first.problem.model is third.problem.model


@pytest.mark.parametrize(
    ("change", "assumed"),
    [
        ({"dtype": ""}, "dtype: bf16"),
        ({"dtype": "", "gpu": "V100-SXM2-16GB"}, "dtype: fp16"),
        ({"gpus_per_node": ""}, "gpus_per_node: 8, the default"),
        ({"interconnect": ""}, "network: InfiniBand 200 Gb/s per device, the default"),
        ({"schedule": ""}, "schedule: 1f1b"),
        ({"schedule": "", "vpp": "2"}, "schedule: interleaved_1f1b"),
        ({"recompute": ""}, "recompute: the fastest that fits"),
        ({"micro_batch": ""}, "micro_batch: the fastest that fits"),
        ({"schedule": "", "level": "near"}, "vpp: the fastest that fits"),
        ({"framework": "llm-foundry", "tp": "1", "pp": "1", "dp": "16", "schedule": ""},
         "zero_stage: 3, the default"),
        ({"vocab": ""}, "vocab: 51200"),
        ({"ffn": ""}, "ffn: 4 * hidden"),
        ({"notes": "comm overlap off"}, "communication overlap off, as stated in the notes"),
        ({"framework": "Megatron-LM", "year": "2024"}, "sequence_parallel: on, the default"),
    ],
)  # fmt: skip
def test_blank_fields_are_filled_and_listed_as_assumptions(change: dict[str, str], assumed: str) -> None:
    assert assumed in case_of(**change).assumed


def test_an_unstated_choice_is_the_fastest_that_fits() -> None:
    case = case_of(gpu="A100-30GB", recompute="", micro_batch="")
    # Micro-batches 1, 2, 4, 8, 16 divide 64 / 4; each with several numbers of recomputed layers.
    assert {strategy.micro_batch_size for strategy in case.strategies} == {1, 2, 4, 8, 16}
    assert {strategy.recompute for strategy in case.strategies} == {"none", "selective", "full"}
    prediction = predicted(case)
    assert prediction.device_bytes <= case.problem.usable_bytes
    every = [
        predicted(replace(case, strategies=case.strategies.take([row])))
        for row in range(len(case.strategies))
    ]
    fitting = [one.step_time_s for one in every if one.device_bytes <= case.problem.usable_bytes]
    assert 0 < len(fitting) < len(every)  # some do not fit
    assert prediction.step_time_s == pytest.approx(min(fitting), rel=1e-12)


def test_an_unstated_choice_is_the_smallest_where_nothing_fits() -> None:
    case = case_of(recompute="", gpu="A100-10GB")
    prediction = predicted(case)
    assert prediction.device_bytes > case.problem.usable_bytes
    assert prediction.strategy.recompute == "full"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tp": "3"}, "gpus: tp * pp * cp * dp is not the number of devices"),
        ({"dp": "3"}, "gpus: tp * pp * cp * dp is not the number of devices"),
        ({"global_batch": "63"}, "global_batch: is not divisible by dp"),
        ({"micro_batch": "3"}, "micro_batch_size divides a replica's batch"),
        ({"tp": "16", "dp": "1", "pp": "1", "schedule": "", "heads": "24"}, "tp divides the attention heads"),
        ({"schedule": "interleaved_1f1b"}, "interleaved_1f1b has vpp of at least 2"),
        ({"schedule": "1f1b", "vpp": "3"}, "vpp > 1 needs interleaved_1f1b"),
        ({"pp": "8", "vpp": "4", "tp": "1", "dp": "2", "schedule": ""}, "pp: is more stages than layers"),
        ({"pp": "16", "vpp": "100", "tp": "1", "dp": "1"}, "pp: has too many pipeline stages"),
        ({"stage_layers": "12/6/6"}, "stage_layers: needs one count per stage"),
        ({"stage_layers": "12/6"}, "stage_layers: leaves out layers"),
        ({"stage_layers": "twelve"}, "stage_layers: is not counts joined by /"),
        ({"schedule": "my own"}, "schedule: is not a known schedule"),
        ({"zero_stage": "all"}, "zero_stage: is not a sharding"),
        ({"recompute": "some"}, "recompute: is not a recompute"),
        ({"dtype": "int8"}, "dtype: is not a known dtype"),
        ({"dtype": "fp8"}, "A100-80G has no fp8"),
        ({"framework": "my own"}, "framework: is not a known framework"),
        ({"framework": ""}, "framework: is not given"),
        ({"gpu": "Quantum9"}, "gpu: is not a known device"),
        ({"gpu": "V100(12)+T4(4)", "gpus_per_node": "8"}, "gpus: do not fill nodes"),
        ({"gpu": "V100(8)+T4(4)", "gpus_per_node": "4"}, "gpus: do not fill nodes"),
        ({"gpu": "V100 and T4"}, "gpu: names several kinds of devices"),
        ({"gpus": ""}, "gpus: is not given"),
        ({"gpus": "12"}, "gpus: do not fill nodes"),
        ({"gpus": "9999999"}, "gpus: is too many devices"),
        ({"global_batch": ""}, "global_batch: is not given"),
        ({"seq_len": ""}, "seq_len: is not given"),
        ({"layers": ""}, "model_name: layers not given, and the model is not a known one"),
        ({"model_name": "LLAMA3_70B", "ffn": ""}, "ffn: is not given, and a gated MLP has no"),
        ({"model_name": "Mine", "arch": "moe"}, "is not a known mixture of experts, and experts, topk not"),
        ({"ep": "4"}, "ep: splits experts of a dense model"),
        ({"notes": "LoRA r=0,targets=q_proj"}, "r: is no rank"),
        ({"interconnect": "0 Gb/s InfiniBand"}, "inter-node: is not a network"),
    ],
)  # fmt: skip
def test_an_impossible_value_skips_its_row_alone(change: dict[str, str], words: str) -> None:
    cases, faults = cases_of(rows_of({}, change, {}))
    assert [case.row.line for case in cases] == [2, 4]
    (fault,) = faults
    assert fault.line == 3
    assert words in fault.reason


@pytest.mark.parametrize(
    ("change", "adapters"),
    [
        ({"framework": "Megatron-Bridge", "notes": "LoRA Performance"}, (16, ("linear_qkv",))),
        ({"framework": "NeMo AutoModel (PyTorch FSDP2)", "model_name": "GPT (LoRA)"}, (16, ("all-linear",))),
        ({"framework": "NeMo 24.07 (Megatron-Core)", "notes": "task=LoRA"}, (32, ("linear_qkv",))),
        ({"notes": "task=LoRA"}, (16, ("q_proj", "v_proj"))),
        ({"notes": "LoRA r=8,targets=o_proj+q_proj, packed"}, (8, ("q_proj", "o_proj"))),
    ],
)
def test_adapters_of_a_run(change: dict[str, str], adapters: tuple[int, tuple[str, ...]]) -> None:
    """Those that it states, else those of the recipes of its framework, which is an assumption."""
    cases, faults = cases_of(rows_of({}, change))
    assert faults == []
    plain, lora = (case.problem.model.lora for case in cases)
    assert plain is None and lora is not None
    assert (lora.r, lora.target_modules) == adapters
    is_assumed = any(text.startswith("lora: ") for text in cases[1].assumed)
    assert is_assumed == ("r=" not in change.get("notes", ""))


def test_the_same_fault_is_listed_for_every_row() -> None:
    _, faults = cases_of(rows_of({"gpu": "Quantum9"}, {"gpu": "Quantum9"}))
    assert [(fault.line, fault.found) for fault in faults] == [(2, "'Quantum9'"), (3, "'Quantum9'")]


def test_stage_layers_are_the_boundaries_stated() -> None:
    (strategy,) = case_of(stage_layers="10/14").strategies
    assert (strategy.first_stage_layers, strategy.last_stage_layers) == (10, 14)


def test_units_around_the_layers_are_in_the_first_and_last_stage() -> None:
    # 30 units of 24 layers: two before them, four after them. 8, 14, 20: layers 6, 12, 18.
    case = case_of(stage_layers="8/6/6/10", pp="4", dp="2")
    (strategy,) = case.strategies
    assert (strategy.first_stage_layers, strategy.last_stage_layers) == (6, 6)
    assert "stage_layers: layers 6/6/6/6 of 30 units" in case.assumed


def test_layers_may_be_stated_for_each_rank_of_an_interleaved_pipeline() -> None:
    """24 layers on four ranks with two stages each: inner ranks have 3 + 3, so of 5 layers the first rank has
    2 in its first stage, and of 7 the last has 4 in its last."""
    change = {"pp": "4", "dp": "2", "vpp": "2", "schedule": "interleaved_1f1b", "micro_batch": "1"}
    (strategy,) = case_of(**change, stage_layers="5/6/6/7").strategies
    assert (strategy.first_stage_layers, strategy.last_stage_layers, strategy.vpp) == (2, 4, 2)
    (even,) = case_of(**change, stage_layers="6/6/6/6").strategies
    assert (even.first_stage_layers, even.last_stage_layers) == (3, 3)
    # By stage, as before.
    (stages,) = case_of(**change, stage_layers="2/3/3/3/3/3/3/4").strategies
    assert stages == strategy
    for text, words in (
        ("2/6/6/10", "of ranks"),
        ("5/6/6/6", "of ranks"),
        ("8/8/8", "8, or 4, one per rank"),
    ):
        with pytest.raises(ConfigError, match=words):
            case_of(**change, stage_layers=text)


def test_virtual_stages_that_a_row_leaves_open_are_a_choice() -> None:
    """24 layers on two ranks: 1, 2, 3, 4, 6 and 12 stages a rank divide them evenly. A stated number, a
    schedule, a complete row, and software without interleaving leave no choice."""
    blank = {"schedule": "", "level": "near", "micro_batch": "4"}
    assert set(case_of(**blank).strategies.vpp.tolist()) == {1, 2, 3, 4, 6, 12}
    for change in ({"vpp": "1"}, {"vpp": "3"}, {"schedule": "1f1b"}, {"level": "complete"},
                   {"framework": "Megatron-DeepSpeed"}):  # fmt: skip
        vpp = set(case_of(**{**blank, **change}).strategies.vpp.tolist())
        assert vpp == {int(change.get("vpp", "1"))}, change
    # With recomputation left open too, each number of stages has its own counts of layers.
    both = case_of(**blank, recompute="").strategies
    assert {strategy.vpp for strategy in both if strategy.recompute == "full"} == {1, 2, 3, 4, 6, 12}


def test_stages_may_hold_embedding_or_head_alone() -> None:
    # 26 stages of 24 layers: embedding and head have stages of their own.
    change = {"pp": "2", "vpp": "13", "schedule": "", "micro_batch": "4"}
    (strategy,) = case_of(**change).strategies
    assert (strategy.first_stage_layers, strategy.last_stage_layers) == (0, 0)


@pytest.mark.parametrize(
    ("text", "shards"),
    [
        ("0", (1, 1, 1)),
        ("1 (distributed optimizer)", (1, 1, 16)),
        ("2 (FSDP SHARD_GRAD_OP)", (1, 16, 16)),
        ("3 (FSDP FULL_SHARD)", (16, 16, 16)),
        ("FSDP", (16, 16, 16)),
        ("3 (FSDP 8)", (8, 8, 8)),
        ("3 (FSDP 5)", (16, 16, 16)),
    ],
)
def test_shardings(text: str, shards: tuple[int, int, int]) -> None:
    (strategy,) = case_of(zero_stage=text, tp="1", pp="1", dp="16", schedule="").strategies
    assert (strategy.param_shard, strategy.grad_shard, strategy.optim_shard) == shards


def test_a_model_has_the_sizes_of_the_row_and_the_shape_of_its_family() -> None:
    model, _ = model_of(row_of())
    # Megatron's count: 12 l h^2 (1 + 13 / (12 h)) and the embeddings of 51200 tokens and 2048 positions.
    h, layers = 2304, 24
    assert parameters(model) == 12 * layers * h * h + 13 * layers * h + (51200 + 2048) * h + 2 * h
    gated, _ = model_of(row_of(model_name="LLAMA3_X", kv_heads="8", ffn="6144"))
    # Attention h^2 (2 + 2 * 8 / 24), three matrices of the MLP, two norms; embedding and head apart.
    each = h * h * 2 + 2 * h * h * 8 // 24 + 3 * h * 6144 + 2 * h
    assert parameters(gated) == layers * each + 2 * 51200 * h + h


def test_a_known_model_without_sizes_is_that_of_its_config() -> None:
    model, assumed = model_of(row_of(model_name="LLAMA3.1_8B", layers="", hidden="", heads=""))
    assert parameters(model) == 8_030_261_248
    assert assumed == ("model: sizes of llama-3.1-8b's public config",)


def test_a_mixture_of_experts_is_its_public_config_with_the_rows_depth() -> None:
    whole, _ = model_of(row_of(model_name="DeepSeek V3 671B", arch="moe", layers="61", hidden="7168",
                               heads="128", experts="256", topk="8", vocab="129280"))  # fmt: skip
    assert parameters(whole) == pytest.approx(671e9, rel=1e-3)
    four_layers = {"layers": "4", "hidden": "7168", "heads": "128", "vocab": "129280"}
    truncated, assumed = model_of(row_of(model_name="deepseekv3 (4 layers)", arch="moe", **four_layers))
    assert (truncated.layers, truncated.head_layers) == (4, 0)
    assert any("truncated" in line for line in assumed)


def test_an_unknown_mixture_of_experts_is_built_from_its_sizes() -> None:
    row = row_of(model_name="Mine", arch="moe", layers="2", hidden="64", heads="4", ffn="128", experts="8",
                 topk="2", vocab="1000")  # fmt: skip
    model, assumed = model_of(row)
    # Attention 4 h^2, router 8 h, 8 experts of 3 matrices, two norms; embedding, head and final norm.
    assert parameters(model) == 2 * (4 * 64 * 64 + 8 * 64 + 8 * 3 * 64 * 128 + 2 * 64) + 2 * 1000 * 64 + 64
    assert "model: gated experts in every layer, none of them shared" in assumed


def test_experts_are_evenly_loaded_where_the_notes_say_so() -> None:
    change = {"model_name": "Mixtral-8x7B", "arch": "moe", "layers": "32", "hidden": "4096", "heads": "32",
              "experts": "8", "topk": "2", "vocab": "32000", "ep": "4", "recompute": ""}  # fmt: skip
    uneven, even = case_of(**change), case_of(**change, notes="MoE force-balanced and dropless")
    assert (uneven.problem.job.expert_imbalance, even.problem.job.expert_imbalance) == (1.1, 1.0)
    assert "expert_imbalance: 1.1" in uneven.assumed


@pytest.mark.parametrize(
    ("text", "name"),
    [("decoupled_adamw", "adamw"), ("Muon", "muon"), ("Adafactor", "adafactor"), ("", "adamw")],
)
def test_optimizers(text: str, name: str) -> None:
    assert case_of(optimizer=text).problem.job.optimizer == name


def test_a_config_error_of_the_model_is_a_fault_too() -> None:
    with pytest.raises(ConfigError):
        CaseBuilder().of(row_of(heads="23"))


def test_a_case_may_be_predicted_on_another_problem() -> None:
    case = case_of()
    slower = replace(case.problem, matmul_flop_per_s=case.problem.matmul_flop_per_s / 2)
    assert predicted(case, slower).step_time_s > 1.2 * predicted(case).step_time_s
    assert predicted(case, case.problem).step_time_s == predicted(case).step_time_s


UNEQUAL = {
    "gpu": "V100(12)+T4(4)", "gpus_per_node": "4", "tp": "1", "pp": "4", "dp": "4", "dtype": "fp16",
    "interconnect": "10 Gb/s (V100 nodes), 50 Gb/s (T4 node) inter; NVLink 170 Gb/s",
    "layers": "24", "hidden": "1024", "heads": "16", "ffn": "4096", "micro_batch": "1",
}  # fmt: skip


def test_unequal_devices_are_predicted_kind_by_kind() -> None:
    """Three nodes of V100, then one of T4, all with the links of the worst connected node: no faster than
    V100 alone, no slower than T4 alone.
    """
    case = case_of(**UNEQUAL)
    assert case.mixed is not None and case.mixed.nodes == (0, 0, 0, 1)
    assert [kind.device.name for kind in case.mixed.problems] == ["V100-32G", "T4"]
    assert {kind.cluster.devices for kind in case.mixed.problems} == {16}
    # 10 Gb/s for four devices; T4's 50 are more, so it gets the rate that V100 reaches.
    paces = [
        kind.cluster.tiers[-1].bytes_per_s * kind.efficiency.scale_out.fraction
        for kind in case.mixed.problems
    ]
    own = 10e9 / 8 / 4 * case.mixed.problems[0].efficiency.scale_out.fraction
    assert paces == pytest.approx([own, own])
    network = {"interconnect": "10 Gb/s inter-node"}
    fast, slow = (predicted(case_of(**{**UNEQUAL, **network, "gpu": gpu})) for gpu in ("V100", "T4"))
    assert fast.step_time_s < predicted(case).step_time_s < slow.step_time_s
    # With the nodes in the other order, the first stage is the slow one.
    reordered = case_of(**{**UNEQUAL, "gpu": "T4(4)+V100(12)"})
    assert reordered.mixed is not None and reordered.mixed.nodes == (0, 1, 1, 1)
    assert fast.step_time_s < predicted(reordered).step_time_s < slow.step_time_s


def test_runs_on_unequal_devices_are_predicted_together_with_others() -> None:
    cases, faults = cases_of(rows_of({}, UNEQUAL, {}))
    assert not faults
    together = predictions_of(cases)
    assert [one.step_time_s for one in together] == [predicted(case).step_time_s for case in cases]


def allocated_bytes(**changes: str) -> float:
    flash = {"year": "2025", "recompute": "none", "notes": "no sequence parallelism"}
    return predicted(case_of(**{**flash, **changes})).allocated_bytes


def test_stated_attention_decides_what_is_saved() -> None:
    # 24 heads over tp 2, 2048 keys and queries, 4 sequences: 5 bytes for each of 201,326,592 scores.
    score_bytes = 5 * (24 // 2) * 2048 * 2048 * 4
    # The largest tensor without scores: 4 x 2048 rows of 9216 / 2 numbers of two bytes.
    widest_bytes = 4 * 2048 * 9216 // 2 * 2
    fused, unfused = (allocated_bytes(attention=text, peak_rank="first") for text in ("flash", "unfused"))
    assert fused == allocated_bytes(peak_rank="first"), "the default of 2025"
    # 12 layers of 2 micro-batches, and the largest tensor with its gradient.
    expected = 12 * 2 * score_bytes + 2 * (score_bytes - widest_bytes)
    assert unfused - fused == pytest.approx(expected, rel=1e-9)
    assert (
        predicted(case_of(attention="unfused", year="2025")).step_time_s
        > predicted(case_of(attention="flash", year="2025")).step_time_s
    )


def test_stated_gradients_and_the_rank_of_a_peak() -> None:
    def gradient_bytes(rank: str) -> float:
        """Of fp32 gradients, as the difference from 16-bit ones."""
        more, less = (
            allocated_bytes(model_name="a Llama", grad_dtype=text, peak_rank=rank)
            for text in ("fp32", "fp16")
        )
        return 2 * (more - less)

    h = 2304
    # Over tp 2: four matrices of attention, three of the MLP with 4 h each; whole: two norms.
    layer = (4 + 3 * 4) * h * h // 2 + 2 * h
    table = 51200 * h // 2
    assert gradient_bytes("first") == pytest.approx(4 * (12 * layer + table), rel=1e-9)
    assert gradient_bytes("last") == pytest.approx(4 * (12 * layer + table + h), rel=1e-9)
    assert allocated_bytes() == allocated_bytes(peak_rank="max")
    assert allocated_bytes() == max(allocated_bytes(peak_rank=rank) for rank in ("first", "last"))


@pytest.mark.parametrize("column", ["attention", "grad_dtype", "peak_rank"])
def test_other_values_of_these_columns_skip_the_row(column: str) -> None:
    with pytest.raises(ConfigError, match=f"{column}: is not known"):
        case_of(**{column: "mine"})


def test_rows_of_packed_samples() -> None:
    """The column gives their length; notes that say packed sequences without it mean 200 tokens. Rates count
    the attention of samples: 6 N + 12 layers * hidden * keys, with 2,048 and 200 keys."""
    whole, given, noted = case_of(), case_of(mean_sample_len="512"), case_of(notes="packed sequences")
    assert [case.problem.job.attention_len for case in (whole, given, noted)] == [2048, 512, 200]
    assert "mean_sample_len: 200" in noted.assumed and not any("sample" in text for text in given.assumed)
    with pytest.raises(ConfigError, match="mean_sample_len"):
        case_of(mean_sample_len="2049")
