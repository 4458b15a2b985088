"""All figures of an uneven plan from its record, where layers, shares or devices are not what they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardwise.cluster import Cluster, pools_of
from shardwise.cost import find_recipe
from shardwise.model import model_flop_per_token
from shardwise.plan import PeakMemory, Stage, StagePart, UnevenResult
from shardwise.search.explain import band_of
from shardwise.search.uneven.again import RecordPrediction, predict_with
from shardwise.search.uneven.stage_record import RecordCostModel, StageFigures
from shardwise.strategy import Job, Profile
from shardwise.ties import first_largest


def predicted_result(
    prices: RecordCostModel, result: UnevenResult, global_batch_size: int
) -> UnevenResult | None:
    """The plan as `predict_record` prices it, for a batch of so many sequences; None where it is none, or
    does not fit."""
    model, cluster, job = prices.model, prices.cluster, prices.job
    prediction = predict_with(prices, result, global_batch_size)
    if prediction.faults or prediction.device_bytes > prediction.usable_bytes:
        return None
    step_s = max(prediction.pipeline_s)
    tokens_per_s = global_batch_size * job.seq_len / step_s
    peak_flop_per_s = _peak_flop_per_s(cluster, job, result)
    mfu, mfu_full_attention = (
        model_flop_per_token(model, job.seq_len, causal_half=is_causal) * tokens_per_s / peak_flop_per_s
        for is_causal in (True, False)
    )
    low, high = widest_band(cluster, job.profile, result.pools)
    tightest, peak = _peak(prediction, result)
    return replace(
        result,
        pipeline_s=prediction.pipeline_s,
        step_time_s=step_s,
        band_s=(low * step_s, high * step_s),
        tokens_per_s_per_device=tokens_per_s / cluster.devices,
        mfu=mfu,
        mfu_full_attention=mfu_full_attention,
        peak_memory=peak,
        breakdown=_breakdown(prediction, result),
        tightest_rank=tightest,
    )


def widest_band(cluster: Cluster, profile: Profile, pools: Sequence[str]) -> tuple[float, float]:
    """Factors of the step time within which measured ones lie, on any of the pools of these names."""
    devices = [cluster.classes[pool.node.device_class] for pool in pools_of(cluster) if pool.name in pools]
    bands = [band_of(profile, device.efficiency) for device in devices]
    return min(low for low, _ in bands), max(high for _, high in bands)


def _peak_flop_per_s(cluster: Cluster, job: Job, result: UnevenResult) -> float:
    """The dense peaks of all devices that are used."""
    classes = {pool.name: cluster.classes[pool.node.device_class] for pool in pools_of(cluster)}
    matmul = find_recipe(job.dtype).matmul
    return sum(size * classes[name].peak_flop_per_s[matmul] for name, size in _devices(result))


def _devices(result: UnevenResult) -> Iterator[tuple[str, int]]:
    """The pool and the devices of every stage, or of every part of one."""
    for stage in _stages(result):
        if stage.parts:
            yield from ((part.device_class, part.tp) for part in stage.parts)
        else:
            yield stage.device_class, stage.devices


def _stages(result: UnevenResult) -> Iterator[Stage]:
    return (stage for pipeline in result.layout.pipelines for stage in pipeline.stages)


def _peak(prediction: RecordPrediction, result: UnevenResult) -> tuple[int, PeakMemory]:
    """The first rank of the stage, or the part of one, whose devices are fullest, and what they hold."""
    found: list[tuple[int, PeakMemory]] = []
    figures = (one for pipeline in prediction.stages for one in pipeline)
    for stage, one in zip(_stages(result), figures, strict=True):
        peak = PeakMemory(
            allocated=one.allocated_bytes,
            reserved=one.allocated_bytes * (1.0 + one.fragmentation_ratio),
            device=one.device_bytes,
            capacity=one.capacity_bytes,
        )
        on: Stage | StagePart = stage.parts[one.fullest_part] if stage.parts else stage
        found.append((int(on.ranks.partition("-")[0]), peak))
    return tightest_of(found)


def tightest_of(peaks: Sequence[tuple[int, PeakMemory]]) -> tuple[int, PeakMemory]:
    """Of first ranks with what they hold the one that is fullest; of equals the lowest rank."""
    in_order = sorted(peaks, key=lambda one: one[0])
    return in_order[int(first_largest([peak.device / peak.capacity for _, peak in in_order]))]


def _breakdown(prediction: RecordPrediction, result: UnevenResult) -> dict[str, float]:
    """Of the slowest pipeline: its busiest stage at work, waiting, and the end of the step."""
    place = int(first_largest(prediction.pipeline_s))
    stages: tuple[StageFigures, ...] = prediction.stages[place]
    busy_s = result.microbatches[place] * max(one.forward_s + one.backward_s for one in stages)
    end_s = max(one.end_s for one in stages)
    return {
        "busiest_stage": busy_s,
        "pipeline_and_gradients": prediction.pipeline_s[place] - busy_s - end_s,
        "end_of_step": end_s,
    }
