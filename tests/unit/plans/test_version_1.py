"""Plan files of version 1, of all three schemas, are read as plans of version 2."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tests.recorded.files import PLANS
from tests.unit.plans.test_plan_file import ROOT

from shardwise.errors import ConfigError
from shardwise.inputs import dumps_yaml, parse_mapping, read_mapping
from shardwise.plans import Plan, plan_document, read_plan, write_plan
from shardwise.plans.documents import document_hash

FILES = sorted(path.name for path in PLANS.iterdir())
SCHEMA = parse_mapping((ROOT / "docs" / "reference" / "schemas" / "plan.json").read_text())


def old(name: str) -> dict[str, Any]:
    """The document of a file of version 1."""
    return dict(read_mapping(str(PLANS / name), max_bytes=8 << 20, max_nodes=10**6))


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_version_1_is_written_as_version_2_and_read_back_equal(name: str, tmp_path: Path) -> None:
    assert old(name)["version"] == 1
    plan = read_plan(PLANS / name)
    path = tmp_path / "plan.yaml"
    write_plan(str(path), plan)
    document = read_mapping(str(path), max_bytes=8 << 20, max_nodes=10**6)
    assert document["version"] == 2
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    assert read_plan(path) == plan


def test_the_files_are_of_every_kind() -> None:
    kinds: dict[str, Plan] = {}
    for name in FILES:
        plan = read_plan(PLANS / name)
        kinds.setdefault(plan.kind, plan)
    assert set(kinds) == {"uniform", "uneven", "graph"}
    assert {str(old(name)["schema"]) for name in FILES} == {
        "shardwise.plan", "shardwise.uneven-plan", "shardwise.graph-plan",
    }  # fmt: skip


def test_what_version_1_had_elsewhere_is_kept() -> None:
    for name in FILES:
        was, plan = old(name), read_plan(PLANS / name)
        best = was.get("best", was)
        assert plan.step_time_s == best["step_time_s"]
        assert (plan.target or "any") == was.get("target", "any")
        if plan.kind == "uniform":
            assert plan.objective == was["objective"]
            # The certificate of a plan for a trace covers one strategy, which nobody asked for.
            fixed = {} if plan.for_trace is not None else was["certificate"]["fixed"]
            assert plan.question.fixed == fixed
            assert plan.best.microbatches == (was["schedule"]["microbatches"],)
        if plan.kind == "uneven":
            assert list(plan.best.microbatches) == best["microbatches"]
            assert list(plan.best.pipeline_s) == best["pipeline_s"]
            assert [list(modes) for modes in plan.best.recompute] == best["recompute"]
            assert plan.idle.devices == best["idle_devices"]
        if plan.kind == "graph":
            assert list(plan.mesh.ranks) == was["mesh"]
            assert plan.best.peak_memory.device == was["device_bytes"]
            assert plan.job.global_batch_size == was["graph"]["batch"]


def without(*keys: str | int) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in keys[:-1]:
            document = document[key]
        del document[keys[-1]]

    return change


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("uniform.yaml", without("best"), "best: "),
        ("uniform.yaml", without("best", "strategy", "cp"), "best.strategy.cp: "),
        ("uniform.yaml", without("schedule", "microbatches"), "schedule.microbatches: "),
        ("uniform.yaml", without("model", "config"), "model.config: "),
        ("uneven.yaml", without("best", "recompute"), "best.recompute: "),
        ("uneven.yaml", lambda document: document["best"]["microbatches"].pop(), "best.microbatches: "),
        ("uneven.yaml", lambda document: document["best"]["recompute"][0].pop(), "best.recompute: "),
        ("uneven.yaml", without("compared"), "compared: "),
        ("uneven.yaml", without("best", "peak_memory_bytes", "device"), "best.peak_memory_bytes.device: "),
        ("graph.yaml", without("mesh"), "mesh: "),
        ("graph.yaml", without("layout"), "layout: "),
        ("graph.yaml", without("job", "profile"), "job.profile: "),
        ("graph.yaml", lambda document: document["graph"].update(batch="x"), "graph.batch: "),
        ("staged-graph.yaml", lambda document: document["layout"]["stages"].pop(), "layout.stages: "),
        ("uniform.yaml", lambda document: document.update(surprise=1), "surprise: "),
        ("uneven.yaml", lambda document: document["best"].update(surprise=1), "best.surprise: "),
    ],
)
def test_a_fault_of_version_1_is_one_line(
    name: str, change: Callable[[Any], None], message: str, tmp_path: Path
) -> None:
    document = old(name)
    change(document)
    document["hash"] = document_hash(document)
    path = tmp_path / "plan.yaml"
    path.write_text(dumps_yaml(document))
    with pytest.raises(ConfigError) as caught:
        read_plan(path)
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_an_altered_file_of_version_1_is_refused(tmp_path: Path) -> None:
    document = old("uneven.yaml")
    document["best"]["step_time_s"] *= 0.5
    path = tmp_path / "plan.yaml"
    path.write_text(dumps_yaml(document))
    with pytest.raises(ConfigError, match="hash: does not match the content"):
        read_plan(path)


def test_the_hash_of_a_plan_is_that_of_its_file_of_version_2(tmp_path: Path) -> None:
    plan = read_plan(PLANS / "uniform.yaml")
    assert write_plan(str(tmp_path / "plan.yaml"), plan) == plan_document(plan)["hash"]
