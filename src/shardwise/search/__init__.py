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
from shardwise.search.clock import Turns
from shardwise.search.curve_parts import MOST_UNITED, PartChoice
from shardwise.search.curves import Curve, CurveSource, Point, Reference
from shardwise.search.drive import Outcome, Progress, Search
from shardwise.search.evaluate import (
    PipelineFigures,
    StepFigures,
    microbatches_more,
    pipeline_figures,
    step_figures,
    step_figures_of,
    step_times_s,
)
from shardwise.search.explain import band_of
from shardwise.search.explanation import Comparison, Explanation, explained, question_of, what_if, why_not
from shardwise.search.goals import Fastest, Found, Goal, Smallest, Tradeoff
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
from shardwise.search.targets import narrowed_for, parts_within, plan_for
from shardwise.search.tracking import Tracked, tracked
from shardwise.search.tree import LedgerBlock
from shardwise.search.uneven import (
    UNEVEN_GAP,
    FoundUneven,
    Limits,
    PricedAgain,
    RecordPrices,
    UnevenOutcome,
    UnevenPipeline,
    UnevenPlan,
    UnevenSpace,
    best_uneven,
    plan_pools,
    priced_again,
    proportional_split,
    relaid,
    restated,
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
    "Comparison",
    "Curve",
    "CurveSource",
    "Explanation",
    "Fastest",
    "Found",
    "FoundUneven",
    "Goal",
    "GraphCurve",
    "GraphCurves",
    "GraphTimeline",
    "LedgerBlock",
    "Limits",
    "MeshChoice",
    "Outcome",
    "PartChoice",
    "PipelineFigures",
    "Point",
    "PricedAgain",
    "Progress",
    "Question",
    "RecordPrices",
    "Reference",
    "Search",
    "Smallest",
    "Space",
    "SpaceChoice",
    "StagedCurve",
    "StagedCurves",
    "StepFigures",
    "StrategyCurve",
    "StrategyCurves",
    "Tracked",
    "Tradeoff",
    "Turns",
    "UnevenOutcome",
    "UnevenPipeline",
    "UnevenPlan",
    "UnevenSpace",
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
    "microbatches_more",
    "narrowed_for",
    "parts_within",
    "pipeline_figures",
    "pipelines_s",
    "plan",
    "plan_for",
    "plan_of_strategy",
    "plan_pools",
    "points_of",
    "priced_again",
    "proportional_split",
    "question_of",
    "ranks_of_nodes",
    "read_space",
    "relaid",
    "restated",
    "search_uneven",
    "shortest_text",
    "smallest",
    "spread_stages",
    "stage_activation_bytes",
    "step_durations",
    "step_figures",
    "step_figures_of",
    "step_figures_over",
    "step_time_s",
    "step_times_s",
    "tracked",
    "uses_any_part",
    "what_if",
    "why_not",
    "worst_durations",
]
