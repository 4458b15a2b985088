"""The process reuses freed tensor memory without returning it to the system."""

from __future__ import annotations

import resource

import torch
from tests.runtime.plans import make_plan

from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, parallelize, reference_module

MIB = 2**20
SIZES = (48 * MIB, 16 * MIB, 3 * MIB)
"""Above and below glibc's largest mmap threshold (32 MiB)."""

PAGE = resource.getpagesize()


def pages_of_a_step(report: object, plan: Plan | None) -> int:
    """The fewest pages that the system gives this process while tensors of SIZES are made and freed, after
    two warm-up rounds; the process runs `plan`, if any. A single round may need more: another thread's small
    allocation can split the free block that the largest tensor needs."""
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

    # Without a plan at least the largest tensor is mapped anew: 48 MiB are 12,288 pages of 4 KiB.
    assert without >= SIZES[0] // PAGE
    assert with_plan < 100
