"""Uneven plans of mixed clusters: pipelines whose stages, layers and shares suit the devices they lie on."""

from shardwise.search.uneven.again import RecordPrediction, predict_record
from shardwise.search.uneven.answer import UNEVEN_GAP, UnevenSearchResult, best_uneven, plan_mixed_cluster
from shardwise.search.uneven.drive import UnevenOutcome, search_uneven
from shardwise.search.uneven.in_place import relayout
from shardwise.search.uneven.laid_out import UnevenPipeline, UnevenPlan
from shardwise.search.uneven.lying import spread_stages
from shardwise.search.uneven.proportional import proportional_split
from shardwise.search.uneven.restated import predicted_result
from shardwise.search.uneven.space import UnevenLimits, UnevenSpace, UnevenSubproblem
from shardwise.search.uneven.stage_record import RecordCostModel

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
    "UnevenSubproblem",
    "best_uneven",
    "plan_mixed_cluster",
    "predict_record",
    "predicted_result",
    "proportional_split",
    "relayout",
    "search_uneven",
    "spread_stages",
]
