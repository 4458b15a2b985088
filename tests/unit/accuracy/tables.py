"""Tables of measured rows, made from one plain row with some changed cells."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from shardwise.accuracy.case import Case, CaseBuilder
from shardwise.accuracy.rows import Row, parse_rows

PLAIN = {
    "id": "mine-001",
    "level": "complete",
    "source": "a table of mine",
    "year": "2022",
    "model_name": "GPT-1.7B",
    "arch": "dense",
    "layers": "24",
    "hidden": "2304",
    "ffn": "9216",
    "heads": "24",
    "vocab": "51200",
    "seq_len": "2048",
    "gpu": "A100-80GB",
    "gpus": "16",
    "gpus_per_node": "8",
    "interconnect": "NVLink; 8x200 Gb/s InfiniBand",
    "framework": "Megatron-LM",
    "dtype": "fp16",
    "tp": "2",
    "pp": "2",
    "dp": "4",
    "recompute": "full",
    "attention": "",
    "grad_dtype": "",
    "micro_batch": "4",
    "global_batch": "64",
    "step_time_s": "2.5",
    "tokens_per_s_per_gpu": "",
    "tflops_per_gpu": "",
    "tflops_convention": "",
    "mfu_pct": "",
    "hfu_pct": "",
    "peak_mem_gib": "",
    "peak_rank": "",
    "mean_sample_len": "",
    "vpp": "",
    "cp": "",
    "ep": "",
    "experts": "",
    "topk": "",
    "kv_heads": "",
    "zero_stage": "",
    "schedule": "1f1b",
    "stage_layers": "",
    "optimizer": "",
    "notes": "",
}
"""A row with every cell filled: 2 x 2 x 4 A100, 4 micro-batches per replica."""


def text_of(*changes: dict[str, str]) -> str:
    """A CSV with one plain row for each of `changes`."""
    file = io.StringIO()
    writer = csv.DictWriter(file, PLAIN, lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {**PLAIN, "id": f"mine-{number:03}", **change} for number, change in enumerate(changes, 1)
    )
    return file.getvalue()


def rows_of(*changes: dict[str, str]) -> list[Row]:
    """Plain rows with these changes."""
    return parse_rows(text_of(*changes))[0]


def row_of(**changes: str) -> Row:
    """One plain row with these cells changed."""
    return rows_of(changes)[0]


def case_of(**changes: str) -> Case:
    """The case of one plain row with these cells changed."""
    return CaseBuilder().of(row_of(**changes))


def file_of(folder: Path, text: str) -> str:
    """The path of a file with `text`."""
    path = folder / "rows.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)
