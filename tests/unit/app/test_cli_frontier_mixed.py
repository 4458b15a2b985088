"""`shardwise frontier` on a mixed cluster: the frontier over all unions of its pools, and the idle
devices.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
from tests.unit.app.test_cli_frontier import SCHEMAS, answer, refused

from shardwise.inputs import read_mapping
from shardwise.plans import Idle, read_plan

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

FAST, SLOW = "1x2xA100-80G", "1x2xV100-32G"
POOLS = {"A100-80G": FAST, "V100-32G": SLOW}
GRAPH = ("frontier", "graph:lstm-2x2048", "--global-batch-size", "256", "--epsilon", "0.001")
MODEL = ("frontier", "gpt2", "--seq-len", "1024", "--global-batch-size", "8", "--space", "core",
         "--target", "any")  # fmt: skip
BY_SUBJECT = pytest.mark.parametrize("question", [GRAPH, MODEL], ids=["graph", "model"])
ALL_USED = {"devices": 0, "nodes": 0, "ranks": ""}


def on(question: tuple[str, ...], cluster: str) -> tuple[str, ...]:
    return (*question, "--cluster", cluster)


def figures(document: Any) -> list[tuple[float, float, int]]:
    return [(point["time_s"], point["memory_bytes"], point["devices"]) for point in document["points"]]


def undominated(points: list[tuple[float, float, int]]) -> list[tuple[float, float, int]]:
    """By the quadratic definition, fastest first."""
    return sorted(
        point
        for point in points
        if not any(
            other[0] <= point[0] and other[1] <= point[1] and other[:2] != point[:2] for other in points
        )
    )


@pytest.mark.slow
@BY_SUBJECT
def test_the_frontier_is_that_of_the_points_of_all_unions(run: Run, question: tuple[str, ...]) -> None:
    """The unions are each pool alone and all devices, in any order of the pools."""
    alone = [answer(run, *on(question, cluster)) for cluster in POOLS.values()]
    every = answer(run, *on(question, f"{FAST}+{SLOW}"), "--use-all")
    expected = undominated([point for document in (*alone, every) for point in figures(document)])
    for cluster in (f"{FAST}+{SLOW}", f"{SLOW}+{FAST}"):
        found = answer(run, *on(question, cluster))
        assert figures(found) == [pytest.approx(point, rel=1e-12) for point in expected]
        assert found["chosen"]["time_s"] == pytest.approx(alone[0]["chosen"]["time_s"], rel=1e-12)
        ranks = "2-3" if cluster.startswith(FAST) else "0-1"
        assert found["chosen"]["idle"] == {"devices": 2, "nodes": 1, "ranks": ranks}
        assert found["chosen"]["part"].startswith("A100-80G of ")
        for point in found["points"]:
            assert (point["idle"] == ALL_USED) is (point["devices"] == 4)
        assert [(one["devices"], one["kept"] > 0) for one in found["profile"]][-1] == (4, True)
        assert sum(one["kept"] for one in found["profile"]) == len(expected)
    # The mutant uses all devices: its fastest plan is slower than that on two of them.
    assert every["chosen"]["time_s"] > 1.1 * found["chosen"]["time_s"]
    assert every["chosen"]["idle"] == ALL_USED
    assert {point["devices"] for point in found["points"]} == {2, 4}


@pytest.mark.slow
@BY_SUBJECT
def test_the_card_shows_idle_devices_and_the_time_of_all_devices(
    run: Run, question: tuple[str, ...], tmp_path: Path
) -> None:
    cluster = f"{FAST}+{SLOW}"
    picture = tmp_path / "frontier.html"
    card = run(*on(question, cluster), "--plot", str(picture)).out
    assert "on 3 parts of the cluster" in card
    assert " idle          2 of 4 devices, 1 whole node   ranks 2-3\n" in card
    assert "all devices take " in card and "--use-all plans for them" in card
    assert "A100-80G + V100-32G" in card and "on 2 devices, A100-80G" in card
    assert "2 devices, A100-80G" in picture.read_text("utf-8")
    whole = run(*on(question, cluster), "--use-all").out
    assert " idle" not in whole and "smaller parts of the cluster were not searched" in whole
    assert "smaller parts of the cluster" not in run(*on(question, FAST)).out


@pytest.mark.slow
def test_a_saved_plan_names_idle_devices_and_is_accepted(run: Run, tmp_path: Path) -> None:
    folder = tmp_path / "frontier"
    assert run(*on(GRAPH, f"{SLOW}+{FAST}"), "--save", str(folder)).code == 0
    index = json.loads((folder / "frontier.json").read_text())
    schema = json.loads((SCHEMAS / "plan.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    seen = set()
    for point, name in zip(index["points"], index["plans"], strict=True):
        path = folder / name
        plan = read_plan(str(path))
        validator.validate(read_mapping(str(path)))
        assert plan.idle == Idle(**point["idle"]) and plan.cluster.devices == point["devices"]
        assert plan.step_time_s == pytest.approx(point["time_s"], rel=1e-9)
        checked = run("check", str(path))
        assert checked.code == 0
        assert "the file may have only the devices that are used" in " ".join(checked.out.split())
        seen.add((plan.idle.devices, plan.idle.nodes))
    assert seen == {(2, 1), (0, 0)}


def test_the_fewest_devices_are_those_of_any_pool(run: Run) -> None:
    """One device of the second pool is enough where one device of the first is too small."""
    limit = ("--mode", "devices", "--memory-limit", "12GiB")
    small = answer(run, *on(MODEL, f"1x2xT4+{FAST}"), *limit)
    assert (
        small["chosen"]["devices"] == 1
        and small["chosen"]["part"] == "1 device of A100-80G of 1x2xT4+1x2xA100-80G"
    )
    assert small["chosen"]["time_s"] == answer(run, *on(MODEL, FAST), *limit)["chosen"]["time_s"]


@pytest.mark.slow
def test_device_counts_are_of_any_pool(run: Run) -> None:
    found = answer(run, *on(GRAPH, f"{SLOW}+{FAST}"), "--devices", "2")
    alone = answer(run, *on(GRAPH, FAST))
    assert found["chosen"]["time_s"] == pytest.approx(alone["chosen"]["time_s"], rel=1e-12)
    first = answer(run, *on(GRAPH, f"{SLOW}+{FAST}"), "--devices", "2", "--use-all")
    assert first["chosen"]["time_s"] > found["chosen"]["time_s"]


@pytest.mark.slow
def test_stages_are_of_one_pool_where_they_cannot_share_all(run: Run) -> None:
    staged = (*on(GRAPH, f"{SLOW}+{FAST}"), "--stages", "2", "--microbatches", "4")
    found = answer(run, *staged)
    assert found["chosen"]["idle"] == {"devices": 2, "nodes": 1, "ranks": "0-1"}
    assert {point["devices"] for point in found["points"]} == {2}
    refused(run(*staged, "--use-all"), "--stages", "all of 4")


@pytest.mark.slow
def test_a_mesh_is_used_on_the_pools_that_have_it(run: Run) -> None:
    meshes = (*on(GRAPH, f"{SLOW}+{FAST}"), "--meshes")
    assert answer(run, *meshes, "2,2x2")["certificate"]["meshes"] == {"2": [[2]], "4": [[2, 2]]}
    refused(run(*meshes, "2,8"), "--meshes", "'8'")
