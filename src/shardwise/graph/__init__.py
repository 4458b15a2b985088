"""What is trained, operator by operator: graphs of typed operators and the ways to lay them on a mesh."""

from shardwise.graph.check import check_graph
from shardwise.graph.customary import data_parallel, megatron
from shardwise.graph.file import GRAPH_SCHEMA, parse_graph
from shardwise.graph.kinds import KINDS, Attribute, OperatorKind
from shardwise.graph.labels import block_labels, operator_label
from shardwise.graph.layout import allows, divided_dims, local_sizes
from shardwise.graph.load import GRAPH_FILES, GRAPH_PREFIX, graph_names, load_graph, shipped_graphs
from shardwise.graph.loans import SkipTensors, blocks_joined_by_skips, skip_tensors_of, tensor_shapes
from shardwise.graph.microbatches import loss_weight, samples_dim
from shardwise.graph.named import MODES, BlockLayout, GraphLayout, Mode
from shardwise.graph.operator import check_op, rules_of, saved_of, work_of
from shardwise.graph.placement import (
    PARTIAL,
    REPLICATE,
    REPLICATE_SHARD_STATES,
    REPLICATE_SUM_GRAD,
    Placement,
    placement_text,
    placements_of,
    shard,
)
from shardwise.graph.record import Block, Operand, OpGraph, OpNode, Parameter
from shardwise.graph.rule import CollectiveCall, ShardingRule
from shardwise.graph.scale import scaled
from shardwise.graph.sizes import SizeGrowth
from shardwise.graph.staged import StagedLayout, staged_from_record, staged_record
from shardwise.graph.told import layout_from_record, layout_record
from shardwise.graph.totals import forward_flop, parameter_count, step_flop
from shardwise.graph.work import KernelWork, Moved, SavedTensors
from shardwise.graph.write import graph_text

__all__ = [
    "GRAPH_FILES",
    "GRAPH_PREFIX",
    "GRAPH_SCHEMA",
    "KINDS",
    "MODES",
    "PARTIAL",
    "REPLICATE",
    "REPLICATE_SHARD_STATES",
    "REPLICATE_SUM_GRAD",
    "Attribute",
    "Block",
    "BlockLayout",
    "CollectiveCall",
    "GraphLayout",
    "KernelWork",
    "Mode",
    "Moved",
    "OpGraph",
    "OpNode",
    "Operand",
    "OperatorKind",
    "Parameter",
    "Placement",
    "SavedTensors",
    "ShardingRule",
    "SizeGrowth",
    "SkipTensors",
    "StagedLayout",
    "allows",
    "block_labels",
    "blocks_joined_by_skips",
    "check_graph",
    "check_op",
    "data_parallel",
    "divided_dims",
    "forward_flop",
    "graph_names",
    "graph_text",
    "layout_from_record",
    "layout_record",
    "load_graph",
    "local_sizes",
    "loss_weight",
    "megatron",
    "operator_label",
    "parameter_count",
    "parse_graph",
    "placement_text",
    "placements_of",
    "rules_of",
    "samples_dim",
    "saved_of",
    "scaled",
    "shard",
    "shipped_graphs",
    "skip_tensors_of",
    "staged_from_record",
    "staged_record",
    "step_flop",
    "tensor_shapes",
    "work_of",
]
