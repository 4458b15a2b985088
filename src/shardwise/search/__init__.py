"""The search: a question in, the proven best strategy out."""

from shardwise.search.answer import (
    evaluate,
    idle_in,
    plan,
    plan_of_strategy,
    ranks_of_nodes,
    stage_activation_bytes,
    step_durations,
    step_time_s,
)
from shardwise.search.clock import WorkLimit
from shardwise.search.curve_parts import MOST_UNITED, PartChoice
from shardwise.search.curves import Curve, CurveSource, Point, Reference
from shardwise.search.drive import BranchAndBound, Progress, SearchResult
from shardwise.search.evaluate import (
    PipelineFigures,
    StepFigures,
    pipeline_figures,
    spare_microbatches,
    step_figures,
    step_figures_of,
    step_times_s,
)
from shardwise.search.explain import band_of
from shardwise.search.explanation import Explanation, PlanComparison, explained, question_of, what_if, why_not
from shardwise.search.goals import Fastest, Goal, Incumbent, Smallest, Tradeoff
from shardwise.search.graph_curves import GraphCurve, GraphCurves
from shardwise.search.graph_timeline import TRAFFIC_PARTS, GraphTimeline, graph_timeline, graph_trace
from shardwise.search.mesh_choice import MeshChoice
from shardwise.search.mixed import MOST_POOLS, is_mixed
from shardwise.search.modes import MODES, chosen, curves_for, points_of, smallest, uses_any_part
from shardwise.search.pinned import Alternative, Axis, Binding
from shardwise.search.question import SPACES, Question, best_dtype, default_job, shortest_text
from shardwise.search.space import Space
from shardwise.search.space_file import SpaceChoice, read_space
from shardwise.search.stage_curves import StagedCurve, StagedCurves
from shardwise.search.strategy_curves import StrategyCurve, StrategyCurves, answer_at
from shardwise.search.targets import parts_within, plan_for, restricted_to
from shardwise.search.tracking import ParetoSearchResult, pareto_search
from shardwise.search.tree import LedgerEntry
from shardwise.search.uneven import (
    UNEVEN_GAP,
    RecordCostModel,
    RecordPrediction,
    UnevenLimits,
    UnevenOutcome,
    UnevenPipeline,
    UnevenPlan,
    UnevenSearchResult,
    UnevenSpace,
    best_uneven,
    plan_mixed_cluster,
    predict_record,
    predicted_result,
    proportional_split,
    relayout,
    search_uneven,
    spread_stages,
)
from shardwise.search.unlike import pipelines_s, step_figures_over, worst_durations
from shardwise.search.whatif import CHANGES

__all__ = [
    "CHANGES",
    "MODES",
    "MOST_POOLS",
    "MOST_UNITED",
    "SPACES",
    "TRAFFIC_PARTS",
    "UNEVEN_GAP",
    "Alternative",
    "Axis",
    "Binding",
    "BranchAndBound",
    "Curve",
    "CurveSource",
    "Explanation",
    "Fastest",
    "Goal",
    "GraphCurve",
    "GraphCurves",
    "GraphTimeline",
    "Incumbent",
    "LedgerEntry",
    "MeshChoice",
    "ParetoSearchResult",
    "PartChoice",
    "PipelineFigures",
    "PlanComparison",
    "Point",
    "Progress",
    "Question",
    "RecordCostModel",
    "RecordPrediction",
    "Reference",
    "SearchResult",
    "Smallest",
    "Space",
    "SpaceChoice",
    "StagedCurve",
    "StagedCurves",
    "StepFigures",
    "StrategyCurve",
    "StrategyCurves",
    "Tradeoff",
    "UnevenLimits",
    "UnevenOutcome",
    "UnevenPipeline",
    "UnevenPlan",
    "UnevenSearchResult",
    "UnevenSpace",
    "WorkLimit",
    "answer_at",
    "band_of",
    "best_dtype",
    "best_uneven",
    "chosen",
    "curves_for",
    "default_job",
    "evaluate",
    "explained",
    "graph_timeline",
    "graph_trace",
    "idle_in",
    "is_mixed",
    "pareto_search",
    "parts_within",
    "pipeline_figures",
    "pipelines_s",
    "plan",
    "plan_for",
    "plan_mixed_cluster",
    "plan_of_strategy",
    "points_of",
    "predict_record",
    "predicted_result",
    "proportional_split",
    "question_of",
    "ranks_of_nodes",
    "read_space",
    "relayout",
    "restricted_to",
    "search_uneven",
    "shortest_text",
    "smallest",
    "spare_microbatches",
    "spread_stages",
    "stage_activation_bytes",
    "step_durations",
    "step_figures",
    "step_figures_of",
    "step_figures_over",
    "step_time_s",
    "step_times_s",
    "uses_any_part",
    "what_if",
    "why_not",
    "worst_durations",
]
