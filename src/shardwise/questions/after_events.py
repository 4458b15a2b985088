"""The decision of `replan` after events, as the Python interface shows it (`Replanned`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from shardwise.cluster import Cluster, load_cluster
from shardwise.errors import ConfigError
from shardwise.notebook import panel, table
from shardwise.plans import Idle, Plan
from shardwise.questions.arguments import text
from shardwise.questions.request import OWN_TARGET, software_profile
from shardwise.questions.targets import require_runs_on, target_name
from shardwise.replanning import (
    AnyArrangement,
    Costs,
    Decision,
    DecisionAfter,
    GivenEvents,
    arrangement_of,
    cluster_for,
    decide_after,
    trace_for,
)
from shardwise.strategy import ANY, NEWEST_MEGATRON_LM, Profile, Target, target_of
from shardwise.units import format_seconds


@dataclass(frozen=True, kw_only=True, repr=False)
class Replanned:
    """The decision of `replan` for a `running` plan on `cluster`. `outcome` has all figures of the decision:
    the new arrangement, the bytes that move over each link, the steps over the horizon, and the option that
    re-routes micro-batches. `idle` are the idle devices that could be used. `unreachable` are nodes that no
    path leads to."""

    after: DecisionAfter
    requested_horizon_s: float

    @property
    def running(self) -> Plan:
        """The plan before the events."""
        return self.after.running

    @property
    def cluster(self) -> Cluster:
        """The whole cluster."""
        return self.after.planner.prices.cluster

    @property
    def outcome(self) -> Decision[AnyArrangement]:
        """The decision with all its figures."""
        return self.after.decision

    @property
    def given(self) -> GivenEvents:
        """The events."""
        return self.after.given

    @property
    def idle(self) -> Idle:
        """The idle devices of nodes that can be used."""
        return self.after.idle

    @property
    def unreachable(self) -> frozenset[str]:
        """Nodes that no path leads to."""
        return frozenset(self.after.situation.unreachable)

    @property
    def decision(self) -> str:
        """`keep`, `patch` or `move`."""
        return self.outcome.decision

    @property
    def step_time_s(self) -> float:
        """Seconds of a step after the decision."""
        return self.outcome.step_s

    @property
    def gain_s_per_step(self) -> float | None:
        """Seconds that a step takes less than if the plan is kept; None if it cannot be kept."""
        return self.outcome.gain_s_per_step

    @property
    def transition_s(self) -> float:
        """Seconds without training until the new plan runs."""
        return self.outcome.transition.seconds

    @property
    def pays_after_s(self) -> float | None:
        """Seconds after which training is ahead of keeping the plan; None: never."""
        return self.outcome.pays_after_s

    @cached_property
    def plan(self) -> Plan:
        """The plan that is decided. Raises ConfigError where no plan file holds it, since micro-batches are
        re-routed; `savable=True` decides without these."""
        if not self.outcome.arrangement.can_be_saved:
            raise ConfigError(
                "cannot be held by a plan file", key="plan", found="an arrangement with unequal shares",
                allowed="replan(..., savable=True)",
            )  # fmt: skip
        return self.after.plan

    def to_dict(self) -> dict[str, object]:
        """The decision as plain values: seconds, bytes and steps."""
        outcome = self.outcome
        return {
            "decision": outcome.decision,
            **outcome.arrangement.document,
            "nodes": list(outcome.arrangement.nodes),
            "step_time_s": outcome.step_s,
            "keep_step_time_s": outcome.keep_step_s,
            "gain_s_per_step": outcome.gain_s_per_step,
            "transition_s": outcome.transition.seconds,
            "bytes_per_link": dict(outcome.transition.bytes_per_link),
            "pays_after_s": outcome.pays_after_s,
            "horizon_s": outcome.horizon_s,
            "steps": outcome.steps,
            "keep_steps": outcome.keep_steps,
        }

    def __repr__(self) -> str:
        return (
            f"<Replanned {self.running.name} on {self.cluster.name}: {self.decision}, "
            f"{format_seconds(self.step_time_s)} a step after {format_seconds(self.transition_s)}>"
        )

    def _repr_html_(self) -> str:
        def shown(seconds: float | None) -> str:
            return "" if seconds is None else format_seconds(seconds)

        facts = [
            ("step time", shown(self.step_time_s)),
            ("step time if kept", shown(self.outcome.keep_step_s) or "the plan cannot run"),
            ("transition", shown(self.transition_s)),
            ("pays after", shown(self.pays_after_s)),
            ("nodes", f"{len(self.outcome.arrangement.nodes):,} of {len(self.cluster.nodes):,}"),
        ]
        return panel(f"{self.running.name} on {self.cluster.name}: {self.decision}", table((), facts))


def cluster_after(plan: Plan, cluster: object, *, inter_node: str | None) -> Cluster:
    """The cluster on which a plan is decided again: `cluster`, or the one that the plan was requested for.
    Raises ConfigError where it does not match the plan."""
    if cluster is None:
        if inter_node is not None:
            raise ConfigError(
                "needs --cluster", key="--inter-node", found=inter_node,
                allowed="with --cluster, or neither for the cluster of the plan",
            )  # fmt: skip
        return cluster_for(plan, plan.requested_cluster)
    if not isinstance(cluster, Cluster):
        cluster = load_cluster(text("--cluster", cluster), inter_node=inter_node)
    return cluster_for(plan, cluster)


def running_by(plan: Plan, target: object, software: object) -> Plan:
    """A running plan whose changes are those that a `target` runs, priced by its profile or by `software`;
    where these are None, by those of the plan. ConfigError where the target does not run the plan."""
    name, profile = target_name(target), software_profile(software)
    if name is None and profile is None:
        return plan
    new = target_of(name) if name not in (None, ANY) else None
    if new is not None:
        _require_run(new, plan)
    if name is None:
        new = None if plan.target is None else target_of(plan.target)
    job = plan.job
    is_other = (None if new is None else new.name) != plan.target
    if profile is None and is_other and job.profile.name == _profile_of(plan.target, plan.cluster).name:
        profile = _profile_of(None if new is None else new.name, plan.cluster)
    profile = profile or job.profile
    profile = profile if new is None or new.name != OWN_TARGET else new.run_by(profile)
    question = replace(plan.question, target=None if new is None else new.name)
    return replace(plan, question=question, job=replace(job, profile=profile))


def _require_run(target: Target, plan: Plan) -> None:
    """ConfigError where `target` does not run the plan on its cluster."""
    plan.require_kind("uniform", "uneven")
    require_runs_on(target, plan.cluster)
    if plan.best.fields is not None:
        refused = [str(one) for one in target.for_job(plan.model, plan.job).refusals(plan.best.fields)]
    else:
        refused = [] if plan.job.dtype in target.uneven_dtypes else ["an uneven plan"]
    if refused:
        raise ConfigError(
            f"{target.command} does not run the plan", key="--target", found=refused[0],
            allowed=f"the target of the plan, {plan.target or ANY}; or any",
        )  # fmt: skip


def _profile_of(target: str | None, cluster: Cluster) -> Profile:
    """The software profile of a target by default; that of our own runtime on devices that it knows."""
    own = target_of(OWN_TARGET)
    if target is None:
        return own.own_profile if own.knows_devices(cluster.classes) else NEWEST_MEGATRON_LM
    return target_of(target).own_profile


def replanned(
    plan: Plan,
    *,
    cluster: object,
    inter_node: str | None,
    events: object,
    horizon_s: float,
    costs: Costs,
    is_of_files: bool,
    target: object = None,
    software: object = None,
) -> Replanned:
    """The decision for a running plan after all events of a trace; with `is_of_files` among plans that a plan
    file can hold. Without a `cluster`, on that of the plan's question; `target` and `software` are as in
    `running_by`. Raises ConfigError for events or a cluster that do not match, Infeasible where nothing
    runs."""
    plan = running_by(plan, target, software)
    loaded = cluster_after(plan, cluster, inter_node=inter_node)
    arrangement_of(plan, loaded)  # refuses plans before it reads the events
    given = trace_for(text("--events", events), loaded)
    after = decide_after(plan, loaded, given, horizon_s=horizon_s, costs=costs, is_of_files=is_of_files)
    return Replanned(after=after, requested_horizon_s=horizon_s)
