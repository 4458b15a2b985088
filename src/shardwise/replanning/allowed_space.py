"""What the question of a plan allows when the cluster changes (`AllowedSpace`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from shardwise.cluster import Cluster
from shardwise.errors import Infeasible
from shardwise.model import Model
from shardwise.plans import Plan, PlanQuestion, Value
from shardwise.replanning.arrangement import Arrangement
from shardwise.replanning.situation import Situation
from shardwise.search import Question, parts_within, restricted_to
from shardwise.strategy import FIELDS, OFFLOADS, Job, Strategy, Target, shards_of, target_of

OF_REPLICAS = frozenset(("dp", "param_shard", "grad_shard", "optim_shard", "dp_replicate", "dp_shard"))
"""Fields that follow from the number of replicas, which changes with the nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BestStrategies:
    """The best strategies of a search, fastest first, and a lower bound of the step time of all that it
    searched, in seconds."""

    least_s: float
    strategies: tuple[Strategy, ...]


NO_STRATEGIES = BestStrategies(least_s=float("inf"), strategies=())


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowedSpace:
    """The space of allowed strategies, as in `Question`, and the largest number of replicas of a stage in an
    uneven plan.

    `target` is the software that runs the plans, for the model and job (None: any). With `use_all` no usable
    node may be idle, except for nodes with notice. `is_of_files` allows only what a plan file can represent:
    equal shares of pipelines, and no re-routing; so does a target. `dropped` are fields that the question
    restricts, and that do not count on other nodes. The running plan may always be kept.
    """

    space: str = "default"
    fixed: Mapping[str, Value] = field(default_factory=dict)
    axes: Mapping[str, tuple[Value, ...]] = field(default_factory=dict)
    use_all: bool = False
    stage_dp: int = 1
    target: Target | None = None
    is_of_files: bool = False
    dropped: frozenset[str] = frozenset()

    def on_any_nodes(self) -> AllowedSpace:
        """The same without values of fields that follow from the number of replicas."""
        return replace(
            self,
            fixed={name: value for name, value in self.fixed.items() if name not in OF_REPLICAS},
            axes={name: values for name, values in self.axes.items() if name not in OF_REPLICAS},
            dropped=self.dropped | OF_REPLICAS & {*self.fixed, *self.axes},
        )

    def with_offload_of(self, running: Strategy) -> AllowedSpace:
        """The same with every kind of offload that the target runs if the running strategy offloads, instead
        of the default of the target."""
        if self.target is None or running.offload == "none" or {"offload"} & {*self.fixed, *self.axes}:
            return self
        return replace(self, axes={**self.axes, "offload": self.target.axes.get("offload", OFFLOADS)})

    @property
    def has_uneven(self) -> bool:
        """Whether uneven plans are allowed: only if the question restricts no field of a strategy, which they
        do not have."""
        return self.space == "default" and not (self.fixed or self.axes or self.dropped)

    def has_uneven_in(self, dtype: str) -> bool:
        """Whether uneven plans are allowed, and run by the target in this dtype."""
        return self.has_uneven and (self.target is None or dtype in self.target.uneven_dtypes)

    @property
    def text(self) -> str:
        """The restrictions in words; empty if everything is allowed."""
        texts = [f"the space {self.space}"] if self.space != "default" else []
        texts += [f"{name}={value}" for name, value in self.fixed.items()]
        texts += [f"{name} of {', '.join(map(str, values))}" for name, values in self.axes.items()]
        texts += ["plans on all nodes"] if self.use_all else []
        texts += [f"plans that {self.target.command} runs"] if self.target is not None else []
        return ", ".join(texts)

    def allows(self, one: Arrangement, situation: Situation) -> bool:
        """Whether a change to an arrangement of an allowed strategy is allowed."""
        if (self.is_of_files or self.target is not None) and not one.can_be_saved:
            return False
        return self.uses_enough(one.nodes, situation)

    def uses_enough(self, nodes: Iterable[str], situation: Situation) -> bool:
        """Whether a plan on these nodes leaves no node idle that it must use."""
        return not self.use_all or situation.states.keys() - situation.noticed <= set(nodes)

    def allows_strategy(self, strategy: Strategy) -> bool:
        """Whether the strategy has allowed values, and the target runs it."""
        if self.target is not None and any(self.target.refusals(strategy)):
            return False
        values = {**{name: (value,) for name, value in self.fixed.items()}, **self.axes}
        if not all(getattr(strategy, name) in allowed for name, allowed in values.items() if name in FIELDS):
            return False
        stage = {name: value for name, value in self.fixed.items() if name == "zero_stage"}
        degrees = shards_of(stage, strategy.dp * strategy.cp)
        return all(getattr(strategy, name) == degree for name, degree in degrees.items())

    def best_on(
        self, model: Model, cluster: Cluster, job: Job, search: Callable[[Question], BestStrategies]
    ) -> BestStrategies:
        """The best strategies on all devices of a cluster, by `search`, among those that the target runs."""
        question = Question(
            model=model, cluster=cluster, job=job, space=self.space, fixed=self.fixed, axes=self.axes,
            use_all=True, has_empty_ends=self.target is None,
        )  # fmt: skip
        return search(question) if self.target is None else _best_of(self.target, question, search)


ANY_SPACE = AllowedSpace()
"""The space without restrictions."""


def _best_of(
    target: Target, question: Question, search: Callable[[Question], BestStrategies]
) -> BestStrategies:
    """The best strategies of `question` that the target runs. If all of them exceed one of its limits, those
    of the subspaces within that limit."""
    try:
        restricted = restricted_to(target, question)
    except Infeasible:
        return NO_STRATEGIES
    whole = search(restricted)
    runnable = tuple(each for each in whole.strategies if target.broken_limit(each) is None)
    if runnable or not whole.strategies:
        return BestStrategies(least_s=whole.least_s, strategies=runnable)
    parts = [_best_of(target, part, search) for part in parts_within(target, restricted, whole.strategies[0])]
    return BestStrategies(
        least_s=min((part.least_s for part in parts), default=float("inf")),
        strategies=tuple(strategy for part in parts for strategy in part.strategies),
    )


def allowed_by(question: PlanQuestion, model: Model, job: Job) -> AllowedSpace:
    """What a question about a model and a job allows."""
    return AllowedSpace(
        space=question.space,
        fixed=question.fixed,
        axes=question.axes,
        use_all=question.use_all,
        stage_dp=question.stage_dp,
        target=None if question.target is None else target_of(question.target).for_job(model, job),
    )


def allowed_space_of(plan: Plan) -> AllowedSpace:
    """What the question of a plan allows on any nodes. Mixed-pool stages are not replanned, so the limit of
    their rows does not matter."""
    return allowed_by(plan.question, plan.model, plan.job).on_any_nodes()


def question_after(question: PlanQuestion, strategy: Strategy | None) -> PlanQuestion:
    """The question of a plan for one that was decided after events: without values of fields that follow from
    the number of replicas, unless the decided `strategy` (None: it is uneven) has them too."""

    def holds(name: str, values: Collection[Value]) -> bool:
        return name not in OF_REPLICAS or getattr(strategy, name, None) in values

    return replace(
        question,
        fixed={name: value for name, value in question.fixed.items() if holds(name, (value,))},
        axes={name: values for name, values in question.axes.items() if holds(name, values)},
    )
