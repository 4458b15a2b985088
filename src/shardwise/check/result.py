"""Everything that a plan says of its best strategy, found again (docs/concepts/cost-model.md, section 15)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardwise.check.durations import StageSeconds, times_of_row
from shardwise.check.figures import Figures
from shardwise.check.layer import tied_head_elements
from shardwise.check.operators import keys_of_query
from shardwise.check.parameters import active_elements
from shardwise.check.price import FamilyCosts, family_costs
from shardwise.check.rows import families, rows_of, strides
from shardwise.check.schedules import Table, table_of
from shardwise.check.timing import makespan_s
from shardwise.model import Experts
from shardwise.operators import Attention, Lookup, Operator
from shardwise.strategy import Strategy
from shardwise.ties import first_largest


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEstimate:
    """One strategy: its step time on a table, breakdown in seconds, memory in bytes."""

    step_time_s: float
    breakdown: Mapping[str, float]
    memory: Mapping[str, float]
    device_bytes: float
    host_bytes: float
    tightest_rank: int


def estimate_strategy(figures: Figures, strategy: Strategy, table: Table | None = None) -> StrategyEstimate:
    """The strategy on `table` (default: its schedule's own). StuckError where the table cannot run."""
    ((_, family),) = families(rows_of([strategy]), figures.job.global_batch_size)
    costs = family_costs(figures, family)
    table = table_of(family) if table is None else table
    times = times_of_row(costs.times, 0)
    hops_s = [float(hop[0]) for hop in costs.hops_s]
    end_s = float(costs.end.total_s[0]) + figures.profile.host_step_s
    step_time_s = makespan_s(table, times, hops_s, max) + end_s
    memory = costs.memory
    rank, parts = memory.tightest(0)
    return StrategyEstimate(
        step_time_s=step_time_s,
        breakdown=_breakdown(figures, costs, table, step_time_s),
        memory=parts,
        device_bytes=float(memory.device_bytes[0]),
        host_bytes=float(memory.host_bytes[0]),
        tightest_rank=rank * int(strides(family.rows)["pp"][0]),
    )


def _breakdown(figures: Figures, costs: FamilyCosts, table: Table, step_time_s: float) -> dict[str, float]:
    """Where the step time goes: the parts of the busiest rank, the end of the step, what is left."""
    times = times_of_row(costs.times, 0)
    parts, busy_s = _busy_parts(figures, costs, times, table)
    ends = {
        "gradient_norm": float(costs.end.norm_s[0]),
        "tied_weights": float(costs.end.tied_s[0]),
        "optimizer": float(costs.end.optimizer_s[0]),
        "host_step": figures.profile.host_step_s,
    }
    outside_s = step_time_s - busy_s - sum(ends.values())
    gathering_s = min(times[0].gather_s, max(outside_s, 0.0))
    reduction_s = min(times[0].reduce_s, max(outside_s - gathering_s, 0.0))
    return {
        **parts,
        **ends,
        "parameter_gathering": gathering_s,
        "gradient_reduction": reduction_s,
        "pipeline_bubble": outside_s - gathering_s - reduction_s,
    }


def _busy_parts(
    figures: Figures, costs: FamilyCosts, times: Sequence[StageSeconds], table: Table
) -> tuple[dict[str, float], float]:
    """The parts of all actions of the rank that works longest, and their sum."""
    family = costs.family
    kinds = "FIW" if family.splits_backward else "FB"

    def of_microbatch_s(rank: int) -> float:
        return sum(float(times[stage].action_s(kind)) for stage in family.stages_of(rank) for kind in kinds)

    busiest = int(first_largest([of_microbatch_s(rank) for rank in range(family.pp)]))
    own, m = family.stages_of(busiest), family.microbatches
    busy_s = m * of_microbatch_s(busiest)
    if family.schedule == "dualpipe_v":
        # Where both halves of a backward are one action, the host starts one action less.
        whole = sum(kind == "B" for _, kind, _ in table[busiest])
        busy_s -= whole * figures.profile.host_action_s

    def amount_s(name: str) -> float:
        return m * sum(float(costs.stages[stage][name][0]) for stage in own)

    parts = {
        "matmul": amount_s("matmul_s"),
        "attention": amount_s("attention_s"),
        "memory_bound": amount_s("memory_bound_s"),
        "host_waits": amount_s("host_s"),
        "recompute": m * sum(times[stage].recompute_s for stage in own),
        "tensor_communication": amount_s("tensor_s"),
        "context_communication": amount_s("context_s"),
        "expert_communication": amount_s("expert_s"),
        "shard_communication": m * sum(times[stage].traffic_s for stage in own),
        "offload": m * sum(times[stage].offload_s for stage in own),
    }
    return {**parts, "host_actions": busy_s - sum(parts.values())}, busy_s


def tokens_per_s_per_device(figures: Figures, step_time_s: float) -> float:
    """Tokens of a step over its seconds, for each device."""
    job = figures.job
    return job.global_batch_size * job.seq_len / step_time_s / figures.cluster.devices


def mfu(figures: Figures, step_time_s: float, *, full_attention: bool = False) -> float:
    """Model flop per second over the dense peak of the matmul dtype."""
    flop = model_flop_per_token(figures, full_attention=full_attention)
    peak = figures.device.peak_flop_per_s[figures.recipe.matmul]
    return flop * tokens_per_s_per_device(figures, step_time_s) / peak


def model_flop_per_token(figures: Figures, *, full_attention: bool = False) -> float:
    """Flop of a token forward and backward, without recomputation: 6 per active element that is multiplied
    with, and 3 times the forward attention."""
    model = figures.model
    elements = tied_head_elements(model.head)
    attention = 0.0
    for operator, experts in _trained(figures):
        elements += active_elements(operator, experts)
        if isinstance(operator, Attention):
            causal = operator.causal and not full_attention
            width = min(operator.window or figures.job.seq_len, figures.job.seq_len)
            keys = (
                keys_of_query(figures.job.seq_len, operator.window, causal=True) if causal else float(width)
            )
            attention += 2 * operator.heads.size * (operator.qk_dim + operator.v_dim) * keys
    return 6 * elements + 3 * attention


def _trained(figures: Figures) -> Iterator[tuple[Operator, Experts | None]]:
    """Every operator that multiplies: of all layers and the head, and of the embedding what is no table."""
    model = figures.model
    for kind in model.pattern:
        for operator in model.kinds[kind].operators:
            yield operator, model.kinds[kind].experts
    for operator in model.head:
        yield operator, model.head_experts
    for operator in model.embedding:
        if not isinstance(operator, Lookup):
            yield operator, None
