"""Calls the product for the recorded questions: turns frozen records into its objects, and its answers into
records.

Only this module and `records` use the product. A change of its names or interface changes these two modules,
and nothing that is recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from math import inf
from pathlib import Path
from typing import Any

from tests.recorded import records
from tests.recorded.files import PLANS, frozen
from tests.reference.one_layout import estimate_layout, estimate_pipeline

from shardwise import search
from shardwise.cluster import Cluster, cluster_from_record, mesh_of
from shardwise.cost import Training
from shardwise.errors import Infeasible
from shardwise.graph import (
    GraphLayout,
    OpGraph,
    StagedLayout,
    layout_from_record,
    parse_graph,
    scaled,
    staged_from_record,
)
from shardwise.inputs import Fields
from shardwise.model import Model, model_from_config
from shardwise.plans import Layout, PeakMemory, Pipeline, Result, Stage, StagePart, read_plan
from shardwise.questions import checked_plan
from shardwise.search.hetero import predict_record
from shardwise.strategy import PROFILES, Job, Profile, Strategy, parse_fields, profile_from_record
from shardwise.strategy.target import Target, target_from_record

PROOF_BUDGET_S = 600.0
"""Time limit for the proof of a plan file; seconds; far more than any of these takes."""


@cache
def model_of(name: str) -> Model:
    """The frozen model of this name."""
    return model_from_config(frozen("models")[name], name=name)


@cache
def cluster_of(name: str) -> Cluster:
    """The frozen cluster of this name, with the frozen devices in its record."""
    record = frozen("clusters")[name]
    devices = {own: frozen("devices")[key] for own, key in record["classes"].items()}
    return cluster_from_record({**record, "name": name, "classes": devices})


@cache
def software_of(name: str) -> Profile:
    """The frozen software of this name."""
    return profile_from_record(Fields(frozen("software")[name], key="profile"))


def is_shipped(name: str) -> bool:
    """Whether the product ships this software with the frozen numbers."""
    return PROFILES[name] == software_of(name)


def target_of(name: str) -> Target | None:
    """The frozen target of this name; None for any."""
    return None if name == "any" else target_from_record(frozen("targets")[name])


@cache
def graph_of(name: str) -> OpGraph:
    """The frozen operator graph of this name, at the batch size of its record."""
    return parse_graph(frozen("graphs")[name])


def job_of(asked: Mapping[str, Any]) -> Job:
    """The job of a question or a candidate."""
    return Job(
        seq_len=asked["seq_len"],
        global_batch_size=asked["batch"],
        dtype=asked["dtype"],
        optimizer=asked["optimizer"],
        memory_margin=asked["memory_margin"],
        expert_imbalance=asked["expert_imbalance"],
        seed=0,
        profile=software_of(asked["software"]),
    )


def question_of(asked: Mapping[str, Any]) -> search.Question:
    """The question about strategies in a record."""
    return search.Question(
        model=model_of(asked["model"]),
        cluster=cluster_of(asked["cluster"]),
        job=job_of(asked),
        space=asked["space"],
        fixed=asked["fixed"],
        axes={name: tuple(values) for name, values in asked["axes"].items()},
        objective=asked["objective"],
        use_all=asked["use_all"],
        top=asked["top"],
        frontier=asked["frontier"],
        stage_dp=asked["stage_dp"],
        mixed_stage_rows=asked["braid"],
    )


def answer_to(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The record of the answer to a question of any kind."""
    return _graph_answer(asked) if "graph" in asked else _strategy_answer(asked)


def _strategy_answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    question, target = question_of(asked), target_of(asked["target"])
    is_of_pools = question.objective == "time" and search.is_mixed(question.cluster)
    try:
        if is_of_pools:
            return records.answer_record(search.plan_mixed_cluster(question, target=target))
        if target is not None:
            return records.answer_record(search.plan_for(target, question, search.plan))
        return records.answer_record(search.plan(question))
    except Infeasible as error:
        return records.infeasible_record(error)


def training_of(asked: Mapping[str, Any]) -> Training:
    """How an operator graph is trained."""
    return Training(
        dtype=asked["dtype"], optimizer=asked["optimizer"], profile=software_of(asked["software"])
    )


def batched_graph(asked: Mapping[str, Any]) -> OpGraph:
    """The graph of a question or a candidate, at its batch size."""
    return scaled(graph_of(asked["graph"]), asked["batch"], asked["seq_len"])


def _graph_answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    graph, cluster, training = batched_graph(asked), cluster_of(asked["cluster"]), training_of(asked)
    meshes, margin = search.MeshChoice(asked["meshes"]), asked["memory_margin"]
    if asked["stages"] == 1:
        source = search.GraphCurves(graph, cluster, training, margin, meshes, uses_all=asked["use_all"])
    else:
        source = search.StagedCurves(
            graph, cluster, training, margin, asked["stages"], asked["microbatches"], meshes,
            uses_all=asked["use_all"],
        )  # fmt: skip
    limit_bytes = asked["limit_bytes"] or inf
    curves = search.curves_for(
        source,
        mode=asked["mode"],
        sizes=asked["sizes"],
        limit_bytes=limit_bytes,
        epsilon=asked["epsilon"],
    )
    every = search.points_of(curves, weighs_cost=False)
    if not every:
        return records.infeasible_record(source.nothing_fits(curves[-1]))
    any_part = search.uses_any_part(asked["mode"], asked["sizes"])
    points = search.points_of(curves, weighs_cost=False, any_part=any_part)
    chosen = search.chosen(every, mode=asked["mode"], limit_bytes=limit_bytes)
    at = (points[-1] if chosen is None else chosen).part
    return records.frontier_record(
        points=points,
        chosen=chosen,
        idle=source.idle_of(at),
        references=source.references(at),
        curves=curves,
        price=lambda point: layout_price(graph, point.part, training, point.layout),
    )


def layout_price(
    graph: OpGraph, cluster: Cluster, training: Training, layout: GraphLayout
) -> tuple[float, float]:
    """Estimated seconds and bytes of a layout, by code that is not part of the search."""
    mesh = mesh_of(cluster, layout.ranks)
    if isinstance(layout, StagedLayout):
        staged = estimate_pipeline(graph, cluster, training, mesh, layout)
        return staged.time_s, staged.memory_bytes
    price = estimate_layout(graph, cluster, training, mesh, layout)
    return price.time_s, price.memory_bytes


def with_price(kind: str, case: Mapping[str, Any], one: Mapping[str, Any]) -> dict[str, Any]:
    """A candidate's record with its seconds per step and the peak bytes of a device."""
    step_time_s, peak_bytes = _PRICED[kind](case, one["candidate"])
    return {**one, "step_time_s": step_time_s, "peak_bytes": peak_bytes}


def _uniform_price(case: Mapping[str, Any], text: str) -> tuple[float, float]:
    result = search.evaluate(
        model_of(case["model"]), cluster_of(case["cluster"]), job_of(case), strategy_of(text)
    )
    return result.step_time_s, result.peak_memory.device


def strategy_of(text: str) -> Strategy:
    """The strategy of a text that names every field."""
    fields: dict[str, Any] = dict(parse_fields(text))
    return Strategy(**fields)


def _uneven_price(case: Mapping[str, Any], candidate: Mapping[str, Any]) -> tuple[float, float]:
    job = job_of(case)
    found = predict_record(model_of(case["model"]), cluster_of(case["cluster"]), job, uneven_of(candidate))
    if found.faults:
        raise ValueError(found.faults[0])
    return max(found.pipeline_s), found.device_bytes


def uneven_of(candidate: Mapping[str, Any]) -> Result:
    """An uneven plan without an estimate."""
    microbatches, size = candidate["microbatches"], candidate["micro_batch_size"]
    return Result(
        fields=None,
        layout=Layout(
            pipelines=tuple(
                Pipeline(
                    stages=tuple(_stage(stage, own / sum(microbatches)) for stage in stages),
                    micro_batch_size=size,
                    microbatches=own,
                    rows=own * size,
                    makespan_s=1.0,
                )
                for stages, own in zip(candidate["pipelines"], microbatches, strict=True)
            )
        ),
        step_time_s=1.0,
        band_s=(1.0, 1.0),
        tokens_per_s_per_device=1.0,
        mfu=0.0,
        mfu_full_attention=0.0,
        peak_memory=PeakMemory(allocated=0.0, reserved=0.0, device=0.0, capacity=1.0),
        memory_band_bytes=(0.0, 0.0),
        fits_probability=1.0,
        breakdown={},
        memory={},
        tightest_rank=0,
        pools=tuple(candidate["pools"]),
        is_alike=candidate["is_alike"],
        evaluator="",
    )


def _stage(stage: Mapping[str, Any], share: float) -> Stage:
    return Stage(
        devices=stage["devices"],
        ranks=stage["ranks"],
        device_class=stage["class"],
        tp=stage["tp"],
        dp=stage["dp"],
        layers=tuple(stage["layers"]),
        share=share,
        recompute=stage["recompute"],
        parts=tuple(
            StagePart(ranks=part["ranks"], device_class=part["class"], tp=part["tp"], rows=part["rows"])
            for part in stage.get("parts", ())
        ),
    )


def _graph_price(case: Mapping[str, Any], layout: Mapping[str, Any]) -> tuple[float, float]:
    graph, cluster, training = batched_graph(case), cluster_of(case["cluster"]), training_of(case)
    ranks = tuple(case["mesh"])
    if "stages" in layout:
        staged = staged_from_record(layout, graph, ranks, ("1f1b",))
        return layout_price(graph, cluster, training, staged)
    return layout_price(graph, cluster, training, layout_from_record(layout, graph, ranks))


_PRICED: Mapping[str, Any] = {"uniform": _uniform_price, "uneven": _uneven_price, "graph": _graph_price}


def plan_content(name: str) -> dict[str, Any]:
    """The content of the plan file of this name, as the product reads it."""
    return records.plan_record(read_plan(str(PLANS / name)))


def faults_of(path: Path) -> list[str]:
    """The checks that fail for a plan file; checks that stay open are not failures."""
    return [check.name for check in checked_plan(str(path), PROOF_BUDGET_S).failed]
