"""The search: takes a `Question` and returns the best plan with a certificate of its lower bound."""

from shardwise.search.answer import (
    evaluate,
    plan,
    plan_of_strategy,
    ranks_of_nodes,
)
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
    Alternative,
    Axis,
    Binding,
    Explanation,
    PlanComparison,
    ResultDifference,
    explained,
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
    predicted_result,
    relayout,
    spread_stages,
)
from shardwise.search.neighbours import Change, Changes, changes_of, fits, predicted
from shardwise.search.overview import PlanOverview, computing_s, overview_of
from shardwise.search.plan_timeline import (
    TRAFFIC_PARTS,
    PipelineTimeline,
    pipeline_trace,
    plan_timelines,
    plan_trace,
    predicted_again,
)
from shardwise.search.question import SPACES, Question, best_dtype, default_job, shortest_text
from shardwise.search.recommended import recommended
from shardwise.search.result import band_of
from shardwise.search.space import SpaceChoice, read_space
from shardwise.search.step_times import (
    PipelineFigures,
    StepFigures,
    pipeline_figures,
    pipelines_s,
    spare_microbatches,
    step_figures_of,
    step_figures_over,
    worst_durations,
)
from shardwise.search.strategy_curves import StrategyCurve, StrategyCurves, answer_at
from shardwise.search.targets import objective_value, parts_within, plan_for, restricted_to

__all__ = [
    "MODES",
    "MOST_UNITED",
    "SPACES",
    "TRAFFIC_PARTS",
    "UNEVEN_GAP",
    "Alternative",
    "Axis",
    "Binding",
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
    "ResultDifference",
    "SearchClock",
    "SpaceChoice",
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
    "is_mixed",
    "objective_value",
    "overview_of",
    "parts_within",
    "pipeline_figures",
    "pipeline_trace",
    "pipelines_s",
    "plan",
    "plan_for",
    "plan_mixed_cluster",
    "plan_of_strategy",
    "plan_timelines",
    "plan_trace",
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
    "step_figures_of",
    "step_figures_over",
    "uses_any_part",
    "what_if",
    "why_not",
    "worst_durations",
]
