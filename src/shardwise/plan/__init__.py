"""The plan: records of an answer, and the file that holds one."""

from shardwise.plan.document import certificate_document, document_hash, plan_document, result_document
from shardwise.plan.goodput import GOODPUT_FROM_DEVICES, Goodput, Reliability, goodput_of
from shardwise.plan.plan import SCHEMA, VERSION, Plan, RunnerUp, plan_of
from shardwise.plan.price import usd_per_billion_tokens
from shardwise.plan.read import check_ledger, read_plan, write_plan
from shardwise.plan.record import Answer, Certificate, Layout, PeakMemory, Pipeline, Result, Stage
from shardwise.plan.store import Files, SystemFiles, check_writable, write_file

__all__ = [
    "GOODPUT_FROM_DEVICES",
    "SCHEMA",
    "VERSION",
    "Answer",
    "Certificate",
    "Files",
    "Goodput",
    "Layout",
    "PeakMemory",
    "Pipeline",
    "Plan",
    "Reliability",
    "Result",
    "RunnerUp",
    "Stage",
    "SystemFiles",
    "certificate_document",
    "check_ledger",
    "check_writable",
    "document_hash",
    "goodput_of",
    "plan_document",
    "plan_of",
    "read_plan",
    "result_document",
    "usd_per_billion_tokens",
    "write_file",
    "write_plan",
]
