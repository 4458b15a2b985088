"""Equations bound to a model, a cluster and a job: prices of strategies, one or many."""

from shardwise.cost.abreast import Shapes
from shardwise.cost.block_bytes import family_least_bytes, least_bytes, least_host_bytes
from shardwise.cost.block_time import (
    end_s,
    grid_least_s,
    grid_work_s,
    least_compute_of_any_micro_batch_s,
    least_of_any_micro_batch_s,
)
from shardwise.cost.blocks import Block, Lie, Split, block_of, known_split, lie_of, most_sharded
from shardwise.cost.distinct import Index, distinct_rows
from shardwise.cost.fabric import alike_grids
from shardwise.cost.handing import Handing, handing_of
from shardwise.cost.keeping import ACTIVATIONS
from shardwise.cost.layers import GRID_FIELDS
from shardwise.cost.layouts import (
    LaidOut,
    border_shapes,
    handed_elements,
    layout_chain,
    open_layouts,
    stage_layouts,
)
from shardwise.cost.lone_stage import (
    Kinds,
    Seat,
    StagePrice,
    StageShape,
    hop_s,
    kinds_of,
    seated_prices,
    stage_bytes,
    stage_price,
)
from shardwise.cost.memory import PARTS, RankBytes, host_bytes, peak_bytes, rank_bytes
from shardwise.cost.one_layout import (
    Charge,
    LayoutPrice,
    PipelinePrice,
    price_layout,
    price_pipeline,
    price_stage,
)
from shardwise.cost.parts import Parts
from shardwise.cost.paths import Paths, least_s
from shardwise.cost.peaks import Peaks, around_s, peaks_of
from shardwise.cost.price import (
    GridPrices,
    Nodes,
    Price,
    price_everywhere,
    price_peaks,
    taken,
)
from shardwise.cost.problem import Problem, bind, has_fused_attention, limits_of
from shardwise.cost.recipe import OPTIMIZERS, RECIPES, Recipe, find_recipe
from shardwise.cost.room import Room, memory_room, room_of
from shardwise.cost.times import StageTimes, StepEnd, stage_times, step_end
from shardwise.cost.totals import (
    NO_TRAFFIC,
    Grids,
    Totals,
    Traffic,
    TrafficTable,
    priced_grids,
    totals_of,
    traffic_of,
    traffic_table,
)
from shardwise.cost.training import Training
from shardwise.cost.turns import Turns

__all__ = [
    "ACTIVATIONS",
    "GRID_FIELDS",
    "NO_TRAFFIC",
    "OPTIMIZERS",
    "PARTS",
    "RECIPES",
    "Block",
    "Charge",
    "GridPrices",
    "Grids",
    "Handing",
    "Index",
    "Kinds",
    "LaidOut",
    "LayoutPrice",
    "Lie",
    "Nodes",
    "Parts",
    "Paths",
    "Peaks",
    "PipelinePrice",
    "Price",
    "Problem",
    "RankBytes",
    "Recipe",
    "Room",
    "Seat",
    "Shapes",
    "Split",
    "StagePrice",
    "StageShape",
    "StageTimes",
    "StepEnd",
    "Totals",
    "Traffic",
    "TrafficTable",
    "Training",
    "Turns",
    "alike_grids",
    "around_s",
    "bind",
    "block_of",
    "border_shapes",
    "distinct_rows",
    "end_s",
    "family_least_bytes",
    "find_recipe",
    "grid_least_s",
    "grid_work_s",
    "handed_elements",
    "handing_of",
    "has_fused_attention",
    "hop_s",
    "host_bytes",
    "kinds_of",
    "known_split",
    "layout_chain",
    "least_bytes",
    "least_compute_of_any_micro_batch_s",
    "least_host_bytes",
    "least_of_any_micro_batch_s",
    "least_s",
    "lie_of",
    "limits_of",
    "memory_room",
    "most_sharded",
    "open_layouts",
    "peak_bytes",
    "peaks_of",
    "price_everywhere",
    "price_layout",
    "price_peaks",
    "price_pipeline",
    "price_stage",
    "priced_grids",
    "rank_bytes",
    "room_of",
    "seated_prices",
    "stage_bytes",
    "stage_layouts",
    "stage_price",
    "stage_times",
    "step_end",
    "taken",
    "totals_of",
    "traffic_of",
    "traffic_table",
]
