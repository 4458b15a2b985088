"""Uneven plans from text, without a search."""

from __future__ import annotations

import re

from tests.runtime.plans import BATCH, SEQ_LEN, tiny

from shardwise.cluster import load_cluster
from shardwise.plans import Certificate, Layout, MixedFigures, PeakMemory, Pipeline, Plan, Result, Stage
from shardwise.strategy import Job

_STAGE = re.compile(r"(?:tp(\d+))?(?:dp(\d+))?l(\d+)(selective|full)?")


def make_uneven(
    text: str,
    *,
    model: str = "llama",
    micro_batch_size: int = 1,
    optimizer: str = "adamw",
    dtype: str = "fp32",
    devices: int | None = None,
) -> Plan:
    """The plan that `text` names, on as many cpu devices as it needs (or on `devices`); not estimated.

    Pipelines are joined by `+`. Each begins with its number of micro-batches and continues with its stages:
    `3 l1 tp2l3full` has 3 micro-batches, a stage of one layer, and one of three layers on two tensor ranks
    that recomputes them.
    """
    pipelines = []
    first = 0
    for part in text.split("+"):
        share, *words = part.split()
        stages = []
        for word in words:
            match = _STAGE.fullmatch(word)
            assert match is not None, word
            tp, dp, layers = int(match[1] or 1), int(match[2] or 1), int(match[3])
            stages.append(
                Stage(
                    devices=tp * dp, ranks=f"{first}-{first + tp * dp - 1}", device_class="cpu", tp=tp, dp=dp,
                    layers=(layers,), share=int(share) * micro_batch_size / BATCH,
                    recompute=match[4] or "none",
                )
            )  # fmt: skip
            first += tp * dp
        pipelines.append(
            Pipeline(
                stages=tuple(stages), micro_batch_size=micro_batch_size, microbatches=int(share),
                rows=int(share) * micro_batch_size, makespan_s=1.0,
            )
        )  # fmt: skip
    devices = devices or first
    nothing = PeakMemory(allocated=0.0, reserved=0.0, device=0.0, capacity=1.0)
    return Plan(
        network=tiny(model),
        cluster=load_cluster(f"1x{devices}xcpu"),
        job=Job(seq_len=SEQ_LEN, global_batch_size=BATCH, dtype=dtype, optimizer=optimizer),  # type: ignore[arg-type]
        best=Result(
            fields=None, layout=Layout(pipelines=tuple(pipelines)), step_time_s=1.0, band_s=(0.5, 2.0),
            tokens_per_s_per_device=1.0, mfu=0.1, mfu_full_attention=0.1, peak_memory=nothing,
            memory_band_bytes=(0.0, 0.0), fits_probability=1.0,
            breakdown={"busiest_stage": 1.0}, memory={}, tightest_rank=0, pools=("cpu",), is_alike=False,
            evaluator="none",
        ),
        certificate=Certificate(
            space="uneven", enumerated=0, rejected={}, cut_by_bound=0, simulated=0, best_s=1.0,
            lower_bound_s=1.0, gap=0.0, search_s=0.0, search_cpu_s=0.0,
        ),
        mixed=MixedFigures(
            uniform_step_time_s=None, fastest_class_step_time_s=None, fastest_class=None, idle=()
        ),
    )  # fmt: skip
