"""Export of a uniform plan to Megatron-LM 0.19: its flags (`megatron/training/arguments.py`) and files.

A field without a flag raises ConfigError with its name. So does a value that Megatron-LM accepts but cannot
train. `layout_text` writes `--pipeline-model-parallel-layout`. `megatron_lm_files` writes the flags one per
line, as a bash array, by the names of arguments, and as overrides of a recipe of Megatron-Bridge.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

import yaml

from shardwise.cluster import architecture_of
from shardwise.cost import FP32_BYTES, has_fused_attention
from shardwise.launch import Program, Verbatim, start_lines
from shardwise.model import decoder_config, names_of
from shardwise.plans import Plan
from shardwise.strategy import Job, Strategy, acting_options, layer_counts, target_of
from shardwise.targets import megatron_bridge
from shardwise.targets.megatron_lm_model import TARGET, MegatronModel, megatron_model, model_flags
from shardwise.targets.writing import check_plan, head_lines, path_in, refusal

_LONGEST_PLAIN = 3
"""Up to this many layers of a stage are written out; more are `t*N`."""


def layout_text(counts: Sequence[int]) -> str:
    """The layout text for stages with these numbers of decoder layers, in model order.

    The embedding `E` comes before the layers of the first stage, the loss `L` after those of the last. Runs
    of equal stages are written once: 1, 1, 1 and 0 layers are `Et|(t|)*2L`.
    """
    stages = [_layers(count) for count in counts]
    stages[0] = "E" + stages[0]
    texts = []
    for stage, run in groupby(stages[:-1]):
        length = len(list(run))
        texts.append(f"{stage}|" if length == 1 else f"({stage}|)*{length}")
    return "".join(texts) + f"{stages[-1]}L"


def _layers(count: int) -> str:
    return "t" * count if count <= _LONGEST_PLAIN else f"t*{count}"


Flag = tuple[str, ...]
"""A flag and its values."""

OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
"""Our optimizers and Megatron-LM's names. Its `adam` decouples weight decay, as AdamW does."""

DTYPES = {"fp32": (), "bf16": ("--bf16",), "fp16": ("--fp16",)}
"""Our dtypes and the flag of each."""

CP_COMM_TYPES = {"ring": "p2p", "all_to_all": "a2a"}

OWN_ORDER, MAPPED_ORDER = "tp-cp-dp-pp", "tp-cp-pp-dp"
"""Megatron-LM's default order of ranks, and that with `--use-tp-pp-dp-mapping`."""


def megatron_lm_flags(plan: Plan) -> tuple[Flag, ...]:
    """The flags of `plan`: model, batch, precision, optimizer and parallelism. Raises ConfigError, with
    the key of the plan file, for a field that has no flag."""
    return flags_with_states(plan, TARGET, _state_flags(plan.best.strategy, plan.job))


def flags_with_states(plan: Plan, target: str, states: Iterable[Flag]) -> tuple[Flag, ...]:
    """The flags of `plan` for a target of Megatron-LM, whose flags for sharded states are `states`. Raises
    ConfigError as `megatron_lm_flags`."""
    strategy = plan.best.strategy
    model = megatron_model(plan.model, seq_len=plan.job.seq_len)
    check_strategy(plan, model, target)
    return (
        *model_flags(model),
        *_job_flags(plan),
        *_division_flags(strategy, plan),
        *states,
        *option_flags(plan, target),
        *_recompute_flags(strategy),
    )


def _division_flags(strategy: Strategy, plan: Plan) -> Iterator[Flag]:
    """The flags that divide the model over ranks."""
    yield from _degree_flags(strategy, has_experts=plan.model.experts is not None)
    yield from _pipeline_flags(strategy, plan.model.layers)


def strategy_settings(plan: Plan) -> dict[str, str]:
    """The flags of the plan's strategy with their values, also where it cannot be exported."""
    return settings_with_states(plan, TARGET, _state_flags(plan.best.strategy, plan.job))


def settings_with_states(plan: Plan, target: str, states: Iterable[Flag]) -> dict[str, str]:
    """The same for a target of Megatron-LM, with these flags for sharded states. Further flags of
    recomputation are values of the first; where all layers are recomputed, they do not depend on the
    stages."""
    strategy = plan.best.strategy
    micro = "--micro-batch-size", str(strategy.micro_batch_size)
    recompute = tuple(word for flag in _recompute_flags(strategy) for word in flag)
    if strategy.recompute == "full" and strategy.recompute_layers >= max(
        stage_layers(strategy, plan.model.layers)
    ):
        recompute = (*recompute[:2], "--recompute-method", "uniform", "--recompute-num-layers", "1")
    division = (*_gradient_flags(plan.job), *_division_flags(strategy, plan))
    flags = (micro, *division, *states, *option_flags(plan, target), recompute)
    return {flag[0]: " ".join(flag[1:]) for flag in flags if flag}


def _overlapping(plan: Plan) -> set[str]:
    """The options that act on the plan and are on."""
    acting = acting_options(TARGET, plan.job.profile, plan.best.strategy)
    return {name for name, value in acting.items() if value == "on"}


def option_flags(plan: Plan, target: str) -> Iterator[Flag]:
    """The flags of the target's options that act on the strategy, but those for gradients, which every job
    has."""
    acting = acting_options(target, plan.job.profile, plan.best.strategy)
    for name, value in target_of(target).values_of(acting).items():
        if name != "grad_reduce_dtype":
            yield from (tuple(flag.split()) for flag in value.flags)


def check_strategy(plan: Plan, model: MegatronModel, name: str) -> None:
    """Raise ConfigError for the first field of the strategy or the job that cannot be exported to the target
    of this name: the capability file excludes it, or Megatron-LM does not accept it with the other fields."""
    strategy = plan.best.strategy
    target = check_plan(plan, name)
    for field, allowed in (*_stage_refusals(plan), *_rank_refusals(strategy, model)):
        raise refusal(target, f"best.strategy.{field}", getattr(strategy, field), allowed)


Refused = tuple[str, str]
"""A field of the strategy, and the values that can be exported."""


def _stage_refusals(plan: Plan) -> Iterator[Refused]:
    """Refusals about chunks, micro-batches, recomputation and attention."""
    strategy = plan.best.strategy
    is_interleaved = strategy.schedule == "interleaved_1f1b"
    if is_interleaved and (strategy.pp < 2 or strategy.vpp < 2):
        yield "schedule", "1f1b unless pp and vpp are both above 1"
    if not is_interleaved and strategy.vpp > 1:
        yield "vpp", "1 with 1f1b"
    if (strategy.recompute == "full") != (strategy.recompute_layers > 0):
        yield "recompute_layers", "above 0 only with full recomputation"
    if strategy.recompute_modules and strategy.recompute != "selective":
        yield "recompute_modules", "none unless recompute is selective"
    if strategy.cp > 1 and not has_fused_attention(plan.cluster, plan.job.profile):
        yield "cp", "1 without fused attention"
    rows = strategy.dp * strategy.micro_batch_size
    if plan.job.global_batch_size % rows:
        yield "micro_batch_size", "a divisor of the batch of a replica"
    elif strategy.vpp > 1 and plan.job.global_batch_size // rows % strategy.pp:
        yield "vpp", "1, because the micro-batches are not a multiple of pp"


def _rank_refusals(strategy: Strategy, model: MegatronModel) -> Iterator[Refused]:
    """Refusals about groups of ranks, which Megatron-LM's parser does not check."""
    experts = strategy.etp * strategy.ep
    if model.experts is None:
        if experts > 1:
            yield "ep", "1 without experts (and etp 1)"
    elif strategy.tp * strategy.cp * strategy.dp % experts or model.experts.num_experts % strategy.ep:
        yield "ep", "a divisor of the experts; etp * ep a divisor of tp * cp * dp"
    if strategy.sequence_parallel and strategy.tp == 1:
        yield "sequence_parallel", "false with tp 1"
    if strategy.dp * strategy.cp % strategy.optim_shard:
        yield "optim_shard", f"a divisor of dp * cp, {strategy.dp * strategy.cp}"


def effective_order(strategy: Strategy, order: str) -> tuple[str, ...]:
    """The axes of `order` with more than one rank; the others change no rank."""
    return tuple(axis for axis in order.split("-") if getattr(strategy, axis) > 1)


def is_mapped(strategy: Strategy) -> bool:
    """Whether only `--use-tp-pp-dp-mapping` gives the order of ranks."""
    own = effective_order(strategy, strategy.axis_order)
    return own != effective_order(strategy, OWN_ORDER) and own == effective_order(strategy, MAPPED_ORDER)


def _job_flags(plan: Plan) -> Iterator[Flag]:
    job = plan.job
    yield "--seq-length", str(job.seq_len)
    yield "--micro-batch-size", str(plan.best.strategy.micro_batch_size)
    yield "--global-batch-size", str(job.global_batch_size)
    if DTYPES[job.dtype]:
        yield DTYPES[job.dtype]
    yield from _gradient_flags(job)
    yield "--optimizer", OPTIMIZERS[job.optimizer]
    if not has_fused_attention(plan.cluster, plan.job.profile):
        yield "--attention-backend", "unfused"


def _gradient_flags(job: Job) -> Iterator[Flag]:
    """The dtype in which gradients are accumulated and reduced."""
    if job.dtype != "fp32" and job.profile.reduce_in_fp32:
        yield ("--accumulate-allreduce-grads-in-fp32",)
    if job.dtype == "bf16" and not job.profile.reduce_in_fp32:
        yield ("--grad-reduce-in-bf16",)


def _degree_flags(strategy: Strategy, *, has_experts: bool) -> Iterator[Flag]:
    yield "--tensor-model-parallel-size", str(strategy.tp)
    if strategy.sequence_parallel:
        yield ("--sequence-parallel",)
    yield "--context-parallel-size", str(strategy.cp)
    yield "--cp-comm-type", CP_COMM_TYPES[strategy.cp_kind]
    yield "--pipeline-model-parallel-size", str(strategy.pp)
    if has_experts:
        yield "--expert-model-parallel-size", str(strategy.ep)
        yield "--expert-tensor-parallel-size", str(strategy.etp)
    if is_mapped(strategy):
        yield ("--use-tp-pp-dp-mapping",)


def stage_layers(strategy: Strategy, layers: int) -> tuple[int, ...]:
    """Decoder layers of the stages, in model order."""
    ends = strategy.first_stage_layers, strategy.last_stage_layers
    return layer_counts(layers, strategy.pp * strategy.vpp, *ends)


def _pipeline_flags(strategy: Strategy, layers: int) -> Iterator[Flag]:
    counts = stage_layers(strategy, layers)
    if len(set(counts)) > 1:
        yield "--pipeline-model-parallel-layout", layout_text(counts)
    elif strategy.vpp > 1:
        yield "--num-virtual-stages-per-pipeline-rank", str(strategy.vpp)


def _state_flags(strategy: Strategy, job: Job) -> Iterator[Flag]:
    """Flags for sharding of optimizer states and for communication overlap."""
    is_offloaded = strategy.offload == "optimizer"
    is_distributed = strategy.optim_shard > 1 or is_offloaded or job.profile.moment_bytes < FP32_BYTES
    if is_distributed:
        yield ("--use-distributed-optimizer",)
    instances = strategy.dp * strategy.cp // strategy.optim_shard
    if is_distributed and instances > 1:
        yield "--num-distributed-optimizer-instances", str(instances)
    if is_offloaded:
        yield ("--optimizer-cpu-offload",)
        yield ("--use-precision-aware-optimizer",)
    reduces, gathers = overlaps(strategy, job)
    if reduces:
        yield ("--overlap-grad-reduce",)
    if gathers:
        yield ("--overlap-param-gather",)


def overlaps(strategy: Strategy, job: Job) -> tuple[bool, bool]:
    """Whether the predicted step time assumes overlapped gradient reduction, and overlapped parameter
    all-gather."""
    if strategy.optim_shard > 1:
        return job.profile.state_overlap > 0, job.profile.state_overlap > 0
    return job.profile.data_overlap > 0, False


def _recompute_flags(strategy: Strategy) -> Iterator[Flag]:
    if strategy.recompute == "selective":
        yield "--recompute-granularity", "selective"
        yield "--recompute-modules", *names_of(strategy.recompute_modules)
    if strategy.recompute == "full":
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "block"
        yield "--recompute-num-layers", str(strategy.recompute_layers)


ARGS = "megatron-lm.args"
"""The file with one flag and its values a line."""

SCRIPT, ARRAY = "megatron-lm.sh", "megatron_lm_args"
"""The file with a bash array, and the name of the array."""

NAMES = "megatron-lm.yaml"
"""The file with the values by the names of Megatron-LM's arguments."""

PRETRAINING = "pretrain_gpt.py"
"""Megatron-LM's program, in its repository."""

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""The environment variable whose value Megatron-LM checks."""


def megatron_lm_files(plan: Plan) -> dict[str, str]:
    """The texts of the files, by name. Raises ConfigError, with the key of the plan file, for a value that
    cannot be exported."""
    return files_of_flags(plan, TARGET, megatron_lm_flags(plan), tuple(_environment(plan)))


def files_of_flags(plan: Plan, target: str, flags: Sequence[Flag], setup: Sequence[str]) -> dict[str, str]:
    """The texts of the files with these flags for a target of Megatron-LM, by name; `setup` are the first
    lines of the script."""
    head = [f"# {line}".rstrip() for line in head_lines(plan, target_of(target))]
    unknown = [f"# {' '.join(map(shlex.quote, flag))}" for flag in _unknown(plan)]
    own = [" ".join(map(shlex.quote, flag)) for flag in flags]
    start = [f"# {line}" for line in start_lines(plan, Program(words=_words(PRETRAINING)))]
    lines = [*head, "#", *_UNKNOWN_NOTE, *unknown, "", *own]
    script = [
        "#!/usr/bin/env bash",
        *head,
        "",
        *setup,
        f"{ARRAY}=(",
        *(f"  {line}" for line in own),
        ")",
        "",
        *_UNKNOWN_NOTE,
        f"# {ARRAY}+=(",
        *(f"#   {line.removeprefix('# ')}" for line in unknown),
        "# )",
        "",
        *start,
    ]
    return {
        ARGS: "\n".join(lines) + "\n",
        SCRIPT: "\n".join(script) + "\n",
        NAMES: "\n".join((*head, "#", *_NAMES_NOTE, ""))
        + yaml.safe_dump(named_values(flags), sort_keys=False),
        megatron_bridge.FILE: megatron_bridge.bridge_text(plan, head, flags),
    }


_NAMES_NOTE = [
    "# The same settings by the names that Megatron-LM prints at the start of a run: for people.",
    "# Start a run with the flags: --yaml-cfg of Megatron-LM 0.19.2 fails for every file.",
]

_NEGATED = {"--no-bias-gelu-fusion": "bias_gelu_fusion", "--disable-bias-linear": "add_bias_linear"}
"""Switches that turn an argument off, and its name."""

_ARGUMENTS = {**_NEGATED, "--norm-epsilon": "layernorm_epsilon"}
"""Arguments whose names are not those of their flags."""


def named_values(flags: Sequence[Flag]) -> dict[str, bool | int | float | str | list[str]]:
    """The values of flags by the names of Megatron-LM's arguments."""
    found: dict[str, bool | int | float | str | list[str]] = {}
    for flag, *values in flags:
        name = _ARGUMENTS.get(flag, flag.removeprefix("--").replace("-", "_"))
        if flag in megatron_bridge.LISTS:
            found[name] = list(values)
        else:
            found[name] = _named_value(" ".join(values)) if values else flag not in _NEGATED
    return found


def _named_value(text: str) -> int | float | str:
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text


def _environment(plan: Plan) -> Iterator[str]:
    """Variables that Megatron-LM needs. Devices that the catalogue does not have may be older ones."""
    architectures = {architecture_of(device) for device in plan.cluster.classes.values()}
    if "ep_overlap" in _overlapping(plan):
        yield "# Overlapped communication of experts needs several connections."
        yield f"export {CONNECTIONS}=32"
        yield ""
    elif not architectures <= {"blackwell", "blackwell-ultra"}:
        yield "# Required before Blackwell with tensor or context parallelism."
        yield f"export {CONNECTIONS}=1"
        yield ""


_UNKNOWN_NOTE = [
    "# The plan does not have these settings. The values are placeholders: set your own, and remove the #.",
    "# With another tokenizer, leave --padded-vocab-size as it is: the plan assumes this vocabulary.",
]


def _unknown(plan: Plan) -> Iterator[Flag]:
    """Settings of a run that a plan does not have."""
    yield "--train-iters", "100000"
    yield "--lr", "3e-4"
    yield "--min-lr", "3e-5"
    yield "--lr-decay-style", "cosine"
    yield "--lr-warmup-iters", "2000"
    yield "--weight-decay", "0.1"
    yield "--adam-beta2", "0.95"
    yield ("--mock-data",)
    if plan.model.experts is not None:
        found = decoder_config(plan.model).get("router_aux_loss_coef")
        yield "--moe-aux-loss-coeff", str(0.01 if found is None else found)


def program(plan: Plan, folder: str, script: str) -> Program:
    """How Megatron-LM starts with the flags in `folder`."""
    return Program(words=_words(script), setup=(f". {shlex.quote(path_in(folder, SCRIPT))}",))


def _words(script: str) -> tuple[str, ...]:
    return "--", script, Verbatim(f'"${{{ARRAY}[@]}}"')
