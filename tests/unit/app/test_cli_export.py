"""The command `export`: its files, its errors, and the check by the target's own reader."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.property.layout_instances import mlp
from tests.runtime.graph_plans import by_rules, plan_with
from tests.runtime.uneven_plans import make_uneven
from tests.unit.app.conftest import Run
from tests.unit.targets.small_plans import LLAMA, small_plan, with_fields
from tests.unit.targets.test_megatron_lm_differences import READING, requested_plan

from shardwise.errors import ConfigError
from shardwise.plans import write_plan
from shardwise.targets import megatron_lm_read_back
from shardwise.targets.megatron_lm_read_back import Reading

TO = ("--to", "megatron-lm-0.19", "--out", "out")
FILES = ["megatron-bridge.txt", "megatron-lm.args", "megatron-lm.sh", "megatron-lm.yaml"]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The path of a plan with experts, from its folder."""
    monkeypatch.chdir(tmp_path)
    write_plan("p.yaml", requested_plan())
    return "p.yaml"


def read_as(reading: Reading) -> Callable[..., list[Reading]]:
    """A reader of flags with this result."""

    def read(requests: Sequence[Any], **_: object) -> list[Reading]:
        assert [request.world_size for request in requests] == [8]
        return [reading]

    return read


def test_files_are_written(run: Run, plan: str) -> None:
    ran = run("export", plan, *TO)
    assert (ran.code, ran.err) == (0, "")
    assert sorted(os.listdir("out")) == FILES
    assert "out/megatron-lm.args" in ran.out and "read back     no" in ran.out
    first = Path("out/megatron-lm.args").read_bytes()
    assert run("export", plan, *TO).code == 0  # over its own files
    assert Path("out/megatron-lm.args").read_bytes() == first


def test_a_target_without_a_version_is_the_newest(run: Run, plan: str) -> None:
    ran = run("export", plan, "--to", "megatron-lm", "--out", "a/b")
    assert ran.code == 0 and "megatron-lm-0.19" in ran.out
    assert sorted(os.listdir("a/b")) == FILES


def test_an_unknown_target_is_refused(run: Run, plan: str) -> None:
    ran = run("export", plan, "--to", "megatron-lm-0.20", "--out", "out")
    assert ran.code == 2 and "--to" in ran.err and "megatron-lm-0.19" in ran.err
    assert not os.path.exists("out")


def test_a_field_without_a_flag_is_refused_by_name(run: Run, plan: str) -> None:
    write_plan("s.yaml", with_fields(requested_plan(), recompute="selective", recompute_layers=0))
    ran = run("export", "s.yaml", *TO)
    assert ran.code == 2 and ran.err.startswith("shardwise: error: s.yaml: best.strategy.recompute: ")
    assert ran.err.count("\n") == 1 and not os.path.exists("out")


def test_plans_of_other_kinds_are_refused(run: Run, plan: str) -> None:
    write_plan("u.yaml", make_uneven("5 tp2l4+3 l2 l2"))
    graph = mlp(8, 6, 12, 5)
    write_plan("g.yaml", plan_with(graph, (2,), by_rules(graph, (2,), lambda op: ("split b",))))
    for path, kind in (("u.yaml", "an uneven plan"), ("g.yaml", "the plan of an operator graph")):
        ran = run("export", path, *TO)
        assert ran.code == 2 and kind in ran.err and path in ran.err
    assert not os.path.exists("out")


def test_foreign_files_are_not_overwritten(run: Run, plan: str) -> None:
    os.mkdir("out")
    Path("out/megatron-lm.sh").write_text("echo mine\n")
    ran = run("export", plan, *TO)
    assert ran.code == 2 and "was not written by shardwise export" in ran.err
    assert os.listdir("out") == ["megatron-lm.sh"]
    assert Path("out/megatron-lm.sh").read_text() == "echo mine\n"


def test_a_csv_belongs_to_the_module_next_to_it(run: Run, plan: str) -> None:
    """The CSV cannot say who wrote it: it is replaced with its module, and never without it."""
    write_plan("z.yaml", small_plan(LLAMA, "pp=2,dp=4,schedule=zb_h1"))
    to = ("--to", "torchtitan", "--out", "out")
    os.mkdir("out")
    Path("out/schedule.csv").write_text("0F0\n")
    refused = run("export", "z.yaml", *to)
    assert refused.code == 2 and "out/schedule.csv" in refused.err
    assert os.listdir("out") == ["schedule.csv"]
    os.remove("out/schedule.csv")
    assert run("export", "z.yaml", *to).code == 0
    first = Path("out/schedule.csv").read_bytes()
    Path("out/schedule.csv").write_text("0F0\n")
    assert run("export", "z.yaml", *to).code == 0
    assert Path("out/schedule.csv").read_bytes() == first
    assert sorted(os.listdir("out")) == ["schedule.csv", "torchtitan_0_3.py"]


def test_a_file_in_place_of_the_folder_is_refused(run: Run, plan: str) -> None:
    Path("out").write_text("")
    ran = run("export", plan, *TO)
    assert ran.code == 2 and "--out: is not a folder" in ran.err


def test_equal_values_are_counted(run: Run, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron_lm_read_back, "read_by_megatron_lm", read_as(READING))
    ran = run("export", plan, *TO, "--validate")
    assert (ran.code, ran.err) == (0, "")
    assert "68 values read back equal" in ran.out
    assert sorted(os.listdir("out")) == FILES


def test_differences_are_listed_and_nothing_is_written(
    run: Run, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = dict(READING.arguments, micro_batch_size=2, seq_length=512)
    changed = Reading(arguments=wrong, config=READING.config, layers=READING.layers, padded_vocab_size=1024)
    monkeypatch.setattr(megatron_lm_read_back, "read_by_megatron_lm", read_as(changed))
    ran = run("export", plan, *TO, "--validate")
    assert ran.code == 4 and ran.out == ""
    assert "megatron-lm-0.19 reads strategy.micro_batch_size as 2; the plan has 1\n" in ran.err
    assert "megatron-lm-0.19 reads job.seq_len as 512; the plan has 1024\n" in ran.err
    assert not os.path.exists("out")


def test_flags_that_are_refused_differ(run: Run, plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        megatron_lm_read_back, "read_by_megatron_lm", read_as(Reading(error="AssertionError: no"))
    )
    ran = run("export", plan, *TO, "--validate")
    assert ran.code == 4 and "AssertionError: no" in ran.err


def test_without_megatron_lm_nothing_is_validated(
    run: Run, plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(_requests: Sequence[Any], **_: object) -> list[Reading]:
        raise ConfigError("Megatron-LM cannot be imported", key="--validate", allowed="pip install it")

    monkeypatch.setattr(megatron_lm_read_back, "read_by_megatron_lm", read)
    ran = run("export", plan, *TO, "--validate")
    assert ran.code == 2 and "--validate: Megatron-LM cannot be imported" in ran.err
    assert not os.path.exists("out")


def test_the_plan_is_not_replaced(run: Run, plan: str) -> None:
    os.mkdir("out")
    write_plan("out/megatron-lm.sh", small_plan(LLAMA, "dp=8"))
    ran = run("export", "out/megatron-lm.sh", *TO)
    assert ran.code == 2 and "is an input file, which would be overwritten" in ran.err
