"""`benchmarks.recipes`: recipes are read from a wheel without importing it, and judged."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks import recipes as bench
from benchmarks.recipes_facts import Recipe, read_facts, read_wheel, write_facts
from benchmarks.recipes_judgement import cluster_for, job_for, judged, model_for, strategy_for, unsaid_of

from shardwise.model import Model, parameters

COMMON = '''
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.bridge.training.config import ConfigContainer, TrainingConfig, TokenizerConfig, GPTDatasetConfig

def _pretrain_common() -> ConfigContainer:
    """Defaults."""
    return ConfigContainer(
        model=None,
        train=TrainingConfig(global_batch_size=32, micro_batch_size=2),
        ddp=DistributedDataParallelConfig(overlap_grad_reduce=True, use_distributed_optimizer=True),
        dataset=GPTDatasetConfig(seq_length=4096),
        tokenizer=TokenizerConfig(tokenizer_type="NullTokenizer", use_tokenizer_vocab_size=True),
        comm_overlap=None,
        mixed_precision="bf16-mixed",
    )
'''

PRECISION = """
from dataclasses import dataclass
from typing import Optional

@dataclass(kw_only=True)
class MixedPrecisionConfig:
    bf16: bool = False
    grad_reduce_in_fp32: bool = True
    fp8: Optional[str] = None
    fp8_recipe: str = "tensorwise"

def bf16_mixed():
    return MixedPrecisionConfig(bf16=True)

def mxfp8_mixed():
    cfg = bf16_mixed()
    cfg.fp8 = "e4m3"
    cfg.fp8_recipe = "mxfp8"
    return cfg
"""

TINY = """
from megatron.bridge import AutoBridge
from megatron.bridge.recipes.common import _pretrain_common
from megatron.bridge.training.comm_overlap import CommOverlapConfig

SEQUENCE_LENGTH_8K: int = 8192

def _layout(stages):
    return [["embedding"] + ["decoder"] * 3] + [["decoder"] * 4] * (stages - 2) + [["decoder"] * 5 + ["loss"]]

def tiny_pretrain_16gpu_h100_bf16_config():
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained("meta-llama/Llama-3.2-1B").to_megatron_provider()
    cfg.tokenizer.vocab_size = 32000
    cfg.dataset.seq_length = SEQUENCE_LENGTH_8K
    for axis, size in (("tensor", 2), ("pipeline", 4)):
        setattr(cfg.model, axis + "_model_parallel_size", size)
    cfg.model.pipeline_model_parallel_layout = _layout(cfg.model.pipeline_model_parallel_size)
    cfg.model.sequence_parallel = cfg.model.tensor_model_parallel_size > 1
    if torch.cuda.is_available():
        cfg.model.tensor_model_parallel_size = 8
    cfg.comm_overlap = CommOverlapConfig(tp_comm_overlap=True)
    return cfg

def tiny_alias_pretrain_16gpu_h100_bf16_config():
    return tiny_pretrain_16gpu_h100_bf16_config()

def tiny_broken_pretrain_12gpu_h100_bf16_config():
    cfg = tiny_pretrain_16gpu_h100_bf16_config()
    return cfg

def tiny_raises_pretrain_8gpu_h100_bf16_config():
    raise NotImplementedError("not yet")

def not_a_recipe(size):
    return size
"""

FAST = """
import torch
from megatron.bridge.recipes.tiny.tiny import tiny_pretrain_16gpu_h100_bf16_config as base
from megatron.bridge.training.mixed_precision import mxfp8_mixed

def _fast(cfg, *, graphs=False):
    cfg.tokenizer.use_tokenizer_vocab_size = False
    if not isinstance(cfg.mixed_precision, str):
        cfg.mixed_precision.grad_reduce_in_fp32 = False
    if graphs and getattr(cfg.model, "cuda_graph_impl", None) is None:
        cfg.model.cuda_graph_impl = "local"

def tiny_pretrain_8gpu_b200_fp8mx_config():
    cfg = base()
    cfg.mixed_precision = mxfp8_mixed()
    cfg.model.pipeline_model_parallel_size = 1
    cfg.model.recompute_granularity = "selective"
    cfg.optimizer.use_precision_aware_optimizer = True
    cfg.optimizer.exp_avg_dtype = torch.bfloat16
    cfg.train.global_batch_size *= 4
    _fast(cfg, graphs=True)
    return cfg
"""


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "megatron_bridge-0-py3-none-any.whl"
    files = {
        "recipes/common.py": COMMON,
        "training/mixed_precision.py": PRECISION,
        "recipes/tiny/tiny.py": TINY,
        "recipes/tiny/__init__.py": "from megatron.bridge.recipes.tiny.tiny import *",
        "perf_recipes/tiny/b200/tiny.py": FAST,
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(f"megatron/bridge/{name}", text)
    return path


def stored(name: str) -> Recipe:
    return next(one for one in read_facts()[0] if name in (one.name, *one.aliases))


def test_reads_calls_imports_and_loops_of_a_wheel(wheel: Path) -> None:
    """tp and pp come from a loop with setattr; the branch that depends on the machine is not taken; the
    vocabulary of the mock tokenizer is padded to 128 * tp = 256: 125 * 256 = 32,000."""
    recipes, _ = read_wheel(wheel)
    found = next(one for one in recipes if one.kind == "canonical" and one.devices == 16)
    assert (found.tp, found.pp, found.vpp, found.cp, found.dp) == (2, 4, 1, 1, 2)
    assert found.layers == (3, 4, 4, 5) and found.sequence_parallel and found.tp_comm_overlap
    assert (found.global_batch_size, found.micro_batch_size, found.seq_len) == (32, 2, 8192)
    assert (found.dtype, found.grad_reduce_dtype, found.moment_dtype) == ("bf16", "fp32", "fp32")
    assert (found.model, found.vocab, found.sharding) == ("meta-llama/Llama-3.2-1B", 32000, "optimizer")
    assert found.aliases == ("tiny_alias_pretrain_16gpu_h100_bf16_config",)


def test_reads_what_a_recipe_changes_in_another(wheel: Path) -> None:
    """mxfp8 with 16-bit gradients and moments, four times the batch, the model's own vocabulary, and the
    default module of a selective recomputation."""
    found = next(one for one in read_wheel(wheel)[0] if one.kind == "performance")
    assert (found.dtype, found.grad_reduce_dtype, found.moment_dtype) == ("mxfp8", "bf16", "bf16")
    assert (found.devices, found.device, found.global_batch_size, found.vocab) == (8, "b200", 128, None)
    assert (found.recompute, found.recompute_modules, found.cuda_graphs) == (
        "selective",
        ("core_attn",),
        "local",
    )
    assert found.layers == () and found.pp == 1


def test_a_recipe_that_cannot_be_read_is_listed_with_the_reason(wheel: Path) -> None:
    recipes, unread = read_wheel(wheel)
    assert [name for name, _ in unread] == ["tiny_raises_pretrain_8gpu_h100_bf16_config"]
    assert "not yet" in unread[0][1]
    assert all("raises" not in name for one in recipes for name in (one.name, *one.aliases))


def test_degrees_that_do_not_multiply_to_the_devices_are_reported(wheel: Path) -> None:
    """2 * 4 * 1 = 8 does not divide 12; the recipe stays in the list, with the reason."""
    broken = next(one for one in read_wheel(wheel)[0] if one.devices == 12)
    assert broken.faults == ("tp * pp * cp = 8 does not divide 12 devices",)
    assert judged(broken).skipped == f"contradicts itself: {broken.faults[0]}"
    assert "| contradicts itself: tp * pp * cp = 8 does not divide 12 devices | 1 |" in "\n".join(
        bench.tables([judged(broken)])
    )


def test_stored_facts_are_what_was_read(wheel: Path, tmp_path: Path) -> None:
    recipes, unread = read_wheel(wheel)
    write_facts(recipes, unread, tmp_path / "facts.json")
    assert read_facts(tmp_path / "facts.json") == (recipes, unread)


def test_a_dense_recipe_as_read_by_eye() -> None:
    """perf_recipes/llama/h100/llama3.py: TP 4, PP 4, CP 2, VPP 5, GBS 256 of 8,192 tokens on 64 H100."""
    found = stored("llama3_70b_pretrain_64gpu_h100_bf16_config")
    assert (found.tp, found.pp, found.cp, found.vpp, found.dp) == (4, 4, 2, 5, 2)
    assert (found.global_batch_size, found.micro_batch_size, found.seq_len) == (256, 1, 8192)
    assert found.sequence_parallel and found.tp_comm_overlap and not found.layers
    assert (found.dtype, found.grad_reduce_dtype, found.recompute) == ("bf16", "bf16", "none")
    assert (found.device, found.devices, found.task, found.vocab) == ("h100", 64, "pretrain", None)


def test_a_recipe_whose_ends_count_as_layers_as_read_by_eye() -> None:
    """perf_recipes/llama/b200/llama31.py: TP 4, PP 16, VPP 4. The embedding and the loss count as layers:
    (126 + 2) / (16 * 4) = 2 of each stage, so the first and the last have 1 decoder layer."""
    found = stored("llama31_405b_pretrain_128gpu_b200_fp8cs_config")
    assert (found.tp, found.pp, found.cp, found.vpp, found.dp) == (4, 16, 1, 4, 2)
    assert (found.dtype, found.global_batch_size, found.ends_count_as_layers) == ("fp8-current", 768, True)
    model = model_for(found.model, found.vocab, found.mtp_layers)
    assert isinstance(model, Model)
    strategy = strategy_for(found, model)
    assert (strategy.first_stage_layers, strategy.last_stage_layers) == (1, 1)


def test_a_recipe_with_experts_as_read_by_eye() -> None:
    """perf_recipes/deepseek/b200/deepseek_v3.py with the layout of (8, 2): 4 layers a stage, 1 on the last
    with the layer of multi-token prediction; 4 * 15 + 1 = 61."""
    found = stored("deepseek_v3_pretrain_256gpu_b200_fp8mx_config")
    assert (found.tp, found.pp, found.vpp, found.ep, found.etp, found.dp) == (1, 8, 2, 8, 1, 32)
    assert found.layers == (4,) * 15 + (1,) and found.mtp_layers == 1
    assert (found.dtype, found.moment_dtype, found.grad_reduce_dtype) == ("mxfp8", "bf16", "bf16")
    assert (found.recompute, found.recompute_modules) == ("selective", ("mla_up_proj",))
    assert found.low_precision_weights
    assert set(unsaid_of(found)) == set()
    model = model_for(found.model, found.vocab, found.mtp_layers)
    assert isinstance(model, Model)
    strategy = strategy_for(found, model)
    assert (strategy.recompute, strategy.recompute_modules) == ("selective", "mla_up_proj")
    profile = job_for(found, model, cluster_for("b200", 256)).profile
    assert (profile.reduce_in_fp32, profile.moment_bytes, profile.master_bytes) == (False, 2.0, 4.0)
    # Graphs of attention, router and preparation of dispatch: experts still wait for the host.
    assert profile.dispatch_s == 0.0 < profile.expert_dispatch_s


def test_a_recipe_that_recomputes_some_layers_as_read_by_eye() -> None:
    """perf_recipes/llama/h100/llama3.py: full recomputation of a block of 5 of 32 layers."""
    found = stored("llama3_8b_pretrain_8gpu_h100_fp8cs_config")
    assert (found.recompute, found.recompute_layers, found.cp) == ("full", 5, 1)
    model = model_for(found.model, found.vocab, found.mtp_layers)
    assert isinstance(model, Model)
    assert strategy_for(found, model).recompute_layers == 5


def test_a_layout_with_other_stages_contradicts_itself() -> None:
    """A layout of 16 stages for pp 4 and vpp 2: Megatron-LM refuses it as well."""
    found = stored("deepseek_v3_pretrain_256gpu_gb200_fp8mx_partial_cg_dev_config")
    assert (found.pp, found.vpp, len(found.layers)) == (4, 2, 16)
    assert judged(found).skipped.startswith("contradicts itself: a layout of 16 stages")
    assert not judged(replace(found, layers=(8,) * 7 + (5,))).skipped


def test_states_alone_of_llama_3_8b_exceed_two_devices() -> None:
    """8,030,261,248 parameters with a vocabulary of 32,000 instead of 128,256:
    - 2 * 96,256 * 4,096 = 788,529,152 fewer. Weights 2 bytes, gradients 4, states 12 over dp * cp = 2:
    12 bytes of each = 80.9 GiB, and an H100 has 79.2. With 8 devices the states are 12 / 8 = 1.5 bytes."""
    found = stored("llama3_8b_pretrain_2gpu_h100_bf16_config")
    model = model_for(found.model, found.vocab, found.mtp_layers)
    assert isinstance(model, Model) and parameters(model) == 8_030_261_248 - 788_529_152
    judgement = judged(found)
    assert judgement.states_bytes == pytest.approx(12 * 7_241_732_096, rel=1e-4)
    assert judgement.states_bytes > judgement.device_bytes == 81_089 * 2**20
    assert not judgement.fits and judgement.gain is None and judgement.fits_on == 8


def test_the_gain_compares_step_times_and_its_parts_add_up() -> None:
    judgement = judged(stored("qwen3_8b_pretrain_4gpu_h100_bf16_config"))
    assert judgement.fits and judgement.gain is not None and judgement.gain > 0.15
    assert judgement.gain == pytest.approx(1.0 - judgement.ours_s / judgement.step_s)
    assert sum(judgement.saved.values()) == pytest.approx(judgement.step_s - judgement.ours_s)
    assert not judgement.agrees("tp") and judgement.ours is not None and judgement.ours.tp < 4


def test_layers_whose_activations_are_offloaded_are_not_on_the_device() -> None:
    """20 of 80 layers: a quarter of the activations less, all else equal."""
    found = stored("llama3_70b_pretrain_64gpu_gb200_bf16_config")
    assert found.offloaded_layers == 20
    kept, offloaded = judged(replace(found, offloaded_layers=0)).memory, judged(found).memory
    assert offloaded["activations"] == pytest.approx(0.75 * kept["activations"])
    assert offloaded["parameters"] == kept["parameters"]


def test_weights_in_the_format_of_the_products_have_no_16_bit_copy() -> None:
    """405B over tp 4 and pp 16 in fp8: matrices of layers have 2 copies of 1 byte, the embedding stays in
    16 bits; so all weights have about 2 bytes, and gradients of 16 bits as many."""
    found = stored("llama31_405b_pretrain_128gpu_b200_fp8cs_config")
    kept, stored_low = judged(replace(found, low_precision_weights=False)).memory, judged(found).memory
    assert kept["parameters"] == pytest.approx(2.0 * kept["gradients"], rel=0.1)
    assert stored_low["parameters"] == pytest.approx(stored_low["gradients"], rel=0.1)
    assert stored_low["optimizer"] == kept["optimizer"]


def test_unknown_models_and_devices_are_named() -> None:
    assert judged(stored("nemotron_3_super_pretrain_64gpu_b200_bf16_config")).skipped == (
        "model: experts in a latent space"
    )
    assert judged(stored("llama3_8b_pretrain_8gpu_r100_bf16_config")).skipped == "device: R100"


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        # Named 4B, 47B, 9B and 12B.
        ("HybridModelProvider 42x3136", 3_973_556_832),
        ("HybridModelProvider 98x8192", 46_791_554_816),
        ("HybridModelProvider 56x4480", 8_888_227_328),
        ("HybridModelProvider 62x5120", 12_310_001_152),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("Qwen/Qwen2.5-0.5B", 494_032_768),
        ("Qwen/Qwen2.5-1.5B", 1_543_714_304),
        ("Qwen/Qwen2.5-14B", 14_770_033_664),
        ("Qwen/Qwen3-1.7B", 1_720_574_976),
        ("Qwen/Qwen3-14B", 14_768_307_200),
        ("deepseek-ai/DeepSeek-V2-Lite", 15_706_484_224),
        ("google/gemma-2-2b", 2_614_341_888),
    ],
)
def test_sizes_have_the_published_number_of_parameters(name: str, count: int) -> None:
    """The numbers that Hugging Face shows for the weights of each model."""
    model = model_for(name, None, None)
    assert isinstance(model, Model) and parameters(model) == count


def test_prints_a_line_for_each_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--only", "qwen25_500m_pretrain", "--each"]) == 0
    assert capsys.readouterr().out.startswith("qwen25_500m_pretrain_1gpu_h100_bf16_config: tp 1 pp 1 vpp 1")
