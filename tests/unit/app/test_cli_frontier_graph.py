"""`shardwise frontier` about operator graphs, small enough for every run."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from tests.property.layout_instances import chain, mlp
from tests.reference.one_layout import estimate_layout
from tests.unit.app.test_cli_calibrate import written
from tests.unit.app.test_cli_frontier import answer, refused
from tests.unit.graph.texts import with_value

from shardwise import api
from shardwise.app.cli.frontier import command
from shardwise.cluster import load_cluster, mesh_of, part_of
from shardwise.cost import Training
from shardwise.errors import InternalError
from shardwise.graph import graph_text, layout_from_record, load_graph, scaled
from shardwise.inputs import dumps_yaml, parse_mapping, read_mapping
from shardwise.pareto.frontier import frontier_of
from shardwise.plans import Plan, plan_document, read_plan, write_plan
from shardwise.plans.documents import document_hash
from shardwise.search import graph_result

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

CLUSTER = "2x2xV100-32G"
SCHEMA = json.loads((Path(__file__).parents[3] / "docs/reference/schemas/plan.json").read_text())
QUESTION = ("frontier", "graph:lstm-2x2048", "--cluster", CLUSTER, "--global-batch-size", "256")


def estimate_of(point: Any, batch: int) -> tuple[float, float]:
    """Seconds and bytes of the layout of a point, estimated from its names by separate code."""
    graph = scaled(load_graph("graph:lstm-2x2048"), batch)
    cluster = part_of(load_cluster(CLUSTER), point["devices"])
    mesh = mesh_of(cluster, tuple(point["layout"]["mesh"]))
    blocks = {"blocks": point["layout"]["blocks"]}
    layout = layout_from_record(blocks, graph, mesh.ranks)
    estimate = estimate_layout(graph, cluster, Training(dtype="fp16"), mesh, layout)
    return estimate.time_s, estimate.memory_bytes


@pytest.mark.parametrize("stages", [(), ("--stages", "2")])
def test_without_numba_a_frontier_is_refused_in_one_line(
    run: Run, monkeypatch: pytest.MonkeyPatch, stages: tuple[str, ...]
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    found = run(*QUESTION, *stages)
    [line] = found.err.strip().splitlines()
    assert found.code == 2 and "numba" in line and "pip install 'shardwise[graph]'" in line


def test_without_numba_a_frontier_of_strategies_is_found(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    job = ("--cluster", "1x8xH100-SXM", "--seq-len", "2048", "--global-batch-size", "8")
    assert answer(run, "frontier", "llama-3.1-8b", *job)["points"]


@pytest.mark.slow
def test_every_point_has_the_cost_of_its_layout(run: Run) -> None:
    document = answer(run, *QUESTION, "--mode", "profile", "--devices", "2,4")
    assert {point["devices"] for point in document["points"]} == {2, 4}
    for point in document["points"]:
        estimate = estimate_of(point, 256)
        assert estimate == pytest.approx((point["time_s"], point["memory_bytes"]), rel=1e-9)
    other = dict(document["points"][0], layout=document["points"][-1]["layout"], devices=4)
    assert estimate_of(other, 256) != pytest.approx((other["time_s"], other["memory_bytes"]), rel=1e-9)


def test_measured_numbers_are_used_for_layouts(run: Run, tmp_path: Path) -> None:
    """With a calibration: its software, and links of 2 GB/s, make the same frontier slower."""
    graph = tmp_path / "mlp.yaml"
    graph.write_text(graph_text(mlp(64, 512, 512, 64)))
    question = (
        "frontier",
        str(graph),
        "--cluster",
        "1x2xcpu",
        "--global-batch-size",
        "64",
        "--dtype",
        "fp32",
    )
    shipped = answer(run, *question)
    measured = answer(run, *question, "--calibration", written(tmp_path))
    assert measured["job"]["profile"] == "shardwise" != shipped["job"]["profile"]
    assert measured["chosen"]["time_s"] != pytest.approx(shipped["chosen"]["time_s"], rel=0.01)


@pytest.mark.slow
def test_the_modes_pick_from_the_points(run: Run) -> None:
    fastest = answer(run, *QUESTION)
    assert fastest["chosen"] == min(fastest["points"], key=lambda point: point["time_s"])
    assert fastest["certificate"]["meshes"] == {"4": [[2, 2]]}
    assert fastest["certificate"]["epsilon"] <= fastest["epsilon"] == 0.001
    assert fastest["operators"] == scaled(load_graph("graph:lstm-2x2048"), 256).operators
    assert all(count >= 1 for count in fastest["layouts_per_operator"].values())
    figures = [(point["time_s"], point["memory_bytes"]) for point in fastest["points"]]
    assert len(frontier_of(figures).points) == len(figures)


@pytest.mark.slow
def test_a_coarse_frontier_matches_a_fine_one_within_epsilon(run: Run) -> None:
    fine = answer(run, *QUESTION, "--epsilon", "0.002")
    coarse = answer(run, *QUESTION, "--epsilon", "0.05")
    assert fine["certificate"]["epsilon"] == 0.002 and coarse["certificate"]["epsilon"] == 0.05
    assert len(coarse["points"]) < len(fine["points"])
    for point in fine["points"]:
        limits = {key: 1.05 * point[key] for key in ("time_s", "memory_bytes")}
        assert any(all(other[key] <= limits[key] for key in limits) for other in coarse["points"])
    (parallel,) = fine["references"]
    assert (parallel["name"], parallel["fits"], parallel["devices"]) == ("data parallel", True, 4)
    figures = {key: parallel[key] for key in ("time_s", "memory_bytes")}
    assert estimate_of(parallel, 256) == pytest.approx(tuple(figures.values()), rel=1e-9)
    assert any(all(point[key] <= 1.002 * figures[key] for key in figures) for point in fine["points"])


LSTM = ("frontier", "graph:lstm-2x2048", "--cluster", "1x4xL4", "--global-batch-size", "256")


@pytest.mark.slow
def test_other_meshes_add_points_that_name_their_mesh(run: Run) -> None:
    """A recurrent layer is best divided by units within pairs, and by samples between pairs."""
    tiers = answer(run, *LSTM, "--epsilon", "0.01")
    every = answer(run, *LSTM, "--epsilon", "0.01", "--meshes", "all")
    pairs = answer(run, *LSTM, "--epsilon", "0.01", "--meshes", "2x2")
    mesh_lists = [document["certificate"]["meshes"]["4"] for document in (tiers, every, pairs)]
    assert mesh_lists == [[[4]], [[4], [2, 2]], [[2, 2]]]
    assert {tuple(point["layout"]["mesh"]) for point in every["points"]} == {(4,), (2, 2)}
    assert every["chosen"]["time_s"] < tiers["chosen"]["time_s"]
    for one in (tiers, pairs):
        for point in one["points"]:
            limits = {key: 1.01 * point[key] for key in ("time_s", "memory_bytes")}
            assert any(all(other[key] <= limits[key] for key in limits) for other in every["points"])
        of_all = every["layouts_per_operator"]
        assert all(of_all[name] > count for name, count in one["layouts_per_operator"].items())
    shown = run(*LSTM, "--epsilon", "0.01", "--meshes", "all").out
    assert "2x2, no recomputation" in shown and "on all meshes: 4, 2x2" in shown
    assert "mesh 2x2" not in shown  # reported once
    plain = run(*LSTM, "--epsilon", "0.1").out
    assert "on the mesh of the tiers: 4" in plain and "mesh 4 ·" in plain


@pytest.mark.parametrize("text", ["5", "2x3", "4x4", "4,4", "2x2,2x2", "", "x", "2x2x2x2", "99999999999x1"])
def test_an_invalid_mesh_is_refused(run: Run, text: str) -> None:
    refused(run(*LSTM, "--meshes", text), "--meshes", "2x2" if "," not in text else "twice")


@pytest.mark.slow
def test_each_device_count_uses_the_requested_meshes_of_its_size(run: Run) -> None:
    """A mesh that fits none of the counts is refused, and so is a count that fits none of the meshes."""
    few = (*LSTM, "--epsilon", "0.1")
    document = answer(run, *few, "--meshes", "2,1,4,2x2", "--mode", "profile")
    assert document["certificate"]["meshes"] == {"1": [[1]], "2": [[2]], "4": [[4], [2, 2]]}
    document = answer(run, *few, "--meshes", "2x2", "--mode", "devices")
    assert document["certificate"]["meshes"] == {"4": [[2, 2]]}
    refused(run(*few, "--meshes", "1,2,4,3x2", "--mode", "profile"), "'3x2'", "1, 2, 4 devices", "4, 2x2")
    refused(run(*few, "--meshes", "2,4"), "'2'", "no mesh of 4 devices")
    refused(run(*few, "--meshes", "2x2", "--devices", "2,4"), "'2x2'", "no mesh of 2 devices")
    refused(run(*few, "--meshes", "8", "--mode", "devices"), "'8'", "no mesh of 4 devices")


def test_meshes_are_refused_for_models(run: Run) -> None:
    question = ("frontier", "gpt2", *LSTM[2:], "--seq-len", "1024", "--meshes", "all")
    refused(run(*question), "--meshes", "axis_order")


@pytest.mark.slow
def test_each_plan_has_the_mesh_of_its_point(run: Run, tmp_path: Path) -> None:
    ran = run(*LSTM, "--epsilon", "0.05", "--meshes", "all", "--save", str(tmp_path))
    assert ran.code == 0, ran.err
    index = json.loads((tmp_path / "frontier.json").read_text())
    meshes = {tuple(read_plan(str(tmp_path / name)).mesh.ranks) for name in index["plans"]}
    assert meshes == {(4,), (2, 2)}
    for name in index["plans"]:
        checked = run("check", str(tmp_path / name))
        assert checked.code == 0, checked.err


def test_options_of_strategies_are_refused_for_graphs(run: Run) -> None:
    refused(run(*QUESTION, "--fix", "tp=2"), "--fix", "tp=2", "layout per operator")
    refused(
        run("frontier", "graph:nothing", "--cluster", CLUSTER, "--global-batch-size", "8"), "graph:nothing"
    )


def save(run: Run, folder: Path) -> list[Path]:
    """The plan files of a frontier, fastest first."""
    ran = run("frontier", "graph:mlp", *QUESTION[2:], "--save", str(folder))
    assert ran.code == 0, ran.err
    index = json.loads((folder / "frontier.json").read_text())
    assert len(index["plans"]) == len(index["points"]) > 1
    assert index["plan_hashes"] == [read_mapping(str(folder / name))["hash"] for name in index["plans"]]
    return [folder / name for name in index["plans"]]


class Killed(BaseException):
    """The command is killed: nothing handles it."""


def test_a_killed_command_leaves_no_index_of_other_files(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second frontier in the folder of a first, killed after its first plan file: the index of the first
    would name a file that is not of the first."""
    save(run, tmp_path)
    written: list[str] = []

    def write_one(path: str, plan: Plan) -> str:
        if written:
            raise Killed
        written.append(path)
        return write_plan(path, plan)

    monkeypatch.setattr(command, "write_plan", write_one)
    abandoned = tmp_path / ".frontier.json.0123456789ab.tmp"
    abandoned.write_text("{")
    os.utime(abandoned, (0, 0))
    with pytest.raises(Killed):
        run("frontier", "graph:mlp", *QUESTION[2:], "--save", str(tmp_path))
    assert written and not (tmp_path / "frontier.json").exists() and not abandoned.exists()


@pytest.mark.slow
def test_plans_of_several_graphs_each_contain_their_own(run: Run, tmp_path: Path) -> None:
    """One after the other in one process; reading one plan changes no other."""
    first = read_plan(str(save(run, tmp_path)[0]))
    other = replace(first, network=replace(first.graph, name="other"))
    for plan in (first, other, first, other):
        document = plan_document(plan)
        graph_document: Any = document["graph"]
        assert (
            graph_document == parse_mapping(graph_text(plan.graph))
            and graph_document["name"] == plan.graph.name
        )
        graph_document["blocks"].clear()


@pytest.mark.slow
def test_each_point_is_saved_as_a_plan_with_its_cost(run: Run, tmp_path: Path) -> None:
    paths = save(run, tmp_path)
    points = json.loads((tmp_path / "frontier.json").read_text())["points"]
    for path, point in zip(paths, points, strict=True):
        plan = read_plan(str(path))
        assert plan.graph == scaled(load_graph("graph:mlp"), 256) and plan.mesh.ranks == (2, 2)
        training = Training(dtype=plan.job.dtype, optimizer=plan.job.optimizer, profile=plan.job.profile)
        estimate = estimate_layout(plan.graph, plan.cluster, training, plan.mesh, plan.operators)
        own = (plan.step_time_s, plan.best.peak_memory.device)
        assert (estimate.time_s, estimate.memory_bytes) == pytest.approx(own, rel=1e-9)
        assert own == pytest.approx((point["time_s"], point["memory_bytes"]), rel=1e-9)
    document = read_mapping(str(paths[0]))
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    write_plan(str(tmp_path / "again.yaml"), read_plan(str(paths[0])))
    assert (tmp_path / "again.yaml").read_bytes() == paths[0].read_bytes()
    checked = run("check", str(paths[0]), "--json")
    assert checked.code == 0, checked.err
    verdict = json.loads(checked.out)
    assert verdict["ok"] and verdict["plan_hash"] == document["hash"]
    assert [check["name"] for check in verdict["checks"] if check["is_open"]] == []
    assert (
        next(check for check in verdict["checks"] if check["name"] == "optimality")["found"] == "not claimed"
    )


@pytest.mark.parametrize("field", ["time_s", "memory_bytes"])
def test_a_point_whose_cost_differs_from_its_layout_is_no_plan(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = load_cluster(CLUSTER)
    found = api.frontier(
        "graph:mlp", cluster=cluster, global_batch_size=256, dtype="fp16", epsilon=0.05, use_all=True
    )
    curve, source = found.curves[0], found.source
    plan = source.plan(curve, 0, epsilon=0.05)
    own = {"time_s": plan.step_time_s, "memory_bytes": plan.best.peak_memory.device}
    assert own == pytest.approx({name: getattr(curve.points[0], name) for name in own}, rel=1e-9)

    def estimated(*given: Any) -> Any:
        best = graph_result(*given)
        if field == "time_s":
            return replace(best, step_time_s=best.step_time_s * (1.0 + 1e-6))
        peak = replace(best.peak_memory, device=best.peak_memory.device * (1.0 + 1e-6))
        return replace(best, peak_memory=peak)

    monkeypatch.setattr("shardwise.search.graph_result", estimated)
    with pytest.raises(InternalError, match=r"a point of .* has a layout of"):
        source.plan(curve, 0, epsilon=0.05)


def stage_of(document: Any) -> Any:
    """The only stage of the plan in a file."""
    ((stage,),) = (pipeline["stages"] for pipeline in document["best"]["layout"]["pipelines"])
    return stage


def rewritten(path: Path, change: Callable[[Any], None]) -> Path:
    """A plan file with a change and its new hash."""
    document: Any = read_mapping(str(path))
    change(document)
    document["hash"] = document_hash(document)
    changed = path.parent / "changed.yaml"
    changed.write_text(dumps_yaml(document))
    return changed


@pytest.mark.slow
def test_a_saved_plan_with_wrong_values_is_detected(run: Run, tmp_path: Path) -> None:
    path, *_, smallest = save(run, tmp_path)

    def faster(document: Any) -> None:
        best = document["best"]
        best["step_time_s"] *= 0.5
        best["layout"]["pipelines"][0]["makespan_s"] *= 0.5
        for name in best["breakdown"]:
            best["breakdown"][name] *= 0.5

    def other_layout(document: Any) -> None:
        stage_of(document)["operators"] = stage_of(read_mapping(str(smallest)))["operators"]

    for change in (faster, other_layout):
        ran = run("check", str(rewritten(path, change)))
        assert ran.code == 4 and "predicted step time" in ran.err

    def no_rule(document: Any) -> None:
        operators = stage_of(document)["operators"]["blocks"][0]["operators"]
        operators[next(iter(operators))][0] = "split nothing"

    def half_a_mesh(document: Any) -> None:
        document["best"]["layout"]["mesh"] = [2, 1]

    def no_border(document: Any) -> None:
        second = stage_of(document)["operators"]["blocks"][1]
        (entry,) = (name for name in second["tensors"] if name not in second["operators"])
        second["tensors"][entry] = ["P", "P"]

    refused(
        run("check", str(rewritten(path, no_border))), "changed.yaml", "layout.blocks", "do not agree", "P P"
    )
    refused(run("check", str(rewritten(path, no_rule))), "changed.yaml", "layout.blocks[0]", "split nothing")
    refused(run("check", str(rewritten(path, half_a_mesh))), "mesh", "2x1", "product is 4")
    text = path.read_text()
    torn = tmp_path / "torn.yaml"
    torn.write_text(text[: len(text) // 2])
    refused(run("check", str(torn)), "torn.yaml")
    torn.write_text(text.replace("fp16", "bf16"))
    refused(run("check", str(torn)), "torn.yaml", "hash")
    torn.write_text(text.replace("version: 2\n", "version: 3\n", 1))
    refused(run("check", str(torn)), "torn.yaml", "newer plan format")


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        ("blocks.1.operators.0.inputs.0.from", "down", ("'up' closes a cycle", "up -> down -> up")),
        ("blocks.1.operators.0.kind", "lineer", ("'up' is not an operator kind", "did you mean linear?")),
        ("blocks.2.operators.0.inputs.0.dims", ["b", "s", "v"], ("'logits' do not have", "[8, 4, 6]")),
        ("sizes.f", 0, ("sizes.f", "'up' is zero")),
        ("blocks.1.operators.1.inputs.0.from", "nobody", ("'down' does not exist", "nobody")),
    ],
    ids=["cycle", "kind", "shapes", "zero", "nowhere"],
)
def test_an_inconsistent_graph_file_names_its_operator(
    run: Run, tmp_path: Path, path: str, value: object, words: tuple[str, ...]
) -> None:
    file = tmp_path / "graph.json"
    argv = ("frontier", str(file), "--cluster", CLUSTER, "--global-batch-size", "8")
    file.write_text(json.dumps(with_value(path, value)))
    refused(run(*argv), str(file), *words)
    ran = run(*argv, "--json")
    error = json.loads(ran.out)["error"]
    assert ran.code == 2 and error["kind"] == "config" and words[0] in f"{error['key']} {error['message']}"


def test_a_concat_without_output_is_refused_by_name(run: Run, tmp_path: Path) -> None:
    block = {
        "name": "all",
        "operators": [
            {
                "name": "joined",
                "kind": "concat",
                "inputs": [{"from": "x", "dims": ["b", "e"]}, {"from": "y", "dims": ["b", "f"]}],
                "output": [],
            }
        ],
    }
    path = tmp_path / "mine.yaml"
    inputs = {"x": ["batch", 2], "y": ["batch", 3]}
    path.write_text(
        dumps_yaml({"batch": 8, "sizes": {"b": "batch", "e": 2, "f": 3}, "inputs": inputs, "blocks": [block]})
    )
    ran = run("frontier", str(path), *QUESTION[2:])
    refused(ran, "mine.yaml", "blocks[0].operators[0].output", "'joined' needs a dim along which", "found []")


@pytest.mark.slow
def test_too_little_memory_shows_the_smallest_point(run: Run) -> None:
    ran = run(*QUESTION, "--memory-limit", "1MiB")
    assert ran.code == 3 and "the smallest needs" in ran.err
    ran = run("frontier", "graph:llama-3.1-8b", "--cluster", "1x1xV100-32G", "--global-batch-size", "64")
    assert ran.code == 3 and "no layout of llama-3.1-8b fits on 1 devices" in ran.err


STAGES = ("frontier", "graph:mlp", "--cluster", CLUSTER, "--global-batch-size", "256", "--stages", "2")


@pytest.mark.slow
def test_stages_and_their_layouts_are_answered_together(run: Run, tmp_path: Path) -> None:
    ran = run(*STAGES, "--microbatches", "4,8", "--save", str(tmp_path), "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    schema = json.loads((Path(__file__).parents[3] / "docs/reference/schemas/frontier.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    proof = document["certificate"]
    # Eight blocks, each of which but the first reads the previous one: seven cuts, twice.
    assert (proof["space"], proof["partitions"]) == ("stages", 14)
    # Lower bounds prune most of them; some are left to evaluate.
    assert 1 <= proof["evaluated"] < 14 and proof["epsilon"] < 0.05
    names = json.loads((tmp_path / "frontier.json").read_text())["plans"]
    for name, point in zip(names, document["points"], strict=True):
        layout = point["layout"]
        assert layout["microbatches"] in (4, 8) and len(layout["stages"]) == 2
        assert sum(block["count"] for stage in layout["stages"] for block in stage["blocks"]) == 8
        plan = read_plan(str(tmp_path / name))
        assert plan.step_time_s == pytest.approx(point["time_s"], rel=1e-9)
        jsonschema.Draft202012Validator(SCHEMA).validate(read_mapping(str(tmp_path / name)))
        assert run("check", str(tmp_path / name)).code == 0
    text = run(*STAGES)
    assert text.code == 0 and "7 partitions" in text.out

    def other_cut(document: Any) -> None:
        first, second = document["best"]["layout"]["pipelines"][0]["stages"]
        moved = second["operators"]["blocks"].pop(0)
        first["operators"]["blocks"].append(moved)
        for stage, more in ((first, moved["count"]), (second, -moved["count"])):
            stage["layers"] += more
            stage["chunks"][0] += more

    ran = run("check", str(rewritten(tmp_path / names[0], other_cut)))
    assert ran.code == 4 and "predicted step time" in ran.err


@pytest.mark.slow
def test_the_card_names_operators_that_compute_across_samples(run: Run, tmp_path: Path) -> None:
    """Statistics of a batch norm are those of the batch; `train` computes no others."""
    path = tmp_path / "normed.yaml"
    path.write_text(graph_text(chain(16, 8, 16, 4, norm="batch_norm")))
    command_line = ("frontier", str(path), "--cluster", "1x2xV100-32G", "--global-batch-size", "16")
    question = (*command_line, "--stages", "2", "--microbatches")
    ran = run(*question, "4")
    assert ran.code == 0, ran.err
    assert "batch_norm operator norm computes across samples" in " ".join(ran.out.split())
    assert "train does not run them" not in run(*question, "1").out
    assert "train does not run them" not in run(*STAGES).out


@pytest.mark.slow
def test_stages_are_laid_out_on_any_of_their_meshes(run: Run, tmp_path: Path) -> None:
    """Each point names its mesh and costs as much as its plan; no point of a single mesh is better."""
    question = (
        *("frontier", "graph:lstm-2x2048", "--cluster", "1x8xV100-32G", "--global-batch-size", "64"),
        *("--stages", "2", "--microbatches", "2", "--epsilon", "0.05"),
    )
    ran = run(*question, "--meshes", "all", "--save", str(tmp_path), "--json")
    document = json.loads(ran.out)
    assert document["certificate"]["meshes"] == {"8": [[4], [2, 2]]}
    points = [(point["time_s"], point["memory_bytes"]) for point in document["points"]]
    left = 1.0 + document["certificate"]["epsilon"]
    alone = answer(run, *question, "--meshes", "2x2")
    assert {tuple(point["layout"]["mesh"]) for point in alone["points"]} == {(2, 2)}
    for point in alone["points"]:
        own = (point["time_s"], point["memory_bytes"])
        assert any(a <= own[0] * left and b <= own[1] * left for a, b in points)
    names = json.loads((tmp_path / "frontier.json").read_text())["plans"]
    assert all(run("check", str(tmp_path / name)).code == 0 for name in names)


@pytest.mark.slow
def test_the_fewest_devices_are_the_smallest_count_on_which_a_point_fits(run: Run) -> None:
    """Two devices of a node cost as much as all four, which are faster; two are still the fewest."""
    question = (*LSTM, "--epsilon", "0.1", "--mode", "devices", "--devices", "2,4")
    plain, weighed = answer(run, *question), answer(run, *question, "--objectives", "time,memory,cost")
    assert {point["devices"] for point in weighed["points"]} == {4}
    assert plain["chosen"] == weighed["chosen"] and plain["chosen"]["devices"] == 2


@pytest.mark.parametrize(
    ("model", "option", "text", "words"),
    [
        ("graph:mlp", "--workers", "abc", ("--workers", "whole number")),
        ("graph:mlp", "--workers", "9999", ("--workers", "1 to")),
        ("graph:mlp", "--expert-imbalance", "foo", ("--expert-imbalance", "1 to 100")),
        ("graph:mlp", "--seq-len", "8", ("--seq-len", "no sequence", "no such option")),
        ("graph:mlp", "--epsilon", "1e3", ("--epsilon", "0 to 1")),
        ("graph:mlp", "--epsilon", "e-3", ("--epsilon", "0 to 1")),
        ("vgg16", "--seq-len", "8", ("MODEL", "did you mean graph:vgg16?")),
    ],
)
def test_options_of_graphs_are_read_like_those_of_transformers(
    run: Run, model: str, option: str, text: str, words: tuple[str, ...]
) -> None:
    refused(run("frontier", model, *LSTM[2:], option, text), *words)


def test_an_epsilon_may_be_a_power_of_ten(run: Run) -> None:
    assert answer(run, *LSTM, "--epsilon", "1e-1")["epsilon"] == 0.1


def test_a_graph_that_fits_nowhere_is_refused_with_its_smallest_point(run: Run) -> None:
    question = ("frontier", "graph:mlp", "--cluster", "1x1xT4", "--global-batch-size", "64", "--json")
    for more in ((), ("--memory-limit", "1GiB")):
        ran = run(*question, *more)
        error = json.loads(ran.out)
        schema = json.loads((Path(__file__).parents[3] / "docs/reference/schemas/error.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(error)
        assert ran.code == 3 and error["reasons"] == {"memory": 1}
        assert error["point"]["devices"] == 1 and error["point"]["memory_bytes"] > 16 * 2**30


def test_the_card_shows_the_number_of_layouts_of_operators(run: Run) -> None:
    """By kind: each number of layouts, with the number of operators that have it, repetitions counted."""
    document = answer(run, *LSTM, "--epsilon", "0.1")
    counts = document["layouts_per_operator"]
    card = run(*LSTM, "--epsilon", "0.1").out
    line = " ".join(card[card.index(" layouts  ") :].split())
    for block in load_graph("graph:lstm-2x2048").blocks:
        for node in block.operators:
            assert f"{node.kind} {block.repeat} x {counts[node.name]}" in line
    assert len(counts) > 2


@pytest.mark.slow
def test_stages_are_compared_with_the_references(run: Run, tmp_path: Path) -> None:
    """References use as many devices, all of them in one stage."""
    path = tmp_path / "plot.html"
    question = (*LSTM, "--epsilon", "0.1")
    staged = answer(run, *question, "--stages", "2")
    assert staged["references"] == answer(run, *question)["references"] != []
    assert "no stages" in run(*question, "--stages", "2", "--plot", str(path)).out
    assert '"name":"data parallel"' in path.read_text("utf-8")


@pytest.mark.slow
def test_stages_leave_no_devices_idle_unrequested(run: Run) -> None:
    """All devices where no number is requested, or the numbers that could be requested; in other modes the
    parts into which they can be divided.
    """
    lstm = ("frontier", "graph:lstm-2x2048", "--global-batch-size", "64", "--epsilon", "0.1")
    eight = (*lstm, "--cluster", "1x8xV100-32G", "--stages", "3")
    for more in ((), ("--mode", "profile")):
        refused(run(*eight, *more), "--stages", "all of 8", "found 3", "allowed: 2, 4; 3 with --devices 3, 6")
    for more, devices in ((("--mode", "devices"), [3]), (("--devices", "6"), [6])):
        document = answer(run, *eight, *more)
        assert [each["devices"] for each in document["profile"]] == devices
    nodes = (*lstm, "--cluster", "3x2xV100-32G", "--stages", "2")
    for more in ((), ("--devices", "6")):
        refused(run(*nodes, *more), "--stages", "all of 6", "allowed: 3; 2 with --devices 2, 4")
    refused(run(*nodes, "--devices", "5"), "--devices", "no part of the cluster", "1 to 2, 4, 6")
    kinds = (*lstm, "--cluster", "1x2xV100-32G+1x2xA100-40G", "--stages", "2", "--use-all")
    refused(run(*kinds), "--stages", "all of 4", "allowed: 2 with --devices 2")


@pytest.mark.slow
def test_impossible_stages_are_refused(run: Run) -> None:
    question = STAGES[:-1]
    refused(run(*question, "3"), "--stages", "3", "as many devices")
    refused(run(*question, "two"), "--stages", "two")
    tied = ("frontier", "graph:gpt2-1.5b", *STAGES[2:])
    refused(run(*tied), "--stages", "blocks share a parameter", "wte")
    refused(run(*question, "2", "--microbatches", "3"), "--microbatches", "divisors of 256")
    refused(run(*question, "2", "--microbatches", "4,4"), "--microbatches", "twice")
    refused(run(*question, "1", "--microbatches", "4"), "--microbatches", "--stages 2 or more")
    gpt2 = ("frontier", "gpt2", "--cluster", "1x2xA100-80G", "--seq-len", "64", "--global-batch-size", "4")
    refused(run(*gpt2, "--microbatches", "2"), "--microbatches", "micro_batch_size")
    refused(run(*gpt2, "--stages", "2", "--fix", "pp=1"), "--stages")
    document = answer(run, *gpt2, "--stages", "2", "--space", "core")
    assert {point["layout"]["strategy"]["pp"] for point in document["points"]} == {2}
    ran = run(*gpt2, "--stages", "3", "--space", "core")
    assert ran.code == 3 and "without --stages" in ran.err and "--fix" not in ran.err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "blocks: is missing"),
        ("block: []\n", "blocks: is missing"),
        ("blocks: 3\n", "blocks: is not a list"),
    ],
)
def test_a_file_with_the_graph_schema_is_read_as_a_graph(
    content: str, message: str, run: Run, tmp_path: Path
) -> None:
    path = tmp_path / "graph.yaml"
    path.write_text(f"schema: shardwise.graph\nbatch: 4\ninputs: {{x: [batch]}}\n{content}")
    result = run("frontier", str(path), "--cluster", CLUSTER, "--global-batch-size", "4")
    assert result.code == 2 and f"{path}: {message}" in result.err
