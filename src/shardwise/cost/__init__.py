"""The cost model: equations bound to a model, a cluster and a job. It estimates one strategy or many.

`costs_of_all_stages` and `peaks_of` estimate tables of uniform strategies, `stage_costs` single stages of
uneven plans, `layout_chain` all layouts of an operator graph, `estimate_layout` one of them. `bounds` has
lower bounds of subproblems of the search. See docs/concepts/cost-model.md.
"""

from shardwise.cost.activations import ACTIVATIONS
from shardwise.cost.bounds.capacity import LayerCapacity, capacity_of, memory_capacity
from shardwise.cost.bounds.memory import (
    host_lower_bound_bytes,
    lower_bound_bytes,
    schedules_lower_bound_bytes,
)
from shardwise.cost.bounds.subproblem import (
    NO_TRAFFIC,
    Grids,
    LayerCounts,
    Split,
    Subproblem,
    Totals,
    Traffic,
    grids_of,
    known_split,
    layer_counts_of,
    most_sharded,
    subproblem_of,
    traffic_table,
)
from shardwise.cost.bounds.time import (
    CriticalPaths,
    any_micro_batch_compute_bound_s,
    any_micro_batch_lower_bound_s,
    end_s,
    grid_lower_bound_s,
    grid_work_lower_bound_s,
    lower_bound_s,
)
from shardwise.cost.collectives import alike_grids
from shardwise.cost.estimate import GridCostTable, TableCosts, costs_of_all_stages, costs_of_peak_stages
from shardwise.cost.layers import PhaseTimes
from shardwise.cost.layouts import (
    Charge,
    LayoutEstimate,
    LayoutSpace,
    entry_shapes,
    estimate_layout,
    estimate_stage,
    layout_chain,
    relaxed_layouts,
    stage_layouts,
)
from shardwise.cost.layouts.chain import StageTransfer, stage_transfer_of
from shardwise.cost.memory import MEMORY_PARTS, host_bytes, outside_schedule_s, peaks_of, rank_bytes
from shardwise.cost.problem import Index, Problem, bind, distinct_rows, has_fused_attention, limits_of
from shardwise.cost.recipe import FP32_BYTES, RECIPES, dtype_spelled, find_recipe
from shardwise.cost.single_stage import (
    NodeSlot,
    StageBytes,
    StageCosts,
    StageKinds,
    StageShape,
    hop_s,
    stage_bytes,
    stage_costs,
    stage_costs_by_slot,
    stage_end,
    stage_kinds_of,
)
from shardwise.cost.stacking import ProblemShapes
from shardwise.cost.stage_formulas import StageEnds, with_sends
from shardwise.cost.times import StageTimes, stage_times, step_end
from shardwise.cost.traffic import (
    EndParts,
    cluster_without_slowdown,
    end_parts,
    host_waits_s,
    offload_traffic_s,
    offloaded_optimizer_s,
    single_stage_traffic,
    traffic_of,
    without_overlap,
    without_slowdown,
)
from shardwise.cost.training import StepCounts, Training

__all__ = [
    "ACTIVATIONS",
    "FP32_BYTES",
    "MEMORY_PARTS",
    "NO_TRAFFIC",
    "RECIPES",
    "Charge",
    "CriticalPaths",
    "EndParts",
    "GridCostTable",
    "Grids",
    "Index",
    "LayerCapacity",
    "LayerCounts",
    "LayoutEstimate",
    "LayoutSpace",
    "NodeSlot",
    "PhaseTimes",
    "Problem",
    "ProblemShapes",
    "Split",
    "StageBytes",
    "StageCosts",
    "StageEnds",
    "StageKinds",
    "StageShape",
    "StageTimes",
    "StageTransfer",
    "StepCounts",
    "Subproblem",
    "TableCosts",
    "Totals",
    "Traffic",
    "Training",
    "alike_grids",
    "any_micro_batch_compute_bound_s",
    "any_micro_batch_lower_bound_s",
    "bind",
    "capacity_of",
    "cluster_without_slowdown",
    "costs_of_all_stages",
    "costs_of_peak_stages",
    "distinct_rows",
    "dtype_spelled",
    "end_parts",
    "end_s",
    "entry_shapes",
    "estimate_layout",
    "estimate_stage",
    "find_recipe",
    "grid_lower_bound_s",
    "grid_work_lower_bound_s",
    "grids_of",
    "has_fused_attention",
    "hop_s",
    "host_bytes",
    "host_lower_bound_bytes",
    "host_waits_s",
    "known_split",
    "layer_counts_of",
    "layout_chain",
    "limits_of",
    "lower_bound_bytes",
    "lower_bound_s",
    "memory_capacity",
    "most_sharded",
    "offload_traffic_s",
    "offloaded_optimizer_s",
    "outside_schedule_s",
    "peaks_of",
    "rank_bytes",
    "relaxed_layouts",
    "schedules_lower_bound_bytes",
    "single_stage_traffic",
    "stage_bytes",
    "stage_costs",
    "stage_costs_by_slot",
    "stage_end",
    "stage_kinds_of",
    "stage_layouts",
    "stage_times",
    "stage_transfer_of",
    "step_end",
    "subproblem_of",
    "traffic_of",
    "traffic_table",
    "with_sends",
    "without_overlap",
    "without_slowdown",
]
