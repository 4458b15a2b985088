"""A uniform plan as flags of Megatron-LM 0.19 (`megatron/training/arguments.py`).

A field that no flag says is refused by its name. So is what Megatron-LM accepts though it cannot train it.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardwise.plan import Plan
from shardwise.strategy import Job, Strategy, layer_counts
from shardwise.targets.megatron_lm_model import (
    MegatronModel,
    megatron_model,
    model_flags,
    refusal,
)
from shardwise.targets.pipeline_layout import layout_text

Flag = tuple[str, ...]
"""A flag and its values."""

OPTIMIZERS = {"adamw": "adam", "sgd": "sgd"}
"""Our optimizers, and Megatron-LM's names. Its `adam` decouples weight decay, as AdamW does."""

DTYPES = {"fp32": (), "bf16": ("--bf16",), "fp16": ("--fp16",)}
"""Our dtypes, and the flag of each."""

CP_COMM_TYPES = {"ring": "p2p", "all_to_all": "a2a"}

OWN_ORDER, MAPPED_ORDER = "tp-cp-dp-pp", "tp-cp-pp-dp"
"""The order of ranks that Megatron-LM has by default, and with `--use-tp-pp-dp-mapping`."""


def megatron_lm_flags(plan: Plan) -> tuple[Flag, ...]:
    """The flags that say `plan`: model, batch, precision, optimizer and parallelism. ConfigError, by the key
    of the plan file, where they cannot."""
    strategy = plan.best.strategy
    model = megatron_model(plan.model, seq_len=plan.job.seq_len)
    check_strategy(plan, model)
    return (
        *model_flags(model),
        *_job_flags(plan),
        *_degree_flags(strategy, has_experts=model.experts is not None),
        *_pipeline_flags(strategy, model.num_layers),
        *_state_flags(strategy, plan.job),
        *_recompute_flags(strategy),
    )


def check_strategy(plan: Plan, model: MegatronModel) -> None:
    """ConfigError for the first field of the strategy or the job that no flag says."""
    for key, found, allowed in (
        *_job_refusals(plan.job),
        *_schedule_refusals(plan.best.strategy),
        *_rank_refusals(plan.best.strategy, model),
        *_state_refusals(plan, model),
        *_sequence_refusals(plan, model),
    ):
        raise refusal(key, found, allowed)


Refused = tuple[str, object, str]
"""The key of a field, its value, and the values that flags say."""


def _key(field: str) -> str:
    return f"best.strategy.{field}"


def _job_refusals(job: Job) -> Iterator[Refused]:
    if job.dtype not in DTYPES:
        yield "job.dtype", job.dtype, ", ".join(DTYPES)
    if job.optimizer not in OPTIMIZERS:
        yield "job.optimizer", job.optimizer, ", ".join(OPTIMIZERS)


def _schedule_refusals(strategy: Strategy) -> Iterator[Refused]:
    if strategy.schedule not in ("1f1b", "interleaved_1f1b"):
        yield _key("schedule"), strategy.schedule, "1f1b, interleaved_1f1b"
    is_interleaved = strategy.schedule == "interleaved_1f1b"
    if is_interleaved and (strategy.pp < 2 or strategy.vpp < 2):
        yield _key("schedule"), strategy.schedule, "1f1b without several chunks on each of several ranks"
    if not is_interleaved and strategy.vpp > 1:
        yield _key("vpp"), strategy.vpp, "1 with 1f1b"
    if strategy.recompute not in ("none", "full"):
        yield _key("recompute"), strategy.recompute, "none, full"
    if (strategy.recompute == "full") != (strategy.recompute_layers > 0):
        yield (
            _key("recompute_layers"),
            strategy.recompute_layers,
            "above 0 with full recomputation alone",
        )


def effective_order(strategy: Strategy, order: str) -> tuple[str, ...]:
    """The axes of `order` that have several ranks: others lie anywhere."""
    return tuple(axis for axis in order.split("-") if getattr(strategy, axis) > 1)


def is_mapped(strategy: Strategy) -> bool:
    """Whether the order of ranks is that of `--use-tp-pp-dp-mapping` alone."""
    own = effective_order(strategy, strategy.axis_order)
    return own != effective_order(strategy, OWN_ORDER) and own == effective_order(strategy, MAPPED_ORDER)


def _rank_refusals(strategy: Strategy, model: MegatronModel) -> Iterator[Refused]:
    own = effective_order(strategy, strategy.axis_order)
    if own != effective_order(strategy, OWN_ORDER) and not is_mapped(strategy):
        yield _key("axis_order"), strategy.axis_order, f"{OWN_ORDER}, {MAPPED_ORDER}"
    ranks = strategy.tp * strategy.cp * strategy.dp
    experts = strategy.etp * strategy.ep
    if model.experts is None:
        if experts > 1:
            yield _key("ep"), strategy.ep, "1 without experts, and etp 1"
        if is_mapped(strategy) and strategy.cp > 1:
            yield _key("axis_order"), strategy.axis_order, f"{OWN_ORDER} with cp above 1"
    else:
        if ranks % experts or model.experts.num_experts % strategy.ep:
            yield _key("ep"), strategy.ep, "a divisor of the experts; etp * ep a divisor of tp * cp * dp"
        if is_mapped(strategy) and experts != strategy.tp * strategy.cp:
            yield _key("axis_order"), strategy.axis_order, f"{OWN_ORDER}, as etp * ep is not tp * cp"
        if strategy.tp > 1 and not strategy.sequence_parallel:
            yield _key("sequence_parallel"), False, "true with experts and tp above 1"
    if strategy.sequence_parallel and strategy.tp == 1:
        yield _key("sequence_parallel"), True, "false with tp 1"
    if model.padded_vocab_size % strategy.tp:
        yield _key("tp"), strategy.tp, f"a divisor of the vocabulary, {model.padded_vocab_size}"


def _state_refusals(plan: Plan, model: MegatronModel) -> Iterator[Refused]:
    strategy = plan.best.strategy
    for name in ("param_shard", "grad_shard"):
        if (found := getattr(strategy, name)) != 1:
            yield _key(name), found, "1"
    copies = strategy.dp * strategy.cp
    if copies % strategy.optim_shard:
        yield _key("optim_shard"), strategy.optim_shard, f"a divisor of dp * cp, {copies}"
    if model.experts is not None and strategy.optim_shard not in (1, copies):
        yield _key("optim_shard"), strategy.optim_shard, f"1 or dp * cp, {copies}, with experts"
    if strategy.offload not in ("none", "optimizer"):
        yield _key("offload"), strategy.offload, "none, optimizer"
    if strategy.offload == "optimizer":
        if strategy.optim_shard == 1 and copies > 1:
            yield _key("offload"), strategy.offload, "none unless the optimizer states are sharded"
        if plan.job.optimizer != "adamw":
            yield _key("offload"), strategy.offload, f"none with {plan.job.optimizer}"


def _sequence_refusals(plan: Plan, model: MegatronModel) -> Iterator[Refused]:
    """What concerns sequences and micro-batches."""
    strategy, job = plan.best.strategy, plan.job
    if strategy.cp > 1:
        if job.seq_len % (2 * strategy.cp):
            yield _key("cp"), strategy.cp, f"twice cp divides the sequence, {job.seq_len}"
        if model.window is not None and strategy.cp_kind == "ring":
            yield _key("cp_kind"), strategy.cp_kind, "all_to_all with windows of attention"
    rows = strategy.dp * strategy.micro_batch_size
    if job.global_batch_size % rows:
        yield _key("micro_batch_size"), strategy.micro_batch_size, "a share of the batch of a replica"
    elif strategy.vpp > 1 and job.global_batch_size // rows % strategy.pp:
        yield _key("vpp"), strategy.vpp, "1, as the micro-batches are no multiple of pp"
    devices = strategy.tp * strategy.cp * strategy.dp * strategy.pp
    if plan.cluster.devices != devices:
        yield "cluster", f"{plan.cluster.devices} devices", f"{devices}, as tp * cp * dp * pp"


def _job_flags(plan: Plan) -> Iterator[Flag]:
    job = plan.job
    yield "--seq-length", str(job.seq_len)
    yield "--micro-batch-size", str(plan.best.strategy.micro_batch_size)
    yield "--global-batch-size", str(job.global_batch_size)
    if DTYPES[job.dtype]:
        yield DTYPES[job.dtype]
    if job.dtype != "fp32" and job.profile.reduce_in_fp32:
        yield ("--accumulate-allreduce-grads-in-fp32",)
    if job.dtype == "bf16" and not job.profile.reduce_in_fp32:
        yield ("--grad-reduce-in-bf16",)
    yield "--optimizer", OPTIMIZERS[job.optimizer]
    if not has_fused_attention(plan):
        yield "--attention-backend", "unfused"


def has_fused_attention(plan: Plan) -> bool:
    """Whether the step time is that of a fused attention kernel on all devices. Megatron-LM picks one."""
    return all(
        any(name in device.efficiency.attention for name in plan.job.profile.attention)
        for device in plan.cluster.classes.values()
    )


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
    """Decoder layers of the stages, in the order of the layers."""
    ends = strategy.first_stage_layers, strategy.last_stage_layers
    return layer_counts(layers, strategy.pp * strategy.vpp, *ends)


def _pipeline_flags(strategy: Strategy, layers: int) -> Iterator[Flag]:
    counts = stage_layers(strategy, layers)
    if len(set(counts)) > 1:
        yield "--pipeline-model-parallel-layout", layout_text(counts)
    elif strategy.vpp > 1:
        yield "--num-virtual-stages-per-pipeline-rank", str(strategy.vpp)


def _state_flags(strategy: Strategy, job: Job) -> Iterator[Flag]:
    """How optimizer states are sharded, and which communication runs beside computation."""
    is_offloaded = strategy.offload == "optimizer"
    is_distributed = strategy.optim_shard > 1 or is_offloaded
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
    """Whether the step time assumes that gradients are reduced, and parameters gathered, during
    computation."""
    if strategy.optim_shard > 1:
        return job.profile.state_overlap > 0, job.profile.state_overlap > 0
    return job.profile.data_overlap > 0, False


def _recompute_flags(strategy: Strategy) -> Iterator[Flag]:
    if strategy.recompute == "full":
        yield "--recompute-granularity", "full"
        yield "--recompute-method", "block"
        yield "--recompute-num-layers", str(strategy.recompute_layers)
