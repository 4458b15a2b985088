"""Memory that tensors free is there for the next ones, without the system between."""

from __future__ import annotations

import resource

import torch
from tests.runtime.plans import make_plan

from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, parallelize, reference_module

MIB = 2**20
SIZES = (48 * MIB, 16 * MIB, 3 * MIB)
"""Above glibc's largest threshold for pieces of their own (32 MiB), and below."""

PAGE = resource.getpagesize()


def pages_of_a_step(report: object, plan: Plan | None) -> int:
    """The fewest pages that the system gives this process while tensors of SIZES come and go, behind the
    second time; in a process that runs `plan`, if any. Once may be more: a small piece that another thread
    takes out of what is free leaves the largest tensor no room."""
    job = None if plan is None else parallelize(reference_module(plan.model), plan)
    for _ in range(2):
        _come_and_go()
    given = []
    for _ in range(4):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        _come_and_go()
        given.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del job
    return min(given)


def _come_and_go() -> None:
    alive = [torch.full((size,), 1, dtype=torch.uint8) for size in SIZES]
    del alive


def test_a_process_reuses_the_memory_that_it_has_freed() -> None:
    plan = make_plan("dp=1")
    with WorkerPool(1) as team:
        (without,) = team.run(1, pages_of_a_step, None)
        (with_plan,) = team.run(1, pages_of_a_step, plan)

    # Without one at least the largest tensor comes anew: 48 MiB are 12,288 pages of 4 KiB.
    assert without >= SIZES[0] // PAGE
    assert with_plan < 100
