"""Every rule of every kind on processes: parts of outputs and gradients make what numpy makes on one."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from tests.property.op_instances import INSTANCES
from tests.property.test_graph_kinds import SPATIAL, evenly
from tests.runtime.graph_broken import KERNEL_TWINS
from tests.runtime.graph_kernels import Case, carried_out, errors

from shardwise.graph import KINDS, allows, rules_of
from shardwise.runtime import Team
from shardwise.runtime.graphs.kernels import KERNELS

pytestmark = pytest.mark.xdist_group("runtime")

TOLERANCE = 1e-9
"""In fp64."""


def cases_on(counts: tuple[int, ...]) -> list[Case]:
    """All rules of all operators that go together on so many ranks; windows only where rows are even, and
    along one dim by one axis."""
    found = []
    for name, op in INSTANCES.items():
        rules = rules_of(op)
        for chosen in product(range(len(rules)), repeat=len(counts)):
            own = [rules[at] for at in chosen]
            if not allows(op, own, counts):
                continue
            if op.kind in SPATIAL and not all(evenly(op, rule, max(counts) ** len(counts)) for rule in own):
                continue
            found.append((name, chosen))
    return found


def wrong(
    team: Team, counts: tuple[int, ...], cases: list[Case], broken: str | None = None
) -> list[tuple[str, tuple[str, ...], float]]:
    """The cases that are not what numpy makes, with how far they are from it."""
    outcomes = list(zip(*team.run(prod(counts), carried_out, counts, cases, broken), strict=True))
    found = []
    for case, parts in zip(cases, outcomes, strict=True):
        error = errors(case, counts, parts)
        if error > TOLERANCE:
            names = tuple(rules_of(INSTANCES[case[0]])[at].name for at in case[1])
            found.append((case[0], names, error))
    return found


STEP = {(2,): 1, (3,): 4, (4,): 3, (2, 2): 20}
"""Of so many cases on a mesh one is run; all with `--full`."""


@pytest.mark.parametrize("counts", STEP)
def test_ranks_make_what_one_makes(team: Team, counts: tuple[int, ...], full: bool) -> None:
    assert wrong(team, counts, cases_on(counts)[:: 1 if full else STEP[counts]]) == []


@pytest.mark.parametrize("twin", KERNEL_TWINS)
def test_a_broken_kernel_is_caught(team: Team, twin: str) -> None:
    name, rule = SHOWN_BY[twin]
    case = (name, ([each.name for each in rules_of(INSTANCES[name])].index(rule),))
    assert wrong(team, (2,), [case]) == []
    assert wrong(team, (2,), [case], broken=twin) != []


SHOWN_BY = {
    "gradients of sums are not summed": ("softmax", "split t"),
    "rows of neighbours are zeros": ("convolution", "split x"),
    "a rank takes its own maximum for that of all": ("cross entropy", "split v"),
    "a rank knows its own state alone": ("lstm", "split h"),
}
"""An operator and a rule for each broken kernel."""


def test_every_kind_is_computed() -> None:
    assert set(KERNELS) == set(KINDS)
