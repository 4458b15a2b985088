"""Schedules as they are exported to TorchTitan, on PyTorch's pipelining itself: its loader of CSV files takes
all seven, and its schedules train as our runtime does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.runtime.equality import batches, whole_module
from tests.runtime.jobs import uniform
from tests.runtime.plans import BATCH, make_plan
from torch import distributed, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    PipelineScheduleMulti,
    _PipelineScheduleRuntime,
    get_schedule_class,
)
from torch.nn import functional
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.plans import Plan
from shardwise.runtime import WorkerPool, parallelize
from shardwise.runtime.workers import Report
from shardwise.schedule import NAMES, generate, stage_ranks
from shardwise.targets.torchtitan import SCHEDULE_CLASSES, schedule_csv

VPP = {"interleaved_1f1b": 2, "zb_v": 2, "dualpipe_v": 2}

LR, TOLERANCE = 1e-3, 1e-5


def _plan(name: str) -> Plan:
    return make_plan(f"pp=2,schedule={name},vpp={VPP.get(name, 1)},micro_batch_size=1")


def _text(name: str) -> str:
    """The file of a schedule of four ranks."""
    return schedule_csv(replace(_plan(name).best.strategy, pp=4), BATCH)


def _loaded(text: str, folder: Path, *, name: str, rank: int, pp: int) -> _PipelineScheduleRuntime:
    """PyTorch's schedule of the file, on one rank of a fake group."""
    file = folder / "schedule.csv"
    file.write_text(text)
    owners = stage_ranks(name, pp, VPP.get(name, 1))
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=pp)
    try:
        stages = [
            PipelineStage(nn.Linear(4, 4), stage, len(owners), torch.device("cpu"))
            for stage, owner in enumerate(owners)
            if owner == rank
        ]
        schedule = _PipelineScheduleRuntime(
            stages, n_microbatches=text.count("F") // len(owners), loss_fn=nn.MSELoss()
        )
        schedule._load_csv(str(file))
        return schedule
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("name", NAMES)
def test_pytorch_loads_every_schedule_on_all_ranks(name: str, tmp_path: Path) -> None:
    text = _text(name)
    table = generate(name, pp=4, microbatches=BATCH, vpp=VPP.get(name, 1))
    for rank in range(4):
        schedule = _loaded(text, tmp_path, name=name, rank=rank, pp=4)
        assert schedule.pipeline_order[rank] is not None
        assert list(map(str, schedule.pipeline_order[rank])) == list(map(str, table.ranks[rank]))
        # Each rank but the ends of the pipeline sends and receives.
        assert any("SEND" in str(action) for action in schedule.pipeline_order_with_comms[rank])


BROKEN: dict[str, Callable[[str], str]] = {
    "a missing forward pass": lambda text: text.replace("0F1,", "", 1),
    "a missing weight gradient": lambda text: text.replace(",0W1", "", 1),
    "an input gradient first": lambda text: text.replace("0F0,", "0I0,", 1).replace(",0I0", ",0F0", 1),
    "another letter": lambda text: text.replace("0F0", "0X0", 1),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_pytorch_refuses_a_broken_schedule(fault: str, tmp_path: Path) -> None:
    text = BROKEN[fault](_text("zb_h1"))
    with pytest.raises((AssertionError, RuntimeError, ValueError)):
        _loaded(text, tmp_path, name="zb_h1", rank=0, pp=4)


def _by_both(report: Report, plan: Plan, file: str | None) -> tuple[float, float, float]:
    """On every rank: the loss of our runtime, that of PyTorch's schedule on the same stages and batch (0
    without the last stage), and the largest difference of their gradients, relative to the largest."""
    job = uniform(parallelize(whole_module(plan.model, 0), plan, lr=LR, max_norm=1e9))
    batch = batches(plan, 0).batch(0)
    ours = job.backward(batch).loss
    expected = [weight.grad.clone() for weight in job.parameters]
    for weight in job.parameters:
        weight.grad = None
    losses: list[torch.Tensor] = []
    schedule = _schedule_of(plan, job.stages, file)
    is_first, is_last = (any(index == end for index, _ in job.stages) for end in (0, schedule_end(plan)))
    schedule.step(
        *([batch[:, :-1]] if is_first else []),
        target=batch[:, 1:] if is_last else None,
        losses=losses if is_last else None,
    )
    scale = max(float(grad.abs().max()) for grad in expected)
    errors = [
        float((weight.grad - grad).abs().max()) / scale
        for weight, grad in zip(job.parameters, expected, strict=True)
    ]
    return ours, float(sum(loss.detach() for loss in losses)), max(errors)


def schedule_end(plan: Plan) -> int:
    """The last stage."""
    return plan.best.strategy.pp * plan.best.strategy.vpp - 1


def _schedule_of(
    plan: Plan, stages: Sequence[tuple[int, nn.Module]], file: str | None
) -> PipelineScheduleMulti:
    """PyTorch's schedule as TorchTitan makes it: by its name, or from the file."""
    own = [
        PipelineStage(module, index, schedule_end(plan) + 1, torch.device("cpu")) for index, module in stages
    ]
    common = {"n_microbatches": BATCH, "loss_fn": _loss, "scale_grads": False}
    if file is not None:
        schedule = _PipelineScheduleRuntime(own, **common)
        schedule._load_csv(file)
        return schedule
    kind = get_schedule_class(SCHEDULE_CLASSES[plan.best.strategy.schedule])
    return kind(own if issubclass(kind, PipelineScheduleMulti) else own[0], **common)


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A micro-batch's share of the mean loss of the batch."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten()) / BATCH


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_pytorchs_schedule_trains_as_our_runtime(team: WorkerPool, name: str, tmp_path: Path) -> None:
    plan = _plan(name)
    file = tmp_path / "schedule.csv"
    file.write_text(schedule_csv(plan.best.strategy, BATCH))
    for csv in _ways(name, file):
        found = team.run(2, _by_both, plan, csv)
        ours = found[0][0]
        assert sum(theirs for _, theirs, _ in found) == pytest.approx(ours, rel=TOLERANCE)
        assert max(error for _, _, error in found) < TOLERANCE


def _ways(name: str, file: Path) -> Iterator[str | None]:
    """By the name of PyTorch's schedule, where it has one, and from the file."""
    if name in SCHEDULE_CLASSES:
        yield None
    yield str(file)
