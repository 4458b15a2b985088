"""The validator refuses every mutated table that no longer does the same work, and no other table.

A mutation is judged by running the table as a program on numbers: stage s multiplies by a weight that only
its rank has, and B, or I and W, sum up the gradients of all weights. Numbers are integers modulo a prime, so
equality is exact. A mutant keeps its meaning if it runs to its end, leaves nothing stored and gives the same
gradients: two independent actions of a rank may change places.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise.errors import ConfigError
from shardwise.schedule import NAMES, Action, ActionKind, Schedule, from_text, generate, to_text
from shardwise.schedule.legality import illegal_reason
from shardwise.schedule.violations import violations

PRIME = 2_305_843_009_213_693_951
Table = list[list[Action]]
Mutation = Callable[[Table, random.Random], None]


class BrokenProgramError(Exception):
    """The table reads something that is not there, or leaves something stored."""


def gradients(schedule: Schedule) -> list[int]:
    """The gradient of each stage's weight, where input i of m is 7 i + 3 and the loss is the mean output.

    Raises BrokenProgramError where the table cannot be run.
    """
    m, stage_rank = schedule.microbatches, schedule.stage_rank
    if m < 1 or not all(0 <= rank < len(schedule.ranks) for rank in stage_rank):
        raise BrokenProgramError("header")
    program = Program(m, stage_rank)
    queues = [list(reversed(row)) for row in schedule.ranks]
    moved = True
    while moved:
        moved = False
        for rank, queue in enumerate(queues):
            while queue and program.can_run(queue[-1]):
                program.run(rank, queue.pop())
                moved = True
    if any(queues) or program.stored or program.outputs or program.errors:
        raise BrokenProgramError("something is left over")
    return program.gradient


class Program:
    """The state of a run: messages between stages, stored tensors of each stage, and the gradients so far."""

    def __init__(self, m: int, stage_rank: tuple[int, ...]) -> None:
        self.m, self.stage_rank, self.last = m, stage_rank, len(stage_rank) - 1
        self.weight = [11 * stage + 5 for stage in range(len(stage_rank))]
        self.gradient = [0 for _ in stage_rank]
        self.outputs = {(0, i): 7 * i + 3 for i in range(m)}
        self.errors: dict[tuple[int, int], int] = {}
        self.stored: dict[tuple[int, int], list[int]] = {}

    def can_run(self, action: Action) -> bool:
        stage, kind, i = action
        if not (0 <= stage <= self.last and 0 <= i < self.m):
            raise BrokenProgramError(f"{action} does not exist")
        if kind is ActionKind.FORWARD:
            return (stage, i) in self.outputs or (stage, i) in self.stored
        if kind is ActionKind.BACKWARD_WEIGHT or (stage, i) not in self.stored:
            return True
        return (stage, i) in self.errors or len(self.stored[stage, i]) == 2

    def run(self, rank: int, action: Action) -> None:
        stage, kind, i = action
        if self.stage_rank[stage] != rank:
            raise BrokenProgramError(f"rank {rank} has no weight for {action}")
        if kind is ActionKind.FORWARD:
            self.forward(stage, i)
        else:
            if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT):
                self.backward_input(stage, i)
            if kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
                self.backward_weight(stage, i)

    def forward(self, stage: int, i: int) -> None:
        if (stage, i) in self.stored or (stage, i) not in self.outputs:
            raise BrokenProgramError("forward twice")
        x = self.outputs.pop((stage, i))
        self.stored[stage, i] = [x]
        if stage == self.last:
            self.errors[stage, i] = pow(self.m, -1, PRIME)
        else:
            self.outputs[stage + 1, i] = x * self.weight[stage] % PRIME

    def backward_input(self, stage: int, i: int) -> None:
        stored = self.stored.get((stage, i))
        if stored is None or len(stored) != 1:
            raise BrokenProgramError("backward without forward, or twice")
        error = self.errors.pop((stage, i))
        stored.append(error)
        if stage > 0:
            self.errors[stage - 1, i] = error * self.weight[stage] % PRIME

    def backward_weight(self, stage: int, i: int) -> None:
        stored = self.stored.pop((stage, i), None)
        if stored is None or len(stored) != 2:
            raise BrokenProgramError("weight gradient without input gradient")
        self.gradient[stage] = (self.gradient[stage] + stored[0] * stored[1]) % PRIME


def place(table: Table, rng: random.Random) -> tuple[list[Action], int]:
    row = rng.choice([row for row in table if row])
    return row, rng.randrange(len(row))


def drop(table: Table, rng: random.Random) -> None:
    row, at = place(table, rng)
    del row[at]


def repeat(table: Table, rng: random.Random) -> None:
    row, at = place(table, rng)
    row.insert(rng.randrange(len(row) + 1), row[at])


def swap_neighbours(table: Table, rng: random.Random) -> None:
    row, at = place(table, rng)
    row[at - 1], row[at] = row[at], row[at - 1]


def swap_any(table: Table, rng: random.Random) -> None:
    row, at = place(table, rng)
    other = rng.randrange(len(row))
    row[other], row[at] = row[at], row[other]


def move_in_row(table: Table, rng: random.Random) -> None:
    row, at = place(table, rng)
    row.insert(rng.randrange(len(row)), row.pop(at))


def move_to_other_rank(table: Table, rng: random.Random) -> None:
    row, at = place(table, rng)
    action = row.pop(at)
    target = rng.choice(table)
    target.insert(rng.randrange(len(target) + 1), action)


def change_kind(table: Table, rng: random.Random) -> None:
    row, at = place(table, rng)
    row[at] = row[at]._replace(kind=rng.choice(list(ActionKind)))


def change_stage(table: Table, rng: random.Random) -> None:
    row, at = place(table, rng)
    row[at] = row[at]._replace(stage=row[at].stage + rng.choice((-2, -1, 1, 2)))


def change_microbatch(table: Table, rng: random.Random) -> None:
    row, at = place(table, rng)
    row[at] = row[at]._replace(microbatch=row[at].microbatch + rng.choice((-2, -1, 1, 2)))


def cut_row(table: Table, rng: random.Random) -> None:
    row, at = place(table, rng)
    del row[at:]


def swap_rows(table: Table, rng: random.Random) -> None:
    one, other = rng.randrange(len(table)), rng.randrange(len(table))
    table[one], table[other] = table[other], table[one]


def reverse_stretch(table: Table, rng: random.Random) -> None:
    row, at = place(table, rng)
    row[at : at + 4] = row[at : at + 4][::-1]


def split_backward(table: Table, rng: random.Random) -> None:
    """B becomes I at the same place and W at some later one: the same work, unless W comes too early."""
    row, at = place(table, rng)
    stage, kind, mb = row[at]
    if kind is ActionKind.BACKWARD:
        row[at] = Action(stage, ActionKind.BACKWARD_INPUT, mb)
        row.insert(rng.randrange(len(row) + 1), Action(stage, ActionKind.BACKWARD_WEIGHT, mb))


MUTATIONS: tuple[Mutation, ...] = (
    drop,
    repeat,
    swap_neighbours,
    swap_any,
    move_in_row,
    move_to_other_rank,
    change_kind,
    change_stage,
    change_microbatch,
    cut_row,
    swap_rows,
    reverse_stretch,
    split_backward,
)


def legal_case(rng: random.Random) -> tuple[str, int, int, int]:
    while True:
        case = rng.choice(NAMES), rng.randint(1, 6), rng.randint(1, 14), rng.randint(1, 3)
        if illegal_reason(*case) is None:
            return case


def mutant(schedule: Schedule, rng: random.Random, mutations: int = 1) -> Schedule:
    table = [list(row) for row in schedule.ranks]
    stage_rank, m = list(schedule.stage_rank), schedule.microbatches
    for _ in range(mutations):
        which = rng.randrange(len(MUTATIONS) + 2)
        if which < len(MUTATIONS) and any(table):
            MUTATIONS[which](table, rng)
        elif which == len(MUTATIONS):
            m += rng.choice((-1, 1))
        else:
            stage_rank[rng.randrange(len(stage_rank))] = rng.randrange(len(table) + 1)
    return Schedule(name=schedule.name, microbatches=m, stage_rank=stage_rank, ranks=table)


def keeps_meaning(changed: Schedule, original: list[int]) -> bool:
    try:
        return gradients(changed) == original
    except BrokenProgramError:
        return False


@pytest.mark.slow
def test_mutations_that_change_meaning_are_refused_and_no_others(full: bool) -> None:
    rng = random.Random(20)
    changing = keeping = 0
    wanted = 10_000 if full else 2_000
    while changing < wanted:
        name, pp, m, vpp = legal_case(rng)
        schedule = generate(name, pp=pp, microbatches=m, vpp=vpp)
        original = gradients(schedule)
        for _ in range(10):
            changed = mutant(schedule, rng, rng.choice((1, 1, 1, 2, 3)))
            keeps = keeps_meaning(changed, original)
            assert (violations(changed) == []) == keeps, to_text(changed)
            changing += not keeps
            keeping += keeps
    assert keeping > wanted // 20


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_computes_the_gradients_of_one_process(name: str) -> None:
    for pp, m, vpp in [(1, 3, 1), (2, 5, 1), (3, 6, 2), (2, 4, 3), (4, 9, 1), (4, 12, 2)]:
        if illegal_reason(name, pp, m, vpp) is None:
            weights = [11 * stage + 5 for stage in range(pp * vpp)]
            product = 1
            for weight in weights:
                product = product * weight % PRIME
            # d mean_i(x_i w_0 w_1 ...) / d w_s = mean(x) * product / w_s
            mean = sum(7 * i + 3 for i in range(m)) * pow(m, -1, PRIME)
            expected = [mean * product * pow(weight, -1, PRIME) % PRIME for weight in weights]
            assert gradients(generate(name, pp=pp, microbatches=m, vpp=vpp)) == expected


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 4).flatmap(
        lambda ranks: st.lists(
            st.lists(
                st.builds(Action, st.integers(0, 3), st.sampled_from(list(ActionKind)), st.integers(0, 5)),
                max_size=30,
            ),
            min_size=ranks + 1,
            max_size=ranks + 1,
        )
    )
)
def test_any_table_round_trips_as_text(table: Table) -> None:
    schedule = Schedule(name="any", microbatches=6, stage_rank=(0, 1, 2, 3), ranks=table)
    assert from_text(to_text(schedule)) == schedule


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="0123FBIW[]* -\n\u0663", max_size=60))
def test_any_text_is_parsed_or_refused(rows: str) -> None:
    text = f"schedule=x microbatches=2 stage_rank=0\n{rows}"
    try:
        schedule = from_text(text)
    except ConfigError:
        return
    assert from_text(to_text(schedule)) == schedule
