"""Every command takes every plan: plans of all kinds through all commands that read a plan file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from tests.recorded.files import PLANS

from shardwise.plans import Plan, read_plan, write_plan

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

SCHEMAS = Path(__file__).parents[3] / "docs" / "reference" / "schemas"

KINDS = {
    "uniform": "for-our-own-runtime.yaml",
    "for a target": "for-megatron-lm.yaml",
    "objective memory": "memory.json",
    "mixed cluster": "mixed.yaml",
    "for a trace": "for-a-trace.yaml",
    "uneven": "uneven-for-our-own-runtime.yaml",
    "mixed-pool stages": "on-two-pools.yaml",
    "graph": "graph.yaml",
    "staged graph": "staged-graph.yaml",
}
"""A plan of each kind; files of version 1, which are written again as version 2."""


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("plans")
    found = {}
    for kind, name in KINDS.items():
        found[kind] = str(folder / name)
        write_plan(found[kind], read_plan(PLANS / name))
    return found


def validated(text: str, schema: str) -> Any:
    document = json.loads(text)
    jsonschema.Draft202012Validator(json.loads((SCHEMAS / f"{schema}.json").read_text())).validate(document)
    return document


@pytest.mark.parametrize("kind", KINDS)
def test_explain_says_where_time_and_memory_go(run: Run, files: dict[str, str], kind: str) -> None:
    plan = read_plan(files[kind])
    ran = run("explain", files[kind])
    assert ran.code == 0, ran.err
    assert "where the time goes" in ran.out and "where the memory goes" in ran.out
    assert "what binds" in ran.out and max(map(len, ran.out.splitlines())) <= 80
    found = validated(run("explain", files[kind], "--json").out, "explanation")
    assert found["kind"] == ("tree" if plan.kind == "uniform" else "layout")
    assert len(found["stages"]) == len(plan.best.layout.stages)
    for stage in found["stages"]:
        assert 0.0 < stage["busy_s"] <= plan.step_time_s and stage["idle_s"] > -1e-9
    peak = plan.best.peak_memory
    assert found["free_bytes"] == pytest.approx(peak.capacity * (1.0 - plan.job.memory_margin) - peak.device)


@pytest.mark.parametrize("kind", ["uneven", "mixed-pool stages"])
def test_an_uneven_plan_is_explained_by_what_else_there_is(
    run: Run, files: dict[str, str], kind: str
) -> None:
    plan = read_plan(files[kind])
    assert plan.mixed is not None
    baselines = json.loads(run("explain", files[kind], "--json").out)["baselines"]
    times = {one["name"]: one["step_time_s"] for one in baselines}
    if plan.mixed.uniform_step_time_s is not None:
        assert times["best uniform strategy"] == plan.mixed.uniform_step_time_s
    without = run("explain", files[kind], "--why-not", "pp=1", "--json")
    found = validated(without.out, "explanation")
    assert found["result"]["strategy"]["pp"] == 1 and found["difference"]["step_time_s"] > 0.0


def test_a_faster_network_is_asked_for_uneven_plans_too(run: Run, files: dict[str, str]) -> None:
    changed = run("explain", files["uneven"], "--what-if", "inter_node_bandwidth=4x", "--json")
    found = validated(changed.out, "explanation")
    assert found["difference"]["step_time_s"] < 0.0
    assert found["certificate"]["space"] == "uneven" or found["result"]["strategy"] is not None


def test_a_graph_is_compared_with_data_parallelism(run: Run, files: dict[str, str]) -> None:
    found = json.loads(run("explain", files["graph"], "--json").out)["baselines"]
    assert "data parallel" in {one["name"] for one in found}


@pytest.mark.parametrize("option", ["--why-not", "--what-if"])
def test_what_a_graph_cannot_be_asked_is_one_line(run: Run, files: dict[str, str], option: str) -> None:
    ran = run("explain", files["graph"], option, "tp=2")
    assert ran.code == 2 and ran.err.count("\n") == 1
    assert f"{option}: is not supported for the plan of an operator graph" in ran.err


@pytest.mark.parametrize("kind", KINDS)
def test_simulate_draws_every_pipeline(run: Run, files: dict[str, str], kind: str, tmp_path: Path) -> None:
    plan = read_plan(files[kind])
    trace = str(tmp_path / "step.json")
    ran = run("simulate", files[kind], "--trace", trace)
    assert ran.code == 0 and "rank " in ran.out and max(map(len, ran.out.splitlines())) <= 100
    assert json.loads(Path(trace).read_text())["traceEvents"]
    found = validated(run("simulate", files[kind], "--json").out, "timeline")
    assert len(found["ranks"]) == len(plan.best.layout.stages)
    assert found["timeline_s"] <= plan.step_time_s


@pytest.mark.parametrize("kind", KINDS)
def test_check_finds_nothing_wrong(run: Run, files: dict[str, str], kind: str) -> None:
    ran = run("check", files[kind], "--json")
    document = json.loads(ran.out)
    every = (*document["checks"], *document.get("computed_again", ()))
    wrong = {one["name"] for one in every if not one["ok"] and not one["is_open"]}
    if kind == "uneven":
        # Its memory was predicted with scores that dropout saves, which its software does not apply.
        assert wrong and all(set(name.split()) & {"bytes", "memory", "fits"} for name in wrong)
        return
    assert ran.code == 0, ran.out
    assert wrong == set()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("other", ["uniform", "uneven", "graph"])
def test_two_plans_of_any_kinds_are_compared(run: Run, files: dict[str, str], kind: str, other: str) -> None:
    plans = [read_plan(files[name]) for name in (kind, other)]
    ran = run("compare", files[kind], files[other])
    assert (ran.code, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 100
    found = validated(run("compare", files[kind], files[other], "--json").out, "plan-comparison")
    difference = found["difference"]
    assert difference["step_time_s"] == plans[1].step_time_s - plans[0].step_time_s
    assert sum(difference["breakdown"].values()) == pytest.approx(difference["step_time_s"], abs=1e-9)
    assert sum(difference["memory"].values()) == pytest.approx(difference["device_bytes"], abs=1.0)
    if kind == other:
        assert difference["step_time_s"] == 0.0 and difference["fields"] == {}


def test_what_two_plans_do_not_share_is_named(run: Run, files: dict[str, str]) -> None:
    ran = run("compare", files["uniform"], files["graph"])
    differ = next(line for line in ran.out.splitlines() if line.startswith(" differ in"))
    assert "model" in differ


def test_the_timeline_of_two_plans_is_refused(run: Run, files: dict[str, str]) -> None:
    ran = run("compare", files["uniform"], files["uneven"], "--trace", "both.json")
    assert ran.code == 2 and "--trace: needs a measured step" in ran.err


@pytest.mark.parametrize("kind", KINDS)
def test_launch_prints_the_commands_or_says_why_not(run: Run, files: dict[str, str], kind: str) -> None:
    ran = run("launch", files[kind], "--with", "torchrun", "--print")
    if ran.code == 0:
        assert "torchrun" in ran.out
    else:
        assert ran.code == 2 and ran.err.count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_export_writes_flags_or_says_in_one_line_why_not(
    run: Run, files: dict[str, str], kind: str, tmp_path: Path
) -> None:
    ran = run("export", files[kind], "--to", "megatron-lm", "--out", str(tmp_path / "run"))
    assert ran.code == (0 if kind in ("for a target", "mixed cluster") else 2), ran.err
    if ran.code:
        assert ran.err.count("\n") == 1 and not (tmp_path / "run").exists()


@pytest.mark.parametrize("kind", KINDS)
def test_replan_decides_or_says_in_one_line_why_not(run: Run, files: dict[str, str], kind: str) -> None:
    plan: Plan = read_plan(files[kind])
    cluster = str(Path(files[kind]).with_suffix(".cluster.yaml"))
    name = plan.cluster.name.rpartition(" of ")[2]
    ran = run("replan", files[kind], "--cluster", name, "--events", "slow n0 0.9", "--json")
    if ran.code == 0:
        assert json.loads(ran.out)["decision"] in ("keep", "patch", "move"), cluster
    else:
        assert ran.code == 2 and ran.err.count("\n") <= 2
    if plan.kind == "graph":
        assert ran.code == 2 and "is not supported for the plan of an operator graph" in ran.out + ran.err
