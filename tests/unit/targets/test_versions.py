"""The versions that brought flags and keys: every one that an export writes has its version, the docs list
them, and an export to an older version names them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.targets.random_plans import random_plans
from tests.targets.replica_plans import replica_plans
from tests.unit.targets.small_plans import LLAMA, small_plan

import shardwise as sw
from shardwise.errors import ConfigError
from shardwise.plans import Plan
from shardwise.strategy import newer_target, target_of, version_of
from shardwise.targets import EXPORTERS

PAGE = Path(__file__).parents[3] / "docs" / "concepts" / "targets.md"
MEGATRON = ("megatron-lm-0.19", "megatron-fsdp-0.19")
LISTED = (*MEGATRON, "deepspeed-0.19", "fsdp2")


def keys_of(values: Mapping[str, Any], head: str = "") -> Iterator[str]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from keys_of(value, f"{head}{name}.")
        else:
            yield head + name


def written(plan: Plan, target: str) -> set[str]:
    files = EXPORTERS[target].files(plan)
    if target in MEGATRON:
        return {line.split()[0] for line in files["megatron-lm.args"].splitlines() if line.startswith("--")}
    text = next(iter(files.values()))
    return set(keys_of(json.loads(text) if target == "deepspeed-0.19" else yaml.safe_load(text)))


@pytest.mark.parametrize("target", LISTED)
def test_every_flag_of_an_export_has_its_version(target: str) -> None:
    plans = (
        random_plans(60, seed=5, target=target) if target in MEGATRON else replica_plans(target, 30, seed=5)
    )
    found = {flag for plan in plans for flag in written(plan, target)} - {"shardwise"}
    since = target_of(target).since
    assert found <= set(since) and len(found) > 10
    of_options = {flag.split()[0].rstrip(":") for values in target_of(target).options.values()
                  for value in values.values() for flag in value.flags}  # fmt: skip
    assert {flag for flag in of_options if "(" not in flag} <= set(since)
    if target != "fsdp2":  # whose versions are those of Accelerate
        assert all(version_of(version) <= version_of(target) for version in since.values())


def test_the_page_lists_them() -> None:
    rows = re.findall(r"^\| `([^`]+)` \| ([0-9.]+) \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    found: dict[str, dict[str, str]] = {}
    for target, version, flags in rows:
        found.setdefault(target, {}).update(dict.fromkeys(re.findall(r"`([^`]+)`", flags), version))
    assert found == {target: target_of(target).since for target in LISTED}


@pytest.mark.parametrize(
    ("name", "target"),
    [
        ("megatron-lm-0.12", "megatron-lm-0.19"), ("megatron-lm-0.19", None), ("megatron-lm-0.20", None),
        ("megatron-lm", None), ("deepspeed-0.9", "deepspeed-0.19"), ("gpt-0.1", None), ("", None),
        ("-1", None), ("fsdp2", None), ("transformers-4", "transformers-5"),
    ],
)  # fmt: skip
def test_older_names(name: str, target: str | None) -> None:
    assert newer_target(name) == target


def named(flag: str) -> str:
    """A flag in an error of a function, which names arguments and not options."""
    return flag.removeprefix("--").replace("-", "_")


def test_an_export_to_an_older_version_names_what_is_newer(tmp_path: Path) -> None:
    """The layout came with 0.13, a padded vocabulary with 0.14; 0.12 has the other flags of this plan."""
    plan = small_plan(LLAMA, "pp=4,dp=2,zero_stage=1,first_stage_layers=2,last_stage_layers=2")
    flag = "--pipeline-model-parallel-layout"
    assert flag in written(plan, "megatron-lm-0.19")
    with pytest.raises(ConfigError, match=f"{named(flag)} came with 0.13") as caught:
        sw.export(plan, to="megatron-lm-0.12", out=tmp_path)
    assert (caught.value.key, caught.value.allowed) == ("to", "megatron-lm-0.19")
    assert str(caught.value).count(" came with ") == 2 and list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError, match="no flag or key of this plan is newer"):
        sw.export(plan, to="megatron-lm-0.18", out=tmp_path)
