"""docs/how-to/megatron-lm.md and torchtitan.md: what they show is of their plans, and their families are
exported."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.search import plan_of_strategy
from shardwise.strategy import Job, complete, parse_fields, target_of
from shardwise.targets import EXPORTERS
from shardwise.targets.megatron_lm_model import FAMILIES
from shardwise.targets.torchtitan_model import MODULES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "megatron-lm.md").read_text()
TITAN_PAGE = (ROOT / "docs" / "how-to" / "torchtitan.md").read_text()


def _exported(strategy: str, *, target: str, file: str) -> str:
    """A file of the plan of Llama 3.1 70B on 64 devices with this strategy."""
    model, cluster = load_model(str(ROOT / "examples" / "llama-3.1-70b")), load_cluster("8x8xH100-SXM")
    completed = complete(
        parse_fields(strategy, key="strategy"), devices=cluster.devices, layers=model.layers, experts=None,
        global_batch_size=256,
    )  # fmt: skip
    job = Job(seq_len=8192, global_batch_size=256, dtype="bf16")
    return EXPORTERS[target].files(plan_of_strategy(model, cluster, job, completed))[file]


def test_the_flags_on_the_export_page_are_those_of_its_plan() -> None:
    """tp 2 x cp 4 x pp 8 is 64 devices; 48 chunks, the first with one layer, the last with none."""
    text = _exported(
        "tp=2,cp=4,pp=8,vpp=6,optim_shard=4,last_stage_layers=0",
        target="megatron-lm-0.19", file="megatron-lm.args",
    )  # fmt: skip
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None and text.endswith(shown[1])


def test_the_overrides_on_the_export_page_are_those_of_its_plan() -> None:
    text = _exported(
        "tp=2,cp=4,pp=8,vpp=6,optim_shard=4,last_stage_layers=0",
        target="megatron-lm-0.19", file="megatron-bridge.txt",
    )  # fmt: skip
    shown = re.findall(r"```text\n(.*?)```", PAGE, re.DOTALL)[1]
    assert "model.pipeline_model_parallel_size=8" in shown
    assert set(shown.splitlines()) <= set(text.splitlines())


def test_the_parallelism_on_the_page_of_torchtitan_is_that_of_its_plan() -> None:
    text = _exported("tp=4,pp=8,vpp=10,dp=2,zero_stage=2", target="torchtitan-0.3", file="torchtitan_0_3.py")
    shown = re.search(r"```python\n(.*?)```", TITAN_PAGE, re.DOTALL)
    assert shown is not None and shown[1] in text


def test_the_families_on_the_page_of_torchtitan_are_exported() -> None:
    line = re.search(r"^- Models of other families than (.*?);", TITAN_PAGE, re.MULTILINE)
    assert line is not None
    assert tuple(re.findall(r"`(\w+)`", line[1])) == tuple(MODULES)
    assert set(MODULES) == set(target_of("torchtitan-0.3").families)


def test_the_families_on_the_export_page_are_exported() -> None:
    line = re.search(r"^- Models of other families than (.*?);", PAGE, re.MULTILINE)
    assert line is not None
    assert tuple(re.findall(r"`(\w+)`", line[1])) == FAMILIES


def test_the_targets_on_the_export_page_exist() -> None:
    assert set(re.findall(r"--to (\S+)", PAGE)) == {"megatron-lm-0.19"}
    assert set(re.findall(r"--to (\S+)", TITAN_PAGE)) == {"torchtitan-0.3"}
