"""From strategies to step time and memory, by the checker's own code (docs/concepts/cost-model.md, sections 1
to 15).

`evaluate` estimates many strategies as columns: step time and bytes. `estimate_strategy` estimates one with
its breakdown. `mfu`, `model_flop_per_token` and `tokens_per_s_per_device` are the derived figures of section
15.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from shardwise_verify.collectives import (
    Fabric,
    Groups,
    all_gather_s,
    fabric_of,
    groups_of,
    hop_senders,
    hop_tier,
    send_s,
)
from shardwise_verify.layers import (
    AMOUNTS,
    PHASES,
    LocalSizes,
    attended_tokens,
    block_amounts,
    block_shapes,
    keys_of_query,
    tied_head_elements,
)
from shardwise_verify.memory import Memory, memory_of
from shardwise_verify.problem import Figures, active_elements
from shardwise_verify.records import (
    AttentionOperator,
    LayerOperator,
    LayersRecord,
    LookupOperator,
    MatmulOperator,
    RoutingRecord,
    ScanOperator,
)
from shardwise_verify.schedules import Table, makespan_s, table_of
from shardwise_verify.sharding import (
    Shardings,
    gathering_s,
    reduced_and_gathered,
    reduction_s,
    shardings_of,
    traffic_amounts,
)
from shardwise_verify.stages import (
    amounts_of_stages,
    kinds_of_stages,
    layers_of_stages,
    on_ranks,
    with_tied_copy,
)
from shardwise_verify.strategy_rows import (
    Column,
    Family,
    StrategyRows,
    distinct,
    families,
    first_largest,
    rows_of,
    strides,
)
from shardwise_verify.times import (
    OptimizerStep,
    RankElements,
    StageSeconds,
    optimizer_step,
    stage_times,
    times_of_row,
)

Floats = NDArray[np.float64]

GRID_FIELDS = (
    "tp", "cp", "pp", "dp", "cp_kind", "etp", "ep", "sequence_parallel", "micro_batch_size", "axis_order",
    "recompute_modules",
)  # fmt: skip
"""Fields on which the amounts of blocks depend: rows that agree in these are estimated once."""

VALUES_PER_BATCH = 1 << 22
"""Values (stages x rows x blocks) estimated together, so that the columns stay within some hundred MiB."""

STAGE_NAMES = (*AMOUNTS, *(f"{phase}_traffic_s" for phase in PHASES))


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCosts:
    """Costs of the rows of one family, except the makespan of their table."""

    family: Family
    layers: tuple[Column, ...]
    stages: list[dict[str, Column]]
    times: list[StageSeconds]
    hops_s: tuple[Column, ...]
    end: OptimizerStep
    memory: Memory

    def step_time_s(self, figures: Figures) -> Column:
        """Seconds per step, on the schedule's own table."""
        makespan = makespan_s(table_of(self.family), self.times, self.hops_s, np.maximum)
        return makespan + self.end.total_s + figures.profile.host_step_s


def family_costs(
    figures: Figures, family: Family, blocks: list[dict[str, Column]] | None = None
) -> FamilyCosts:
    """The costs of every row of a family. `blocks` are the results of `sharded_blocks_of` on its rows,
    where known."""
    model, rows = figures.model, family.rows
    fabric = fabric_of(figures.cluster, figures.efficiency, figures.backend)
    groups = groups_of(rows, figures.cluster)
    shardings = _shardings_of(figures, rows, groups)
    if blocks is None:
        blocks = sharded_blocks_of(figures, rows)
    layers = layers_of_stages(len(model.layer_kinds), family)
    kinds = kinds_of_stages(model.layer_kinds, len(model.kinds), layers)
    stages = amounts_of_stages(blocks, kinds, STAGE_NAMES)
    copy = blocks[-2]["dense"] * model.embedding_copies
    dense = with_tied_copy(family, stages, "dense", copy)
    expert = [stage["expert"] for stage in stages]
    is_joint = model.tied_embeddings and family.stages == 1  # both ends share one table, counted in one block
    everything = (
        dense,
        expert,
        [stage["dense_blocks"] - is_joint for stage in stages],
        [stage["expert_blocks"] for stage in stages],
    )
    copy = blocks[-2]["trained_dense"] * model.embedding_copies
    trained_dense = with_tied_copy(family, stages, "trained_dense", copy)
    trained_expert = [stage["trained_expert"] for stage in stages]
    is_joint = is_joint and bool(np.all([np.all(block["trained_blocks"] > 0) for block in blocks[-2:]]))
    trained = (trained_dense, trained_expert, [stage["trained_blocks"] - is_joint for stage in stages])
    reduced, gathered = reduced_and_gathered(
        figures, *(tuple(np.array(each) for each in part) for part in (everything, trained))
    )
    reductions_s = reduction_s(figures, fabric, shardings, reduced)
    gatherings_s = gathering_s(figures, fabric, shardings, gathered)
    sent_s = hops_s(family, rank_hops_s(figures, fabric, groups, rows, family.pp))
    share = figures.profile.pipeline_overlap
    # The last stage sends no activations, the first no gradients.
    nothing = np.zeros(len(rows))
    waits_s = [nothing, *((1 - share) * hop_s for hop_s in sent_s), nothing]
    times = [
        stage_times(
            figures,
            family,
            stages[number],
            layers[number],
            reductions_s[number],
            gatherings_s[number],
            (waits_s[number + 1], waits_s[number]),
        )
        for number in range(family.stages)
    ]
    of_ranks = RankElements(
        *(tuple(on_ranks(family, each)) for each in (dense, expert, trained_dense, trained_expert))
    )
    copies = on_ranks(family, [stage["copied_bytes"] for stage in stages])
    return FamilyCosts(
        family=family,
        layers=layers,
        stages=stages,
        times=times,
        hops_s=tuple(share * hop_s for hop_s in sent_s),
        end=optimizer_step(figures, fabric, groups, family, shardings, blocks, of_ranks),
        memory=memory_of(
            figures,
            family,
            shardings,
            blocks,
            stages,
            layers,
            of_ranks,
            copies,
            (trained_dense, trained_expert),
        ),
    )


def blocks_of(figures: Figures, fabric: Fabric, rows: StrategyRows) -> list[dict[str, Column]]:
    """The amounts of each kind of layer, of the embedding and of the head, on every row."""
    first, of = distinct([getattr(rows, name) for name in GRID_FIELDS])
    grids = rows.take(first)
    groups = groups_of(grids, figures.cluster)
    return [
        {name: amount[of] for name, amount in block_amounts(figures, fabric, groups, grids, shape).items()}
        for shape in block_shapes(figures.model)
    ]


def sharded_blocks_of(figures: Figures, rows: StrategyRows) -> list[dict[str, Column]]:
    """The same with the communication of sharding, which is the same for all schedules."""
    fabric = fabric_of(figures.cluster, figures.efficiency, figures.backend)
    shardings = _shardings_of(figures, rows, groups_of(rows, figures.cluster))
    return [
        block | traffic_amounts(figures, fabric, shardings, block)
        for block in blocks_of(figures, fabric, rows)
    ]


def _shardings_of(figures: Figures, rows: StrategyRows, groups: Groups) -> Shardings:
    degrees = (rows.param_shard, rows.grad_shard, rows.optim_shard)
    return shardings_of(
        degrees,
        groups,
        has_experts=figures.model.experts is not None,
        by_instance=figures.profile.shards_experts_by_instance,
        once=figures.profile.whole_in_pipelines & (rows.pp > 1),
    )


def rank_hops_s(
    figures: Figures, fabric: Fabric, groups: Groups, rows: StrategyRows, pp: int
) -> list[Column]:
    """Seconds of one message from each of `pp` pipeline ranks to the next; the last entry is from the
    first to the last rank. Each tensor rank sends its part; without sequence parallelism the receivers
    all-gather it. 0 without a pipeline."""
    nbytes = LocalSizes(figures=figures, rows=rows, experts=None).hidden_bytes("tokens")
    if pp == 1:
        return [0.0 * nbytes]
    joined = np.where(
        rows.sequence_parallel | (rows.tp == 1), 0.0, all_gather_s(fabric, nbytes, groups.tensor)
    )
    pairs = [*((rank, rank + 1) for rank in range(pp - 1)), (0, pp - 1)]
    tiers = [hop_tier(groups, *pair) for pair in pairs]
    return [send_s(fabric, nbytes / rows.tp, tier, hop_senders(groups, tier)) + joined for tier in tiers]


def hops_s(family: Family, of_ranks: Sequence[Column]) -> tuple[Column, ...]:
    """Seconds of a message from each stage to the next. Where a V turns, both stages are on one rank and
    the message is free."""
    pp, stages = family.pp, range(family.stages - 1)
    if not family.is_v:
        return tuple(of_ranks[stage % pp] for stage in stages)
    one_way = of_ranks[: pp - 1]
    return (*one_way, 0.0 * of_ranks[0], *one_way[::-1])


class Evaluation(NamedTuple):
    """Of every row: seconds per step, bytes of the tightest rank on its device, bytes on its host."""

    step_time_s: Floats
    device_bytes: Floats
    host_bytes: Floats


def evaluate(figures: Figures, rows: StrategyRows) -> Evaluation:
    """The figures that rank strategies, for legal rows of any schedules."""
    found = Evaluation(*(np.empty(len(rows)) for _ in Evaluation._fields))
    blocks = len(figures.model.kinds) + 2
    most = max(VALUES_PER_BATCH // (blocks * len(STAGE_NAMES)), 1)
    for start in range(0, len(rows), most):
        of_part = Evaluation(*(column[start : start + most] for column in found))
        _evaluate(figures, rows.take(slice(start, start + most)), of_part)
    return found


def _evaluate(figures: Figures, rows: StrategyRows, found: Evaluation) -> None:
    """Write the figures of all rows into `found`. Blocks are estimated for all schedules together."""
    blocks = sharded_blocks_of(figures, rows)
    for places, family in families(rows, figures.job.global_batch_size):
        length = max(VALUES_PER_BATCH // (family.stages * (len(blocks) + 16)), 1)
        for part, some in family.slices(length):
            own = [{name: amount[places[part]] for name, amount in block.items()} for block in blocks]
            costs = family_costs(figures, some, own)
            found.step_time_s[places[part]] = costs.step_time_s(figures)
            found.device_bytes[places[part]] = costs.memory.device_bytes
            found.host_bytes[places[part]] = costs.memory.host_bytes


def fitting(figures: Figures, found: Evaluation) -> tuple[Column, Column]:
    """Which rows fit on their devices, and which on their hosts."""
    return found.device_bytes <= figures.usable_bytes, found.host_bytes <= figures.host_capacity_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyEstimate:
    """One strategy: its step time on a table, breakdown in seconds, memory in bytes."""

    step_time_s: float
    breakdown: Mapping[str, float]
    memory: Mapping[str, float]
    device_bytes: float
    host_bytes: float
    tightest_rank: int


def estimate_strategy(figures: Figures, strategy: object, table: Table | None = None) -> StrategyEstimate:
    """The estimate of the strategy on `table` (default: its schedule's own). Raises DeadlockError where
    the table deadlocks."""
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
    """Step time by part: the actions of the busiest rank, the end of the step, and the remainder (bubble)."""
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
    """The parts of all actions of the busiest rank, and their sum."""
    family = costs.family
    kinds = "FIW" if family.splits_backward else "FB"

    def of_microbatch_s(rank: int) -> float:
        return sum(float(times[stage].action_s(kind)) for stage in family.stages_of(rank) for kind in kinds)

    busiest = int(first_largest([of_microbatch_s(rank) for rank in range(family.pp)]))
    own, m = family.stages_of(busiest), family.microbatches
    busy_s = m * of_microbatch_s(busiest)
    if family.schedule == "dualpipe_v":
        # Where both halves of a backward are one action, the host starts one action fewer.
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
    """Tokens per second of step time and device."""
    job = figures.job
    return job.global_batch_size * job.seq_len / step_time_s / figures.cluster.devices


def mfu(figures: Figures, step_time_s: float, *, full_attention: bool = False) -> float:
    """Model FLOP utilisation: model FLOP/s over the dense peak of the matmul dtype."""
    flop = model_flop_per_token(figures, full_attention=full_attention)
    peak = figures.device.peak_flop_per_s[figures.recipe.matmul]
    return flop * tokens_per_s_per_device(figures, step_time_s) / peak


def model_flop_per_token(figures: Figures, *, full_attention: bool = False) -> float:
    """FLOP of a token, forward and backward, without recomputation: 6 per active element of a matmul
    weight, 4 per frozen one, plus 3 times the forward attention."""
    model = figures.model
    elements = tied_head_elements(model.head)
    trained = elements if all(operator.trained for operator in model.head) else 0
    attention = 0.0
    for operator, experts in _multiplied(figures):
        elements += active_elements(operator, experts)
        trained += active_elements(operator, experts) if operator.trained else 0
        if isinstance(operator, ScanOperator):
            attention += operator.flop
        if isinstance(operator, AttentionOperator):
            causal = operator.causal and not full_attention
            tokens = attended_tokens(figures.job)
            width = min(operator.window or tokens, tokens)
            keys = keys_of_query(tokens, operator.window, causal=True) if causal else float(width)
            attention += 2 * operator.heads.size * (operator.qk_dim + operator.v_dim) * keys
    images = _flop_of_images(model) / figures.job.seq_len
    return 4 * elements + 2 * trained + 3 * attention + images


def _multiplied(figures: Figures) -> Iterator[tuple[LayerOperator, RoutingRecord | None]]:
    """Every operator that multiplies: of all layers and the head, and of the embedding all but lookup
    tables."""
    model = figures.model
    for kind in model.layer_kinds:
        for operator in model.kinds[kind].operators:
            yield operator, model.kinds[kind].experts
    for operator in model.head:
        yield operator, model.head_experts
    for operator in model.embedding:
        if not isinstance(operator, LookupOperator) and operator.rows not in ("patches", "images"):
            yield operator, None


def _flop_of_images(model: LayersRecord) -> float:
    """Flop for the images of a sequence: products and attention forward, and backward where there is one."""
    total = 0.0
    for operator in model.embedding:
        rows = {"patches": model.patches, "images": model.image_tokens}.get(operator.rows, 0)
        rows *= operator.repeats
        back = 0 if operator.forward_only else 1
        if isinstance(operator, MatmulOperator):
            passes = 1 + back + (1 if back and operator.trained else 0)
            total += rows * passes * 2 * operator.k.size * operator.n.size
        elif isinstance(operator, AttentionOperator) and operator.block is not None:
            dims = operator.qk_dim + operator.v_dim
            total += rows * (1 + 2 * back) * 2 * operator.heads.size * dims * operator.block
    return total
