"""The document of a report and its page: packed timelines, the critical path, escapes, and the numbers of the
plan."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import shardwise as sw
from shardwise.app.cli import words
from shardwise.app.cli.main import main
from shardwise.app.web import page, report_document, timeline
from shardwise.schedule import generate
from shardwise.sim import Durations, simulate, task_graph

SCHEMA = Path(__file__).parents[3] / "docs" / "reference" / "schemas" / "report.json"

TYPES = {"u8": "<u1", "u16": "<u2", "u32": "<u4", "f32": "<f4"}


def unpacked(column: dict[str, Any]) -> list[float]:
    numbers = np.frombuffer(base64.b64decode(column["data"]), TYPES[column["type"]]).tolist()
    return [column["values"][each] for each in numbers] if "values" in column else list(numbers)


def data_of(html: str) -> dict[str, object]:
    """The document in a page, as a browser reads it."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, re.DOTALL)
    assert found is not None
    document: dict[str, object] = json.loads(found[1])
    return document


@pytest.fixture(scope="module")
def plan() -> sw.Plan:
    return sw.evaluate(
        "llama-3.1-8b", cluster="2x8xH100-SXM", seq_len=4096, global_batch_size=16,
        strategy="tp=2,pp=4,vpp=2,dp=2,schedule=interleaved_1f1b,zero_stage=1,micro_batch_size=1",
    )  # fmt: skip


def test_integers_take_the_narrowest_type() -> None:
    assert timeline.packed(np.array([0, 255]))["type"] == "u8"
    assert timeline.packed(np.array([0, 256]))["type"] == "u16"
    assert timeline.packed(np.array([0, 65536]))["type"] == "u32"
    assert unpacked(timeline.packed(np.array([1, 256, 65535]))) == [1, 256, 65535]


def test_the_critical_path_is_that_of_a_hand_drawn_pipeline() -> None:
    """GPipe with 2 stages and 2 micro-batches, forward 1 s and 3 s, backward 2 s and 4 s, no sends:

    stage 0: 0F0 0-1, 0F1 1-2, then backwards at 11-13 and 15-17
    stage 1: 1F0 1-4, 1F1 4-7, then backwards of 4 s each, 7-11 and 11-15

    Stage 1 never waits after 1 s. The path is the first forward of stage 0, all of stage 1, and the last
    backward of stage 0.
    """
    schedule = generate("gpipe", pp=2, microbatches=2, vpp=1)
    durations = Durations.of(stages=2, forward_s=[1.0, 3.0], backward_s=[2.0, 4.0])
    found = simulate(task_graph(schedule, durations))
    names = [found.graph.names[task] for task in timeline.critical_tasks(found)][::-1]
    assert found.makespan_s == 17.0
    assert names[0] == "0F0" and names[1:3] == ["1F0", "1F1"]
    assert [name[:2] for name in names[3:]] == ["1B", "1B", "0B"]
    # Each task of the path starts when the one before it ends.
    tasks = timeline.critical_tasks(found)[::-1]
    assert found.start_s[tasks[1:]].tolist() == found.finish_s[tasks[:-1]].tolist()


def test_a_timeline_has_every_action_at_its_time(plan: sw.Plan) -> None:
    document = report_document([plan])["plans"][0]["timeline"]["pipelines"][0]  # type: ignore[index]
    actions, schedule = document["actions"], plan.schedules[0]
    assert actions["offsets"] == schedule.columns.offsets.tolist()
    assert unpacked(actions["stage"]) == schedule.columns.stage.tolist()
    assert unpacked(actions["microbatch"]) == schedule.columns.microbatch.tolist()
    kinds = unpacked(actions["kind"])
    assert [int(kind) & 7 for kind in kinds] == schedule.columns.kind.tolist()
    starts, lengths = np.array(unpacked(actions["start_s"])), np.array(unpacked(actions["length_s"]))
    for first, stop in zip(actions["offsets"][:-1], actions["offsets"][1:], strict=True):
        # A rank runs one action at a time, in the order of the table.
        assert (starts[first:stop][1:] >= (starts + lengths)[first:stop][:-1] - 1e-6).all()
    ends = [one["start_s"] + one["length_s"] for one in document["data_parallel"]]
    assert len(ends) == 16  # a gather and a reduction of each of 4 x 2 chunks
    assert max((starts + lengths).max(), *ends) == pytest.approx(document["makespan_s"], rel=1e-6)
    assert document["makespan_s"] + document["end_s"] == pytest.approx(plan.step_time_s, rel=1e-9)
    busy = [row["busy_s"] for row in document["rows"]]
    assert lengths.sum() == pytest.approx(sum(busy), rel=1e-5)


def test_memory_of_stages_is_that_of_the_plan(plan: sw.Plan) -> None:
    shown = report_document([plan])["plans"][0]["memory_by_stage"]  # type: ignore[index]
    assert [one["device_bytes"] for one in shown] == [
        pytest.approx(stage["device"]) for stage in sw.memory_by_stage(plan)
    ]
    tightest = max(shown, key=lambda one: one["device_bytes"])
    assert tightest["band_bytes"] == pytest.approx(list(plan.best.memory_band_bytes))
    assert tightest["fits_probability"] == pytest.approx(plan.best.fits_probability)


@pytest.fixture(scope="module")
def uneven_plan() -> sw.Plan:
    found = sw.plan(
        "llama-2-7b", cluster="1x2xA100-80G+1x2xV100-32G", seq_len=2048, global_batch_size=8, target="any",
        dtype="fp16",
    )  # fmt: skip
    assert found.best.fields is None
    return found


def test_memory_of_an_uneven_plan_is_that_of_each_device_class(uneven_plan: sw.Plan) -> None:
    """Each stage with the capacity of its own device; the fullest of them is the rank of the plan."""
    shown = report_document([uneven_plan])["plans"][0]["memory_by_stage"]  # type: ignore[index]
    peak = uneven_plan.best.peak_memory
    fullest = max(shown, key=lambda one: one["device_bytes"] / one["capacity_bytes"])
    assert fullest["parts"] == pytest.approx(dict(uneven_plan.memory))
    assert fullest["capacity_bytes"] == peak.capacity and fullest["device_bytes"] == pytest.approx(
        peak.device
    )
    classes = {stage.device_class for stage in uneven_plan.best.layout.stages}
    assert len({one["capacity_bytes"] for one in shown}) == len(classes) > 1
    pipelines = len(uneven_plan.best.layout.pipelines)
    assert all(
        (" of pipeline" in one["name"] or " pipelines" in one["name"]) == (pipelines > 1) for one in shown
    )


def test_parts_of_the_step_sum_to_it(plan: sw.Plan, uneven_plan: sw.Plan) -> None:
    for one in (plan, uneven_plan):
        found = report_document([one])["plans"][0]["step_parts"]  # type: ignore[index]
        whole = found["computation_s"] + found["communication_s"] - found["overlap_s"] + found["idle_s"]
        assert whole == pytest.approx(one.step_time_s, rel=1e-9)


def test_the_report_says_what_the_card_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence and one number for one thing, on the card and in the report of the saved plan."""
    monkeypatch.chdir(tmp_path)
    question = [
        "llama-3.1-8b",
        "--cluster",
        "2x8xH100-SXM",
        "--seq-len",
        "8192",
        "--global-batch-size",
        "128",
    ]
    assert main(["plan", *question, "--target", "megatron-lm-0.19", "--save", "p.yaml", "--verbose"]) == 0
    card = " ".join(capsys.readouterr().out.split())
    shown = report_document([sw.load("p.yaml")], ["p.yaml"])["plans"][0]  # type: ignore[index]
    texts = shown["texts"]
    assert texts["division"] in card and all(part in card for part in texts["details"])
    assert texts["settings"] and all(" ".join(part.split()) in card for part in texts["settings"])
    assert f"step time {words.seconds(shown['best']['step_time_s'])}" in card
    low, high = shown["best"]["band_s"]
    assert f"80 % band {words.rounded_seconds(low)} to {words.rounded_seconds(high)}" in card
    assert f"{words.rounded_seconds(low)} and {words.rounded_seconds(high)}" in texts["sure"][0]
    probability = f"{shown['best']['fits_probability']:.2f}"
    assert f"{probability} likely to fit" in card and f"probability {probability}" in texts["sure"][1]
    sure = texts["sure"][2].split(".")[0]
    assert sure.split(" plans")[1] in card  # at least N plans are within ...
    counted = f"among {shown['certificate']['enumerated']:,} candidates"
    assert counted in card or shown["certificate"].get("other_options")
    for text in texts["assumptions"]:
        assert " ".join(text.split()) in card


NAMES = ["<script>alert(1)</script>", "</script><img src=x onerror=alert(1)>", "<!-- &amp; \u2028 'x' \"y\""]


@pytest.mark.parametrize("name", NAMES)
def test_names_cannot_leave_the_data(plan: sw.Plan, name: str) -> None:
    """A name from a file ends neither the element of the data nor opens another one."""
    from dataclasses import replace

    html = replace(plan, network=replace(plan.model, name=name)).report()
    assert html.count("<script") == html.count("</script>") == 2
    assert "<img" not in html and "<!--" not in html
    document = data_of(html)
    assert document["plans"][0]["model"]["name"] == name  # type: ignore[index]


def test_only_the_scripts_of_the_page_may_run(plan: sw.Plan) -> None:
    html = plan.report()
    script = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', html)
    assert policy is not None
    assert "connect-src 'none'" in policy[1] and "fetch(" not in html
    assert policy[1].startswith("default-src 'none'") and f"script-src 'sha256-{digest}'" in policy[1]
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)", re.sub(r'id="data">.*?</script>', "", html, flags=re.DOTALL)
    )


def test_the_command_writes_the_page_of_the_file(
    plan: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    plan.save("p.yaml")
    assert main(["report", "p.yaml"]) == 0
    assert "p.html" in capsys.readouterr().out
    html = Path("p.html").read_text("utf-8")
    assert data_of(html) == json.loads(json.dumps(report_document([sw.load("p.yaml")], ["p.yaml"])))
    assert main(["report", "p.yaml", "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown == data_of(html)
    jsonschema.validate(shown, json.loads(SCHEMA.read_text()))


def test_a_wrong_name_is_refused(plan: sw.Plan, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "p.yaml"
    plan.save(path)
    assert main(["report", str(path), "--out", str(tmp_path / "p.pdf")]) == 2
    assert "--out: has no suffix of a page" in capsys.readouterr().err
    with pytest.raises(sw.ConfigError, match="out: has no suffix of a page"):
        plan.report(tmp_path / "p.pdf")


def test_the_frontier_is_searched_on_request(plan: sw.Plan) -> None:
    """The plan was given, so its question is the whole default space on 16 devices."""
    html = sw.evaluate(
        "llama-3.1-8b", cluster="1x2xH100-SXM", seq_len=4096, global_batch_size=4,
        strategy="tp=2,recompute=full",
    ).report(frontier=True)  # fmt: skip
    one = data_of(html)["plans"][0]  # type: ignore[index]
    points = one["frontier"]
    assert len(points) > 1 and len(one["texts"]["points"]) == len(points)
    assert [point["step_time_s"] for point in points] == sorted(point["step_time_s"] for point in points)
    assert [-point["device_bytes"] for point in points] == sorted(-point["device_bytes"] for point in points)
    assert one["texts"]["points"][0]["command"].startswith("shardwise explain plan.yaml --why-not tp=")


def test_scripts_are_all_in_the_page() -> None:
    scripts = {path.name for path in (Path(page.__file__).parent / "assets").glob("*.js")}
    assert scripts == {*page.SCRIPTS, page.SERVER_SCRIPT, page.MAIN_SCRIPT}


def test_a_measured_step_is_shown_with_its_actions(plan: sw.Plan, tmp_path: Path) -> None:
    """The predicted step as if it were measured on the 4 ranks of each stage, twice as slow, in the same
    order."""
    plan.save(tmp_path / "p.yaml")
    assert main(["simulate", str(tmp_path / "p.yaml"), "--trace", str(tmp_path / "t.json")]) == 0
    trace = json.loads((tmp_path / "t.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    trace["traceEvents"] = [
        {**event, "pid": event["pid"] + rank, "ts": 2 * event["ts"], "dur": 2 * event["dur"]}
        for event in spans
        for rank in range(4)
    ]
    (tmp_path / "t.json").write_text(json.dumps(trace))
    argv = ["compare", str(tmp_path / "p.yaml"), str(tmp_path / "t.json"), "--out", str(tmp_path / "c.html")]
    assert main(argv) == 0
    one = data_of((tmp_path / "c.html").read_text("utf-8"))["plans"][0]  # type: ignore[index]
    measured, predicted = one["measured"]["pipeline"], one["timeline"]["pipelines"][0]
    assert one["measured"]["disorder"] is None
    assert [row["name"] for row in measured["rows"]] == [f"rank {rank}" for rank in range(16)]
    ends = measured["actions"]["offsets"]
    for name in ("stage", "microbatch", "length_s"):
        found, wanted = unpacked(measured["actions"][name]), unpacked(predicted["actions"][name])
        scale = 2.0 if name == "length_s" else 1.0
        for rank in (0, 5, 15):  # of stages 0, 1 and 3, each with 32 actions
            own = wanted[32 * (rank // 4) : 32 * (rank // 4 + 1)]
            assert found[ends[rank] : ends[rank + 1]] == pytest.approx([scale * one for one in own], abs=3e-6)
