"""A single stage costs the same as that stage of a uniform strategy."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from shardwise.cluster import load_cluster
from shardwise.cost import StageShape, bind, hop_s, stage_bytes, stage_costs, stage_kinds_of, with_sends
from shardwise.model import load_model
from shardwise.search import default_job, evaluate
from shardwise.sim import Durations, makespan_s
from shardwise.strategy import RECOMPUTES, complete, even_ends, layer_counts

CASES = [
    # model, cluster, tp, pp, dp within a stage, pipelines, micro-batch, recompute
    ("gpt2", "2x8xA100-80G", 4, 2, 2, 1, 2, "none"),
    ("llama-2-7b", "4x8xA100-80G", 8, 4, 1, 1, 2, "selective"),
    ("llama-2-7b", "4x8xA100-80G", 4, 4, 2, 1, 1, "full"),
    ("gpt2", "4x8xA100-80G", 1, 1, 1, 32, 1, "none"),
    ("gpt2", "1x8xA100-80G", 2, 4, 1, 1, 1, "none"),
    ("opt-350m", "4x8xV100-32G", 2, 1, 1, 16, 2, "selective"),
]


BLOCKING = {"pipeline_overlap": 0.25, "state_overlap": 0.0, "data_overlap": 0.0}
"""Software whose sends block: a send takes a part of its sender's action."""

SOFTWARE: list[dict[str, Any]] = [{}, BLOCKING, {"buffers_all_microbatches": True}]


@pytest.mark.parametrize("software", SOFTWARE)
@pytest.mark.parametrize(("name", "on", "tp", "pp", "dp", "pipelines", "size", "recompute"), CASES)
def test_stages_of_a_uniform_strategy_cost_the_same(
    name: str, on: str, tp: int, pp: int, dp: int, pipelines: int, size: int, recompute: str,
    software: dict[str, Any],
) -> None:  # fmt: skip
    model, cluster = load_model(name), load_cluster(on)
    job = default_job(model, cluster, seq_len=1024, global_batch_size=64)
    job = replace(job, profile=replace(job.profile, **software))
    fields = {"tp": tp, "pp": pp, "dp": dp * pipelines, "micro_batch_size": size, "recompute": recompute}
    strategy = complete(
        {**fields, "optim_shard": dp * pipelines}, devices=cluster.devices, layers=model.layers,
        experts=None, global_batch_size=64,
    )  # fmt: skip
    uniform = evaluate(model, cluster, job, strategy)

    kinds = stage_kinds_of(bind(model, cluster, job), [(tp, dp)], size * dp)
    microbatches = 64 // (size * dp * pipelines)
    place = np.arange(pp, 0, -1)[:, None]
    counts = layer_counts(model.layers, pp, *(int(end) for end in even_ends(model.layers, pp)))
    shape = StageShape(
        layers=np.array(counts)[:, None],
        in_flight=np.minimum(place, microbatches),
        is_first=1.0 * (place == pp),
        is_last=1.0 * (place == 1),
        replicas=(pipelines,),
    )
    price = stage_costs(kinds, shape)
    way = RECOMPUTES.index(recompute)
    hops = [hop_s(kinds)[0]] * (pp - 1)
    forward_s, backward_s, hops = with_sends(
        price.forward_s[:, 0], price.backward_s[way, 0, :, 0], hops, job.profile.pipeline_overlap
    )
    durations = Durations.of(
        stages=pp,
        forward_s=forward_s,
        backward_s=backward_s,
        gather_s=price.gather_s[0, :, 0],
        reduce_s=price.reduce_s[way, 0, :, 0],
        hop_forward_s=hops,
        hop_backward_s=hops,
    )
    drained = makespan_s("1f1b", pp=pp, microbatches=microbatches, vpp=1, durations=durations)[0]
    assert drained + price.end_s[0].max() == pytest.approx(uniform.step_time_s, rel=1e-12)
    assert stage_bytes(kinds, shape).device[way, 0].max() == pytest.approx(
        uniform.peak_memory.device, rel=1e-12
    )
