"""What a policy or a decision picks as a plan: on its nodes, as the cluster has them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, replace

from shardwise import search
from shardwise.app.cli.answer import schedule_of
from shardwise.cluster import Cluster, Conditions, EventTrace, NodeView, cluster_of_nodes, events_text
from shardwise.errors import InternalError
from shardwise.model import Model
from shardwise.plan import (
    Answer,
    Certificate,
    MixedFigures,
    Plan,
    TraceChoice,
    UnevenAnswer,
    UnevenFile,
    plan_of,
)
from shardwise.replan import Arrangement, MixedPlanner, UnevenArrangement, situation_of
from shardwise.strategy import Job


def trace_source(trace: EventTrace) -> str:
    """Where a trace is from, for the plan file."""
    return trace.source or "events"


def trace_hash(trace: EventTrace) -> str:
    """The SHA-256 of a trace in its canonical form."""
    return f"sha256:{hashlib.sha256(events_text(trace).encode()).hexdigest()}"


def on_nodes(found: TraceChoice, cluster: Cluster) -> Cluster:
    """The nodes of the plan as the cluster has them."""
    return cluster_of_nodes(cluster, [int(name[1:]) for name in found.nodes])


def uniform_plan(
    arrangement: Arrangement,
    found: TraceChoice,
    *,
    model: Model,
    cluster: Cluster,
    job: Job,
    space: str,
    priced_as: Sequence[str],
) -> tuple[Plan, Answer]:
    """A uniform arrangement whose pipelines have equal shares: priced on its nodes, and proven for itself
    where events were not `priced_as` something else."""
    strategy, own = arrangement.strategy, on_nodes(found, cluster)
    fixed = asdict(strategy)
    question = search.Question(
        model=model, cluster=own, job=job, space=space, fixed=fixed, use_all=True, top=0
    )
    answer = search.plan(question)
    answer = replace(answer, certificate=_with_events(answer.certificate, priced_as))
    plan = plan_of(answer, model=model, cluster=own, job=job, schedule=schedule_of(strategy, job))
    nodes = [int(name[1:]) for name in found.nodes]
    idle = search.idle_in(cluster, search.ranks_of_nodes(cluster, nodes))
    return replace(plan, for_trace=found), replace(answer, idle=idle, all_devices_step_time_s=None)


def _with_events(certificate: Certificate, priced_as: Sequence[str]) -> Certificate:
    """With what is said of the events that the plan was chosen for."""
    return replace(certificate, priced_as=(*certificate.priced_as, *priced_as))


def uneven_plan(
    planner: MixedPlanner,
    arrangement: UnevenArrangement,
    found: TraceChoice,
    uniform: Arrangement | UnevenArrangement | None,
    priced_as: Sequence[str],
) -> tuple[UnevenFile, UnevenAnswer]:
    """An uneven arrangement, beside a uniform one where there is any; the certificate is of this plan
    alone."""
    prices = planner.prices
    no_events = EventTrace(nodes=len(prices.cluster.nodes), events=())
    nominal = situation_of(NodeView(prices.cluster), Conditions.at_start(no_events))
    predicted = planner.uneven.predicted(arrangement, nominal)
    if predicted is None:
        raise InternalError("a plan that runs does so on nodes as the cluster has them")
    step_s = predicted.result.step_time_s
    own = on_nodes(found, prices.cluster)
    certificate = Certificate(
        space="uneven", enumerated=1, rejected={}, cut_by_bound=0, simulated=1, best_s=step_s,
        lower_bound_s=step_s, gap=0.0, search_s=0.0, search_cpu_s=0.0, priced_as=own.priced_as,
    )  # fmt: skip
    answer = UnevenAnswer(
        best=predicted.result,
        certificate=_with_events(certificate, priced_as),
        mixed=MixedFigures(
            uniform_step_time_s=None if uniform is None else planner.step_s(uniform, nominal),
            fastest_class_step_time_s=None,
            fastest_class=None,
            idle=(),
        ),
    )
    plan = UnevenFile(
        model=prices.model,
        cluster=own,
        job=prices.job,
        best=answer.best,
        certificate=answer.certificate,
        mixed=answer.mixed,
        for_trace=found,
    )
    return plan, answer
