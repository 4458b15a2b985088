"""Checks that need no costs: what a plan file states must add up.

`count_checks` counts parameters from the resolved layers, `outcome_checks` adds up a certificate, and
`unlike_checks` covers plans whose stages are not alike: devices, layers, ranks and micro-batches, sums, and
fit from the stated bytes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from math import prod

from shardwise_verify.checks import Check, fit_check, number_check, same, value_check
from shardwise_verify.problem import active_parameters, parameters
from shardwise_verify.reading import InputError
from shardwise_verify.records import (
    CertificateRecord,
    ClusterRecord,
    MixedRecord,
    ModelRecord,
    NodeRecord,
    PipelineRecord,
    PlanRecord,
    StageRecord,
)
from shardwise_verify.space import divisors


def count_checks(model: ModelRecord) -> Iterator[Check]:
    """The parameter counts that the file states."""
    yield value_check("parameters", model.parameters, parameters(model.layers))
    yield value_check("active parameters", model.active_parameters, active_parameters(model.layers))


def ledger_check(certificate: CertificateRecord) -> Check:
    """Whether the counts of the outcomes add up."""
    rejected = sum(certificate.rejected.values())
    return Check(
        name="ledger",
        ok=rejected + certificate.cut_by_bound + certificate.simulated == certificate.enumerated,
        found=f"{rejected} rejected + {certificate.cut_by_bound} pruned + {certificate.simulated} evaluated",
        expected=f"{certificate.enumerated} enumerated",
    )


def outcome_checks(plan: PlanRecord, certificate: CertificateRecord) -> Iterator[Check]:
    """The ledger of a certificate, its bound and its gap, and that it answers the question of the plan."""
    yield ledger_check(certificate)
    listed = 1 + len(plan.runners_up)
    yield Check(
        name="simulated",
        # A subproblem that was not finished in time counts as unexplored, even where it gave a candidate.
        ok=certificate.simulated + certificate.unexplored >= listed,
        found=str(certificate.simulated),
        expected=f"at least {listed}, the number of listed strategies",
    )
    optimum_s = plan.best.step_time_s if plan.optimum is None else plan.optimum.step_time_s
    yield number_check("best_s", certificate.best_s, optimum_s)
    lower, best = certificate.lower_bound_s, certificate.best_s
    yield Check(
        name="lower bound",
        ok=0 < lower <= best or same(lower, best),
        found=repr(lower),
        expected=f"more than 0, and at most {best!r}",
    )
    lines, is_approximated = certificate.priced_as, plan.cluster.is_approximated
    if bool(lines) != is_approximated and not (lines and plan.for_trace is not None):
        expected = "lines about the links" if is_approximated else "nothing"
        yield Check(name="priced as", ok=False, found="; ".join(lines) or "nothing", expected=expected)
    if lines or certificate.gap is None:  # nothing is proven, and the file has no gap
        yield value_check("gap", certificate.gap, None if lines else (best - lower) / best)
    else:
        yield number_check("gap", certificate.gap, (best - lower) / best if best else 0.0, scale=1.0)


def unlike_checks(plan: PlanRecord) -> Iterator[Check]:
    """What an uneven plan or the plan of an operator graph states about its layout, sums and memory."""
    best, peak, job = plan.best, plan.best.peak_memory_bytes, plan.job
    faults = list(_faults(plan))
    yield Check(
        name="layout",
        ok=not faults,
        found="; ".join(faults[:3]) or "devices, ranks, layers and micro-batches add up",
        expected="each device once, each layer once, and the whole batch",
    )
    makespan_s = max(pipeline.makespan_s for pipeline in best.layout.pipelines)
    yield number_check("step time of the slowest pipeline", best.step_time_s, makespan_s)
    yield number_check("sum of the breakdown", sum(best.breakdown.values()), best.step_time_s)
    yield number_check("sum of the memory", sum(best.memory_parts.values()), peak.device)
    if best.tokens_per_s_per_device is not None:
        tokens = job.global_batch_size * job.seq_len / best.step_time_s / plan.cluster.devices
        yield number_check("tokens per second", best.tokens_per_s_per_device, tokens)
    sizes = sorted({device.memory_bytes for device in plan.cluster.classes.values()})
    capacity = peak.capacity if any(same(peak.capacity, size) for size in sizes) else sizes[0]
    yield number_check("capacity bytes", peak.capacity, capacity)
    yield fit_check("stated bytes fit", peak.device, capacity * (1.0 - job.memory_margin))
    if plan.mixed is not None and plan.kind == "uneven":
        yield _compared_check(plan, plan.mixed)
    if plan.certificate is not None:
        yield from _uneven_certificate_checks(plan, plan.certificate)
        yield from outcome_checks(plan, plan.certificate)


def _faults(plan: PlanRecord) -> Iterator[str]:
    """What does not add up in the layout."""
    layout, used = plan.best.layout, Counter[int]()
    batch = plan.job.global_batch_size
    if sum(pipeline.rows for pipeline in layout.pipelines) != batch:
        yield f"the rows of the pipelines are not the batch of {batch}"
    for place, pipeline in enumerate(layout.pipelines):
        if pipeline.rows != pipeline.microbatches * pipeline.micro_batch_size:
            yield f"pipeline {place} has {pipeline.rows} rows"
        if plan.model is not None and _layers(pipeline) != len(plan.model.layers.layer_kinds):
            yield f"pipeline {place} has {_layers(pipeline)} layers"
        if not pipeline.stages or sum(stage.devices for stage in pipeline.stages) > plan.cluster.devices:
            yield f"pipeline {place} has another number of devices than the cluster"
            return
        for number, stage in enumerate(pipeline.stages):
            where = f"pipeline {place}, stage {number}"
            if stage.layers != sum(stage.chunks):
                yield f"{where}: {stage.layers} layers in chunks of {sum(stage.chunks)}"
            if not same(stage.share, pipeline.rows / batch):
                yield f"{where}: a share of {stage.share!r}"
            yield from (f"{where}: {fault}" for fault in _stage_faults(stage, plan, used))
    if any(count > 1 for count in used.values()):
        yield "a device is on two stages"


def _layers(pipeline: PipelineRecord) -> int:
    return sum(stage.layers for stage in pipeline.stages)


def _stage_faults(stage: StageRecord, plan: PlanRecord, used: Counter[int]) -> Iterator[str]:
    """What does not add up in the devices of a stage; `used` counts its ranks."""
    mesh = stage.tp * stage.cp * stage.dp
    if plan.kind == "graph":
        if mesh != 1:
            yield f"degrees of {mesh} devices together with a layout of operators"
        mesh = prod(plan.best.layout.mesh)
    held = [(stage.ranks, stage.device_class, mesh)]
    if stage.parts:
        held = [(part.ranks, part.device_class, part.tp) for part in stage.parts]
        if stage.dp != len(stage.parts) or stage.tp != stage.parts[0].tp:
            yield f"tp {stage.tp} and dp {stage.dp} of {len(stage.parts)} parts"
        rows = sum(part.rows for part in stage.parts)
        if rows != plan.best.layout.pipelines[0].micro_batch_size:
            yield f"parts of {rows} rows"
        if ranks_in(stage.ranks) != sorted(rank for ranks, _, _ in held for rank in ranks_in(ranks)):
            yield f"ranks {stage.ranks} of other parts"
    for ranks, device_class, degrees in held:
        numbers = ranks_in(ranks)
        used.update(numbers)
        if len(numbers) != degrees:
            yield f"{len(numbers)} ranks for {degrees} devices"
        if not _are_of(plan.cluster, numbers, device_class):
            yield f"{device_class} at ranks {ranks}"
    if stage.devices != sum(degrees for _, _, degrees in held):
        yield f"{stage.devices} devices"
    if stage.parts and stage.device_class != " + ".join(part.device_class for part in stage.parts):
        yield f"the class {stage.device_class}"


def ranks_in(ranges: str) -> list[int]:
    """The ranks of `0-7,16-23`, ascending. Raises InputError for other text and for more than 10^7 ranks."""
    found: list[int] = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        ends = (first, last or first)
        if not all(end.isascii() and end.isdecimal() and len(end) <= 7 for end in ends):
            raise InputError("is not a list of rank ranges", key="best.layout", found=ranges[:40])
        found += range(int(ends[0]), int(ends[1]) + 1)
        if len(found) > 10**7:
            raise InputError("has too many ranks", key="best.layout", found=ranges[:40])
    return sorted(found)


def _are_of(cluster: ClusterRecord, ranks: list[int], pools: str) -> bool:
    """Whether the ranks are in the cluster, on these pools (names joined by ` + `) and on no other. A pool
    has the name of its device class, or of some node of that class, with a mark for another speed."""
    if not ranks or ranks[-1] >= cluster.devices:
        return False
    classes: dict[str, None] = {}
    start = 0
    for node in cluster.nodes:
        end = start + node.count * node.devices
        if bisect_left(ranks, start) < bisect_left(ranks, end):
            classes[node.device_class] = None
        start = end
    of_class = {
        name: {name, *(node.name for node in cluster.nodes if node.device_class == name)} for name in classes
    }
    named = [name.rstrip("'").partition(" at ")[0] for name in pools.split(" + ")]
    return len(named) == len(classes) and all(
        name in of_class[found] for name, found in zip(named, classes, strict=True)
    )


# Certificates of uneven plans


def _uneven_certificate_checks(plan: PlanRecord, certificate: CertificateRecord) -> Iterator[Check]:
    """The space of an uneven search and its number of candidates."""
    yield value_check("space", certificate.space, "uneven")
    restrictions = {**certificate.fixed, **certificate.axes, **certificate.rejected}
    yield value_check("fixed, axes, rejected", restrictions, {})
    batch = plan.job.global_batch_size
    expected = 1 if plan.for_trace is not None else uneven_candidates(plan.cluster, batch)
    yield value_check("candidates", certificate.enumerated + certificate.unexplored, expected)


def uneven_candidates(cluster: ClusterRecord, batch: int) -> int:
    """The number of candidates of an uneven search (docs/concepts/mixed-clusters.md): per set of pools and
    micro-batch size, every number of pipelines, and on several pools every number of identical pipelines from
    two on."""
    pools = Counter[NodeRecord]()
    for node in cluster.nodes:
        pools[replace(node, name="", count=1)] += node.count * node.devices
    total = 0
    for count in range(1, len(pools) + 1):
        for some in combinations(pools.values(), count):
            for size in divisors(batch):
                most = min(sum(some), batch // size)
                total += most + (most - 1 if count > 1 else 0)
    return total


def _compared_check(plan: PlanRecord, mixed: MixedRecord) -> Check:
    """Uniform strategies are not faster than an uneven plan, unless it was chosen for a trace; one pool alone
    is not faster than the best union of pools."""
    best_s = plan.best.step_time_s
    uniform_s, alone_s, alone = (
        mixed.uniform_step_time_s, mixed.fastest_class_step_time_s, mixed.fastest_class,
    )  # fmt: skip
    least_s = 0.0 if plan.for_trace is not None else best_s
    names = {*plan.cluster.classes, *(node.name for node in plan.cluster.nodes)}
    ok = (uniform_s is None or uniform_s >= least_s) and (alone_s is None) == (alone is None)
    if alone_s is not None and alone is not None:
        ok &= alone.rstrip("'").split(" at ")[0] in names and uniform_s is not None and alone_s >= uniform_s
    return Check(
        name="compared",
        ok=ok,
        found=f"uniform {uniform_s!r} s, {alone} alone {alone_s!r} s",
        expected=f"at least {least_s!r} s; one pool alone takes no less than any union of pools",
    )
