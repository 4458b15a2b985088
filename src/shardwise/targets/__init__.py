"""Export plans to other training software, and read back how that software parses them."""

from shardwise.targets.export import EXPORTS, Exported, export_of, exported, reader_request
from shardwise.targets.megatron_lm import WRITTEN_BY, layout_text, megatron_lm_flags
from shardwise.targets.megatron_lm_model import FAMILIES, check_model
from shardwise.targets.megatron_lm_read_back import (
    ReadBack,
    ReadBackDifference,
    ReaderRequest,
    Reading,
    differences,
    read_back,
    read_by_megatron_lm,
)

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
