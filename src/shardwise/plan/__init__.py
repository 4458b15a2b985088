"""The plan: records of an answer, and the file that holds one."""

from shardwise.plan.document import (
    certificate_document,
    document_hash,
    layout_document,
    plan_document,
    result_document,
)
from shardwise.plan.for_trace import DECISION, TRACE_POLICIES, TraceChoice
from shardwise.plan.goodput import GOODPUT_FROM_DEVICES, Goodput, Reliability, goodput_of
from shardwise.plan.graph_plan import (
    GraphJob,
    GraphPlan,
    graph_plan_document,
    is_graph_plan,
    read_graph_plan,
    write_graph_plan,
)
from shardwise.plan.hashes import plan_hash
from shardwise.plan.kinds import AnyPlan, read_any_plan
from shardwise.plan.plan import SCHEMA, VERSION, Plan, RunnerUp, plan_of
from shardwise.plan.price import usd_per_billion_tokens, usd_per_step
from shardwise.plan.read import check_ledger, read_plan, write_plan
from shardwise.plan.record import (
    NO_IDLE_DEVICES,
    OBJECTIVES,
    PROVEN_GAP,
    Answer,
    Certificate,
    FrontierPoint,
    Idle,
    Layout,
    MixedFigures,
    PeakMemory,
    Pipeline,
    Result,
    SearchedPart,
    Stage,
    StagePart,
    StrategyFrontier,
    Value,
)
from shardwise.plan.store import Files, SystemFiles, check_writable, write_file
from shardwise.plan.uneven import UnevenAnswer, UnevenResult
from shardwise.plan.uneven_plan import (
    UnevenFile,
    is_uneven_plan,
    read_uneven_plan,
    uneven_plan_document,
    write_uneven_plan,
)
from shardwise.plan.verify import GRAPH_PLAN_SCHEMA, UNEVEN_PLAN_SCHEMA

__all__ = [
    "DECISION",
    "GOODPUT_FROM_DEVICES",
    "GRAPH_PLAN_SCHEMA",
    "NO_IDLE_DEVICES",
    "OBJECTIVES",
    "PROVEN_GAP",
    "SCHEMA",
    "TRACE_POLICIES",
    "UNEVEN_PLAN_SCHEMA",
    "VERSION",
    "Answer",
    "AnyPlan",
    "Certificate",
    "Files",
    "FrontierPoint",
    "Goodput",
    "GraphJob",
    "GraphPlan",
    "Idle",
    "Layout",
    "MixedFigures",
    "PeakMemory",
    "Pipeline",
    "Plan",
    "Reliability",
    "Result",
    "RunnerUp",
    "SearchedPart",
    "Stage",
    "StagePart",
    "StrategyFrontier",
    "SystemFiles",
    "TraceChoice",
    "UnevenAnswer",
    "UnevenFile",
    "UnevenResult",
    "Value",
    "certificate_document",
    "check_ledger",
    "check_writable",
    "document_hash",
    "goodput_of",
    "graph_plan_document",
    "is_graph_plan",
    "is_uneven_plan",
    "layout_document",
    "plan_document",
    "plan_hash",
    "plan_of",
    "read_any_plan",
    "read_graph_plan",
    "read_plan",
    "read_uneven_plan",
    "result_document",
    "uneven_plan_document",
    "usd_per_billion_tokens",
    "usd_per_step",
    "write_file",
    "write_graph_plan",
    "write_plan",
    "write_uneven_plan",
]
