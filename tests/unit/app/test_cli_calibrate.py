"""Costs of software from whole steps; calibration files are written, read, and used by the planner."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from math import log as log_of
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
from benchmarks.accelerated_record import H200
from tests.unit.accuracy.test_nccl_tests import SIZES, run_head, table
from tests.unit.app.conftest import Run

from shardwise.accuracy import (
    MeasuredStep,
    TierCurve,
    accelerator_plans,
    calibration_document,
    calibration_plans,
    eager_profile,
    queued_costs,
    software_costs,
    with_dispatch,
    with_kernels,
    with_links,
)
from shardwise.accuracy.calibration import KernelCurves, LinkCurve
from shardwise.accuracy.calibration.steps import predicted_step_s
from shardwise.app.cli.measuring import groups_of
from shardwise.cluster import AttentionCurve, Device, find_device, load_cluster
from shardwise.errors import ConfigError
from shardwise.inputs import dumps_yaml
from shardwise.plans import Plan, read_plan
from shardwise.questions.request import with_measured
from shardwise.strategy import PROFILES, Profile, TimeFactors, read_calibration

CURVES = KernelCurves(launch_s=9e-6, flop_per_s=7.5e10, k_half=11.0, memory_bytes_per_s=1.25e10)
ATTENTION = AttentionCurve(forward_fraction=0.4, backward_fraction=0.45, seq_half=20.0)


def device() -> Device:
    known = load_cluster("1x1xcpu").classes["cpu"]
    return with_kernels(known, CURVES, ATTENTION, bf16_ratio=2.0)


def profile() -> Profile:
    return replace(
        eager_profile(),
        pointwise_passes=1.7,
        dispatch_s=0.0,
        expert_dispatch_s=0.0,
        host_action_s=6e-4,
        host_step_s=2e-3,
    )


def steps(true: Device, software: Profile) -> list[MeasuredStep]:
    """The steps that a device and its software take exactly by the cost model."""
    plans = calibration_plans(load_cluster("1x1xcpu"), eager_profile())
    return [MeasuredStep(plan=plan, seconds=predicted_step_s(plan, true, software)) for plan in plans]


@pytest.mark.slow
def test_known_costs_of_software_are_recovered() -> None:
    true, software = device(), profile()
    blank = replace(software, pointwise_passes=9.0, host_action_s=1.0, host_step_s=1.0, dispatch_s=1.0)
    start = replace(true, efficiency=replace(true.efficiency, launch_s=1.0))
    found, costs = software_costs(steps(true, software), start, blank)
    assert found.efficiency.launch_s == pytest.approx(9e-6, rel=1e-6)
    for name in ("pointwise_passes", "host_action_s", "host_step_s"):
        assert getattr(costs, name) == pytest.approx(getattr(software, name), rel=1e-6), name
    assert costs.dispatch_s == 0.0


@pytest.mark.slow
def test_known_costs_on_a_device_that_kernels_are_queued_for_are_recovered() -> None:
    """Large steps determine everything but the host's time per kernel, which the small ones determine; the
    launch time is the device's own.
    """
    known = find_device("H100-SXM").efficiency
    straight = replace(known, memory=replace(known.memory, half_bytes=0.0))  # as measured
    true = replace(find_device("H100-SXM"), efficiency=straight)
    software = replace(profile(), dispatch_s=8e-5)
    plans = accelerator_plans(load_cluster("1x1xH100-SXM"), eager_profile(), "bf16")

    def taken(of: Sequence[Plan], by: Profile) -> list[MeasuredStep]:
        return [MeasuredStep(plan=plan, seconds=predicted_step_s(plan, true, by)) for plan in of]

    costs = queued_costs(taken(plans.large, replace(software, dispatch_s=0.0)), true, software)
    for name in ("pointwise_passes", "host_action_s", "host_step_s"):
        assert getattr(costs, name) == pytest.approx(getattr(software, name), rel=1e-6), name
    assert costs.dispatch_s == 0.0
    found = with_dispatch(taken(plans.small, software), true, costs)
    assert found.dispatch_s == pytest.approx(8e-5, rel=1e-6)
    # Kernels that take this long do not depend on the host.
    assert with_dispatch(taken(plans.large, costs), true, costs) == costs


@pytest.mark.slow
def test_plans_that_do_not_fit_an_accelerator_are_not_measured() -> None:
    """An RTX3090 has 24 GB."""
    small, large = (
        accelerator_plans(load_cluster(f"1x1x{name}"), eager_profile(), "bf16").large
        for name in ("RTX3090", "H100-SXM")
    )
    assert 0 < len(small) <= len(large)
    assert all(plan.best.peak_memory.device < 0.9 * plan.best.peak_memory.capacity for plan in small)


def test_steps_of_one_action_each_cannot_separate_actions_from_steps() -> None:
    true, software = device(), profile()
    same_actions = [step for step in steps(true, software) if len(step.plan.schedules[0].ranks[0]) == 2]
    with pytest.raises(ConfigError, match="measured steps"):
        software_costs(same_actions, true, software)


def action_deviation_s(of: list[MeasuredStep], true: Device, software: Profile) -> float:
    """Standard deviation of the fitted action time when each step has an independent error of 2 %: the root
    of the sum of the squared effects of all steps.
    """
    variance = 0.0
    for place, step in enumerate(of):
        off = [*of[:place], replace(step, seconds=1.02 * step.seconds), *of[place + 1 :]]
        variance += (software_costs(off, true, software)[1].host_action_s - software.host_action_s) ** 2
    return sqrt(variance)


@pytest.mark.slow
def test_noise_of_a_step_hardly_changes_the_time_of_an_action() -> None:
    """A pipeline of 8 micro-batches on 4 stages has 22 actions in a row: 0.3 ms each are 7 ms per step."""
    true, software = device(), replace(profile(), host_action_s=3e-3, host_step_s=2e-2)
    of = steps(true, software)
    assert action_deviation_s(of, true, software) < 3e-4
    # Without the case of many actions, action times are mistaken for those of kernels and steps, by
    # milliseconds.
    assert action_deviation_s(of[:-1], true, software) > 1e-3


def document() -> dict[str, Any]:
    tiers = load_cluster("2x2xcpu").tiers
    inside = LinkCurve(latency_s=3e-5, startup_s=1e-4, bytes_per_s=2e9)
    outside = LinkCurve(
        latency_s=2e-4, startup_s=5e-4, lockstep_s=3e-3, bytes_per_s=tiers[1].bytes_per_s * 0.95
    )
    linked = with_links(
        device(), [TierCurve(tier=tiers[0], curve=inside), TierCurve(tier=tiers[1], curve=outside)]
    )
    return calibration_document(linked, profile(), machine="a machine", measured={"steps": {"times": 7}})


def written(tmp_path: Path, **changes: Any) -> str:
    path = tmp_path / "c.yaml"
    path.write_text(dumps_yaml(document() | changes))
    return str(path)


def test_a_calibration_is_read_back_as_written(tmp_path: Path) -> None:
    calibration = read_calibration(written(tmp_path))
    read, true = calibration.devices["cpu"], device()
    assert read.peak_flop_per_s == {"fp32": 7.5e10, "bf16": 1.5e11}
    assert read.memory_bytes_per_s == true.memory_bytes_per_s
    assert read.efficiency.matmul == true.efficiency.matmul
    assert read.efficiency.attention == true.efficiency.attention
    assert read.efficiency.launch_s == 9e-6 and read.efficiency.is_calibrated
    assert (read.scale_up_bytes_per_s, read.scale_up_latency_s) == (2e9, 3e-5)
    assert read.efficiency.scale_up.fraction == 1.0 and read.efficiency.scale_up.startup_s == 1e-4
    assert read.scale_out_latency_s == 2e-4
    assert read.efficiency.scale_out.fraction == pytest.approx(0.95)
    assert (read.efficiency.scale_up.lockstep_s, read.efficiency.scale_out.lockstep_s) == (0.0, 3e-3)
    assert read.efficiency.provenance["launch_s"] == "measured: a machine"
    found = calibration.profile
    assert found is not None
    assert replace(found, provenance={}) == replace(profile(), provenance={})


def test_sharded_states_overlap_as_data_by_default(tmp_path: Path) -> None:
    def read(**software: object) -> Profile:
        found = read_calibration(written(tmp_path, software={"like": "fsdp2", **software})).profile
        assert found is not None
        return found

    assert read().state_overlap == read().data_overlap == 1.0
    assert read(data_overlap=0.5).state_overlap == 0.5
    assert read(data_overlap=0.5, state_overlap=0.25).state_overlap == 0.25


def test_our_own_runtime_overlaps_only_dense_gradients_in_fp32_with_the_backward_pass(tmp_path: Path) -> None:
    other = read_calibration(written(tmp_path, software={"like": "fsdp2"}))
    assert other.profile_without_data_overlap == other.profile
    ours = read_calibration(written(tmp_path, software={"like": "fsdp2", "name": "shardwise"}))
    assert ours.profile is not None and ours.profile_without_data_overlap is not None
    assert (ours.profile.data_overlap, ours.profile_without_data_overlap.data_overlap) == (1.0, 0.0)
    for found, dtype, has_experts, overlaps in (
        (ours, "fp32", False, True),
        (ours, "bf16", False, False),
        (ours, "fp32", True, False),
        (other, "bf16", True, True),  # other software does so whatever it trains
    ):
        profile = found.profile_of(dtype, has_experts=has_experts)
        assert profile == (found.profile if overlaps else found.profile_without_data_overlap)


def test_a_calibrated_device_replaces_the_known_one(tmp_path: Path) -> None:
    measured = read_calibration(written(tmp_path)).devices
    shorthand = load_cluster("2x2xcpu", measured=measured)
    file = tmp_path / "cluster.yaml"
    file.write_text("nodes: [{device: cpu, count: 2, devices: 2}]\n")
    for cluster in (shorthand, load_cluster(str(file), measured=measured)):
        assert cluster.classes["cpu"] == measured["cpu"]
        assert cluster.tiers[0].bytes_per_s == 2e9
        assert cluster.tiers[1].latency_s == 2e-4
    assert load_cluster("2x2xcpu").classes["cpu"] != measured["cpu"]


@pytest.mark.slow
def test_the_planner_takes_a_calibration(run: Run, tmp_path: Path) -> None:
    model = tmp_path / "m.yaml"
    model.write_text("{layers: 4, hidden: 256, ffn: 1024, heads: 4, vocab: 512, seq_len: 128}\n")
    question = (str(model), "--cluster", "1x2xcpu", "--seq-len", "128", "--global-batch-size", "8",
                "--dtype", "fp32", "--json")  # fmt: skip
    times = []
    for extra in ((), ("--calibration", written(tmp_path))):
        ran = run("evaluate", *question, *extra, "--strategy", "dp=2")
        assert ran.code == 0, ran.err
        times.append(json.loads(ran.out)["result"])
    plain, calibrated = times
    assert calibrated["step_time_s"] < plain["step_time_s"]  # 75 GFLOP/s instead of 50
    assert calibrated["breakdown"]["host_step"] == 2e-3
    saved = str(tmp_path / "p.yaml")
    ran = run(
        "plan",
        "--target=any",
        *question,
        "--calibration",
        written(tmp_path),
        "--fix",
        "dp=2",
        "--save",
        saved,
    )
    assert ran.code == 0, ran.err
    assert "measured: a machine" in Path(saved).read_text()
    assert run("check", saved).code == 0
    ran = run("plan", "--target=any", *question[:-1], "--calibration", written(tmp_path))
    assert "kernels of cpu measured on a machine" in ran.out and "all else fitted" in ran.out
    assert "measured on" not in run("plan", "--target=any", *question[:-1]).out


@pytest.mark.parametrize("command", ["plan", "frontier"])
def test_a_calibration_of_other_devices_is_refused(run: Run, tmp_path: Path, command: str) -> None:
    question = ("gpt2", "--seq-len", "1024") if command == "plan" else ("graph:mlp",)
    ran = run(command, *question, "--cluster", "1x2xH200", "--global-batch-size", "8", "--calibration",
              written(tmp_path))  # fmt: skip
    assert (ran.code, ran.out) == (2, "") and ran.err.count("\n") == 1
    assert "--calibration: has no device of this cluster; found cpu; allowed: a calibration of H200" in (
        ran.err
    )


@pytest.mark.slow
def test_our_measured_software_is_planned_for_on_an_accelerator_on_request(run: Run, tmp_path: Path) -> None:
    """Software of others can be planned for there too: on the measured device, with its known profile."""
    model = tmp_path / "m.yaml"
    model.write_text("{layers: 4, hidden: 256, ffn: 1024, heads: 4, vocab: 512, seq_len: 128}\n")
    profiles = []
    for target in ((), ("--target", "shardwise")):
        saved = str(tmp_path / f"p{len(target)}.yaml")
        ran = run("plan", str(model), "--cluster", "1x1xH200", "--calibration", str(H200.calibrated),
                  "--seq-len", "128", "--global-batch-size", "8", *target, "--save", saved)  # fmt: skip
        assert ran.code == 0, ran.err
        plan = read_plan(saved)
        assert plan.cluster.classes["H200"].efficiency.is_calibrated
        profiles.append(plan.job.profile)
        assert run("check", saved).code == 0
    others, ours = profiles
    assert others.name.startswith("megatron") and ours.name == "shardwise"
    measured = read_calibration(str(H200.calibrated)).profile
    assert measured is not None and ours.pointwise_passes == measured.pointwise_passes
    ran = run("frontier", "graph:mlp", "--cluster", "1x1xH200", "--calibration", str(H200.calibrated),
              "--global-batch-size", "64", "--json")  # fmt: skip
    assert ran.code == 0, ran.err
    assert json.loads(ran.out)["job"]["profile"].startswith("megatron")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schema": "shardwise.plan"}, "is not a calibration"),
        ({"version": 2}, "is newer"),
        ({"classes": {"cpu": {"device": "H100-SXM"}}}, "differs from the name of its class"),
        ({"classes": {"gpu": {"device": "gpu"}}}, "is not a known device"),
        ({"software": {"like": "megatron"}}, "software.like"),
        ({"software": {"like": "fsdp2", "host_step_s": -1.0}}, "software.host_step_s"),
        ({"software": {"like": "fsdp2", "data_overlap": 1.5}}, "software.data_overlap"),
        ({"software": {"like": "fsdp2", "attention": ["flash-9"]}}, "attention"),
        ({"software": {"like": "fsdp2", "tensor_overlap": 0.6, "tensor_backward_overlap": 0.6}},
         "at most 1 in sum with tensor_overlap"),
        ({"speed": 1}, "speed"),
    ],
)  # fmt: skip
def test_an_invalid_calibration_is_refused_by_its_key(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read_calibration(written(tmp_path, **changes))
    assert words in str(caught.value) and "c.yaml" in str(caught.value)


def test_groups_of_links_cross_one_tier_each() -> None:
    # Two nodes of two: pairs within the nodes, then the first devices of both and the second devices of both.
    assert groups_of(load_cluster("2x2xcpu")) == [(0, [[0, 1], [2, 3]]), (1, [[0, 2], [1, 3]])]
    # Four devices of one node: pairs, and all of them.
    assert groups_of(load_cluster("1x4xcpu")) == [(0, [[0, 1], [2, 3]]), (0, [[0, 1, 2, 3]])]


def test_a_cluster_of_other_ranks_than_were_started_is_refused(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ran = run("calibrate", "--out", str(tmp_path / "c.yaml"), "--links", "--cluster", "1x4xcpu")
    assert ran.code == 2 and ran.err.startswith("shardwise: error: --cluster: has another number of devices")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("--out", "/nowhere/c.yaml"), "--out"),
        (("--out", "c.yaml", "--cluster", "1x8xH100-SXM"), "--cluster"),
        (("--out", "c.yaml", "--links", "--cluster", "1x1xcpu"), "--cluster"),
        (("--out", "c.yaml", "--threads", "0"), "--threads"),
        (
            ("--out", "c.yaml", "--links", "--cluster", "2x1xcpu"),
            "have no network between them; found 2 nodes",
        ),
        (("--out", "c.yaml", "--from", "missing.yaml"), "missing.yaml"),
        (("--out", "base.yaml", "--from", "base.yaml"), "--out"),
    ],
)
def test_an_impossible_calibration_is_refused_in_one_line(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("base.yaml").write_text(dumps_yaml(document()))
    ran = run("calibrate", *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.count("\n") == 1 and named in ran.err
    assert sorted(each.name for each in tmp_path.iterdir()) == ["base.yaml"]


# --- from logs and nccl-tests ------------------------------------------------------------------------------


def test_figures_of_links_are_read_from_nccl_tests(run: Run, tmp_path: Path) -> None:
    """Two nodes from their output alone, and one node in addition; nothing else of the device changes."""
    path, out = tmp_path / "between.txt", str(tmp_path / "c.yaml")
    # A ring sends 15/16 of the tensor through the cards of a node; an all-reduce would be two trees.
    times = [(nbytes, 1e-4 + 15 / 16 * nbytes / (8 * 20e9)) for nbytes in SIZES]
    path.write_text(run_head((8, 8), "NVIDIA A100-SXM4-40GB") + table("all_gather", 16, times))
    inside = tmp_path / "all_gather.txt"
    inside.write_text(run_head((8,)) + table("all_gather", 8, [(n, 2e-5 + 7 / 8 * n / 180e9) for n in SIZES]))
    ran = run("calibrate", "--out", out, "--from", str(path))
    assert ran.code == 0, ran.err
    assert "A100-40G" in ran.out and "links of InfiniBand" in ran.out
    known, found = find_device("A100-40G"), read_calibration(out).devices["A100-40G"]
    achieved = found.efficiency.scale_out
    # 20 GB/s of the device's 25 GB/s card are 0.8, and two nodes lose 2^-crowding of it
    assert achieved.fraction == pytest.approx(0.8 * 2**achieved.crowding, rel=1e-3)
    assert found.scale_out_latency_s * 15 + achieved.startup_s == pytest.approx(1e-4, rel=0.01)
    assert replace(found, efficiency=known.efficiency, scale_out_latency_s=known.scale_out_latency_s,
                   sources={}) == replace(known, sources={})  # fmt: skip
    assert (
        "measured: nccl-tests on 16 x NVIDIA A100-SXM4-40GB"
        in (found.efficiency.provenance["scale_out.fraction"])
    )
    assert found.efficiency.provenance["matmul.k_half"] == known.efficiency.provenance["matmul.k_half"]
    again = str(tmp_path / "d.yaml")
    ran = run("calibrate", "--out", again, "--from", out, "--from", str(inside), "--cluster", "1x8xA100-40G")
    assert ran.code == 0, ran.err
    both = read_calibration(again).devices["A100-40G"].efficiency
    assert both.scale_out == found.efficiency.scale_out
    assert both.scale_up.fraction == pytest.approx(180 / 300, rel=1e-3)
    question = ("gpt2-xl", "--cluster", "2x8xA100-40G", "--seq-len", "1024", "--global-batch-size", "64",
                "--strategy", "dp=16", "--json")  # fmt: skip
    plain, calibrated = (json.loads(run("evaluate", *question, *extra).out)["result"]
                   for extra in ((), ("--calibration", again)))  # fmt: skip
    assert plain["step_time_s"] != calibrated["step_time_s"]


def logged(tmp_path: Path, run: Run, factor: float, *, cluster: str = "1x5xA100-80G") -> tuple[str, str]:
    """A plan and the log of a run on a device `factor` times as fast as its record, after a slow start."""
    plan, log = tmp_path / "p.yaml", tmp_path / "steps.jsonl"
    ran = run("plan", "--target=any", "gpt2-xl", "--cluster", cluster, "--seq-len", "1024",
              "--global-batch-size", "8", "--fix", "tp=5,zero_stage=0,recompute=none",
              "--save", str(plan))  # fmt: skip
    assert ran.code == 0, ran.err
    read = read_plan(str(plan))
    (known,) = read.cluster.classes.values()
    seconds = predicted_step_s(read, TimeFactors(kernels=1.0 / factor).of_device(known), read.job.profile)
    lines = [
        json.dumps(
            {
                "step": step,
                "loss": 1.0,
                "gradient_norm": 1.0,
                "step_time_s": taken_s,
                "predicted_s": read.best.step_time_s,
                "tokens": step,
            }
        )
        for step, taken_s in enumerate([9.0, 5.0, seconds, seconds * 1.3, seconds, seconds * 0.8], start=1)
    ]
    log.write_text("\n".join(lines) + '\n{"step": 7, "loss"')
    return str(plan), str(log)


@pytest.mark.slow
@pytest.mark.parametrize("factor", [0.6, 1.2])
def test_a_log_and_its_plan_move_predictions_most_of_the_way(run: Run, tmp_path: Path, factor: float) -> None:
    """Without the first quarter of six steps, the median is the fourth smallest of five: `seconds`. One step
    is explained to 85 to 90 %: 0.0225 of its variance is its workload's, 0.01 to 0.0325 the machine's, and
    0.0064 its own (test_few_steps)."""
    plan, log = logged(tmp_path, run, factor)
    out = str(tmp_path / "c.yaml")
    ran = run("calibrate", "--out", out, "--from", plan, "--from", log)
    assert ran.code == 0, ran.err
    assert "steps: times 1" in ran.out
    read, found = read_plan(plan), read_calibration(out)
    device = found.devices["A100-80G"]
    assert device.efficiency.is_calibrated and found.profile is not None
    # The software is the one of the plan, not our own runtime's.
    assert found.profile.name == read.job.profile.name == "megatron-lm-0.19"
    known = PROFILES[found.profile.name]
    assert replace(found.profile.with_costs(known), provenance={}) == replace(known, provenance={})
    measured_s = sorted(json.loads(line)["step_time_s"] for line in Path(log).read_text().split("\n")[1:6])[2]
    (workload,) = found.workloads
    ran_by = read.job.profile.with_costs(found.profile)
    again_s = predicted_step_s(read, device, ran_by) * workload.time_factor
    explained = log_of(again_s / read.best.step_time_s) / log_of(measured_s / read.best.step_time_s)
    assert 0.82 < explained < 0.92


@pytest.mark.slow
def test_a_plan_with_its_measured_time_calibrates_as_its_log_does(run: Run, tmp_path: Path) -> None:
    plan, log = logged(tmp_path, run, 0.8)
    measured_s = sorted(json.loads(line)["step_time_s"] for line in Path(log).read_text().split("\n")[1:6])[2]
    outs = [str(tmp_path / name) for name in ("log.yaml", "time.yaml")]
    for out, extra in zip(outs, (("--from", log), ("--measured", f"{measured_s!r}s")), strict=True):
        ran = run("calibrate", "--out", out, "--from", plan, *extra)
        assert ran.code == 0, ran.err
    assert Path(outs[0]).read_text() == Path(outs[1]).read_text()
    ran = run("calibrate", "--out", outs[0], "--from", plan, "--measured", "1s", "--measured", "2s")
    assert ran.code == 2 and "--measured: is not given once for each plan" in ran.err


def test_a_measured_run_keeps_its_software_and_its_memory(run: Run, tmp_path: Path) -> None:
    """A row of Megatron-LM that takes 1.2 times its prediction. Software of another kind would change memory,
    as the calibration of our own runtime's numbers once did for all (by 24 %)."""
    question = ("--cluster", "2x8xH100-SXM", "--seq-len", "8192", "--global-batch-size", "128", "--target",
                "megatron-lm", "--strategy", "tp=2,dp=8,zero_stage=1,recompute=none", "--json")  # fmt: skip

    def evaluated(*extra: str, model: str = "llama-3.1-8b") -> Any:
        ran = run("evaluate", model, *question, *extra)
        assert ran.code == 0, ran.err
        return json.loads(ran.out)["result"]

    plain = evaluated()
    rows, out = tmp_path / "runs.csv", str(tmp_path / "c.yaml")
    rows.write_text(
        "id,model_name,framework,gpu,gpus,seq_len,global_batch,micro_batch,tp,pp,recompute,dtype,step_time_s\n"
        "run-1,Llama-3.1-8B,Megatron-LM,H100-SXM,16,8192,128,1,2,1,none,bf16,"
        f"{1.2 * plain['step_time_s']}\n"
    )
    ran = run("calibrate", "--out", out, "--from", str(rows))
    assert ran.code == 0, ran.err
    assert read_calibration(out).profile is not None
    calibrated = evaluated("--calibration", out)
    assert calibrated["memory"] == plain["memory"]
    assert 1.1 < calibrated["step_time_s"] / plain["step_time_s"] < 1.2
    # Another model on the machine: the factor of the workload does not count.
    other = [evaluated(*extra, model="qwen2.5-7b")["step_time_s"] for extra in ((), ("--calibration", out))]
    assert 1.03 < other[1] / other[0] < 1.12
    validated = run("validate", str(rows), "--calibration", out, "--json")
    assert abs(json.loads(validated.out)["overall"]["bias"]) < 0.05


@pytest.mark.slow
def test_files_that_do_not_go_together_are_refused_in_one_line(run: Run, tmp_path: Path) -> None:
    plan, log = logged(tmp_path, run, 1.0)
    other = tmp_path / "other.txt"
    other.write_text(run_head((8,)) + table("all_reduce", 8, [(n, n / 1e11) for n in SIZES]))
    part = tmp_path / "part.txt"
    part.write_text(run_head((4, 4)) + table("all_reduce", 8, [(n, n / 1e11) for n in SIZES]))
    unknown = tmp_path / "unknown.txt"
    unknown.write_text(run_head((8,), "Abacus 7") + table("all_reduce", 8, [(n, n / 1e11) for n in SIZES]))
    bare = tmp_path / "bare.txt"
    bare.write_text(table("all_reduce", 8, [(n, n / 1e11) for n in SIZES]))
    letter = tmp_path / "letter.txt"
    letter.write_text("Dear all,\n")
    bent = tmp_path / "bent.jsonl"
    text = Path(log).read_text().splitlines()
    bent.write_text("\n".join([text[0], text[1].replace("5.0", "-5.0")]) + "\n")
    for sources, words in (
        ((log,), "steps.jsonl: predicted_s: has no plan in --from that predicts"),
        ((plan,), "p.yaml: --from: has no log"),
        (
            (plan, "--from", log, "--from", str(other)),
            "have several device classes; found H100-SXM, A100-80G",
        ),
        ((str(part), "--cluster", "2x8xH100-SXM"), "part.txt: line 16: does not use whole nodes"),
        ((str(other), "--cluster", "1x4xH100-SXM"), "other.txt: line 16: has another number of ranks"),
        ((str(unknown),), "is not a known device"),
        ((str(bare),), "bare.txt: line 5: does not name its devices"),
        ((str(letter),), "letter.txt: --from: is not a file to calibrate from"),
        ((plan, "--from", str(bent)), "bent.jsonl: line 2.step_time_s: is not a number in range"),
        ((str(other), "--links"), "--links: measures this machine"),
        ((written(tmp_path), "--from", written(tmp_path)), "is a second calibration"),
    ):
        ran = run("calibrate", "--out", str(tmp_path / "out.yaml"), "--from", *sources)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), ran.err
        assert words in ran.err
        assert not (tmp_path / "out.yaml").exists()


# --- from configurations of training software and their logs ----------------------------------------------


FLAGS = """torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 \\
 --num-attention-heads 16 --ffn-hidden-size 8192 --seq-length 2048 --max-position-embeddings 2048 \\
 --micro-batch-size 4 \\
 --global-batch-size 256 --bf16 --use-distributed-optimizer --tensor-model-parallel-size 2 \\
 --vocab-size 51200 --make-vocab-size-divisible-by 128
"""


def block_of(flags: str) -> str:
    """The flags as Megatron-LM prints its arguments: the name, dots up to column 48, the value."""
    lines = []
    for flag in flags.replace("\\\n", " ").split("--")[2:]:
        name, *values = flag.replace("-", "_", flag.split()[0].count("-")).split()
        lines.append(f"  {name} {'.' * (48 - len(name))} {values[0] if values else True}")
    return "\n".join(["---- arguments ----", *lines, "---- end of arguments ----"])


def lines_of(*milliseconds: float) -> str:
    return "\n".join(
        f" [2026-11-01 10:00:0{place}] iteration {place}/ 100 | consumed samples: 256 | elapsed time per"
        f" iteration (ms): {taken:.1f} | learning rate: 1.0E-04 | global batch size: 256 |"
        for place, taken in enumerate(milliseconds)
    )


def test_a_log_of_megatron_lm_with_its_flags_is_a_measured_step(run: Run, tmp_path: Path) -> None:
    """Without the first of four steps, the median of 4.7, 4.8 and 4.9 s is 4.8. A log next to its flags
    and a measured time say the same; one without a cluster, or without a step, is refused."""
    whole, flags, log = tmp_path / "whole.log", tmp_path / "flags.sh", tmp_path / "run.log"
    steps = lines_of(9000.0, 4700.0, 4900.0, 4800.0)
    whole.write_text(f"{block_of(FLAGS)}\n{steps}\n")
    flags.write_text(FLAGS)
    log.write_text(steps)
    out, cluster = str(tmp_path / "c.yaml"), ("--cluster", "1x8xA100-80G")
    found = []
    for sources in ((str(whole),), (str(flags), "--from", str(log)), (str(flags), "--measured", "4800ms")):
        ran = run("calibrate", "--out", out, "--from", *sources, *cluster)
        assert ran.code == 0, ran.err
        found.append(read_calibration(out))
    assert found[0].devices == found[1].devices == found[2].devices
    assert found[0].profile is not None and found[0].profile.name == "megatron-lm-0.19"
    reviewed = json.loads(run("review", str(flags), *cluster, "--json").out)
    slower = 4.8 / reviewed["predicted_s"]
    again = json.loads(run("review", str(flags), *cluster, "--calibration", out, "--json").out)
    explained = log_of(again["predicted_s"] / reviewed["predicted_s"]) / log_of(slower)
    assert 0.82 < explained < 0.92
    assert again["memory"] == reviewed["memory"]
    refused: list[tuple[tuple[str, ...], str]] = [
        ((str(whole),), "--cluster: does not say on which devices"),
        ((str(flags), *cluster), "flags.sh: --from: has no measured steps"),
        ((str(whole), *cluster, "--measured", "1s"), "--measured: is not given once"),
        ((str(log), *cluster), "run.log: --from: is not a file to calibrate from"),
    ]
    for given, words in refused:
        ran = run("calibrate", "--out", out, "--from", *given)
        assert ran.code == 2 and words in ran.err, ran.err


def test_measured_software_counts_for_targets_of_its_kind() -> None:
    """Host times of Megatron-LM of 2025 are those of Megatron-LM 0.19, whose overlaps stay; DeepSpeed has its
    own. Of the same software every measured number counts, and what was not measured stays as an option set
    it."""
    of_2025 = replace(PROFILES["megatron-2025"], dispatch_s=1e-3, data_overlap=0.5)
    own, other = PROFILES["megatron-lm-0.19"], PROFILES["deepspeed-0.19"]
    assert with_measured(other, of_2025) == other
    assert with_measured(own, None) == own
    related = with_measured(own, of_2025)
    assert (related.dispatch_s, related.data_overlap) == (1e-3, own.data_overlap)
    assert related.name == own.name and related.tensor_overlap == own.tensor_overlap
    optioned = replace(own, tensor_overlap=0.2)
    same = with_measured(optioned, replace(own, dispatch_s=2e-3, data_overlap=0.5))
    assert (same.dispatch_s, same.data_overlap, same.tensor_overlap) == (2e-3, 0.5, 0.2)
