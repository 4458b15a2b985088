"""Runs that change plans midway: their losses equal those of a run that does not, no sample is lost, and the
bytes between nodes are those that `replan` predicts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from tests.runtime.plans import make_plan
from tests.sampling import sample_of
from torch import distributed

import shardwise.runtime
from shardwise import search
from shardwise.app.cli.adapting import advisor_for, link_rates, rounds
from shardwise.app.cli.main import main
from shardwise.cluster import Cluster, load_cluster
from shardwise.measure import message_rates
from shardwise.model import model_from_config
from shardwise.plans import Plan, plan_hash, write_plan
from shardwise.replanning import Costs, LinkAwarePlanner
from shardwise.runtime import Advice, RankLost, StepRecord, TrainOptions, WorkerPool, resumed_options, train
from shardwise.runtime.adaptive import DEVIATION, RECENT, ReplanEvent, StepTimeMonitor
from shardwise.runtime.workers import Report
from shardwise.sim import COMPUTE, Span, read_trace
from shardwise.strategy import Job, Strategy, complete, target_of


@dataclass(slots=True)
class Scripted:
    """Advises a list of strategies one by one, whatever is measured; then to stay."""

    script: list[Strategy]

    def measure(self) -> Mapping[str, float]:
        return {"n0>s0g0": 1e6}

    def advise(
        self, running: Strategy, rates: Mapping[str, float], *, horizon_s: float, migration_s: float
    ) -> Advice:
        following = self.script.pop(0) if self.script else running
        return Advice(decision="move", strategy=following, step_s=1.0, keep_step_s=None)


def trained(report: Report, plan: Plan, options: TrainOptions) -> list[StepRecord]:
    records: list[StepRecord] = []
    train(records.append, plan, options)
    return records


def on(cluster: Cluster, plan: Plan) -> Plan:
    """The same plan on another cluster."""
    return search.plan_of_strategy(plan.model, cluster, plan.job, plan.best.strategy)


SCRIPTS = [
    ("gpt", ("dp=4,zero_stage=3", "tp=4", "pp=2,schedule=zb_v,vpp=2,micro_batch_size=1,dp=2")),
    ("mixtral", ("dp=4,ep=4,zero_stage=1", "pp=2,tp=2,ep=2,schedule=1f1b", "dp=4,ep=4,zero_stage=1")),
]


@pytest.mark.parametrize(("model", "texts"), sample_of(SCRIPTS, SCRIPTS[:1]))
def test_a_run_that_migrates_twice_ends_like_one_that_does_not(
    team: WorkerPool, model: str, texts: tuple[str, ...]
) -> None:
    cluster = load_cluster("2x2xcpu")
    plans = [on(cluster, make_plan(text, model=model)) for text in texts]
    options = TrainOptions(steps=5, seed=3, lr=3e-3)
    quiet = team.run(4, trained, plans[0], options)[0]
    advised = replace(options, advisor=Scripted([plan.best.strategy for plan in plans[1:]]))
    for records in team.run(4, trained, plans[0], advised):
        assert [record.loss for record in records] == pytest.approx([r.loss for r in quiet], rel=2e-5)
        assert [record.step for record in records] == [record.step for record in quiet]
        assert [record.step for record in records] == [1, 2, 3, 4, 5]
        ran = [record.strategy for record in records]
        assert ran[:3] == [plan.best.strategy for plan in plans] and ran[3:] == [ran[2]] * 2
        changes = [record.change for record in records[:2]]
        assert all(isinstance(change, ReplanEvent) and change.moved_bytes > 0 for change in changes)
        assert records[-1].change is None  # no step is left to migrate for


@dataclass(slots=True)
class Killed(Scripted):
    """Rank 1 is killed when links are measured for the third time."""

    measured: int = 0

    def measure(self) -> Mapping[str, float]:
        self.measured += 1
        if self.measured == 3 and distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return {"n0>s0g0": 1e6}


def test_a_run_killed_after_a_migration_resumes_from_its_checkpoint(team: WorkerPool, tmp_path: Path) -> None:
    """The run migrates after step 1, saves after step 2 under the second plan, and dies after step 3. It
    resumes under the first plan, with the losses of an undisturbed run."""
    cluster = load_cluster("2x1xcpu")
    first, second = (on(cluster, make_plan(text)) for text in ("dp=2,zero_stage=1", "pp=2,schedule=1f1b"))
    options = TrainOptions(steps=5, checkpoint=str(tmp_path), checkpoint_every=2)
    quiet = team.run(2, trained, first, replace(options, checkpoint=None))[0]
    with pytest.raises(RankLost, match="rank 1 was ended by signal 9"):
        team.run(2, trained, first, replace(options, advisor=Killed([second.best.strategy])))
    resumed = team.run(2, trained, first, resumed_options(options, first))[0]
    assert [record.step for record in resumed] == [3, 4, 5]
    assert [r.loss for r in resumed] == pytest.approx([r.loss for r in quiet[2:]], rel=2e-5)


def estimated(before: Plan, after: Plan) -> float:
    """Bytes that `replan` predicts for all links into nodes."""
    present = LinkAwarePlanner(before, target_of("shardwise"))
    change = present.transition(before.best.strategy, after.best.strategy, {}, Costs())
    return sum(b for name, b in change.bytes_per_link.items() if name.split(">")[1].startswith("n"))


ESTIMATED = [
    ("2x2xcpu", "dp=4,zero_stage=1", "pp=2,dp=2,schedule=1f1b,zero_stage=1"),
    ("2x2xcpu", "pp=2,dp=2,schedule=1f1b,zero_stage=1", "dp=4,zero_stage=3"),
    ("4x1xcpu", "dp=4,zero_stage=3", "pp=4,schedule=1f1b"),
    ("2x1xcpu", "dp=2,zero_stage=0", "pp=2,schedule=1f1b"),
]


@pytest.mark.parametrize(("nodes", "before", "after"), ESTIMATED)
def test_the_bytes_between_nodes_are_those_that_replan_charges(
    team: WorkerPool, nodes: str, before: str, after: str
) -> None:
    cluster = load_cluster(nodes)
    first, second = (on(cluster, make_plan(text)) for text in (before, after))
    options = TrainOptions(steps=2, advisor=Scripted([second.best.strategy]))
    change = team.run(cluster.devices, trained, first, options)[0][0].change
    assert change is not None
    assert change.moved_bytes == pytest.approx(estimated(first, second), rel=1e-6)


def test_a_step_time_monitor_uses_the_middle_of_the_last_steps() -> None:
    watch = StepTimeMonitor(1.0)
    assert not watch.deviates(9.0)  # the first step includes setup
    assert not any(watch.deviates(seconds) for seconds in (1.0, 5.0, 1.1, 1.0, 4.0))  # single slow steps
    assert watch.deviates(2.0 * DEVIATION) and watch.typical_s == 2.0 * DEVIATION
    watch.rebaseline()
    assert not any(watch.deviates(4.0) for _ in range(2 * RECENT))  # the new baseline
    faster = [watch.deviates(4.0 / DEVIATION / 1.1) for _ in range(RECENT)]
    assert faster == [False, True, True]  # faster deviates too
    watch.restart(2.0)
    assert not watch.deviates(9.0)
    assert [watch.deviates(2.0 * DEVIATION * 1.01) for _ in range(RECENT)] == [False, False, True]


def test_every_link_is_crossed_both_ways_by_two_neighbours_where_there_are_two() -> None:
    """Nodes of 2, 1 and 2 devices start at ranks 0, 2 and 3."""
    cluster = load_cluster("1x2xcpu+1x1xcpu+1x2xcpu")
    assert rounds(cluster) == [[(0, 2)], [(2, 0)], [(2, 3)], [(3, 2)]]
    # Only messages from node 1 are slow; each link has the best rate of its messages.
    found = link_rates(cluster, {(0, 2): 8.0, (2, 0): 1.0, (2, 3): 1.5, (3, 2): 9.0})
    up = {name: rate for name, rate in found.items() if name.startswith("n")}
    down = {name.split(">")[1]: rate for name, rate in found.items() if not name.startswith("n")}
    assert sorted(up.values()) == [1.5, 8.0, 9.0] and down == {"n1": 9.0, "n0": 1.0, "n2": 1.5}


def rated(report: Report, pairs: list[list[tuple[int, int]]]) -> dict[tuple[int, int], float]:
    return message_rates(pairs)


def test_messages_are_timed_alike_on_all_ranks(team: WorkerPool) -> None:
    every = team.run(3, rated, [[(0, 1)], [(1, 0)], [(1, 2)]])
    assert every[0] == every[1] == every[2]
    assert set(every[0]) == {(0, 1), (1, 0), (1, 2)} and all(rate > 0.0 for rate in every[0].values())


def test_a_link_that_lost_its_bandwidth_leads_to_a_migration() -> None:
    """The advisor migrates when links have a tenth of the planned bandwidth, and stays when a migration would
    gain almost nothing."""
    cluster = load_cluster("2x1xcpu", inter_node="640Mb/s")
    model = model_from_config(
        {"layers": 4, "hidden": 256, "ffn": 1024, "heads": 4, "vocab": 512, "seq_len": 128}, name="small"
    )
    job = Job(seq_len=128, global_batch_size=16, dtype="fp32")
    fields = {"dp": 2, "optim_shard": 2, "micro_batch_size": 8}
    strategy = complete(fields, devices=2, layers=4, experts=None, global_batch_size=16)
    advisor = advisor_for(search.plan_of_strategy(model, cluster, job, strategy))
    links = ("n0>s0g0", "s0g0>n0", "n1>s0g0", "s0g0>n1")
    slow, slower = (dict.fromkeys(links, share * 80e6) for share in (0.1, 0.95))
    migrated = advisor.advise(strategy, slow, horizon_s=600.0, migration_s=2.0)
    assert migrated.decision == "move" and migrated.strategy.pp == 2
    assert migrated.keep_step_s is not None and migrated.step_s < 0.7 * migrated.keep_step_s
    assert advisor.advise(strategy, slower, horizon_s=600.0, migration_s=2.0).strategy == strategy
    # The way back would gain 4 %, which is within the prediction error.
    assert advisor.advise(migrated.strategy, {}, horizon_s=1e5, migration_s=2.0).decision == "keep"


def test_train_adaptive(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, log = str(tmp_path / "p.yaml"), tmp_path / "log.jsonl"
    write_plan(plan, on(load_cluster("2x1xcpu"), make_plan("dp=2,zero_stage=1")))
    assert main(["train", plan, "--steps", "3", "--adaptive", "--log", str(log)]) == 0
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2, 3]
    assert records[0]["change"]["reason"] == "interval" and set(records[0]["change"]["rates"]) == {
        "n0>s0g0", "s0g0>n0", "n1>s0g0", "s0g0>n1",
    }  # fmt: skip
    assert records[-1]["change"] is None and "optim_shard=2" in records[0]["strategy"]
    assert "after step 1 (interval)" in capsys.readouterr().err
    write_plan(plan, make_plan("dp=2"))
    assert main(["train", plan, "--adaptive"]) == 2
    error = capsys.readouterr().err
    assert "--adaptive: has no links to monitor" in error and error.count("\n") == 1


def scripted_run(steps: list[tuple[Strategy, float, float]]) -> Callable[..., object]:
    """A run whose steps have these strategies, times and predictions."""

    def train_locally(plan: Plan, *_: object, report: Callable[[StepRecord], None], **__: object) -> object:
        for step, (strategy, step_s, predicted_s) in enumerate(steps, start=1):
            record = StepRecord(
                step=step, loss=1.0, gradient_norm=1.0, step_time_s=step_s, predicted_s=predicted_s,
                strategy=strategy,
            )  # fmt: skip
            report(record)
        return [[Span(0, COMPUTE, "0F0", 0.0, 1.0)]]

    return train_locally


def test_the_summary_names_the_last_strategy_and_that_it_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Step times and the prediction are those of the last strategy."""
    plan, path = make_plan("dp=2,zero_stage=1"), str(tmp_path / "p.yaml")
    write_plan(path, plan)
    first, second = plan.best.strategy, make_plan("pp=2").best.strategy
    without_zero = make_plan("dp=2").best.strategy

    def summary(*steps: tuple[Strategy, float, float]) -> dict[str, str]:
        monkeypatch.setattr(shardwise.runtime, "train_locally", scripted_run(list(steps)))
        assert main(["train", path, "--steps", str(len(steps))]) == 0
        found: dict[str, str] = {}
        for line in capsys.readouterr().out.splitlines():
            name, text = line[:12].strip(), line[12:].strip()
            # A long line goes on under its text.
            found[name] = f"{found.get(name, '')} {text}".strip() if not name else text
        return found

    # Of the two steps under pp 2 the median is (0.5 + 0.4) / 2; of all but the first quarter it would be 1.
    once = summary(*[(first, 1.0, 1.0)] * 4, (second, 0.5, 0.3), (second, 0.4, 0.3))
    assert once["plan"].startswith("pp 2 · ") and once["changed"] == "after step 4; initially dp 2"
    assert once["step time"] == "450 ms measured (median), 300 ms predicted"
    # The line after the step time says what the prediction does not know.
    assert once[""] == "cpu predicted from datasheets; `shardwise calibrate` measures this machine"
    back = summary((first, 1.0, 1.0), (second, 0.5, 0.3), (first, 0.9, 0.8))
    assert (
        back["plan"].startswith("dp 2 · ")
        and back["step time"] == "900 ms measured (median), 800 ms predicted"
    )
    assert back["changed"] == "2 times, last after step 2; initially dp 2"
    alike = summary((first, 1.0, 1.0), (without_zero, 1.0, 1.0))
    assert alike["changed"] == "after step 1; initially dp 2 (optim_shard 2)"
    assert "changed" not in summary((first, 1.0, 1.0), (first, 1.0, 1.0))


def test_the_summary_says_that_processes_share_cores(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two processes on one core; on two cores each has its own."""
    plan, path = make_plan("dp=2,zero_stage=1"), str(tmp_path / "p.yaml")
    write_plan(path, plan)
    for cores, is_shared in ((1, True), (2, False)):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        run = scripted_run([(plan.best.strategy, 1.0, 1.0)])
        monkeypatch.setattr(shardwise.runtime, "train_locally", run)
        assert main(["train", path, "--steps", "1"]) == 0
        out = capsys.readouterr().out
        assert ("2 processes share 1 core; each is predicted to have its own" in out) is is_shared
        assert "cpu predicted from datasheets" in out


def test_the_trace_after_a_migration_names_the_plan_that_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step of this run has another strategy than the plan."""
    plan, trace = make_plan("dp=2,zero_stage=1"), str(tmp_path / "m.json")
    migrated = search.plan_of_strategy(plan.model, plan.cluster, plan.job, make_plan("pp=2").best.strategy)
    ran = [(plan.best.strategy, 1.0, 1.0), (migrated.best.strategy, 1.0, 1.0)]
    monkeypatch.setattr(shardwise.runtime, "train_locally", scripted_run(ran))
    write_plan(str(tmp_path / "p.yaml"), plan)
    words = ["train", str(tmp_path / "p.yaml"), "--steps", "2", "--trace", trace]
    assert main(words) == 0
    assert read_trace(trace).plan_hash == plan_hash(migrated) != plan_hash(plan)
    ran.reverse()
    assert main(words) == 0
    assert read_trace(trace).plan_hash == plan_hash(plan)
