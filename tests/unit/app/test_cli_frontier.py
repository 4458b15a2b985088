"""`shardwise frontier` with the real planner on questions small enough for every run."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from shardwise.plans import read_plan, write_plan
from shardwise.search.bnb.incumbent import Tradeoff
from shardwise.strategy import Strategy, strategy_text
from shardwise.units import parse_quantity

if TYPE_CHECKING:
    from tests.unit.app.conftest import Ran, Run

SCHEMAS = Path(__file__).parents[3] / "docs" / "reference" / "schemas"
QUESTION = ("gpt2", "--cluster", "1x4xA100-80G", "--seq-len", "1024", "--global-batch-size", "12")
CORE = ("frontier", *QUESTION, "--space", "core", "--target", "any")
L4 = ("gpt2", "--cluster", "2x2xL4", "--seq-len", "1024", "--global-batch-size", "8")
NODES = ("frontier", *L4, "--space", "core", "--target", "any")
WIDTH = 80
LIMIT = ("--memory-limit", "2.5GiB")


def validated(text: str, name: str = "frontier") -> Any:
    document = json.loads(text)
    schema = json.loads((SCHEMAS / f"{name}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


def answer(run: Run, *argv: str) -> Any:
    ran = run(*argv, "--json")
    assert (ran.code, ran.err) == (0, "")
    return validated(ran.out)


def refused(ran: Ran, *words: str) -> None:
    assert (ran.code, ran.out) == (2, "")
    assert ran.err.startswith("shardwise: error: ") and ran.err.count("\n") == 1
    assert all(word in ran.err for word in words), ran.err


def key_of(mode: str) -> Callable[[Any], tuple[float, ...]]:
    if mode == "devices":
        return lambda point: (point["devices"], point["time_s"])
    return lambda point: (point["time_s"],)


@pytest.mark.slow
def test_the_pick_is_the_best_of_the_points_within_the_limit(run: Run) -> None:
    profile = answer(run, *CORE, "--mode", "profile")["points"]
    assert {point["devices"] for point in profile} == {1, 2, 4}
    for mode, limit in (("time", None), ("time", "2.6GiB"), ("devices", "5GiB"), ("devices", "1.6GiB")):
        given = () if limit is None else ("--memory-limit", limit)
        document = answer(run, *CORE, "--mode", mode, "--devices", "1,2,4", *given)
        assert document["points"] == profile  # the limit excludes no point
        limit_bytes = inf if limit is None else parse_quantity(limit, "B")
        fitting = [point for point in profile if point["memory_bytes"] <= limit_bytes]
        assert document["chosen"] == min(fitting, key=key_of(mode)), (mode, limit)
        assert document["memory_limit_bytes"] == (None if limit is None else limit_bytes)


@pytest.mark.slow
def test_reference_strategies_are_estimated_as_by_evaluate_and_beaten(run: Run) -> None:
    document = answer(run, *CORE, "--devices", "4")
    parallel, megatron = document["references"]
    assert (parallel["name"], megatron["name"]) == ("data parallel", "Megatron")
    for found in (parallel, megatron):
        assert found["fits"] and found["devices"] == 4
        strategy = found["layout"]["strategy"]
        text = strategy_text(Strategy(**strategy))
        # Megatron's distributed optimizer divides the states over all replicas, data parallelism nothing.
        replicas = strategy["dp"] * strategy["cp"] if found is megatron else 1
        assert (strategy["param_shard"], strategy["grad_shard"], strategy["optim_shard"]) == (1, 1, replicas)
        result = json.loads(run("evaluate", *QUESTION, "--strategy", text, "--json").out)["result"]
        assert result["step_time_s"] == pytest.approx(found["time_s"], rel=1e-9)
        assert result["peak_memory_bytes"]["device"] == pytest.approx(found["memory_bytes"], rel=1e-9)
        keys = ("time_s", "memory_bytes")
        assert any(all(point[key] <= found[key] for key in keys) for point in document["points"])
    assert parallel["layout"]["strategy"]["dp"] == 4
    # No strategy of the core space with a distributed optimizer is faster.
    fastest = answer(run, *CORE, "--devices", "4", "--fix", "zero_stage=1")["chosen"]
    assert megatron["time_s"] == fastest["time_s"]
    assert megatron["memory_bytes"] < parallel["memory_bytes"]


def test_a_reference_that_does_not_fit_is_its_smallest_variant(run: Run) -> None:
    argv = ("frontier", "llama-3.1-8b", "--cluster", "1x8xA100-80G", "--global-batch-size", "8")
    parallel, megatron = answer(run, *argv, "--seq-len", "2048", "--space", "core")["references"]
    assert not parallel["fits"] and megatron["fits"]
    # 16 bytes for each of 8.03 billion parameters alone.
    assert parallel["memory_bytes"] > 16 * 8.03e9


@pytest.mark.slow
def test_limits_change_the_pick(run: Run) -> None:
    """The limit, not chance, makes the test above pass."""
    for mode in ("time", "devices"):
        argv = (*CORE, "--mode", mode, "--devices", "1,2,4")
        picks = [answer(run, *argv, *more)["chosen"] for more in ((), ("--memory-limit", "1.6GiB"))]
        assert picks[0] != picks[1]


@pytest.mark.slow
def test_points_are_a_frontier_on_each_device_count(run: Run) -> None:
    document = answer(run, *CORE, "--mode", "profile")
    assert document["chosen"] is None
    assert [entry["devices"] for entry in document["profile"]] == [1, 2, 4]
    for entry in document["profile"]:
        points = [point for point in document["points"] if point["devices"] == entry["devices"]]
        assert len(points) == entry["points"] > 3
        times = [point["time_s"] for point in points]
        nbytes = [point["memory_bytes"] for point in points]
        assert times == sorted(set(times)) and nbytes == sorted(set(nbytes), reverse=True)
        assert entry["fastest"]["time_s"] == times[0]
        assert entry["smallest"]["memory_bytes"] == nbytes[-1]
        assert entry["fastest"]["device_s"] == entry["devices"] * times[0]
        assert entry["knee"] is None or entry["knee"]["time_s"] in times[1:-1]
    certificate = document["certificate"]
    outcomes = sum(certificate["rejected"].values()) + certificate["cut_by_bound"] + certificate["simulated"]
    counts = []
    for devices in (1, 2, 4):
        argv = ("gpt2", "--cluster", f"1x{devices}xA100-80G", "--global-batch-size", "12", "--space", "core")
        counts.append(json.loads(run("space", *argv, "--json").out)["count"])
    assert outcomes == certificate["enumerated"] == sum(counts)


@pytest.mark.slow
def test_the_frontier_is_that_of_plan(run: Run) -> None:
    planned = json.loads(
        run("plan", "--target=any", *QUESTION, "--space", "core", "--frontier", "--json").out
    )
    document = answer(run, *CORE)
    assert [(point["time_s"], point["layout"]["strategy"]) for point in document["points"]] == [
        (point["step_time_s"], point["strategy"]) for point in planned["frontier"]
    ]
    assert document["chosen"]["time_s"] == planned["best"]["step_time_s"]
    assert (document["operators"], document["layouts_per_operator"]) == (None, None)


@pytest.mark.slow
def test_cost_is_weighed_between_device_counts(run: Run) -> None:
    argv = (*NODES, "--mode", "profile", "--devices", "1,2,4")
    two, three = answer(run, *argv), answer(run, *argv, "--objectives", "time,memory,cost")
    undominated = [
        point for point in two["points"] if not any(_beats(other, point) for other in two["points"])
    ]
    assert three["points"] == undominated
    assert 0 < len(undominated) < len(two["points"])
    for entry, plain in zip(three["profile"], two["profile"], strict=True):
        assert entry["kept"] == sum(point["devices"] == entry["devices"] for point in undominated)
        assert plain["kept"] == plain["points"] == entry["points"]
    shown = run(*argv, "--objectives", "time,memory,cost").out
    assert f"{len(undominated)} points of time, memory and cost on 3 device counts" in shown
    # A device of a node costs as much as the node: on one device no point is best in any objective.
    assert three["profile"][0]["kept"] == 0 and "1  fastest" in shown
    assert f"0 of {two['profile'][0]['points']}" in shown


def _beats(other: Any, point: Any) -> bool:
    names = ("time_s", "memory_bytes", "cost_usd")
    return all(other[name] <= point[name] for name in names) and any(
        other[name] < point[name] for name in names
    )


@pytest.mark.slow
def test_cost_needs_prices(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: mine\nnodes:\n  - {device: Ascend-910B, count: 4}\n")
    question = ("frontier", "gpt2", "--cluster", str(path), "--global-batch-size", "8", "--space", "core")
    refused(run(*question, "--objectives", "time,memory,cost"), "--objectives", "price")
    assert {point["cost_usd"] for point in answer(run, *question)["points"]} == {None}
    assert "$" not in run(*question).out


@pytest.mark.slow
def test_a_limit_below_the_smallest_point_exits_3_with_that_point(run: Run) -> None:
    document = answer(run, *CORE, "--mode", "profile")
    least = min(document["points"], key=lambda point: point["memory_bytes"])
    argv = (*CORE, "--mode", "devices", "--memory-limit", "1GiB", "--json")
    ran = run(*argv)
    assert ran.code == 3
    assert ran.err.count("\n") == 1 and ran.err.startswith("shardwise: infeasible: ")
    assert "1 GiB" in ran.err and "tp=4" in ran.err
    error = validated(ran.out, "error")
    assert error["error"]["kind"] == "infeasible"
    assert error["point"] == least
    # Exactly this much is enough, a byte less is not.
    needed = -int(-least["memory_bytes"] // 1)
    assert answer(run, *CORE, "--memory-limit", f"{needed}B")["chosen"] == least
    assert run(*CORE, "--memory-limit", f"{needed - 1}B").code == 3


@pytest.mark.slow
def test_nothing_that_fits_at_all_exits_3_with_reasons(run: Run) -> None:
    argv = (
        "gpt3-175b",
        "--cluster",
        "2xL4",
        "--seq-len",
        "2048",
        "--global-batch-size",
        "8",
        "--space",
        "core",
    )
    ran = run("frontier", *argv)
    assert (ran.code, ran.out) == (3, "")
    assert "nothing fits" in ran.err and "rejected: " in ran.err


@pytest.mark.slow
def test_every_point_is_saved_as_a_plan_that_the_checker_accepts(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    ran = run(*NODES, "--devices", "2,4", "--save", str(folder), "--json")
    assert ran.code == 0 and ran.err.count("\n") == 1
    document, index = validated(ran.out), validated((folder / "frontier.json").read_text())
    assert index["points"] == document["points"] and "plans" not in document
    names = index["plans"]
    assert sorted(path.name for path in folder.iterdir()) == sorted([*names, "frontier.json"])
    assert len(names) == len(document["points"]) > 6
    for name, point in zip(names, document["points"], strict=True):
        plan = read_plan(str(folder / name))
        assert plan.best.step_time_s == point["time_s"]
        assert plan.best.peak_memory.device == pytest.approx(point["memory_bytes"], rel=1e-12)
        assert plan.cluster.devices == point["devices"]
        checked = run("check", str(folder / name))
        assert checked.code == 0, checked.out
        assert "open" not in [line.split()[0] for line in checked.out.splitlines() if line.split()]


@pytest.mark.slow
def test_a_point_saved_with_too_much_memory_is_detected(run: Run, tmp_path: Path) -> None:
    """The margin makes a slower point optimal: with the margin of the fastest point, the check fails."""
    run(*NODES, "--save", str(tmp_path))
    names = json.loads((tmp_path / "frontier.json").read_text())["plans"]
    slow = read_plan(str(tmp_path / names[1]))
    loose = replace(slow, job=replace(slow.job, memory_margin=0.05))
    path = str(tmp_path / "loose.yaml")
    write_plan(path, loose)
    checked = run("check", path)
    assert checked.code == 4
    assert any(line.startswith("wrong") and "optimal" in line for line in checked.out.splitlines())


@pytest.mark.slow
def test_saving_again_overwrites(run: Run, tmp_path: Path) -> None:
    def contents() -> dict[str, str]:
        return {
            path.name: "\n".join(line for line in path.read_text().splitlines() if "search_" not in line)
            for path in tmp_path.iterdir()
        }

    run(*NODES, "--save", str(tmp_path))
    first = contents()
    assert run(*NODES, "--save", str(tmp_path)).code == 0
    assert contents() == first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "limit"),
    [((), ()), (("--mode", "devices"), LIMIT), (("--mode", "profile"), ()), (("--mode", "profile"), LIMIT)],
)
def test_the_card_shows_the_answer_within_its_columns(
    run: Run, more: tuple[str, ...], limit: tuple[str, ...]
) -> None:
    ran = run(*CORE, *more, *limit)
    assert (ran.code, ran.err) == (0, "")
    card, _, commands = ran.out.partition(" next ")
    assert max(map(len, card.splitlines())) <= WIDTH
    assert commands.count("shardwise frontier") == 2
    document = answer(run, *CORE, *more, *limit)
    assert f"{len(document['points'])} points" in ran.out
    assert "exact (--epsilon 0.10 %)" in ran.out
    if document["chosen"] is None:
        assert " chosen " not in ran.out
        for entry in document["profile"]:
            first = "fastest" if entry["fastest"] else "smallest"
            assert f" {entry['devices']}  {first}" in ran.out
        assert ("above the limit" in ran.out) == bool(limit)
    else:
        assert f"{document['chosen']['memory_bytes'] / 2**30:.1f} GiB per device" in ran.out
        assert ran.out.count(" → ") == 1


@pytest.mark.slow
def test_the_same_question_has_the_same_answer(run: Run) -> None:
    seen = set()
    for workers in ("1", "1", "2"):
        document = answer(run, *CORE, "--mode", "profile", "--workers", workers)
        for keys in (document, document["certificate"]):
            del keys["search_s"], keys["search_cpu_s"]
        seen.add(json.dumps(document))
    assert len(seen) == 1


@pytest.mark.slow
def test_epsilon_is_reported_and_never_used(run: Run) -> None:
    default, exact = answer(run, *CORE), answer(run, *CORE, "--epsilon", "0")
    assert (default["epsilon"], exact["epsilon"]) == (0.001, 0.0)
    assert default["points"] == exact["points"]
    assert default["profile"][0]["epsilon"] == 0.0


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--mode", "fast"), ("--mode", "time, devices, profile")),
        (("--mode", "device"), ("did you mean devices?",)),
        (("--memory-limit", "40"), ("--memory-limit", "unit")),
        (("--memory-limit", "0GiB"), ("--memory-limit", "more than 0")),
        (("--memory-limit", "-1GiB"), ("--memory-limit",)),
        (("--memory-limit", "1e400GiB"), ("--memory-limit", "finite")),
        (("--memory-limit", "40GB/s"), ("--memory-limit",)),
        (("--devices", ""), ("--devices", "1,2,4")),
        (("--devices", "1,,2"), ("--devices",)),
        (("--devices", "two"), ("--devices",)),
        (("--devices", "0"), ("--devices",)),
        (("--devices", "2,2"), ("--devices", "twice")),
        (("--devices", "5"), ("--devices", "1 to 4")),
        (("--objectives", "time"), ("--objectives", "time,memory,cost")),
        (("--objectives", "time,memory,memory"), ("--objectives",)),
        (("--objectives", "time,cost"), ("--objectives",)),
        (("--objectives", "time,memory,speed"), ("--objectives",)),
        (("--objectives", ""), ("--objectives",)),
        (("--epsilon", "-0.1"), ("--epsilon",)),
        (("--epsilon", "2"), ("--epsilon", "0 to 1")),
        (("--epsilon", "nan"), ("--epsilon",)),
        (("--workers", "0"), ("--workers",)),
        (("--fix", "tp=seven"), ("--fix.tp",)),
        (("--space", "cor"), ("did you mean core?",)),
        (("--save", ""), ("--save",)),
        (("--save", "missing/plans"), ("--save", "missing/plans")),
        (("--save", "file"), ("--save", "neither a folder")),
    ],
)
def test_arguments_that_cannot_be_used(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, argv: tuple[str, ...], words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("mine")
    refused(run(*CORE, *argv), *words)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_device_counts_are_parts_of_the_cluster(run: Run) -> None:
    refused(run(*NODES, "--devices", "1,3"), "--devices", "found 3", "1 to 2, 4")


@pytest.mark.slow
def test_an_input_is_not_overwritten(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps({"name": "mine", "nodes": [{"device": "L4", "count": 2}]}))
    argv = ("frontier", "gpt2", "--cluster", str(path), "--global-batch-size", "8", "--space", "core")
    before = path.read_text()
    refused(run(*argv, "--save", str(tmp_path)), "--save", "is an input")
    assert path.read_text() == before


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_the_plot_is_written_in_addition_to_the_answer(run: Run, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"plot.{suffix}"
    ran = run(*CORE, "--mode", "devices", "--devices", "1,2", "--plot", str(path), "--json")
    assert (ran.code, ran.err) == (0, f"wrote {path}\n")
    document = validated(ran.out)
    assert path.stat().st_size > 10_000
    if suffix == "html":
        text = path.read_text()
        shown = json.loads(text.split('id="data">')[1].split("</script>")[0])
        # The pick and both extremes; the references, on two devices alone.
        devices = document["chosen"]["devices"]
        assert sum(len(line["dots"]) for line in shown["lines"]) == len(document["points"])
        assert len(shown["marks"]) == 3 + 2 * (devices > 1)
        assert "gpt2 on 1x4xA100-80G" in text and "micro-batch" in text


def test_plots_that_cannot_be_written(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run(*CORE, "--plot", "plot.pdf"), "--plot", ".png, .svg, .html")
    refused(run(*CORE, "--plot", "missing/plot.png"), "--plot", "folder does not exist")
    monkeypatch.setattr("shardwise.app.plot.file.find_spec", lambda name: None)
    refused(run(*CORE, "--plot", "plot.svg"), "--plot", "pip install 'shardwise[plot]'")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_frontier_is_not_answered(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupted search has found some points; they are not reported as the whole frontier."""
    offer = Tradeoff.offer

    def interrupted(self: Tradeoff, *incumbents: Any) -> None:
        offer(self, *incumbents)
        raise KeyboardInterrupt

    monkeypatch.setattr(Tradeoff, "offer", interrupted)
    ran = run(*CORE, "--save", str(tmp_path / "plans"), "--json")
    assert (ran.code, ran.err) == (130, "shardwise: error: interrupted before there was an answer\n")
    assert json.loads(ran.out)["error"]["kind"] == "interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_the_next_commands_can_be_copied(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ran = run(*CORE, "--mode", "devices", "--memory-limit", "3GiB", "--devices", "1,2")
    commands = ran.out.partition(" next ")[2].replace("\\\n", " ").strip().splitlines()
    for command in commands:
        again = run(*shlex.split(command)[1:], "--json")
        assert again.code == 0
        assert json.loads(again.out)["mode"] == "devices"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["frontier", "frontier.html"]
    # A change that was requested already is not proposed again.
    assert " next " not in run(*CORE, "--plot", "plot.svg", "--save", "plans").out
