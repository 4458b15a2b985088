"""The runners-up of a plan: legal, fitting, priced right, in order, and each of a kind of its own."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from shardwise.check.figures import Figures
from shardwise.check.finding import TOLERANCE, Check, fits, same
from shardwise.check.price import evaluate
from shardwise.check.rows import rows_of
from shardwise.check.rules import first_broken, is_candidate
from shardwise.plan import Plan, RunnerUp
from shardwise.strategy import Strategy

StrategyKind = tuple[object, ...]

KIND_FIELDS = ("tp", "cp", "pp", "dp", "ep", "etp", "schedule", "recompute")
"""What tells one runner-up from another."""


def runners_up_checks(plan: Plan, figures: Figures) -> Iterator[Check]:
    """Each runner-up by itself, then their order and kinds."""
    for number, runner_up in enumerate(plan.runners_up, start=1):
        yield _runner_up_check(f"runner-up {number}", runner_up, plan, figures)
    if plan.runners_up:
        yield _order_check(plan)
        yield _kinds_check(plan)


def _runner_up_check(name: str, runner_up: RunnerUp, plan: Plan, figures: Figures) -> Check:
    claimed = _text(runner_up.step_time_s, runner_up.device_bytes)

    def verdict(ok: bool, expected: str) -> Check:
        return Check(name=name, ok=ok, found=claimed, expected=expected)

    proof = plan.certificate
    if not is_candidate(figures, runner_up.strategy, proof.space, proof.fixed, proof.axes):
        return verdict(False, f"a candidate of the space {proof.space!r}")
    rows = rows_of([runner_up.strategy])
    broken = str(first_broken(rows, figures)[0])
    if broken:
        return verdict(False, f"a legal strategy; this one breaks {broken}")
    evaluation = evaluate(figures, rows)
    seconds, device, host = (float(column[0]) for column in evaluation)
    if not (fits(device, figures.usable_bytes) and fits(host, figures.host_capacity_bytes)):
        return verdict(False, f"one that fits; this one needs {device!r} B, on its host {host!r} B")
    ok = same(runner_up.step_time_s, seconds) and same(runner_up.device_bytes, device)
    return verdict(ok, _text(seconds, device))


def _text(seconds: float, nbytes: float) -> str:
    return f"{seconds!r} s, {nbytes!r} B"


def _order_check(plan: Plan) -> Check:
    times = [plan.best.step_time_s, *(runner_up.step_time_s for runner_up in plan.runners_up)]
    is_sorted = all(b >= a * (1 - TOLERANCE) for a, b in pairwise(times))
    return Check(
        name="runners-up order",
        ok=is_sorted,
        found=", ".join(map(repr, times)),
        expected="no time less than the one before, the best first",
    )


def _kinds_check(plan: Plan) -> Check:
    strategies = [plan.best.strategy, *(runner_up.strategy for runner_up in plan.runners_up)]
    kinds = {kind_of(strategy) for strategy in strategies}
    return Check(
        name="runners-up kinds",
        ok=len(kinds) == len(strategies),
        found=f"{len(kinds)} kinds among {len(strategies)} strategies",
        expected=f"each differs from all others in one of {', '.join(KIND_FIELDS)}",
    )


def kind_of(strategy: Strategy) -> StrategyKind:
    """The values in which runners-up differ."""
    return tuple(getattr(strategy, name) for name in KIND_FIELDS)
