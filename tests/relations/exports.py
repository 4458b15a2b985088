"""(h) A plan for a target is no faster than a plan for any target, and can be exported."""

from __future__ import annotations

from tests.relations.commands import Answer, Commands, Saved
from tests.relations.questions import Question
from tests.relations.relation import REL_TOL, is_plan, relation, require

from shardwise.errors import ConfigError
from shardwise.plans import read_plan
from shardwise.targets import EXPORTERS

TARGET = "megatron-lm-0.19"


def _is_for_target(question: Question) -> bool:
    """Whether Megatron-LM can run plans of the job: it has neither Adafactor nor our Muon."""
    return is_plan(question) and question.options.get("--optimizer", "adamw") in ("adamw", "sgd")


def _planned(question: Question, shardwise: Commands) -> Answer | None:
    """The answer for the target; None where it does not support the model or a fixed value."""
    try:
        return shardwise.answer(question.words(target=TARGET))
    except ConfigError as error:
        refused = ("cannot be exported to Megatron-LM", "is not run by Megatron-LM")
        require(any(text in str(error) for text in refused), f"refused: {error}")
        return None


@relation(_is_for_target)
def a_target_is_no_faster_than_any(question: Question, shardwise: Commands) -> None:
    """The target supports a part of all strategies."""
    planned = _planned(question, shardwise)
    if planned is not None and planned.fits:
        free = shardwise.answer(question.words(target="any"))
        require(free.fits, "any: nothing fits", planned, free)
        found = f"{TARGET}: {planned.step_time_s!r} s, any: {free.step_time_s!r} s"
        is_slower = planned.step_time_s >= free.step_time_s * (1.0 - max(free.gap, REL_TOL))
        require(is_slower, found, planned, free)


@relation(_is_for_target)
def plans_for_a_target_are_exportable(question: Question, shardwise: Commands) -> None:
    """Export accepts every plan that was made for its target; the plan file has the time of the answer."""
    planned = _planned(question, shardwise)
    if planned is not None and planned.fits:
        plan = read_plan(shardwise.path_of(Saved(question.words(target=TARGET))))
        require(plan.kind == "uniform", "not a plan of one strategy", planned)
        assert plan.kind == "uniform"
        require(bool(EXPORTERS[TARGET].files(plan)), "no files", planned)
        found = f"the file has {plan.best.step_time_s!r} s, the answer {planned.step_time_s!r} s"
        require(plan.best.step_time_s == planned.step_time_s, found, planned)
