"""Which plans the shardwise runtime can run, by its capability file
`strategy/data/targets/shardwise.json`."""

from __future__ import annotations

from shardwise.errors import ConfigError
from shardwise.graph import StagedLayout, loss_weight
from shardwise.plans import Plan
from shardwise.strategy import target_of

TARGET = target_of("shardwise")


def check_runnable(plan: Plan) -> None:
    """ConfigError with the first reason why this runtime cannot run `plan`. Of a graph, its operators are not
    checked."""
    {"uniform": _check_uniform, "uneven": _check_uneven, "graph": _check_graph}[plan.kind](plan)


def _check_uniform(plan: Plan) -> None:
    target = TARGET.for_job(plan.model, plan.job)
    for refusal in target.refusals(plan.best.strategy):
        allowed = f"{refusal.allowed}, as in plans of `plan --target {TARGET.name}`"
        raise _refusal(f"best.strategy.{refusal.key}", refusal.found, allowed)
    _check_known(plan, TARGET.dtypes)
    strategy = plan.best.strategy
    is_ring = strategy.cp > 1 and strategy.cp_kind == "ring"
    if is_ring and plan.job.dtype == "fp32" and not TARGET.knows_devices(plan.cluster.classes):
        # PyTorch's flash-attention kernels, which return the log-sum-exp of scores, do not support fp32 on
        # devices.
        raise _refusal("job.dtype", "fp32 with ring attention", "bf16, or cp_kind all_to_all")
    if (
        len(plan.best.layout.pipelines) > 1
        or len({s.device_class for p in plan.best.layout.pipelines for s in p.stages}) > 1
    ):
        raise _refusal("best.layout", "a mixed layout", "one pipeline of equal stages")


def _check_uneven(plan: Plan) -> None:
    """Stages must also form pipelines on the ranks of the cluster."""
    _check_known(plan, TARGET.uneven_dtypes)
    if plan.model.experts is not None:
        raise _refusal("model", "experts", "models without experts")
    best, job = plan.best, plan.job
    sequences = sum(best.microbatches) * best.micro_batch_size
    taken: list[int] = []
    for place, pipeline in enumerate(best.layout.pipelines):
        layers = sum(sum(stage.layers) for stage in pipeline.stages)
        if layers != plan.model.layers:
            raise _refusal(f"best.layout.pipelines.{place}", f"{layers} layers", f"{plan.model.layers}")
        for stage in pipeline.stages:
            if stage.parts and not TARGET.runs_mixed_pool_stages:
                raise _refusal("best.layout", "a stage on two pools", "stages on one pool each")
            ranks = stage.rank_numbers
            taken += ranks
            if len(ranks) != stage.tp * stage.dp:
                raise _refusal("best.layout", f"ranks {stage.ranks}", f"{stage.tp * stage.dp} ranks")
            if best.micro_batch_size % stage.dp or job.seq_len % stage.tp:
                raise _refusal("best.layout", f"tp {stage.tp}, dp {stage.dp}", "equal parts of a micro-batch")
    if sequences != job.global_batch_size:
        raise _refusal("best.microbatches", f"{sequences} sequences", f"{job.global_batch_size}")
    if len(set(taken)) != len(taken) or not set(taken) <= set(range(plan.cluster.devices)):
        raise _refusal("best.layout", "ranks used twice or unknown", f"ranks below {plan.cluster.devices}")


def _check_graph(plan: Plan) -> None:
    for key, found, known in (
        ("job.dtype", plan.job.dtype, TARGET.dtypes),
        ("job.optimizer", plan.job.optimizer, TARGET.optimizers),
    ):
        if found not in known:
            raise _refusal(key, found, ", ".join(known))
    if not TARGET.runs_on(plan.cluster.vendors):
        raise _refusal("cluster", ", ".join(plan.cluster.classes), TARGET.known_devices)
    if isinstance(plan.operators, StagedLayout):
        if shared := plan.operators.shared_parameters(plan.graph):
            raise _refusal("layout.stages", f"{shared[0]} in several stages", "parameters of one stage each")
        loss_weight(plan.graph, plan.microbatches)


def _check_known(plan: Plan, dtypes: tuple[str, ...]) -> None:
    """ConfigError if this runtime does not support the job, the model or the devices."""
    for key, found, known in (
        ("job.dtype", plan.job.dtype, dtypes),
        ("job.optimizer", plan.job.optimizer, TARGET.optimizers),
        ("model", plan.model.family, TARGET.families),
    ):
        if found not in known:
            raise _refusal(key, found, ", ".join(known))
    for part in plan.model.special_parts:
        if part in TARGET.lacks:
            raise _refusal("model", part, "models without it")
    if not TARGET.runs_on(plan.cluster.vendors):
        raise _refusal("cluster", ", ".join(plan.cluster.classes), TARGET.known_devices)


def _refusal(key: str, found: str, allowed: str) -> ConfigError:
    return ConfigError("is not supported by this runtime", key=key, found=found, allowed=allowed)
