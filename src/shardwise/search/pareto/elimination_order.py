"""Elimination order of the variables of a factor graph: which one comes next, and by which rule."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Literal

from shardwise.pareto import FactorGraph

EliminationRule = Literal["edge", "leaf", "node", "branch"]
"""`edge` joins tables on the same variables. The others eliminate a variable: `leaf` one with at most one
neighbour, `node` one with two, `branch` one with more.

Cai et al. 2020, section 4: their branch elimination merges operators until the other rules apply. Eliminating
the variable from the joint table of all its neighbours is the same step.
"""


@dataclass(frozen=True, slots=True)
class EliminationStep:
    """The tables `inputs` become the table `output` on `variables`; `variable` is eliminated, or None."""

    rule: EliminationRule
    variable: int | None
    inputs: tuple[int, ...]
    output: int
    variables: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class EliminationOrder:
    """Elimination steps of a factor graph.

    Tables 0 and up are its factors, on the variables `factors`; the others are made by the steps. `last` is
    the remaining table on the separator (entry, exit and shared variables, as far as they exist, by number).
    """

    factors: tuple[tuple[int, ...], ...]
    steps: tuple[EliminationStep, ...]
    last: int

    def variables_of(self, table: int) -> tuple[int, ...]:
        """The variables of a table, in the order of its axes."""
        given = len(self.factors)
        return self.factors[table] if table < given else self.steps[table - given].variables


def order_of(part: FactorGraph) -> EliminationOrder:
    """The elimination order of `part` down to its separator.

    Greedy: next is the variable whose elimination makes the smallest table, of equal ones the first. Among
    variables with a single choice, the one with fewest neighbours.
    """
    separator = set(part.separator)
    tables = {place: factor.variables for place, factor in enumerate(part.factors)}
    steps: list[EliminationStep] = []
    free = set(range(len(part.sizes))) - separator

    on: dict[tuple[int, ...], list[int]] = {}  # tables by their variables
    for table, variables in tables.items():
        on.setdefault(tuple(sorted(variables)), []).append(table)

    def add(
        rule: EliminationRule, variable: int | None, inputs: tuple[int, ...], variables: tuple[int, ...]
    ) -> None:
        output = len(part.factors) + len(steps)
        steps.append(EliminationStep(rule, variable, inputs, output, variables))
        for each in inputs:
            on[tuple(sorted(tables.pop(each)))].remove(each)
        tables[output] = variables
        on.setdefault(variables, []).append(output)

    def merge(variables: tuple[int, ...]) -> None:
        if len(on[variables]) > 1:
            add("edge", None, tuple(sorted(on[variables])), variables)

    adjacent: dict[int, set[int]] = {each: set() for each in range(len(part.sizes))}
    for factor in part.factors:
        for each in factor.variables:
            adjacent[each] |= set(factor.variables) - {each}

    def size(variable: int) -> int:
        return prod(part.sizes[other] for other in (*adjacent[variable], variable))

    def neighbours(variable: int) -> int:
        """Tables of size 1 still have an axis for each variable, so fewer neighbours are better there."""
        return len(adjacent[variable]) if sizes[variable] == 1 else 0

    for variables in list(on):
        merge(variables)
    sizes = {each: size(each) for each in sorted(free)}
    while sizes:
        variable = min(sizes, key=lambda each: (sizes[each], neighbours(each), each))
        neighbourhood = tuple(sorted(adjacent[variable]))
        rule: EliminationRule = (
            "leaf" if len(neighbourhood) < 2 else "node" if len(neighbourhood) == 2 else "branch"
        )
        inputs = tuple(table for table, variables in sorted(tables.items()) if variable in variables)
        add(rule, variable, inputs, neighbourhood)
        del sizes[variable]
        for other in neighbourhood:  # they are in one table now
            adjacent[other] = (adjacent[other] | adjacent[variable]) - {other, variable}
            if other in sizes:
                sizes[other] = size(other)
        merge(neighbourhood)
    if len(tables) > 1 or not tables or set(next(iter(tables.values()))) != separator:
        add("edge", None, tuple(sorted(tables)), tuple(sorted(separator)))
    factors = tuple(factor.variables for factor in part.factors)
    return EliminationOrder(factors, tuple(steps), next(iter(tables)))
