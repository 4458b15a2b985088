"""docs/how-to/megatron-lm.md: its flags are those of its plan, its families those that can be exported."""

from __future__ import annotations

import re
from pathlib import Path

from shardwise.cluster import load_cluster
from shardwise.model import load_model
from shardwise.search import plan_of_strategy
from shardwise.strategy import Job, complete, parse_fields
from shardwise.targets import EXPORTERS
from shardwise.targets.megatron_lm_model import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "how-to" / "megatron-lm.md").read_text()


def test_the_flags_on_the_export_page_are_those_of_its_plan() -> None:
    """tp 2 x cp 4 x pp 8 is 64 devices; 48 chunks, the first with one layer, the last with none."""
    model, cluster = load_model(str(ROOT / "examples" / "llama-3.1-70b")), load_cluster("8x8xH100-SXM")
    job = Job(seq_len=8192, global_batch_size=256, dtype="bf16")
    fields = parse_fields("tp=2,cp=4,pp=8,vpp=6,optim_shard=4,last_stage_layers=0", key="strategy")
    strategy = complete(
        fields, devices=cluster.devices, layers=model.layers, experts=None, global_batch_size=256
    )
    text = EXPORTERS["megatron-lm-0.19"].files(plan_of_strategy(model, cluster, job, strategy))[
        "megatron-lm.args"
    ]
    shown = re.search(r"```text\n(.*?)```", PAGE, re.DOTALL)
    assert shown is not None and text.endswith(shown[1])


def test_the_families_on_the_export_page_are_exported() -> None:
    line = re.search(r"^- Models of other families than (.*?);", PAGE, re.MULTILINE)
    assert line is not None
    assert tuple(re.findall(r"`(\w+)`", line[1])) == FAMILIES


def test_the_targets_on_the_export_page_exist() -> None:
    assert set(re.findall(r"--to (\S+)", PAGE)) == {"megatron-lm-0.19"}
