"""Export plans to other training software, and read back how that software parses them."""

from shardwise.targets.export import EXPORTS, Exported, export_of, exported, reader_request
from shardwise.targets.megatron_lm import WRITTEN_BY
from shardwise.targets.megatron_lm_model import check_model
from shardwise.targets.megatron_lm_read_back import ReadBack, read_back, read_by_megatron_lm

__all__ = [
    "EXPORTS",
    "WRITTEN_BY",
    "Exported",
    "ReadBack",
    "check_model",
    "export_of",
    "exported",
    "read_back",
    "read_by_megatron_lm",
    "reader_request",
]
