"""Uneven plans of mixed clusters: pipelines whose stages, layers and shares suit the devices they lie on."""

from shardwise.search.uneven.again import PricedAgain, priced_again
from shardwise.search.uneven.answer import UNEVEN_GAP, FoundUneven, best_uneven, plan_pools
from shardwise.search.uneven.drive import UnevenOutcome, search_uneven
from shardwise.search.uneven.in_place import relaid
from shardwise.search.uneven.laid_out import UnevenPipeline, UnevenPlan
from shardwise.search.uneven.lying import spread_stages
from shardwise.search.uneven.proportional import proportional_split
from shardwise.search.uneven.restated import restated
from shardwise.search.uneven.space import Block, Limits, UnevenSpace
from shardwise.search.uneven.stage_record import RecordPrices

__all__ = [
    "UNEVEN_GAP",
    "Block",
    "FoundUneven",
    "Limits",
    "PricedAgain",
    "RecordPrices",
    "UnevenOutcome",
    "UnevenPipeline",
    "UnevenPlan",
    "UnevenSpace",
    "best_uneven",
    "plan_pools",
    "priced_again",
    "proportional_split",
    "relaid",
    "restated",
    "search_uneven",
    "spread_stages",
]
