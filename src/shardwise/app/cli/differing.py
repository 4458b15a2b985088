"""Two plans of any kind, term by term: the lines that `compare A B`, `explain --why-not` and `--what-if`
share, and the answer of `compare A B`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from shardwise.app.cli import documents, words
from shardwise.app.cli.card import priced_as_lines
from shardwise.app.cli.division import layout_lines
from shardwise.app.cli.output import Line, Output, TableRow, columns, row
from shardwise.app.cli.overlap import step_parts_or_none, two_parts_lines
from shardwise.errors import ConfigError
from shardwise.inputs import printable
from shardwise.plans import Plan, StepParts, usd_per_billion_tokens
from shardwise.search import ResultDifference

Names = tuple[str, str]
"""How the columns of the two plans are named."""


def compared_plans(plan: Plan, other: Plan, *, other_path: str, trace: str | None, is_json: bool) -> Output:
    """The answer of `compare` for two plans. ConfigError with `trace`: no step was measured."""
    if trace is not None:
        raise ConfigError(
            "needs a measured step", key="--trace", found=f"the plan file {printable(other_path)}",
            allowed="with a trace of `shardwise train --trace`",
        )  # fmt: skip
    if is_json:
        return Output(document=documents.plan_comparison(plan, other))
    return Output(lines=list(_lines(plan, other)))


def _lines(plan: Plan, other: Plan) -> Iterator[Line]:
    yield ((" two plans", "title"),)
    yield (("─" * columns(), "dim"),)
    for label, one in (("first", plan), ("second", other)):
        yield row(label, (f"{one.name} on {one.cluster.name}", "value"))
        yield from layout_lines(one.best, one.network, one.cluster, one.job)
        yield from priced_as_lines(one.priced_as)
    difference = ResultDifference(before=plan.best, after=other.best)
    yield from changed_lines(difference)
    yield from _different_questions(plan, other)
    yield ()
    names = ("first", "second")
    costs = [usd_per_billion_tokens(one.cluster, one.job, one.step_time_s) for one in (plan, other)]
    yield from term_lines(difference, names, costs)
    yield from step_lines(step_parts_or_none(plan), step_parts_or_none(other), names)


def step_lines(before: StepParts | None, after: StepParts | None, names: Names) -> Iterator[Line]:
    """Computation, communication, overlap and idle time of both, on the critical rank of each."""
    rows = list(two_parts_lines(before, after))
    if rows:
        yield ()
        yield _heading("critical rank", names)
    for label, first, second in rows:
        yield _row(label, first, second, words.seconds, "")


def _different_questions(plan: Plan, other: Plan) -> Iterator[Line]:
    """What the two plans do not have in common, so that their step times are of different things."""
    pairs = (
        ("model", plan.name, other.name),
        ("cluster", plan.cluster.name, other.cluster.name),
        ("sequence length", f"{plan.job.seq_len:,}", f"{other.job.seq_len:,}"),
        ("samples", f"of {plan.job.attention_len:,}", f"{other.job.attention_len:,} tokens"),
        ("batch", f"{plan.job.global_batch_size:,}", f"{other.job.global_batch_size:,}"),
        ("dtype", plan.job.dtype, other.job.dtype),
        ("optimizer", plan.job.optimizer, other.job.optimizer),
        ("software", plan.job.profile.name, other.job.profile.name),
        ("target", plan.target or "any", other.target or "any"),
    )
    texts = [f"{name} {first} and {second}" for name, first, second in pairs if first != second]
    yield from words.wrapped_rows("differ in", texts, "warn")


def changed_lines(difference: ResultDifference) -> Iterator[Line]:
    """The fields of two uniform strategies that differ."""
    if not difference.has_strategies:
        return
    changed = [
        f"{name} {words.value_text(old)} → {words.value_text(new)}"
        for name, (old, new) in difference.fields.items()
    ]
    yield from words.wrapped_rows("changes", changed or ["nothing"], "dim")


def term_lines(
    difference: ResultDifference, names: Names, costs: Sequence[float | None] = ()
) -> Iterator[Line]:
    """Terms of step time, then of memory: before, after and difference, the largest difference first. Plans
    that are estimated in different terms are compared in their sums alone. `costs` are dollars per billion
    tokens of both."""
    before, after = difference.before, difference.after
    yield _heading("time", names)
    if difference.has_equal_terms:
        more = difference.breakdown_s
        least_s = 1e-4 * before.step_time_s
        yield from _rows(before.breakdown, after.breakdown, more, words.seconds, least_s)
    slower = after.step_time_s / before.step_time_s - 1.0
    yield _row("step time", before.step_time_s, after.step_time_s, words.seconds, "value",
               f"  {slower * 100:+.2f} %")  # fmt: skip
    for name, old, new in (
        ("tokens/s per device", before.tokens_per_s_per_device, after.tokens_per_s_per_device),
        ("MFU", before.mfu, after.mfu),
    ):
        if old is not None and new is not None:
            yield _row(name, old, new, words.percent if name == "MFU" else _whole, "")
    dollars = [cost for cost in costs if cost is not None]
    if len(dollars) == 2:
        yield _row("cost, billion tokens", dollars[0], dollars[1], _dollars, "")
    yield ()
    yield _heading("memory", names)
    peaks = before.peak_memory.device, after.peak_memory.device
    if difference.has_equal_terms:
        yield from _rows(before.memory, after.memory, difference.memory_bytes, _gib, 1e-3 * peaks[0])
    yield _row("peak memory", *peaks, _gib, "value")


def _heading(title: str, names: Names) -> Line:
    return TableRow([(f" {title:<22}{names[0]:>12}{names[1]:>20}{'difference':>14}", "label")])


def _gib(nbytes: float) -> str:
    return f"{words.gib(nbytes)} GiB"


def _dollars(usd: float) -> str:
    return f"${usd:,.2f}"


def _whole(number: float) -> str:
    return f"{number:,.0f}"


Texts = Callable[[float], str]


def _rows(
    before: Mapping[str, float],
    after: Mapping[str, float],
    more: Mapping[str, float],
    text_of: Texts,
    least: float,
) -> Iterator[Line]:
    for name in sorted(more, key=lambda name: -abs(more[name])):
        if abs(more[name]) >= least:
            label = words.term_text(name)
            yield _row(label, before.get(name, 0.0), after.get(name, 0.0), text_of, "")
    same = [name for name in more if abs(more[name]) < least]
    if same:
        sums = (sum(before.get(name, 0.0) for name in same), sum(after.get(name, 0.0) for name in same))
        yield _row(f"{words.counted(len(same), 'other term')}", *sums, text_of, "dim")


def _row(label: str, old: float, new: float, text_of: Texts, style: str, end: str = "") -> Line:
    difference = ("+" if new >= old else "-") + text_of(abs(new - old))
    return TableRow([(f" {label:<22}{text_of(old):>12}{text_of(new):>20}{difference:>14}{end}", style)])
