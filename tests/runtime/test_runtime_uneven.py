"""Uneven plans: losses and gradients equal those of one process, and the plan is obeyed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.equality import Difference, Trajectory, batches, single_process, whole_module
from tests.runtime.jobs import uneven
from tests.runtime.mutation import with_mutant
from tests.runtime.plans import make_plan, tiny
from tests.runtime.recorded_collectives import CollectiveRecord, record_collectives
from tests.runtime.uneven_equality import divided_unevenly
from tests.runtime.uneven_mutants import HALF_MUTANTS, MUTANTS
from tests.runtime.uneven_plans import make_uneven
from tests.sampling import sample_of

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.model import parameters
from shardwise.plans import Layout, Pipeline, Plan, StagePart, read_plan, write_plan
from shardwise.runtime import TrainOptions, WorkerPool, check_runnable, parallelize, reference_module, train
from shardwise.runtime.gradients import local
from shardwise.runtime.regions import LocalRegion, region_of
from shardwise.runtime.workers import Report
from shardwise.schedule import generate
from shardwise.sim import COMPUTE

ROOT = Path(__file__).resolve().parents[2]
STEPS, MORE_STEPS = 2, 3
"""The loss of the second step shows the first update, that of the third the optimizer states."""
TOLERANCE = 2e-5
"""As for other plans: relative, in fp32."""

MATRIX = [
    # two pipelines of one stage with shares of 3 to 1; the second case is tied
    ("6 l4 + 2 l4", "llama", 1),
    ("3 l4 + 1 l4", "gpt", 2),
    # stages of different tensor degrees, the wider one first and last; tied over two stages
    ("8 tp2l1 l3", "llama", 1),
    ("8 l2 tp2l2", "gpt", 1),
    # pipelines of different depth and tensor degree; cuts that cross; a pipeline of one stage; three tensor
    # degrees
    ("5 tp2l4 + 3 l2 l2", "gpt", 1),
    ("3 l1 l3 + 5 l3 l1", "qwen3", 1),
    ("3 l1 tp2l2 l1 + 1 l4", "qwen3", 2),
    ("4 tp4l1 l2 tp2l1 + 4 l4", "neox", 1),
    # fewer key-value heads than tensor ranks next to whole ones; each stage recomputes in its own way
    ("5 tp4l4 + 2 l2 tp2l2full + 1 l4selective", "llama", 1),
    # samples of a micro-batch are divided in one stage and not in the next
    ("3 dp2l2 tp2l2 + 1 l4", "llama", 2),
    # ALiBi slopes of different heads in each pipeline, embeddings of another width; soft-capped scores and
    # logits
    ("3 l1 tp2l3 + 5 l4", "bloom", 1),
    ("8 l2 tp2l2", "opt", 1),
    ("3 tp2l2 l2 + 1 l4", "gemma2", 2),
]


@cache
def expected(model: str, optimizer: str, seed: int, steps: int) -> Trajectory:
    return single_process(make_plan("tp=1", model=model, optimizer=optimizer), seed=seed, steps=steps)


def run(
    team: WorkerPool, plan: Plan, seed: int = 0, broken: str | None = None, steps: int = STEPS
) -> list[Difference]:
    right = expected(plan.model.name, plan.job.optimizer, seed, steps)
    return team.run(plan.cluster.devices, divided_unevenly, plan, right, seed, broken)


OFTEN = [case for case in MATRIX if case not in (MATRIX[5], MATRIX[11])]
"""Run without `--full`: the two cases left out have cuts and stages that other cases have too."""


@pytest.mark.parametrize(("text", "model", "size"), sample_of(MATRIX, OFTEN))
def test_an_uneven_run_equals_one_process(team: WorkerPool, text: str, model: str, size: int) -> None:
    plan = make_uneven(text, model=model, micro_batch_size=size)
    found = run(team, plan, steps=MORE_STEPS)
    assert max(rank.largest for rank in found) < TOLERANCE
    check_tables(plan, found)
    # Optimizer states: every element of the model on one rank; at most an element of padding per set and rank
    total = sum(rank.parameters for rank in found)
    assert parameters(plan.model) <= total < parameters(plan.model) + 100


def check_tables(plan: Plan, found: list[Difference]) -> None:
    """Every rank ran 1F1B of its own pipeline; communication between the actions is ignored."""
    for pipeline, share in zip(plan.best.layout.pipelines, plan.best.microbatches, strict=True):
        table = generate("1f1b", pp=len(pipeline.stages), microbatches=share, vpp=1)
        for stage, row in zip(pipeline.stages, table.ranks, strict=True):
            for rank in stage.rank_numbers:
                words = ("SEND", "RECV", "REDUCE_GRAD")
                ran = [one for one in found[rank].executed if not any(word in one for word in words)]
                assert ran == list(map(str, row))


def test_sgd_another_seed_and_an_idle_rank(team: WorkerPool) -> None:
    plan = make_uneven("5 tp2l4 + 3 l4", optimizer="sgd", devices=4)
    found = run(team, plan, seed=7, steps=MORE_STEPS)
    assert max(rank.largest for rank in found) < TOLERANCE
    assert (found[3].executed, found[3].parameters) == ((), 0)


HALF_TOLERANCE = 2e-2
"""As for other plans: bf16 compared with fp32."""


@pytest.mark.parametrize(("text", "model"), [("6 l4 + 2 l4", "llama"), ("3 l1 tp2l2 l1 + 5 tp2l4", "gpt")])
def test_bf16_with_fp32_reduction_stays_close(team: WorkerPool, text: str, model: str) -> None:
    found = run(team, make_uneven(text, model=model, dtype="bf16"))
    assert 1e-6 < max(rank.loss for rank in found) < HALF_TOLERANCE  # the run is not in fp32
    assert max(rank.norm for rank in found) < HALF_TOLERANCE


def _precision(report: Report, plan: Plan, broken: str | None) -> tuple[bool, bool, bool]:
    """Whether the weights are in bf16 and equal the rounded owned weights; whether owned weights have more
    digits than bf16 before the first step; and whether summed gradients do."""
    with with_mutant(HALF_MUTANTS, broken):
        return _precision_of(plan)


def _precision_of(plan: Plan) -> tuple[bool, bool, bool]:
    job = uneven(parallelize(reference_module(plan.model), plan))

    def is_more(shares: list[Any]) -> bool:
        return any(bool((share != share.bfloat16().float()).any()) for share in shares)

    def is_rounded() -> bool:
        owned = job.owned.gathered_regions([own for own, _ in job.owned.parameters])
        return all(
            weight.dtype == torch.bfloat16
            and torch.equal(
                LocalRegion(region_of(weight), {"": local(weight.detach())}).view("", region).flatten(),
                values.bfloat16(),
            )
            for (weight, region, _), values in zip(job.owned.regions, owned, strict=True)
        )

    before = is_more([own for own, _ in job.owned.parameters])
    job.backward(batches(plan, 0).batch(0))
    sums = is_more([own.grad for own, _ in job.owned.parameters])
    job.update()
    return is_rounded(), before, sums


@pytest.mark.parametrize("text", ["3 l1 tp2l3 + 5 l4", "8 l4"])
def test_in_bf16_weights_and_sums_are_stored_in_fp32(team: WorkerPool, text: str) -> None:
    plan = make_uneven(text, dtype="bf16")
    devices = plan.cluster.devices
    assert team.run(devices, _precision, plan, None) == [(True, True, True)] * devices


@pytest.mark.parametrize(
    ("mutant", "found"),
    [
        ("gradients are added up in bf16", (True, True, False)),
        ("weights are owned in bf16", (True, False, True)),
        ("weights compute in fp32", (False, True, True)),
    ],
)
def test_a_mutant_with_another_precision_is_caught(
    team: WorkerPool, mutant: str, found: tuple[bool, bool, bool]
) -> None:
    """On one rank no weight has two owners, whose sum would hide the rounding."""
    assert team.run(1, _precision, make_uneven("8 l4", dtype="bf16"), mutant) == [found]


BROKEN = [
    ("shares are not weighed", "6 l4 + 2 l4", "llama", 1),
    ("a pipeline's gradients are left out", "6 l4 + 2 l4", "llama", 1),
    ("pieces upside down", "5 tp2l4 + 3 l2 l2", "llama", 1),
    ("the tied head is left out", "8 l1 l3", "gpt", 1),
    ("every tensor rank counts", "5 tp2l4 + 3 l4", "llama", 1),
    ("all pipelines take the first samples", "6 l4 + 2 l4", "llama", 1),
    ("all replicas take the first rows", "4 dp2l4", "llama", 2),
    ("hidden states change places", "8 l2 tp2l2", "llama", 1),
    ("no sum over tensor ranks", "8 tp2l1 l3", "llama", 1),
    ("no clipping", "6 l4 + 2 l4", "llama", 1),
    ("weights stay", "6 l4 + 2 l4", "llama", 1),
]


@pytest.mark.parametrize(("mutant", "text", "model", "size"), BROKEN)
def test_a_broken_mutant_is_caught(team: WorkerPool, mutant: str, text: str, model: str, size: int) -> None:
    found = run(team, make_uneven(text, model=model, micro_batch_size=size), broken=mutant)
    assert max(rank.largest for rank in found) > 100 * TOLERANCE


def test_every_mutant_is_tried() -> None:
    assert {mutant for mutant, *_ in BROKEN} == set(MUTANTS)


def _recorded(report: Report, plan: Plan) -> Counter[CollectiveRecord]:
    job = parallelize(whole_module(plan.model, 0), plan)
    with record_collectives() as record:
        job.step(batches(plan, 0).batch(0))
    return record.counts


def test_each_pair_of_ranks_reduces_its_common_gradients(team: WorkerPool) -> None:
    """A layer of the tiny llama has 32 x 32 (q, out) twice, 32 x 16 (k, v) twice and 3 x 32 x 48 in its MLP:
    7,680 elements that two tensor ranks divide, and 2 norms of 32. With 4 layers, two tables of 96 x 32 and
    the last norm: 36,864 divided, 288 replicated."""
    half, norms = 4 * 36_864 // 2, 4 * 288
    counts = team.run(3, _recorded, make_uneven("5 tp2l4 + 3 l4"))
    for kind in ("reduce_scatter", "all_gather"):
        found = [
            {size: many for (name, size), many in sizes_of(one).items() if name == kind and size >= norms}
            for one in counts
        ]
        # each tensor rank has one half, the rank of the other pipeline both
        wide = [{size: many for size, many in one.items() if size in (half, norms)} for one in found]
        assert wide == [{half: 1, norms: 1}, {half: 1, norms: 1}, {half: 2, norms: 1}]


def sizes_of(counts: Counter[CollectiveRecord]) -> dict[tuple[str, int], int]:
    return {(one.kind, one.nbytes): many for one, many in counts.items()}


def test_stages_send_every_element_once(team: WorkerPool) -> None:
    """A micro-batch's hidden states are 32 tokens of 32 elements in fp32: 4,096 bytes. Two tensor ranks have
    2,048 each; 8 micro-batches go forward and back."""
    first, second, last = map(sizes_of, team.run(3, _recorded, make_uneven("8 tp2l1 l3")))
    for rank in (first, second):
        assert (rank["send", 2_048], rank["recv", 2_048]) == (8, 8)
    assert (last["send", 2_048], last["recv", 2_048]) == (16, 16)


def _recompute_kinds(report: Report, plan: Plan) -> list[str]:
    job = uneven(parallelize(reference_module(plan.model), plan))
    assert job.stage is not None
    return [layer.recompute for layer in job.stage.layers.values()]


def test_every_stage_recomputes_as_planned(team: WorkerPool) -> None:
    plan = make_uneven("4 l1full l3 + 4 l4selective")
    assert team.run(3, _recompute_kinds, plan) == [["full"], ["none"] * 3, ["selective"] * 4]


def test_a_trace_shows_every_pipelines_own_actions(team: WorkerPool) -> None:
    plan = make_uneven("5 l4 + 3 l4")
    for spans, share in zip(
        team.run(2, train, plan, TrainOptions(steps=1, is_traced=True)), (5, 3), strict=True
    ):
        row = generate("1f1b", pp=1, microbatches=share, vpp=1).ranks[0]
        assert [span.name for span in spans if span.track == COMPUTE] == [*map(str, row), "optimizer"]


def test_the_documented_command_lines_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On two unequal processes `plan` answers with an uneven plan, and `train` runs it."""
    plan, log = str(tmp_path / "p.yaml"), tmp_path / "steps.jsonl"
    question = [str(ROOT / "examples/tiny.yaml"), "--cluster", str(ROOT / "examples/clusters/unequal.yaml"),
                "--seq-len", "64", "--global-batch-size", "16", "--dtype", "fp32"]  # fmt: skip
    assert main(["plan", *question, "--save", plan]) == 0
    shown_plan = " ".join(capsys.readouterr().out.replace("\\\n", " ").split())  # long commands continue
    assert f"shardwise train {plan}" in shown_plan
    shares = read_plan(plan).best.microbatches
    assert len(shares) == 2 and shares[0] != shares[1]
    assert main(["train", plan, "--steps", "6", "--log", str(log)]) == 0
    shown = capsys.readouterr()
    assert "plan          uneven: 2 data-parallel pipelines" in shown.out
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert set(records[0]) == {
        "step", "loss", "gradient_norm", "step_time_s", "exposed_communication_s", "predicted_s", "tokens",
        "tokens_per_s", "mfu",
    }  # fmt: skip
    assert [record["tokens"] for record in records] == [1024 * step for step in range(1, 7)]
    assert records[-1]["loss"] < records[0]["loss"] - 0.1


def saved(tmp_path: Path, plan: Plan) -> str:
    path = str(tmp_path / "uneven.yaml")
    write_plan(path, plan)
    return path


def changed(plan: Plan, **changes: Any) -> Plan:
    return replace(plan, best=replace(plan.best, **changes))


def doubled(plan: Plan) -> Plan:
    """Both pipelines on the ranks of the first."""
    first, second = plan.best.layout.pipelines
    pipelines = (first, replace(second, stages=first.stages))
    return changed(plan, layout=replace(plan.best.layout, pipelines=pipelines))


def on_two_pools(plan: Plan) -> Plan:
    """Its first two stages joined to one stage on two device pools."""
    (one,), (other,) = (pipeline.stages for pipeline in plan.best.layout.pipelines)
    parts = tuple(
        StagePart(ranks=stage.ranks, device_class=stage.device_class, tp=1, rows=1) for stage in (one, other)
    )
    stage = replace(one, devices=2, ranks=f"{one.ranks},{other.ranks}", dp=2, parts=parts)
    pipeline = Pipeline(stages=(stage,), micro_batch_size=1, microbatches=8, rows=8, makespan_s=1.0)
    return changed(plan, layout=Layout(pipelines=(pipeline,)))


def without_a_sequence(plan: Plan) -> Plan:
    """Its last pipeline has one micro-batch fewer."""
    *others, last = plan.best.layout.pipelines
    last = replace(last, microbatches=last.microbatches - 1, rows=last.rows - last.micro_batch_size)
    return changed(plan, layout=replace(plan.best.layout, pipelines=(*others, last)))


PLAN = make_uneven("5 l4 + 3 l4")


@pytest.mark.parametrize(
    ("plan", "options", "named"),
    [
        (make_uneven("5 l4 + 3 l4", dtype="fp16"), [], "job.dtype: is not supported by this runtime; found"),
        (make_uneven("5 l4 + 3 l4", optimizer="muon"), [], "job.optimizer: is not supported"),
        (make_uneven("5 l4 + 3 l3"), [], "best.layout.pipelines.1: is not supported by this runtime; found"),
        (make_uneven("8 tp3l4"), [], "best.layout: is not supported by this runtime; found tp 3"),
        (on_two_pools(PLAN), [], "best.layout: is not supported by this runtime; found a stage on two pools"),
        (doubled(PLAN), [], "best.layout: is not supported by this runtime; found ranks used twice"),
        (PLAN, ["--resume"], "--resume: needs --checkpoint"),
        (PLAN, ["--adaptive"], "--adaptive: is not supported for an uneven plan"),
        (PLAN, ["--data", "none.bin"], "none.bin"),
    ],
)  # fmt: skip
def test_an_unsupported_uneven_plan_is_a_one_line_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], plan: Plan, options: list[str], named: str
) -> None:
    assert main(["train", saved(tmp_path, plan), *options]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"shardwise: error: {named}") and error.count("\n") == 1


def test_a_batch_that_the_pipelines_do_not_share_is_refused() -> None:
    """Files of such plans are not read at all."""
    with pytest.raises(ConfigError, match=r"best\.microbatches: is not supported by this runtime; found 7"):
        check_runnable(without_a_sequence(PLAN))


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("global_batch_size: 8", "global_batch_size: 16", "hash: does not match the content"),
        ("version: 2\n", "version: 3\n", "newer"),
    ],
)
def test_changed_and_newer_plans_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], old: str, new: str, named: str
) -> None:
    path = Path(saved(tmp_path, PLAN))
    path.write_text(path.read_text().replace(old, new, 1))
    assert main(["train", str(path)]) == 2
    error = capsys.readouterr().err
    assert named in error and error.count("\n") == 1


def _refused(report: Report, path: str, model: str) -> str:
    try:
        parallelize(reference_module(tiny(model)), path)
    except ConfigError as error:
        return str(error)
    return ""


def test_another_model_and_another_number_of_processes_are_refused(team: WorkerPool, tmp_path: Path) -> None:
    path = saved(tmp_path, PLAN)
    assert "is not the plan's model" in team.run(2, _refused, path, "gpt")[0]
    assert "another number of processes" in team.run(3, _refused, path, "llama")[2]
