"""`plan` on mixed clusters: uneven answers, and reasons for uniform ones."""

from __future__ import annotations

import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.unit.app.test_cli_commands import validated

from shardwise.app.cli.main import main
from shardwise.errors import ConfigError
from shardwise.inputs import read_mapping
from shardwise.plans import PROVEN_GAP, Layout, MixedFigures, read_plan, write_plan
from shardwise.search import cluster_parts
from shardwise.search.hetero import predict_record
from shardwise.search.hetero.branch_and_bound import UnevenOutcome
from shardwise.sim import read_trace
from shardwise.strategy import target_of

SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "schemas" / "plan-answer.json"
REPLAN_SCHEMA = SCHEMA.with_name("replan.json")
QUESTION = (
    "plan", "opt-350m", "--cluster", "1x2xA100-40G+1x2xV100-16G", "--seq-len", "2048",
    "--global-batch-size", "64",
)  # fmt: skip
PIPED = (
    "plan", "llama-2-13b", "--cluster", "1x4xA100-80G+1x4xV100-32G", "--seq-len", "1024",
    "--global-batch-size", "32",
)  # fmt: skip


SHARED = (
    "plan", "llama-2-7b", "--cluster", "1x2xA100-40G+1x4xA10G", "--seq-len", "1024",
    "--global-batch-size", "16", "--stage-dp", "2",
)  # fmt: skip


SCHEMA_OF_FILE = jsonschema.Draft202012Validator(json.loads(SCHEMA.with_name("plan.json").read_text()))


def answer(run: Any, *argv: str) -> Any:
    ran = run(*argv, "--json")
    assert (ran.code, ran.err) == (0, "")
    document = json.loads(ran.out)
    jsonschema.Draft202012Validator(json.loads(SCHEMA.read_text())).validate(document)
    return document


@pytest.fixture(scope="module")
def text_of_plan(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The file of the uneven plan for `QUESTION`."""
    path = tmp_path_factory.mktemp("plan") / "plan.yaml"
    with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
        assert main([*QUESTION, "--save", str(path)]) == 0
    return path.read_text()


@pytest.fixture
def saved(text_of_plan: str, tmp_path: Path) -> str:
    """The path of a copy of that file."""
    path = tmp_path / "plan.yaml"
    path.write_text(text_of_plan)
    return str(path)


ON_PROCESSORS = (
    "plan", "examples/tiny.yaml", "--cluster", "examples/clusters/unequal.yaml", "--seq-len", "64",
    "--global-batch-size", "16", "--dtype",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_our_runtime_runs_uneven_plans(run: Any, dtype: str) -> None:
    trained = answer(run, *ON_PROCESSORS, dtype)
    assert trained["best"]["strategy"] is None and trained["not_run"] == []
    assert answer(run, *ON_PROCESSORS, dtype, "--target", "shardwise")["best"] == trained["best"]


@pytest.mark.slow
def test_plans_that_our_runtime_does_not_run_are_planned_for_target_any(run: Any) -> None:
    ran = run(*ON_PROCESSORS, "bf16", "--optimizer", "muon", "--target", "any")
    assert "--target any --save plan.yaml" in ran.out and "does not run this plan" in ran.err
    refused = run(*ON_PROCESSORS, "bf16", "--optimizer", "muon")
    assert refused.code == 2 and "runs no plan of this job" in refused.err and "--target any" in refused.err


@pytest.mark.slow
def test_a_runtime_with_fewer_dtypes_under_uneven_plans_gets_the_best_uniform_one(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = replace(target_of("shardwise"), uneven_dtypes=("fp32",))
    monkeypatch.setattr("shardwise.questions.targets.target_of", lambda name: narrow)
    uniform = answer(run, *ON_PROCESSORS, "bf16")
    assert uniform["best"]["strategy"] is not None and uniform["not_run"] == []
    assert "in fp32 only" in run(*ON_PROCESSORS, "bf16").out


@pytest.mark.slow
@pytest.mark.parametrize("question", [QUESTION, PIPED])
def test_an_uneven_answer_is_complete(run: Any, question: tuple[str, ...]) -> None:
    document = answer(run, *question)
    best = document["best"]
    assert best["strategy"] is None and document["is_proven"]
    pipelines = best["layout"]["pipelines"]
    layers = {"opt-350m": 24, "llama-2-13b": 40}[question[1]]
    taken: set[int] = set()
    for pipeline in pipelines:
        stages = pipeline["stages"]
        assert sum(stage["layers"] for stage in stages) == layers
        for stage in stages:
            first, _, last = stage["ranks"].partition("-")
            ranks = set(range(int(first), int(last or first) + 1))
            assert len(ranks) == stage["devices"] == stage["tp"] * stage["dp"]
            assert not ranks & taken
            taken |= ranks
    assert len(taken) == document["devices_used"]
    assert sum(pipeline["stages"][0]["share"] for pipeline in pipelines) == pytest.approx(1.0)
    assert sum(pipeline["rows"] for pipeline in pipelines) == int(question[-1])
    for pipeline in pipelines:
        assert pipeline["rows"] == pipeline["microbatches"] * pipeline["micro_batch_size"]
    assert best["step_time_s"] == max(pipeline["makespan_s"] for pipeline in pipelines)
    assert sum(best["breakdown"].values()) == pytest.approx(best["step_time_s"])
    assert best["step_time_s"] < best["uniform_step_time_s"] <= best["fastest_class_step_time_s"]
    memory = {name: value for name, value in best["memory"].items() if name != "tightest_rank"}
    assert sum(memory.values()) == pytest.approx(best["peak_memory_bytes"]["device"])
    certificate = document["certificate"]
    assert certificate["enumerated"] == certificate["cut_by_bound"] + certificate["simulated"]
    assert certificate["simulated"] >= 1  # the plan itself was estimated


@pytest.mark.slow
def test_the_card_shows_pipelines_and_the_gain(run: Any) -> None:
    out = run(*QUESTION).out
    assert "uneven: 2 data-parallel pipelines" in out
    assert "[1 A100-40G, 23 layers] → [1 V100-16G, 1 layer]" in out
    assert "as fast as the best uniform strategy" in out and "as fast as A100-40G alone" in out
    assert re.search(r"optimal among [\d,]+ candidates of uneven plans", out)


@pytest.mark.slow
def test_devices_that_make_nothing_faster_are_left_idle_and_named(run: Any) -> None:
    out = run(
        "plan", "gpt2", "--cluster", "1x2xH100-SXM+1x2xT4", "--seq-len", "512", "--global-batch-size", "4"
    ).out
    assert "T4" in out and "left idle" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--fix", "tp=1"), "a space or fields were chosen"),
        (("--space", "core"), "a space or fields were chosen"),
        (("--exhaustive", "--space", "core"), "a space or fields were chosen"),
    ],
)
def test_a_uniform_answer_has_its_reason(run: Any, more: tuple[str, ...], why: str) -> None:
    document = answer(run, *QUESTION, *more)
    assert document["best"]["strategy"] is not None
    assert why in document["best"]["why"]
    assert document["best"]["uniform_step_time_s"] == document["best"]["step_time_s"]


@pytest.mark.slow
@pytest.mark.parametrize("question", [QUESTION, PIPED])
def test_a_saved_uneven_plan_is_predicted_equally(
    run: Any, tmp_path: Path, question: tuple[str, ...]
) -> None:
    path = str(tmp_path / "plan.yaml")
    saved = run(*question, "--save", path)
    assert saved.code == 0 and f"wrote {path} (sha256:" in saved.err and "uneven" in saved.out
    checked = run("check", path, "--json")
    verdict = json.loads(checked.out)
    assert checked.code == 0 and verdict["ok"]
    found = {check["name"]: check for check in verdict["checks"]}
    assert {"hash", "layout", "stated bytes fit", "best_s", "gap"} <= set(found)
    again = {check["name"] for check in verdict["computed_again"]}
    assert {"predicted step time", "predicted device bytes", "predicted bytes fit"} <= again
    assert [name for name, check in found.items() if not check["ok"]] == ["optimal"]
    assert found["optimal"]["is_open"]


@pytest.mark.slow
@pytest.mark.parametrize("question", [QUESTION, PIPED])
def test_the_timeline_of_an_uneven_plan(run: Any, tmp_path: Path, question: tuple[str, ...]) -> None:
    """The event engine, which shares no code with the estimate of the plan, ends each pipeline at the same
    time; every stage occurs once, by its first rank.
    """
    path, trace = str(tmp_path / "plan.yaml"), str(tmp_path / "trace.json")
    assert run(*question, "--save", path).code == 0
    plan = read_plan(path)
    document = validated(run("simulate", path, "--json", "--trace", trace).out, "timeline")
    predicted = predict_record(plan.model, plan.cluster, plan.job, plan.best)
    stages = [(place, stage) for place, one in enumerate(plan.best.layout.pipelines) for stage in one.stages]
    assert [(rank["pipeline"], rank["rank"]) for rank in document["ranks"]] == [
        (place, int(stage.ranks.split("-")[0])) for place, stage in stages
    ]
    for place, (step_s, times) in enumerate(zip(plan.best.pipeline_s, predicted.pipelines, strict=True)):
        own = [rank for rank in document["ranks"] if rank["pipeline"] == place]
        assert own[0]["busy_s"] + own[0]["idle_s"] + times.end_s == pytest.approx(step_s, rel=1e-9)
        work_s = times.durations.forward_s[0] + times.durations.backward_s[0]
        busy = [rank["busy_s"] for rank in own]
        assert busy == pytest.approx((plan.best.microbatches[place] * work_s).tolist(), rel=1e-9)
    assert {span.rank for span in read_trace(trace).spans} == {rank["rank"] for rank in document["ranks"]}
    chart = run("simulate", path).out
    assert "rank 0 |" in chart and "then gradient norm" in chart


@pytest.mark.slow
@pytest.mark.parametrize("question", [QUESTION, SHARED])
def test_a_saved_file_matches_its_schema(run: Any, tmp_path: Path, question: tuple[str, ...]) -> None:
    path = tmp_path / "plan.yaml"
    assert run(*question, "--save", str(path)).code == 0
    document: Any = read_mapping(str(path))
    SCHEMA_OF_FILE.validate(document)
    for key in set(document["best"]) - {"pools", "is_alike", "memory_band_bytes", "fits_probability"}:
        less = {name: value for name, value in document["best"].items() if name != key}
        assert not SCHEMA_OF_FILE.is_valid(document | {"best": less}), key
    assert not SCHEMA_OF_FILE.is_valid(document | {"compared": {}})


def test_the_timeline_of_an_invalid_plan_is_refused(run: Any, saved: str) -> None:
    plan = read_plan(saved)
    write_plan(saved, replace(plan, best=replace(plan.best, pools=("nothing",))))
    refused = run("simulate", saved)
    assert refused.code == 2 and "is not a plan of its cluster" in refused.err


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda best: replace(best, step_time_s=0.9 * best.step_time_s), "predicted step time"),
        (
            lambda best: replace(best, layout=with_microbatches(best.layout)),
            "prediction",
        ),
        (
            lambda best: replace(
                best, peak_memory=replace(best.peak_memory, device=0.5 * best.peak_memory.device)
            ),
            "predicted device bytes",
        ),
        (
            lambda best: replace(best, layout=best.layout.with_times((0.5, *best.pipeline_s[1:]))),
            "predicted pipeline 0",
        ),
        (lambda best: replace(best, mfu=0.99), "predicted mfu"),
        (lambda best: replace(best, tightest_rank=best.tightest_rank + 1), "tightest rank"),
        (
            lambda best: replace(
                best, peak_memory=replace(best.peak_memory, reserved=best.peak_memory.device)
            ),
            "predicted reserved bytes",
        ),
        (lambda best: replace(best, layout=relocated(best.layout)), "layout"),
    ],
)
def test_a_plan_with_wrong_values_is_detected(run: Any, saved: str, change: Any, wrong: str) -> None:
    plan = read_plan(saved)
    best = change(plan.best)
    write_plan(saved, replace(plan, best=best, certificate=replace(plan.proof, best_s=best.step_time_s)))
    checked = run("check", saved, "--json")
    assert checked.code == 4
    document = json.loads(checked.out)
    verdicts = {check["name"]: check["ok"] for check in (*document["checks"], *document["computed_again"])}
    assert not verdicts[wrong]


def test_a_plan_where_nothing_uniform_fits_is_read(run: Any, saved: str) -> None:
    alone = MixedFigures(
        uniform_step_time_s=None, fastest_class_step_time_s=None, fastest_class=None, idle=()
    )
    plan = replace(read_plan(saved), mixed=alone)
    write_plan(saved, plan)
    assert read_plan(saved) == plan


def with_microbatches(layout: Layout) -> Layout:
    """The layout with the micro-batches of the first pipeline halved in size and doubled in number."""
    first, *others = layout.pipelines
    half = replace(first, micro_batch_size=first.micro_batch_size // 2, microbatches=2 * first.microbatches)
    return replace(layout, pipelines=(half, *others))


def relocated(layout: Layout) -> Layout:
    """The layout with the first stage on the ranks of another stage."""
    first, *others = layout.pipelines
    stage = replace(first.stages[0], ranks=others[-1].stages[0].ranks)
    return Layout(pipelines=(replace(first, stages=(stage, *first.stages[1:])), *others))


@pytest.mark.slow
def test_replicas_of_a_stage_share_rows_where_they_may(run: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    saved = run(*SHARED, "--save", path)
    assert saved.code == 0 and ", dp 2, " in saved.out
    shared = read_plan(path).best
    assert shared.step_time_s < answer(run, *SHARED[:-2])["best"]["step_time_s"]
    stages = [stage for pipeline in shared.layout.pipelines for stage in pipeline.stages]
    assert all(stage.devices == stage.tp * stage.dp for stage in stages)
    verdict = json.loads(run("check", path, "--json").out)
    assert [check["name"] for check in verdict["checks"] if not check["ok"]] == ["optimal"]
    ran = run("replan", path, "--cluster", SHARED[3], "--events", "slow n0 1", "--json")
    decision = json.loads(ran.out)
    assert decision["decision"] == "keep"
    assert decision["step_time_s"] == pytest.approx(shared.step_time_s, rel=1e-12)


@pytest.mark.parametrize(
    ("cluster", "stage_dp", "message"),
    [
        ("1x2xA100-80G+1x4xA10G", "3", "is not a power of two"),
        ("1x2xA100-80G+1x4xA10G", "0", "1 to 64"),
        ("1x4xA10G", "2", "applies to uneven plans only"),
    ],
)
def test_stage_dp_is_refused_where_it_has_no_effect(
    run: Any, cluster: str, stage_dp: str, message: str
) -> None:
    ran = run(*SHARED[:3], cluster, *SHARED[4:-1], stage_dp)
    assert ran.code == 2 and "--stage-dp" in ran.err and message in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.slow
def test_an_uneven_plan_is_answered_with_the_requested_options(run: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    found = answer(run, *QUESTION, "--mtbf", "1000h")
    assert 0.0 < found["goodput"]["fraction"] < 1.0 and found["parts"]
    saved = run(*QUESTION, "--save", path, "--json")
    verdict = json.loads(run("check", path, "--json").out)
    assert json.loads(saved.out)["plan_hash"] == found["plan_hash"] == verdict["plan_hash"]


@pytest.mark.slow
def test_an_unfinished_uniform_search_leaves_nothing_proven(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert answer(run, *QUESTION)["is_proven"]
    whole = cluster_parts._part_of
    monkeypatch.setattr(cluster_parts, "_part_of", lambda *of: replace(whole(*of), is_complete=False))
    assert not answer(run, *QUESTION)["is_proven"]
    assert "the search of uniform strategies is incomplete" in run(*QUESTION).out


@pytest.mark.parametrize("ranks", ["0-99999999999999999999", "0-9999999", "1" * 5000, "3-1", "\u0663"])
def test_ranks_that_no_cluster_has_are_detected(run: Any, saved: str, ranks: str) -> None:
    plan = read_plan(saved)
    first, *others = plan.best.layout.pipelines
    stage = replace(first.stages[0], ranks=ranks)
    layout = Layout(pipelines=(replace(first, stages=(stage, *first.stages[1:])), *others))
    write_plan(saved, replace(plan, best=replace(plan.best, layout=layout)))
    assert run("check", saved).code in (2, 4)
    if ranks != "0-9999999":
        with pytest.raises(ConfigError, match="is not a list of rank ranges"):
            _ = stage.rank_numbers


def test_a_space_file_with_values_of_one_pool_is_accepted(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text("axes: {tp: [8]}\n")
    argv = ("plan", "--target=any", "opt-350m", "--cluster", "1x8xA100-80G+1x4xT4", "--seq-len", "1024")
    found = answer(run, *argv, "--global-batch-size", "64", "--space", str(path))
    assert found["best"]["strategy"]["tp"] == 8 and found["devices_used"] == 8


def test_an_altered_file_is_refused_and_export_names_its_kind(run: Any, saved: str, tmp_path: Path) -> None:
    path = Path(saved)
    other = run("export", str(path), "--to", "megatron-lm", "--out", str(tmp_path / "run"))
    assert other.code == 2 and "is not supported for an uneven plan" in other.err
    path.write_text(path.read_text().replace("micro_batch_size: ", "micro_batch_size: 1", 1))
    altered = run("check", str(path))
    assert altered.code == 2 and "the file was changed" in altered.err


@pytest.mark.slow
def test_a_saved_uneven_plan_is_replanned(run: Any, saved: str) -> None:
    cluster = QUESTION[QUESTION.index("--cluster") + 1]
    schema = json.loads(REPLAN_SCHEMA.read_text())
    for events, decisions in (("slow n0 1", {"keep"}), ("lost n1", {"patch", "move"})):
        command_line = ("replan", saved, "--cluster", cluster, "--events", events)
        ran = run(*command_line, "--json")
        assert ran.code == 0
        document = json.loads(ran.out)
        jsonschema.Draft202012Validator(schema).validate(document)
        assert document["decision"] in decisions
        if document["decision"] == "keep":
            assert document["step_time_s"] == pytest.approx(read_plan(saved).best.step_time_s, rel=1e-12)
            assert document["plan"]["strategy"] is None and document["plan"]["uneven"]["layout"]["pipelines"]
        card = run(*command_line)
        assert card.code == 0 and document["decision"] in card.out
    other = run("replan", saved, "--cluster", "4x2xT4", "--events", "lost n1")
    assert other.code == 2 and "is not of this cluster" in other.err


@pytest.mark.slow
def test_allow_idle_is_the_default(run: Any) -> None:
    own, allowed = answer(run, *QUESTION), answer(run, *QUESTION, "--allow-idle")
    assert allowed["best"] == own["best"] and allowed["devices_used"] == own["devices_used"]
    both = run(*QUESTION, "--allow-idle", "--use-all")
    assert both.code == 2 and "--use-all: cannot be combined with --allow-idle" in both.err


@pytest.mark.slow
def test_a_saved_uneven_plan_is_replayed(run: Any, saved: str, tmp_path: Path) -> None:
    plot = tmp_path / "replay.html"
    command_line = ("replay", saved, "--cluster", QUESTION[3], "--events", "slow n0 0.5", "--length", "2h")
    ran = run(*command_line, "--plot", str(plot), "--json")
    assert ran.code == 0
    document = json.loads(ran.out)
    schema = json.loads((REPLAN_SCHEMA.parent / "replay.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    static, *_, oracle = document["policies"]
    (first,) = static["decisions"]
    assert first["strategy"] is None and first["uneven"]["layout"]["pipelines"]
    assert first["step_time_s"] > read_plan(saved).best.step_time_s
    assert static["tokens"] < oracle["tokens"]
    assert "uneven, " in plot.read_text()
    card = run(*command_line)
    assert card.code == 0 and "adaptive" in card.out


@pytest.mark.slow
def test_a_plan_for_a_trace_may_be_uneven(run: Any, tmp_path: Path) -> None:
    path, cluster = str(tmp_path / "plan.yaml"), QUESTION[3]
    command_line = (*QUESTION, "--events", "slow n1 0.9", "--policy", "worst")
    ran = run(*command_line, "--save", path, "--json")
    assert ran.code == 0
    document = json.loads(ran.out)
    schema = json.loads((REPLAN_SCHEMA.parent / "plan-answer.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    found = document["for_trace"]
    assert document["best"]["strategy"] is None and document["best"]["layout"]["pipelines"]
    own = next(one for one in found["policies"] if one["name"] == "worst")
    other = next(one for one in found["uniform"] if one["name"] == "worst")
    assert own["strategy"] is None and own["worst_step_time_s"] < other["worst_step_time_s"]
    plan = read_plan(path)
    assert plan.for_trace is not None and plan.for_trace.policy == "worst"
    assert list(plan.for_trace.nodes) == found["nodes"]
    # The checker's answer, and the run on the nodes that the plan names, agree with the plan.
    assert run("check", path).code == 0
    decision = json.loads(run("replan", path, "--cluster", cluster, "--events", "slow n1 0.9", "--json").out)
    assert decision["keep_step_time_s"] == pytest.approx(own["worst_step_time_s"], rel=1e-12)
    card = run(*command_line)
    assert card.code == 0 and "uneven: " in card.out and "uniform" in card.out
    assert all(len(line) <= 100 for line in card.out.splitlines() if "shardwise" not in line)
    altered = Path(path).read_text().replace("policy: worst", "policy: now")
    Path(path).write_text(altered)
    assert run("check", path).code == 2


@pytest.mark.slow
def test_a_gap_that_uneven_plans_leave_is_not_called_proven(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best uniform strategy is proven optimal, but an uneven plan may be 1.5 % faster."""
    module = sys.modules["shardwise.search.hetero.answer"]

    def ended(*command_line: Any, cutoff_s: float, **more: Any) -> UnevenOutcome:
        return UnevenOutcome(
            plan=None, lower_bound_s=0.985 * cutoff_s, pruned=7, searched=3, unexplored=0, evaluated=40,
            search_s=0.0, search_cpu_s=0.0,
        )  # fmt: skip

    monkeypatch.setattr(module, "search_uneven", ended)
    document = answer(run, *QUESTION, "--target=any")
    assert document["best"]["strategy"] is not None and document["certificate"]["gap"] == 0.0
    assert not document["is_proven"] and document["uneven_gap"] == pytest.approx(0.015)
    assert "none is faster by more than 1.5 %" in document["best"]["why"]
    card = run(*QUESTION, "--target=any").out
    assert "proof         optimal among" in card
    assert "not proven among uneven plans: gap 1.50 %" in card
    monkeypatch.undo()
    whole = answer(run, *QUESTION, "--target=any")
    assert whole["is_proven"] and whole["uneven_gap"] <= PROVEN_GAP


@pytest.mark.slow
def test_a_cluster_of_many_pools_reports_why_it_is_planned_as_one(run: Any) -> None:
    kinds = "1x2xA100-40G+1x2xV100-16G+1x2xT4+1x2xA10G+1x2xL4"
    document = answer(
        run, "plan", "gpt2", "--cluster", kinds, "--seq-len", "512", "--global-batch-size", "20"
    )
    assert "uneven plans are searched on 2 to 4 kinds of nodes; this cluster has 5" in document["best"]["why"]


SPACE = (
    "space", "gpt2", "--cluster", "1x2xA100-40G+1x2xV100-16G", "--seq-len", "512", "--global-batch-size", "8",
)  # fmt: skip


def test_space_counts_the_pipelines_of_uneven_plans(run: Any) -> None:
    document = json.loads(run(*SPACE, "--json").out)
    schema = json.loads((SCHEMA.parent / "space.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    uneven = document["uneven"]
    assert uneven["axes"]["tp on A100-40G"] == ["1", "2"] and uneven["pipelines"] > 1000
    assert f"{uneven['pipelines']:,}" in run(*SPACE).out
    alone = json.loads(run("space", "gpt2", "--cluster", "1x2xV100-16G", *SPACE[4:], "--json").out)
    assert alone["uneven"] is None
    assert json.loads(run(*SPACE, "--fix", "pp=1", "--json").out)["uneven"] is None
    shared = json.loads(run(*SPACE, "--stage-dp", "2", "--json").out)["uneven"]
    assert shared["axes"]["dp of a stage"] == ["1", "2"] and shared["pipelines"] > uneven["pipelines"]


@pytest.mark.slow
def test_other_objectives_report_that_only_uniform_strategies_are_searched(run: Any) -> None:
    ran = run("plan", "--target=any", *SPACE[1:], "--objective", "memory")
    assert ran.code == 0 and "uneven plans are searched for objective time only" in ran.err
    assert "searched for objective time only" not in run("plan", "--target=any", *SPACE[1:]).err
