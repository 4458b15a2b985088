"""Why no candidate has the values that are asked for: which of them exclude each other, and what the space
demands of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from shardwise.plan import Value
from shardwise.search.question import Question
from shardwise.search.space import divisors
from shardwise.strategy import SCHEDULES

DEGREES = frozenset(("tp", "cp", "pp", "dp"))
SHARDS = frozenset(("param_shard", "grad_shard", "optim_shard"))
ALIASED = frozenset(("zero_stage", "dp_replicate", "dp_shard"))

MOST_TRIED = 64
"""Values of a field that are tried at most, to say which of them there are."""


def why_empty(question: Question) -> str:
    """Of a question whose space is empty: the fewest of its fixed values and lists that leave nothing, what
    the space demands of such fields, and the values that the first of them may have beside the others."""
    subset = [*question.fixed, *question.axes]
    for name in tuple(subset):
        rest = [other for other in subset if other != name]
        if _is_empty(_with_only(question, rest)):
            subset = rest
    if not subset:
        return "the space is empty"
    requested = ",".join(_text(question, name) for name in subset)
    found = f"the space is empty: no candidate has {requested} ({_demand(question, frozenset(subset))})"
    possible = list(_possible(_with_only(question, subset), subset[0]))
    if not possible:
        return found
    with_others = " beside the other" if len(subset) > 1 else ""
    return f"{found}; {subset[0]} may be {', '.join(map(_shown, possible))}{with_others}"


def _with_only(question: Question, names: Iterable[str]) -> Question:
    subset = frozenset(names)
    return replace(
        question,
        fixed={name: value for name, value in question.fixed.items() if name in subset},
        axes={name: values for name, values in question.axes.items() if name in subset},
    )


def _is_empty(question: Question) -> bool:
    space = question.candidates()
    degrees = space.degrees()
    return not degrees or not int(space.count_below_grids(space.grids(degrees)).sum())


def _possible(question: Question, field: str) -> Iterator[Value]:
    """The values of a field that some candidate has, the rest of the question as it is."""
    axes = {name: values for name, values in question.axes.items() if name != field}
    tried = list(_values(question, field))
    if len(tried) > MOST_TRIED:
        return
    for value in tried:
        if not _is_empty(replace(question, fixed={**question.fixed, field: value}, axes=axes)):
            yield value


def _values(question: Question, field: str) -> Iterable[Value]:
    """All values that a field may have in any space of so many devices, where they can be listed."""
    if field in DEGREES | SHARDS | {"ep", "etp", "dp_replicate", "dp_shard"}:
        return divisors(question.cluster.devices)
    if field == "micro_batch_size":
        return divisors(question.job.global_batch_size)
    if field == "schedule":
        return SCHEDULES
    return range(1, question.model.layers + 1) if field == "vpp" else ()


def _demand(question: Question, names: frozenset[str]) -> str:
    """What the space (docs/reference/space.md) demands of fields like these; the first that concerns one of
    them."""
    model, cluster, batch = question.model, question.cluster, question.job.global_batch_size
    experts = (
        "experts: etp * ep divides tp * cp * dp"
        + ("; in core ep is 1 and etp is tp" * question.candidates().is_core)
        if model.experts is not None
        else f"{model.name} has no experts: ep and etp are 1"
    )
    demands = (
        ({"ep", "etp"}, experts),
        ({"micro_batch_size"}, f"micro_batch_size divides the {batch} sequences over dp"),
        (SHARDS | ALIASED, "param_shard divides grad_shard, that optim_shard, that dp * cp"),
        (
            {"schedule", "vpp"},
            "pp=1 has 1f1b alone; vpp is 2 or more in interleaved_1f1b, 2 in zb_v and dualpipe_v, else 1; "
            f"pp * vpp is at most the {model.layers} layers; core has gpipe, 1f1b and interleaved_1f1b",
        ),
        (
            {"first_stage_layers", "last_stage_layers"},
            f"of {model.layers} layers the first and the last stage have no more than in an even split; two "
            "stages may have any; in core the split is even",
        ),
        (
            {"recompute", "recompute_layers"},
            "recompute_layers is 1 to the most layers of a stage with recompute=full, else 0",
        ),
        ({"offload"}, "in core nothing is offloaded"),
        ({"cp_kind", "cp"}, "cp_kind is ring where cp is 1; in core cp is 1"),
        ({"sequence_parallel"}, "sequence_parallel is false where tp is 1"),
        ({"axis_order"}, "an order of the axes larger than 1 has one spelling, with the others behind"),
    )
    if names <= DEGREES and not ("cp" in names and question.candidates().is_core):
        return f"tp * cp * pp * dp is the {cluster.devices} devices"
    return next(text for fields, text in demands if names & fields)


def _text(question: Question, name: str) -> str:
    if name in question.fixed:
        return f"{name}={_shown(question.fixed[name])}"
    return f"{name} in [{', '.join(map(_shown, question.axes[name]))}]"


def _shown(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
