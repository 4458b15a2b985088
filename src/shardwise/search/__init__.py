"""The search: takes a `Question` and returns the best plan with a certificate of its lower bound."""

from shardwise.search.answer import (
    evaluate,
    plan,
    plan_of_strategy,
    ranks_of_nodes,
)
from shardwise.search.best_alternatives import explained
from shardwise.search.bnb.incumbent import Fastest
from shardwise.search.bnb.ledger import LedgerEntry
from shardwise.search.bnb.solver import BranchAndBound
from shardwise.search.clock import SearchClock, WorkLimit
from shardwise.search.cluster_parts import is_mixed
from shardwise.search.curve_parts import MOST_UNITED, MeshChoice, PartChoice
from shardwise.search.curves import (
    MODES,
    Curve,
    CurveSource,
    Point,
    Reference,
    chosen,
    curves_for,
    points_of,
    smallest,
    uses_any_part,
)
from shardwise.search.explanation import (
    CHANGES,
    Alternative,
    Axis,
    Explanation,
    PlanComparison,
    Relaxation,
    ResultDifference,
    what_if,
    why_not,
)
from shardwise.search.graph_curves import GraphCurve, GraphCurves, StagedCurve, StagedCurves
from shardwise.search.graph_pipeline import estimate_pipeline
from shardwise.search.graph_result import graph_result
from shardwise.search.hetero import (
    UNEVEN_GAP,
    RecordCostModel,
    UnevenSearchResult,
    UnevenSpace,
    best_uneven,
    plan_mixed_cluster,
    plan_uneven,
    predicted_result,
    relayout,
    spread_stages,
)
from shardwise.search.infeasibility import host_memory
from shardwise.search.neighbours import Change, Changes, changes_of, fits, predicted
from shardwise.search.options import over_open_options
from shardwise.search.overview import PlanOverview, computing_s, overview_of
from shardwise.search.plan_frontier import plan_frontier
from shardwise.search.plan_timeline import (
    TRAFFIC_PARTS,
    PipelineTimeline,
    pipeline_trace,
    plan_timelines,
    plan_trace,
    predicted_again,
    stage_memory_of,
    step_parts_of,
)
from shardwise.search.question import SPACES, Question, best_dtype, default_job, shortest_text
from shardwise.search.recommended import recommended
from shardwise.search.result import band_of, masks_samples, memory_by_stage
from shardwise.search.space import SpaceChoice, read_space
from shardwise.search.stage_memory import StageMemory
from shardwise.search.step_times import (
    PipelineFigures,
    StepFigures,
    peaks_of_rank,
    pipeline_figures,
    pipelines_s,
    spare_microbatches,
    step_figures_of,
    step_figures_over,
    worst_durations,
)
from shardwise.search.strategy_curves import StrategyCurve, StrategyCurves, answer_at
from shardwise.search.targets import objective_value, parts_within, plan_for, restricted_to, without_target

__all__ = [
    "CHANGES",
    "MODES",
    "MOST_UNITED",
    "SPACES",
    "TRAFFIC_PARTS",
    "UNEVEN_GAP",
    "Alternative",
    "Axis",
    "BranchAndBound",
    "Change",
    "Changes",
    "Curve",
    "CurveSource",
    "Explanation",
    "Fastest",
    "GraphCurve",
    "GraphCurves",
    "LedgerEntry",
    "MeshChoice",
    "PartChoice",
    "PipelineFigures",
    "PipelineTimeline",
    "PlanComparison",
    "PlanOverview",
    "Point",
    "Question",
    "RecordCostModel",
    "Reference",
    "Relaxation",
    "ResultDifference",
    "SearchClock",
    "SpaceChoice",
    "StageMemory",
    "StagedCurve",
    "StagedCurves",
    "StepFigures",
    "StrategyCurve",
    "StrategyCurves",
    "UnevenSearchResult",
    "UnevenSpace",
    "WorkLimit",
    "answer_at",
    "band_of",
    "best_dtype",
    "best_uneven",
    "changes_of",
    "chosen",
    "computing_s",
    "curves_for",
    "default_job",
    "estimate_pipeline",
    "evaluate",
    "explained",
    "fits",
    "graph_result",
    "host_memory",
    "is_mixed",
    "masks_samples",
    "memory_by_stage",
    "objective_value",
    "over_open_options",
    "overview_of",
    "parts_within",
    "peaks_of_rank",
    "pipeline_figures",
    "pipeline_trace",
    "pipelines_s",
    "plan",
    "plan_for",
    "plan_frontier",
    "plan_mixed_cluster",
    "plan_of_strategy",
    "plan_timelines",
    "plan_trace",
    "plan_uneven",
    "points_of",
    "predicted",
    "predicted_again",
    "predicted_result",
    "ranks_of_nodes",
    "read_space",
    "recommended",
    "relayout",
    "restricted_to",
    "shortest_text",
    "smallest",
    "spare_microbatches",
    "spread_stages",
    "stage_memory_of",
    "step_figures_of",
    "step_figures_over",
    "step_parts_of",
    "uses_any_part",
    "what_if",
    "why_not",
    "without_target",
    "worst_durations",
]
