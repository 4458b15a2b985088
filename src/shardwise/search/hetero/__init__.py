"""Search of uneven plans on mixed clusters: pipelines whose stages, layers and shares fit their devices."""

from shardwise.search.hetero.answer import (
    UNEVEN_GAP,
    UnevenSearchResult,
    best_uneven,
    plan_mixed_cluster,
    plan_uneven,
)
from shardwise.search.hetero.branch_and_bound import UnevenOutcome, UnevenPipeline, UnevenPlan, search_uneven
from shardwise.search.hetero.placement import spread_stages
from shardwise.search.hetero.proportional import proportional_split
from shardwise.search.hetero.record_costs import (
    RecordCostModel,
    RecordPrediction,
    predict_record,
    predicted_result,
)
from shardwise.search.hetero.relayout import relayout
from shardwise.search.hetero.space import UnevenLimits, UnevenSpace
from shardwise.search.hetero.step_parts import uneven_parts

__all__ = [
    "UNEVEN_GAP",
    "RecordCostModel",
    "RecordPrediction",
    "UnevenLimits",
    "UnevenOutcome",
    "UnevenPipeline",
    "UnevenPlan",
    "UnevenSearchResult",
    "UnevenSpace",
    "best_uneven",
    "plan_mixed_cluster",
    "plan_uneven",
    "predict_record",
    "predicted_result",
    "proportional_split",
    "relayout",
    "search_uneven",
    "spread_stages",
    "uneven_parts",
]
