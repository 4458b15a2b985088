"""Answers on an approximated input: each says so in one line, and proves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest

from shardwise.inputs import dumps, read_mapping
from shardwise.plans import read_plan
from shardwise.plans.documents import document_hash

if TYPE_CHECKING:
    from tests.unit.app.conftest import Run

SCHEMAS = Path(__file__).parents[3] / "docs" / "reference" / "schemas"

LINKS = """\
name: two pairs
nodes:
  - {device: T4, count: 2, devices: 2}
switches: [lan]
links:
  - {from: d0, to: d1, bandwidth: 10GB/s, latency: 2us}
  - {from: d2, to: d3, bandwidth: 10GB/s, latency: 2us}
  - {from: d0, to: n0, bandwidth: 10GB/s, latency: 2us}
  - {from: d1, to: n0, bandwidth: 10GB/s, latency: 2us}
  - {from: d2, to: n1, bandwidth: 10GB/s, latency: 2us}
  - {from: d3, to: n1, bandwidth: 10GB/s, latency: 2us}
  - {from: n0, to: lan, bandwidth: 10Gb/s, latency: 5us}
  - {from: n1, to: lan, bandwidth: 10Gb/s, latency: 5us}
"""
LINE = (
    "links are priced as 2 tiers: 10 GB/s within 2 devices, 1.25 GB/s between all 4; the order of nodes in "
    "the file matters; nothing is proven of the links themselves"
)
JOB = ("--seq-len", "512", "--global-batch-size", "8")
CLAIMS = ("optimal", "gap 0", "exact", " proven:")


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    path = tmp_path / "links.yaml"
    path.write_text(LINKS)
    return str(path)


@pytest.fixture
def saved(run: Run, cluster: str, tmp_path: Path) -> str:
    path = str(tmp_path / "plan.yaml")
    assert (
        run(
            "plan",
            "--target=any",
            "gpt2",
            "--cluster",
            cluster,
            *JOB,
            "--space",
            "core",
            "--use-all",
            "--save",
            path,
        ).code
        == 0
    )
    return path


def answered(run: Run, schema: str, *argv: str) -> Any:
    ran = run(*argv, "--json")
    assert ran.code == 0, ran.err
    document = json.loads(ran.out)
    validate(document, schema)
    return document


def validate(document: Any, schema: str) -> None:
    text = (SCHEMAS / f"{schema}.json").read_text()
    jsonschema.Draft202012Validator(json.loads(text)).validate(document)


def rewrite(path: str, change: Callable[[Any], None]) -> None:
    """A plan file with other content and its correct hash."""
    document: dict[str, Any] = dict(read_mapping(path))
    change(document)
    document["hash"] = document_hash(document)
    Path(path).write_text(dumps(document, file=path))


def read(run: Run, *argv: str) -> str:
    """The text for people with joined lines, which claims no proof."""
    ran = run(*argv)
    assert ran.code == 0, ran.err
    text = " ".join(ran.out.replace("not proven: the input is approximated", "").split())
    assert not [claim for claim in CLAIMS if claim in text], text
    return text


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal so wide that each check has one line."""
    monkeypatch.setattr("shardwise.app.cli.checking.columns", lambda: 1000)
    monkeypatch.setattr("shardwise.app.cli.checking.LONGEST_NAME", 1000)
    monkeypatch.setattr("shardwise.app.cli.output.columns", lambda: 1000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schema", "argv"),
    [
        ("plan-answer", ("plan", "gpt2", "--space", "core", "--frontier", "--use-all")),
        ("evaluation", ("evaluate", "gpt2", "--strategy", "zero_stage=1")),
        ("frontier", ("frontier", "gpt2", "--space", "core")),
    ],
)
def test_answers_on_links_name_the_tiers_that_approximate_them(
    run: Run, cluster: str, schema: str, argv: tuple[str, ...]
) -> None:
    command_line = (*argv, "--cluster", cluster, *JOB)
    assert f"approximation {LINE}" in read(run, *command_line)
    assert answered(run, schema, *command_line)["priced_as"] == [LINE]


@pytest.mark.slow
def test_a_plan_on_links_is_not_proven(run: Run, cluster: str) -> None:
    command_line = (
        "plan",
        "--target=any",
        "gpt2",
        "--space",
        "core",
        "--use-all",
        "--cluster",
        cluster,
        *JOB,
    )
    document = answered(run, "plan-answer", *command_line)
    assert document["is_proven"] is False and document["uneven_gap"] is None
    assert document["certificate"]["gap"] is None and document["certificate"]["priced_as"] == [LINE]
    # The same with tiers, which are estimated as given.
    plain = answered(run, "plan-answer", *command_line[:-6], "--cluster", "2x2xT4", *JOB)
    assert plain["is_proven"] is True and plain["priced_as"] == []
    assert plain["certificate"]["gap"] == 0.0 and "priced_as" not in plain["certificate"]


def test_the_space_of_links_is_counted_as_any(run: Run, cluster: str) -> None:
    assert answered(run, "space", "space", "gpt2", "--cluster", cluster, *JOB)["priced_as"] == [LINE]


@pytest.mark.slow
def test_a_graph_on_links_is_not_exact(run: Run, cluster: str, tmp_path: Path) -> None:
    command_line = ("frontier", "graph:lstm-2x2048", "--cluster", cluster, "--global-batch-size", "16")
    document = answered(run, "frontier", *command_line, "--epsilon", "0.1", "--save", str(tmp_path / "plans"))
    assert document["priced_as"] == [LINE] and document["certificate"]["epsilon"] is None
    assert f"approximation {LINE}" in read(run, *command_line, "--epsilon", "0.1")
    plan = str(next((tmp_path / "plans").glob("*.yaml")))
    assert f"approximation {LINE}" in read(run, "simulate", plan)
    assert answered(run, "timeline", "simulate", plan)["priced_as"] == [LINE]
    checked = run("check", plan).out
    assert any(line.split()[1] == "approximations" and LINE in line for line in checked.splitlines() if line)
    assert "optimality" in checked and "not claimed" in checked


@pytest.mark.slow
def test_a_saved_plan_on_links_names_its_approximation_in_every_command(run: Run, saved: str) -> None:
    validate(read_mapping(saved), "plan")
    assert read_plan(saved).priced_as == (LINE,)
    for command in ("explain", "simulate"):
        assert f"approximation {LINE}" in read(run, command, saved)
    # The best plan with tp 2 uses a part whose links form one tier.
    assert "approximation links are priced as " in read(run, "explain", saved, "--why-not", "tp=2")
    for argv in (("explain", saved), ("explain", saved, "--what-if", "devices=2")):
        (line,) = answered(run, "explanation", *argv)["priced_as"]
        assert line.startswith("links are priced as ")
    assert answered(run, "timeline", "simulate", saved)["priced_as"] == [LINE]


def test_check_leaves_the_proof_open(run: Run, saved: str) -> None:
    ran = run("check", saved)
    assert ran.code == 0 and ran.err == "shardwise: not proven: optimal\n"
    lines = [line for line in ran.out.splitlines() if line.startswith("open")]
    assert len(lines) == 1 and "as estimated:" in lines[0] and "a proof for the input as given" in lines[0]
    (gap,) = [line for line in ran.out.splitlines() if line.startswith("ok     gap ")]
    assert gap.split() == ["ok", "gap", "None"]


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("priced_as", ["links are priced as they are"], "1 of"),
        ("priced_as", [LINE, LINE], "1 of"),
        ("gap", 0.0, "certificate.gap: must be null: nothing is proven"),
        ("priced_as", None, "certificate.gap: is missing"),
    ],
)
def test_a_plan_on_links_that_claims_more_is_refused(
    run: Run, saved: str, key: str, value: object, message: str
) -> None:
    """Without the line the plan would count as proven, on tiers that its file does not give."""

    def change(document: Any) -> None:
        document["certificate"][key] = value
        if value is None:
            del document["certificate"][key]

    rewrite(saved, change)
    ran = run("check", saved)
    assert ran.code in (2, 4) and message in ran.err


def test_a_plan_on_links_without_its_approximation_is_refused(run: Run, saved: str) -> None:
    def change(document: Any) -> None:
        del document["certificate"]["priced_as"]
        document["certificate"]["gap"] = 0.0

    rewrite(saved, change)
    ran = run("check", saved)
    assert ran.code == 4 and "priced as" in ran.err


@pytest.mark.slow
def test_a_plan_on_a_part_of_links_names_its_approximation(run: Run, cluster: str, tmp_path: Path) -> None:
    """One device has no links; but links were approximated to find that it is best for the objective."""
    path = str(tmp_path / "part.yaml")
    command_line = (
        "plan",
        "--target=any",
        "gpt2",
        "--cluster",
        cluster,
        *JOB,
        "--space",
        "core",
        "--objective",
        "devices",
    )
    assert "links are priced as tiers; " in read(run, *command_line, "--save", path)
    plan = read_plan(path)
    assert not plan.cluster.links and plan.cluster.devices == 1 and len(plan.priced_as) == 1
    document = answered(run, "plan-answer", *command_line)
    assert document["is_proven"] is False and document["priced_as"] == list(plan.priced_as)


@pytest.mark.slow
def test_replan_on_links_names_its_approximation(run: Run, saved: str, cluster: str, tmp_path: Path) -> None:
    path = str(tmp_path / "after.yaml")
    command_line = ("replan", saved, "--cluster", cluster, "--events", "slow n0 0.9")
    assert answered(run, "replan", *command_line)["priced_as"] == [LINE]
    assert f"approximation {LINE}" in read(run, *command_line, "--save", path)
    assert run("check", path).code == 0


# --- events ----------------------------------------------------------------------------------------------

PAIRS = "2x2xT4"
TAKEN = "d0 is taken for its node n0: all 2 devices of it {}; nothing is proven of the devices themselves"


@pytest.fixture
def paired(run: Run, tmp_path: Path) -> str:
    path = str(tmp_path / "plan.yaml")
    assert (
        run("plan", "--target=any", "gpt2", "--cluster", PAIRS, *JOB, "--space", "core", "--save", path).code
        == 0
    )
    return path


@pytest.mark.parametrize(
    ("device", "node", "line"),
    [
        ("slow d0 0.5", "slow n0 0.5", TAKEN.format("run at 0.5")),
        ("lost d0", "lost n0", TAKEN.format("count as lost")),
    ],
    ids=["slow", "lost"],
)
def test_an_event_of_a_device_is_planned_as_one_of_its_node(
    run: Run, paired: str, tmp_path: Path, device: str, node: str, line: str
) -> None:
    command_line = ("replan", paired, "--cluster", PAIRS, "--events")
    found, same = (answered(run, "replan", *command_line, events) for events in (device, node))
    assert found.pop("priced_as") == [line] and same.pop("priced_as") == []
    assert found == same
    assert f"approximation {line}" in read(run, *command_line, device)
    path = str(tmp_path / "after.yaml")
    assert run(*command_line, device, "--save", path).code == 0
    validate(read_mapping(path), "plan")
    assert read_plan(path).priced_as == (line,)
    checked = run("check", path)
    assert checked.code == 0 and "not proven: optimal" in checked.err and line in checked.out


@pytest.mark.slow
@pytest.mark.parametrize("events", ["slow d0 0.5", "link n0>s1g0 1GB/s"])
def test_a_plan_for_a_trace_with_device_events_has_no_gap(run: Run, tmp_path: Path, events: str) -> None:
    path = str(tmp_path / "plan.yaml")
    command_line = ("plan", "gpt2", "--cluster", PAIRS, *JOB, "--space", "core", "--events")
    document = answered(run, "plan-answer", *command_line, events, "--save", path)
    (line,) = document["priced_as"]
    assert document["is_proven"] is False and document["for_trace"]["gap"] is None
    assert [pick["gap"] for pick in document["for_trace"]["policies"]] == [None] * 3
    assert f"approximation {line}" in read(run, *command_line, events)
    saved: Any = read_mapping(path)
    validate(saved, "plan")
    assert saved["for_trace"]["gap"] is None and run("check", path).code == 0
    # Whole nodes: there is one.
    plain = answered(run, "plan-answer", *command_line, "slow n0 0.5")
    assert plain["priced_as"] == [] and plain["for_trace"]["gap"] is not None


@pytest.mark.slow
def test_a_gap_for_an_approximated_trace_is_refused(run: Run, tmp_path: Path) -> None:
    path = str(tmp_path / "plan.yaml")
    command_line = ("plan", "gpt2", "--cluster", PAIRS, *JOB, "--space", "core", "--events", "slow d0 0.5")
    assert run(*command_line, "--save", path).code == 0
    rewrite(path, lambda document: document["for_trace"].update(gap=0.0))
    ran = run("check", path)
    assert ran.code == 2 and "for_trace.gap: does not go with priced_as" in ran.err


@pytest.mark.slow
def test_a_replay_names_its_approximation(run: Run) -> None:
    command_line = ("replay", "gpt2", "--cluster", PAIRS, *JOB, "--events", "slow d0 0.5", "--length", "1h")
    line = TAKEN.format("run at 0.5")
    assert answered(run, "replay", *command_line, "--policy", "static")["priced_as"] == [line]
    assert f"approximation {line}" in read(run, *command_line, "--policy", "static")
