"""Why nothing fits: the constraint that binds, by how many bytes, and relaxations that do fit.

`why_empty` explains an empty space by an infeasible subset of its fixed values, found by a deletion filter.
`infeasible` builds the error of a search without a feasible candidate.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain

from shardwise.cluster import Cluster, multiplied, part_of, part_sizes
from shardwise.cost import Problem, bind, peaks_of
from shardwise.errors import Infeasible, InternalError
from shardwise.model import Model
from shardwise.plans import Result, Value
from shardwise.search.bnb.incumbent import Fastest, Goal, Smallest
from shardwise.search.bnb.solver import SearchResult
from shardwise.search.question import Question, shortest_text
from shardwise.search.result import result_of
from shardwise.search.space import divisors
from shardwise.strategy import (
    HOST_MEMORY,
    MEMORY,
    RULES,
    SCHEDULES,
    TARGET_LIMIT,
    Job,
    Strategy,
    StrategyTable,
    first_broken,
)
from shardwise.ties import first_largest

DEGREES = frozenset(("tp", "cp", "pp", "dp"))
SHARDS = frozenset(("param_shard", "grad_shard", "optim_shard"))
ALIASED = frozenset(("zero_stage", "dp_replicate", "dp_shard"))

# Empty spaces

MOST_TRIED = 64
"""Largest number of values of a field that are tried to list its possible values."""


def why_empty(question: Question) -> str:
    """Why the space of a question is empty: an infeasible subset of its fixed values and axes, the demand of
    the space on such fields, and the possible values of the first field with the other ones unchanged."""
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
    with_others = " with the other values unchanged" if len(subset) > 1 else ""
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
    """The values of a field that some candidate has, with the rest of the question unchanged."""
    axes = {name: values for name, values in question.axes.items() if name != field}
    tried = list(_values(question, field))
    if len(tried) > MOST_TRIED:
        return
    for value in tried:
        if not _is_empty(replace(question, fixed={**question.fixed, field: value}, axes=axes)):
            yield value


def _values(question: Question, field: str) -> Iterable[Value]:
    """All values that a field can have in any space with this number of devices, if they can be listed."""
    if field in DEGREES | SHARDS | {"ep", "etp", "dp_replicate", "dp_shard"}:
        return divisors(question.cluster.devices)
    if field == "micro_batch_size":
        return divisors(question.job.global_batch_size)
    if field == "schedule":
        return SCHEDULES
    return range(1, question.model.layers + 1) if field == "vpp" else ()


def _demand(question: Question, names: frozenset[str]) -> str:
    """What the space (docs/reference/space.md) demands of these fields: the first rule that concerns one of
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
            "pp=1 has only 1f1b; vpp is 2 or more in interleaved_1f1b, 2 in zb_v and dualpipe_v, else 1; "
            f"pp * vpp is at most the {model.layers} layers; core has gpipe, 1f1b and interleaved_1f1b",
        ),
        (
            {"first_stage_layers", "last_stage_layers"},
            f"of {model.layers} layers, the first and the last stage have at most as many as in an even "
            "split; with two stages any split is allowed; in core the split is even",
        ),
        (
            {"recompute", "recompute_layers"},
            "recompute_layers is 1 to the layers of the largest stage with recompute=full, else 0",
        ),
        ({"offload"}, "in core nothing is offloaded"),
        ({"cp_kind", "cp"}, "cp_kind is ring where cp is 1; in core cp is 1"),
        ({"sequence_parallel"}, "sequence_parallel is false where tp is 1"),
        ({"axis_order"}, "orders that differ only in axes of size 1 are one; the first of them is written"),
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


# Nothing fits

GIB = 2**30

SearchFunction = Callable[[Question, Problem, Goal], SearchResult]

MOST_RELAXATIONS = 3
"""Largest number of relaxations that an error lists."""

NEXT_SMALLER = 2
"""Parts of a cluster that are tried, in addition to the largest power of two."""


def legal_reason(problem: Problem, strategy: Strategy) -> tuple[str | None, str]:
    """The code of the first rule that a strategy breaks, with its demand and the value found; (None, "") if
    it is legal."""
    broken = int(first_broken(StrategyTable.of([strategy]), problem.limits, RULES)[0])
    if broken < 0:
        return None, ""
    rule = RULES[broken]
    return rule.code, rule.violation_text(strategy, problem.limits)


class OutOfTime(Exception):
    """The budget ended a search that had to be complete, or left no time to begin it."""


def infeasible(
    question: Question, problem: Problem, outcome: SearchResult, search: SearchFunction
) -> Infeasible:
    """The error with the constraint that binds and relaxations that help, as far as their searches get:
    `search` raises OutOfTime if no time is left."""
    rejected = outcome.ledger.rejected
    try:
        binding = _binding(question, problem, outcome, search)
    except OutOfTime:
        what = MEMORY if MEMORY in rejected else HOST_MEMORY
        binding = f"nothing fits: {what} binds; by how much was not found within the budget"
    return Infeasible(binding, reasons=rejected, relaxations=tuple(_relaxations(question, rejected, search)))


def _binding(question: Question, problem: Problem, outcome: SearchResult, search: SearchFunction) -> str:
    rejected = outcome.ledger.rejected
    if not rejected:
        return why_empty(question)
    if MEMORY not in rejected and HOST_MEMORY not in rejected:
        most = max(rejected, key=lambda code: rejected[code])
        share = f"{rejected[most]:,} of {outcome.enumerated:,}"
        if most == TARGET_LIMIT:
            return (
                f"no strategy of this space is run by the target: its limits exclude {share}; "
                "--target any allows them"
            )
        (rule,) = (rule for rule in RULES if rule.code == most)
        return (
            f"no candidate is legal: {share} break {most} ({rule.text}; {rule.limits_text(problem.limits)})"
        )
    closest = _smallest(question, replace(problem, capacity_bytes=float("inf")), search)
    if closest is None:
        return _host_binding(question, problem, search)
    result = result_of(problem, closest)
    largest = list(result.memory)[int(first_largest(list(result.memory.values())))]
    return (
        f"nothing fits: {MEMORY} binds; {_missing(problem, result)}; most of it {largest} "
        f"({result.memory[largest] / GIB:.2f} GiB) "
        f"with {shortest_text(question.model, question.cluster, question.job, closest)}"
    )


def _missing(problem: Problem, result: Result) -> str:
    needed, usable = result.peak_memory.device, problem.usable_bytes
    return (
        f"the closest candidate needs {needed / GIB:.2f} GiB on rank {result.tightest_rank}, "
        f"{(needed - usable) / GIB:.2f} GiB more than the {usable / GIB:.2f} GiB it may use"
    )


def _host_binding(question: Question, problem: Problem, search: SearchFunction) -> str:
    """The text for candidates that all offload more than a host has."""
    boundless = replace(problem, capacity_bytes=float("inf"), host_bytes_per_device=float("inf"))
    closest = _smallest(question, boundless, search)
    if closest is None:
        raise InternalError("a candidate was rejected for its memory, and there is none")
    needed, has = host_bytes_of(problem, closest), problem.host_bytes_per_device
    return (
        f"nothing fits: {HOST_MEMORY} binds; a rank offloads {needed / GIB:.2f} GiB and its host has "
        f"{has / GIB:.2f} GiB for it "
        f"with {shortest_text(question.model, question.cluster, question.job, closest)}"
    )


def host_bytes_of(problem: Problem, strategy: Strategy) -> float:
    """Bytes that a legal strategy offloads to the host, per device."""
    return float(peaks_of(problem, StrategyTable.of([strategy])).host_bytes[0])


def host_memory(model: Model, cluster: Cluster, job: Job, strategy: Strategy) -> tuple[float, float]:
    """Bytes that a legal strategy offloads to the host, and bytes of the host, both per device."""
    problem = bind(model, cluster, job)
    return host_bytes_of(problem, strategy), problem.host_bytes_per_device


def _smallest(question: Question, problem: Problem, search: SearchFunction) -> Strategy | None:
    """The candidate of the question that takes least memory in `problem`; None if no candidate is legal and
    fits."""
    outcome = search(replace(question, exhaustive=False), problem, Smallest())
    if outcome.unexplored:
        raise OutOfTime
    return outcome.found[0].table[0] if outcome.found else None


def _relaxations(question: Question, rejected: Collection[str], search: SearchFunction) -> Iterator[str]:
    """Relaxations of the question, cheapest first, that have an answer: at most `MOST_RELAXATIONS`, and the
    first of each kind. Ends when a search is ended by its budget."""
    is_illegal = bool(rejected) and MEMORY not in rejected and HOST_MEMORY not in rejected
    others = _on_fewer_devices(question) if is_illegal else _needing_less(question)
    kinds: set[str] = set()
    for kind, text, changed in chain(_wider(question), others):
        if kind in kinds:
            continue
        try:
            outcome = search(changed, changed.problem(), Fastest(1))
        except OutOfTime:
            return
        if outcome.found:
            kinds.add(kind)
            best = outcome.found[0]
            strategy = shortest_text(changed.model, changed.cluster, changed.job, best.table[0])
            yield f"{text}: {best.time_s:.3f} s per step with {strategy}"
        if len(kinds) == MOST_RELAXATIONS or outcome.unexplored:
            return


def _wider(question: Question) -> Iterator[tuple[str, str, Question]]:
    """Single relaxations, each with its kind: a wider space, or without one fixed field."""
    requested = replace(question, exhaustive=False)
    if requested.axes:
        yield "space", f"with --space {requested.space}", replace(requested, axes={})
    elif requested.space == "core":
        yield "space", "with --space default", replace(requested, space="default")
    for name in requested.fixed:
        rest = {key: value for key, value in requested.fixed.items() if key != name}
        yield name, f"without {requested.fixed_by.get(name, f'--fix {name}')}", replace(requested, fixed=rest)


def _needing_less(question: Question) -> Iterator[tuple[str, str, Question]]:
    """Single relaxations, each with its kind, that need less device memory: of the job, then of the
    cluster."""
    requested = replace(question, exhaustive=False)
    job = requested.job
    if job.memory_margin > 0.0:
        yield "margin", "with --memory-margin 0", replace(requested, job=replace(job, memory_margin=0.0))
    if job.optimizer == "adamw":
        lighter = replace(job, optimizer="adafactor")
        yield "optimizer", "with --optimizer adafactor", replace(requested, job=lighter)
    for factor in (2, 4, 8):
        if job.seq_len % factor == 0:
            shorter = job.with_seq_len(job.seq_len // factor)
            yield "sequence", f"with --seq-len {shorter.seq_len}", replace(requested, job=shorter)
    for factor in (2, 4, 8, 16):
        cluster = multiplied(requested.cluster, factor)
        text = f"on {cluster.devices} devices ({factor} times as many nodes)"
        yield "cluster", text, replace(requested, cluster=cluster)


def _on_fewer_devices(question: Question) -> Iterator[tuple[str, str, Question]]:
    """Smaller parts of the cluster, for questions without a legal candidate: sizes that must be divisible by
    the number of devices may be divisible by one with fewer or smaller prime factors. Tries the largest parts
    and the largest power of two."""
    requested = replace(question, exhaustive=False)
    smaller = part_sizes(requested.cluster)[:-1]
    tried = {*smaller[-NEXT_SMALLER:], *(size for size in smaller if size.bit_count() == 1)}
    for devices in sorted(tried, reverse=True)[: NEXT_SMALLER + 1]:
        text = f"on {devices} of the {requested.cluster.devices} devices"
        yield "cluster", text, replace(requested, cluster=part_of(requested.cluster, devices))
