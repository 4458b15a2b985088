"""docs/how-to/fsdp2-deepspeed-transformers.md: its families and files are those of the targets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.unit.targets.small_plans import LLAMA, small_plan

from shardwise.strategy import newest_target, target_of
from shardwise.targets import EXPORTERS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "fsdp2-deepspeed-transformers.md").read_text()
TARGETS = ("fsdp2", "deepspeed-0.19", "megatron-fsdp-0.19", "transformers-5")


def rows(heading: str) -> list[list[str]]:
    """The cells of the rows of the table under this heading."""
    table = PAGE[PAGE.index(heading) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


@pytest.mark.parametrize("name", TARGETS)
def test_the_families_on_the_page_are_those_of_the_target(name: str) -> None:
    (cell,) = (cells[1] for cells in rows("| target | families |") if f"`{name}`" in cells[0])
    assert tuple(re.findall(r"`(\w+)`", cell.split(";")[0])) == target_of(name).families


def test_families_with_tensor_parallelism_are_those_of_fsdp2() -> None:
    (cell,) = (cells[1] for cells in rows("| target | families |") if "`fsdp2`" in cells[0])
    (limit,) = (limit for limit in target_of("fsdp2").limits if limit.families and limit.field == "tp")
    listed = re.findall(r"`(\w+)`", cell.split("above 1 for")[1])
    assert set(listed) == set(target_of("fsdp2").families) - set(limit.families)


@pytest.mark.parametrize("name", TARGETS)
def test_the_files_on_the_page_are_written(name: str) -> None:
    (cell,) = (cells[1] for cells in rows("| target | files | read back by |") if f"`{name}`" in cells[0])
    plan = small_plan(LLAMA, "tp=1,dp=8,zero_stage=3")
    assert set(re.findall(r"`([\w.-]+)`", cell)) == set(EXPORTERS[name].files(plan))


@pytest.mark.parametrize("name", TARGETS)
def test_dtypes_and_optimizers_on_the_page_are_those_of_the_target(name: str) -> None:
    place = TARGETS.index(name) + 1
    table = {cells[0].strip("`"): cells[place] for cells in rows("| field | `fsdp2` |")}
    assert set(table["dtype"].split(", ")) == set(target_of(name).dtypes)
    assert set(table["optimizer"].split(", ")) == set(target_of(name).optimizers)


def test_a_name_without_a_version_is_the_newest() -> None:
    assert [newest_target(name) for name in ("fsdp2", "deepspeed", "megatron-fsdp", "transformers")] == list(
        TARGETS
    )
    assert newest_target("") == "" and newest_target("megatron") == "megatron"
