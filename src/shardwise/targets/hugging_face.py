"""What the exports for training scripts on Hugging Face Transformers share: the classes of decoder layers,
the check of plans over data-parallel and tensor-parallel ranks, and the values that a script sets itself."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

from shardwise.cost import has_fused_attention
from shardwise.inputs import printable
from shardwise.model import (
    ALL_LINEAR,
    GroupedQueryAttentionShape,
    Model,
    decoder_of,
    parameters,
    vision_classes,
)
from shardwise.plans import Plan
from shardwise.strategy import Target
from shardwise.targets.writing import check_plan, head_lines, refusal
from shardwise.units import format_count

LAYER_CLASSES: Mapping[str, str] = {
    "arcee": "ArceeDecoderLayer",
    "aria_text": "AriaTextDecoderLayer",
    "bamba": "BambaDecoderLayer",
    "biogpt": "BioGptDecoderLayer",
    "cohere": "CohereDecoderLayer",
    "cohere2": "Cohere2DecoderLayer",
    "cohere2_moe": "Cohere2MoeDecoderLayer",
    "cwm": "CwmDecoderLayer",
    "deepseek_v2": "DeepseekV2DecoderLayer",
    "deepseek_v3": "DeepseekV3DecoderLayer",
    "dots1": "Dots1DecoderLayer",
    "ernie4_5": "Ernie4_5DecoderLayer",
    "ernie4_5_moe": "Ernie4_5_MoeDecoderLayer",
    "exaone4": "Exaone4DecoderLayer",
    "exaone_moe": "ExaoneMoeDecoderLayer",
    "falcon": "FalconDecoderLayer",
    "falcon_mamba": "FalconMambaBlock",
    "flex_olmo": "FlexOlmoDecoderLayer",
    "gemma": "GemmaDecoderLayer",
    "gemma2": "Gemma2DecoderLayer",
    "gemma3": "Gemma3DecoderLayer",
    "glm": "GlmDecoderLayer",
    "glm4": "Glm4DecoderLayer",
    "glm4_moe": "Glm4MoeDecoderLayer",
    "gpt2": "GPT2Block",
    "gpt_bigcode": "GPTBigCodeBlock",
    "gpt_neox": "GPTNeoXLayer",
    "gpt_oss": "GptOssDecoderLayer",
    "granite": "GraniteDecoderLayer",
    "granitemoe": "GraniteMoeDecoderLayer",
    "granitemoehybrid": "GraniteMoeHybridDecoderLayer",
    "granitemoeshared": "GraniteMoeSharedDecoderLayer",
    "helium": "HeliumDecoderLayer",
    "hunyuan_v1_dense": "HunYuanDenseV1DecoderLayer",
    "hunyuan_v1_moe": "HunYuanMoEV1DecoderLayer",
    "hy_v3": "HYV3DecoderLayer",
    "hyperclovax": "HyperCLOVAXDecoderLayer",
    "internlm3": "LlamaDecoderLayer",
    "iquestcoder": "LlamaDecoderLayer",
    "jais2": "Jais2DecoderLayer",
    "jamba": "JambaAttentionDecoderLayer,JambaMambaDecoderLayer",
    "kimi_linear": "KimiLinearDecoderLayer",
    "kolibri1": "Kolibri1DecoderLayer",
    "laguna": "LagunaDecoderLayer",
    "lfm2": "Lfm2DecoderLayer",
    "lfm2_moe": "Lfm2MoeDecoderLayer",
    "llama": "LlamaDecoderLayer",
    "mamba": "MambaBlock",
    "mamba2": "Mamba2Block",
    "mellum": "MellumDecoderLayer",
    "minimax": "MiniMaxDecoderLayer",
    "minimax_m2": "MiniMaxM2DecoderLayer",
    "ministral": "MinistralDecoderLayer",
    "ministral3": "Ministral3DecoderLayer",
    "mistral": "MistralDecoderLayer",
    "mixtral": "MixtralDecoderLayer",
    "nemotron": "NemotronDecoderLayer",
    "nemotron_h": "NemotronHBlock",
    "olmo": "OlmoDecoderLayer",
    "olmo2": "Olmo2DecoderLayer",
    "olmo3": "Olmo3DecoderLayer",
    "olmo_hybrid": "OlmoHybridAttentionDecoderLayer,OlmoHybridLinearAttentionDecoderLayer",
    "olmoe": "OlmoeDecoderLayer",
    "opt": "OPTDecoderLayer",
    "persimmon": "PersimmonDecoderLayer",
    "phi": "PhiDecoderLayer",
    "phi3": "Phi3DecoderLayer",
    "phimoe": "PhimoeDecoderLayer",
    "qwen2": "Qwen2DecoderLayer",
    "qwen2_moe": "Qwen2MoeDecoderLayer",
    "qwen3": "Qwen3DecoderLayer",
    "qwen3_5": "Qwen3_5DecoderLayer",
    "qwen3_5_moe": "Qwen3_5MoeDecoderLayer",
    "qwen3_moe": "Qwen3MoeDecoderLayer",
    "qwen3_next": "Qwen3NextDecoderLayer",
    "seed_oss": "SeedOssDecoderLayer",
    "smollm3": "SmolLM3DecoderLayer",
    "solar_open": "SolarOpenDecoderLayer",
    "stablelm": "StableLmDecoderLayer",
    "starcoder2": "Starcoder2DecoderLayer",
}
"""Families of Transformers and the class of their decoder layers, or two of them (Transformers 5.23)."""


_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_PLAIN = (*_ATTENTION, "up_proj", "down_proj")
_JOINED = (*_ATTENTION, "gate_up_proj", "down_proj")
_SEPARATE = (*_ATTENTION, "gate_proj", "up_proj", "down_proj")
_FUSED = ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h")
_OUT = ("q_proj", "k_proj", "v_proj", "out_proj")
_FC = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")

ADAPTED_MODULES: Mapping[str, tuple[str, ...]] = {
    "arcee": _PLAIN,
    "biogpt": _FC,
    "deepseek_v2": ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "deepseek_v3": ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
    "falcon": _FUSED,
    "falcon_mamba": (),
    "glm": _JOINED,
    "glm4": _JOINED,
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_bigcode": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": _FUSED,
    "jais2": _PLAIN,
    "lfm2": _OUT,
    "lfm2_moe": _OUT,
    "mamba": (),
    "mamba2": (),
    "nemotron": _PLAIN,
    "opt": _FC,
    "persimmon": _FUSED,
    "phi": ("q_proj", "k_proj", "v_proj", "dense", "fc1", "fc2"),
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "starcoder2": (*_ATTENTION, "c_fc", "c_proj"),
}
"""Modules with matrices, by their names in Transformers' classes of a family; others have `_SEPARATE`."""

ADAPTERS = "adapter_config.json"
"""The file of adapters, as PEFT reads it."""

NOTES = "shardwise"
"""The key of texts in JSON files, which the software ignores."""

TRAINING = "train.py"
"""Stands for the training script of the user."""


def check_model(model: Model, seq_len: int) -> None:
    """Accept every model of the target's families: Transformers builds it from its own config."""


def micro_batches(plan: Plan) -> int:
    """Micro-batches of a replica in one step (gradient accumulation)."""
    strategy = plan.best.strategy
    return plan.job.global_batch_size // (strategy.dp * strategy.micro_batch_size)


def check_replicas(plan: Plan, name: str) -> Target:
    """The target of this name for a plan of data-parallel and tensor-parallel ranks. ConfigError for the
    first value of the plan that the capability file excludes, or that is no legal plan."""
    strategy = plan.best.strategy
    target = check_plan(plan, name)
    rows, ranks = strategy.dp * strategy.micro_batch_size, strategy.dp * strategy.cp
    for field, is_legal, allowed in (
        ("micro_batch_size", plan.job.global_batch_size % rows == 0, "a divisor of the batch of a replica"),
        (
            "recompute_layers",
            strategy.recompute_layers == (plan.model.layers if strategy.recompute == "full" else 0),
            f"{plan.model.layers} with full recomputation, else 0",
        ),
        ("param_shard", ranks % strategy.param_shard == 0, f"a divisor of dp * cp, {ranks}"),
        ("optim_shard", ranks % strategy.optim_shard == 0, f"a divisor of dp * cp, {ranks}"),
        ("ep", plan.model.experts is not None or strategy.ep * strategy.etp == 1, "1 without experts"),
    ):
        if not is_legal:
            raise refusal(target, f"best.strategy.{field}", getattr(strategy, field), allowed)
    return target


def adapter_files(plan: Plan, target: Target) -> dict[str, str]:
    """The text of `adapter_config.json` by its name, for plans of adapters. ConfigError for names of modules
    that the family does not have in Transformers."""
    lora = plan.model.lora
    if lora is None:
        return {}
    known = (*ADAPTED_MODULES.get(plan.model.family, _SEPARATE), ALL_LINEAR)
    for name in lora.target_modules:
        if name not in known:
            raise refusal(target, "model.config.lora.target_modules", name, ", ".join(known))
    is_all = ALL_LINEAR in lora.target_modules
    config = {
        NOTES: [*head_lines(plan, target), "lora_alpha is not part of a plan."],
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if plan.model.labels is None else "SEQ_CLS",
        "base_model_name_or_path": None,
        "r": lora.r,
        "target_modules": ALL_LINEAR if is_all else list(lora.target_modules),
        "lora_dropout": lora.dropout,
        "bias": "none",
        # PEFT would adapt modules of the same name in a vision tower too.
        **({"exclude_modules": _tower_pattern(plan.model)} if plan.model.patches else {}),
    }
    return {ADAPTERS: json.dumps(config, indent=2) + "\n"}


def _tower_pattern(model: Model) -> str:
    """A regular expression for the names of the modules of a model's tower and projector."""
    modules = vision_classes(model.config).modules
    parts = {name.rpartition(".")[2] for part in ("vision", "projector") for name in modules[part]}
    return rf".*\b({'|'.join(sorted(parts))})\b.*"


def processes_per_node(plan: Plan, target: Target) -> int:
    """Devices of each node. ConfigError where nodes differ, because launchers start equally many processes
    on each."""
    counts = [node.devices for node in plan.cluster.nodes]
    if len(set(counts)) > 1:
        raise refusal(target, "cluster", f"nodes of {', '.join(map(str, counts))} devices", "equal nodes")
    return counts[0]


def attention(plan: Plan) -> str:
    """The value of `attn_implementation`: a fused kernel where the prediction assumes one. PyTorch's SDPA has
    neither soft caps nor sinks."""
    if not has_fused_attention(plan.cluster, plan.job.profile):
        return "eager"
    shapes = [shape.attention for shape in decoder_of(plan.model).layers]
    queries = [shape for shape in shapes if isinstance(shape, GroupedQueryAttentionShape)]
    if any(shape.sinks for shape in queries):
        return SINKS_KERNEL
    return "flash_attention_2" if any(shape.softcap for shape in queries) else "sdpa"


SINKS_KERNEL = "kernels-community/vllm-flash-attn3"
"""A kernel of the Hugging Face Hub that Transformers lists for gpt-oss, for Hopper devices."""


def layer_classes(model: Model) -> list[str]:
    """The classes of the model's layers, with those of a vision tower; none where they are not known."""
    own = LAYER_CLASSES.get(model.family, "").split(",")
    if not model.patches:
        return own
    classes = vision_classes(model.config)
    return [*([classes.decoder] if classes.decoder else own), classes.tower]


def _frozen_modules(model: Model, part: str) -> list[str]:
    """Names of the modules of a frozen part; a projector within the tower is no part of it."""
    if not model.patches:
        return ["all parameters"]
    modules = vision_classes(model.config).modules
    within = [name for name in modules["projector"] if name.startswith(f"{modules['vision'][0]}.")]
    without = f" without {', '.join(within)}" if part == "vision" and within else ""
    head = ["lm_head"] if part == "language" and not model.tied_embeddings else []
    return [*(f"{name}{without}" for name in modules[part]), *head]


def model_lines(plan: Plan) -> Iterator[str]:
    """The model and its input, which the training script builds."""
    job = plan.job
    size = format_count(parameters(plan.model))
    name = printable(plan.model.name)
    yield f"- model: {name} ({size} parameters), built from model.config of the plan file"
    if plan.model.patches:
        yield "- class: AutoModelForImageTextToText, with the vision tower"
    for part in plan.model.frozen:
        yield f"- frozen: {', '.join(_frozen_modules(plan.model, part))}: requires_grad_(False)"
    yield f'- from_pretrained or from_config: attn_implementation="{attention(plan)}"'
    if job.profile.loss == "fused":
        yield "- loss: a fused cross entropy, such as Liger's (use_liger_kernel=True of TrainingArguments)"
    yield f"- sequence length: {job.seq_len} tokens"
    if plan.model.lora is not None:
        yield f"- adapters: get_peft_model(model, LoraConfig.from_pretrained(FOLDER)), with {ADAPTERS} of"
        yield "    this folder, before the model is prepared; no weights but theirs go to the optimizer"


def batch_lines(plan: Plan) -> Iterator[str]:
    """Optimizer and batch, for software that does not read them from a file."""
    job, strategy = plan.job, plan.best.strategy
    yield f"- optimizer: {OPTIMIZER_CLASSES[job.optimizer]}"
    batch = f"{strategy.micro_batch_size} sequences on each of {strategy.dp} data-parallel ranks"
    yield f"- micro-batch: {batch}"
    yield f"- gradient accumulation: {micro_batches(plan)} micro-batches ({job.global_batch_size} sequences)"


OPTIMIZER_CLASSES = {"adamw": "torch.optim.AdamW", "sgd": "torch.optim.SGD"}
"""Our optimizers and PyTorch's."""
