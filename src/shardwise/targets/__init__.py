"""Exports plans to other training software, and reads back how that software understands them."""

from shardwise.targets.child import ReaderRequest, Reading, read_by_megatron_lm
from shardwise.targets.export import EXPORTS, Exported, export_of, exported, reader_request
from shardwise.targets.megatron_lm import megatron_lm_flags
from shardwise.targets.megatron_lm_differences import ReadBack, ReadBackDifference, differences, read_back
from shardwise.targets.megatron_lm_files import WRITTEN_BY
from shardwise.targets.megatron_lm_model import FAMILIES, check_model
from shardwise.targets.pipeline_layout import layout_text

__all__ = [
    "EXPORTS",
    "FAMILIES",
    "WRITTEN_BY",
    "Exported",
    "ReadBack",
    "ReadBackDifference",
    "ReaderRequest",
    "Reading",
    "check_model",
    "differences",
    "export_of",
    "exported",
    "layout_text",
    "megatron_lm_flags",
    "read_back",
    "read_by_megatron_lm",
    "reader_request",
]
