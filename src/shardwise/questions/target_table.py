"""The best plan of every target, and the target that is recommended.

Targets are in the order in which they are recommended: the first one whose best is within
`RECOMMENDED_WITHIN` of the fastest. Our own runtime is one of them only where no other has a plan, or where
the best plan is uneven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardwise.errors import ConfigError, Infeasible, InternalError
from shardwise.launch import unsupported_job
from shardwise.plans import UNEVEN_SPACE, Answer, Plan, TargetBest
from shardwise.questions.request import OWN_TARGET, Request
from shardwise.questions.targets import require_job, require_runs_on
from shardwise.search import Question, objective_value
from shardwise.strategy import ANY, Target, newest_target, target_names, target_of
from shardwise.targets import EXPORTERS

ORDER = ("megatron-lm", "torchtitan", "fsdp2", "deepspeed", "megatron-fsdp", "transformers")
"""Names of targets without their versions, in the order in which they are recommended."""

RECOMMENDED_WITHIN = 0.03
"""How much slower than the fastest target the recommended one may be, relative."""


INTERRUPTED = "interrupted before a plan was found"
"""The reason of a target whose search the user ended too early."""


@dataclass(frozen=True, slots=True)
class TargetAnswer:
    """A target (None: any) with the request that has its software profile, the question and its answer; else
    the reason why there is none."""

    target: Target | None
    request: Request
    question: Question | None = None
    answer: Answer | None = None
    reason: str | None = None

    @property
    def name(self) -> str:
        return ANY if self.target is None else self.target.name

    @property
    def is_own(self) -> bool:
        """Whether it is our own runtime."""
        return self.name == OWN_TARGET

    @property
    def found(self) -> tuple[Question, Answer]:
        """The question and its answer. Raises InternalError where there is none."""
        if self.question is None or self.answer is None:
            raise InternalError(f"no answer for the target {self.name}")
        return self.question, self.answer

    @property
    def is_interrupted(self) -> bool:
        """Whether the user interrupted its search."""
        return self.reason == INTERRUPTED or (self.answer is not None and self.answer.is_interrupted)

    @property
    def is_uneven(self) -> bool:
        """Whether the best plan is an uneven one."""
        return self.found[1].certificate.space == UNEVEN_SPACE

    @property
    def value(self) -> float:
        """The value of the objective."""
        return objective_value(*self.found)[0]


Ask = Callable[[Target | None, Request], tuple[Question, Answer]]
"""Asks a question for a target with its software profile (None: any)."""


def targets_in_order() -> tuple[Target, ...]:
    """The newest version of each target, in the order in which they are recommended."""
    names = (newest_target(name) for name in ORDER)
    return tuple(target_of(name) for name in names if name in target_names())


def targets_that_run(plan: Plan) -> tuple[str, ...]:
    """Names of the targets, in the order in which they are recommended, that run a plan of a model as it is.
    Our own runtime is not among them (`launch.not_run`)."""
    return tuple(target.name for target in targets_in_order() if _runs(target, plan))


def _runs(target: Target, plan: Plan) -> bool:
    if plan.best.fields is None or not target.runs_on(plan.cluster.vendors):
        return False
    if any(True for _ in unsupported_job(target, plan.model, plan.job, target.dtypes)):
        return False
    try:
        EXPORTERS[target.name].check_model(plan.model, plan.job.seq_len)
    except ConfigError:
        return False
    return next(target.for_job(plan.model, plan.job).refusals(plan.best.fields), None) is None


def answers_of_targets(request: Request, of_any: TargetAnswer, ask: Ask) -> list[TargetAnswer]:
    """The answer for every target in order, until the user interrupts; that of our own runtime is last."""
    found: list[TargetAnswer] = []
    for target in targets_in_order():
        found.append(_answer_of(target, request, ask))
        if found[-1].is_interrupted:
            return found
    if of_any.is_uneven or all(one.answer is None for one in found):
        found.append(_answer_of(target_of(OWN_TARGET), request, ask))
    return found


def _answer_of(target: Target, request: Request, ask: Ask) -> TargetAnswer:
    own = request
    try:
        own = request.for_target(target)
        require_runs_on(target, request.cluster)
        require_job(target, request)
        return TargetAnswer(target, own, *ask(target, own))
    except (ConfigError, Infeasible) as error:
        return TargetAnswer(target, own, reason=_reason(error))
    except KeyboardInterrupt:
        return TargetAnswer(target, own, reason=INTERRUPTED)


def _reason(error: ConfigError | Infeasible) -> str:
    """Why there is no plan, in a few words next to the name of the target."""
    if isinstance(error, Infeasible):
        return "nothing that fits"
    key, found = error.key or "", error.found or ""
    if key.startswith("fix."):
        return f"does not run {key.removeprefix('fix.')} {found}"
    if found in target_names():
        return "does not run on these devices"
    return f"does not run {found.partition(' (it ')[0]}" if found else error.message


def recommended_target(found: Sequence[TargetAnswer]) -> TargetAnswer | None:
    """The first target that is within `RECOMMENDED_WITHIN` of the best; our own runtime only where nothing
    else has an answer. None without any answer."""
    answered = [one for one in found if one.answer is not None]
    others = [one for one in answered if not one.is_own] or answered
    if not others:
        return None
    most = min(one.value for one in others) * (1.0 + RECOMMENDED_WITHIN)
    return next(one for one in others if one.value <= most)


def table_of(found: Sequence[TargetAnswer], of_any: TargetAnswer) -> tuple[TargetBest, ...]:
    """Rows for a plan: the best of each target, then that without a target."""
    return tuple(_row(one, of_any) for one in (*found, of_any))


def _row(one: TargetAnswer, of_any: TargetAnswer) -> TargetBest:
    if one.answer is None:
        return TargetBest(target=one.name, reason=one.reason)
    return TargetBest(
        target=one.name,
        strategy=one.answer.best.fields,
        step_time_s=one.answer.best.step_time_s,
        over_any=one.value / of_any.value - 1.0,
    )
