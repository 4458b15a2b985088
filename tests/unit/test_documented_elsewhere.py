"""docs/how-to/other-software.md: its table has every field, its spaces are searched, and its program agrees
with plans.
"""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

from shardwise.cluster import load_cluster
from shardwise.model import model_from_config
from shardwise.plans import Plan, write_plan
from shardwise.search import Question, plan, plan_of_strategy
from shardwise.search.space import read_space
from shardwise.strategy import Job, Strategy

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "other-software.md").read_text()
SPACES = sorted((ROOT / "examples" / "spaces").glob("*.yaml"))
LAYERS = 7


def answered(**more: Any) -> Plan:
    dimensions = {"layers": LAYERS, "hidden": 512, "ffn": 2048, "heads": 8, "vocab": 4096, "seq_len": 512}
    question = Question(
        model=model_from_config(dimensions, name="small"),
        cluster=load_cluster("1x8xA100-40G"),
        job=Job(seq_len=512, global_batch_size=16, dtype="bf16"),
        **more,
    )
    return plan_of_strategy(question.model, question.cluster, question.job, plan(question).best.strategy)


def test_every_field_is_documented() -> None:
    table, _, _ = PAGE.partition("## Start it")
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    documented_names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(documented_names) == sorted(field.name for field in dataclasses.fields(Strategy))


def test_the_documented_spaces_exist() -> None:
    documented_names = set(re.findall(r"examples/spaces/([\w-]+\.yaml)", PAGE))
    assert documented_names and documented_names == {path.name for path in SPACES}


@pytest.mark.parametrize("path", SPACES, ids=lambda path: path.stem)
def test_the_documented_spaces_are_searched(path: Path) -> None:
    space = read_space(str(path))
    strategy = answered(space=space.base, axes=space.axes).best.strategy
    for name, values in space.axes.items():
        assert getattr(strategy, name) in values


@pytest.mark.parametrize(
    "fixed", [{"pp": 4}, {"pp": 2, "vpp": 3}, {"pp": 2, "vpp": 2, "first_stage_layers": 0}]
)
def test_the_documented_program_prints_the_stages_of_the_plan(tmp_path: Path, fixed: dict[str, Any]) -> None:
    found = answered(space="default", axes={"schedule": ("1f1b", "interleaved_1f1b")}, fixed=fixed)
    write_plan(str(tmp_path / "plan.yaml"), found)
    program = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert program is not None
    script = tmp_path / "program.py"
    script.write_text(program[1].replace("plan.yaml", str(tmp_path / "plan.yaml")))
    names = runpy.run_path(str(script))
    pp, vpp = fixed["pp"], fixed.get("vpp", 1)
    stages = found.best.layout.pipelines[0].stages
    assert len(names["counts"]) == pp * vpp and sum(names["counts"]) == LAYERS
    for place, count in enumerate(names["counts"]):
        assert count == stages[place % pp].layers[place // pp]
    modules = [name for part in names["parts"] for name in part]
    assert modules == ["tok_embeddings", *(f"layers.{n}" for n in range(LAYERS)), "norm", "output"]
    assert [sum(name.startswith("layers.") for name in part) for part in names["parts"]] == names["counts"]
