"""Every flag and key of other software that the docs, the exports and the imports name exists in that
software."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from tests.targets.dataclass_fields import fields_of
from tests.targets.folders import environment_with
from tests.targets.megatron import ROOT, environment
from tests.targets.random_plans import plan_of_text, random_plans
from tests.targets.replica_plans import replica_plans
from tests.targets.titan_plans import random_titan_plans

from shardwise.targets import EXPORTERS
from shardwise.targets.deepspeed import zero_settings
from shardwise.targets.fsdp2 import accelerate_settings
from shardwise.targets.imports.megatron_lm_import import NAMES
from shardwise.targets.megatron_fsdp import fsdp_settings
from shardwise.targets.torchtitan import titan_settings

PAGES = [
    ROOT / "docs" / "how-to" / f"{name}.md"
    for name in (
        "megatron-lm",
        "torchtitan",
        "fsdp2-deepspeed-transformers",
        "other-software",
        "review-your-config",
    )
]

SOURCES = sorted((ROOT / "src" / "shardwise" / "targets").rglob("*.py"))

OTHERS = frozenset(
    (
        "--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port", "--standalone",
        "--config-file", "--recipe", "--module", "--config", "--deepspeed", "--index-url",
    )
)  # fmt: skip
"""Flags of programs that start the software."""

LISTED = """
import argparse, json
from megatron.training.arguments import add_megatron_arguments
parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
print("\\n" + json.dumps([word for action in parser._actions for word in action.option_strings]))
"""


def printed(code: str, variables: dict[str, str]) -> list[str]:
    """The JSON list in the last line that a child process prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=variables
    )
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


def own_flags() -> set[str]:
    """Options of shardwise, as its reference lists them."""
    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    return set(re.findall(r"--[a-z][a-z0-9-]*", text))


def named_flags(file: Path) -> set[str]:
    """Long options in a page, or in the texts of a module."""
    text = file.read_text()
    if file.suffix == ".py":
        constants = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
        text = "\n".join(value for value in constants if isinstance(value, str))
    return set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9](?!\w)", text))


@pytest.mark.xdist_group("megatron-lm")
def test_flags_of_megatron_lm_exist() -> None:
    known = set(printed(LISTED, environment()))
    named: set[str] = {flag for value in NAMES.values() for flag in value.split() if flag.startswith("--")}
    for target in ("megatron-lm-0.19", "megatron-fsdp-0.19"):
        for plan in random_plans(10, seed=5, target=target):
            text = EXPORTERS[target].files(plan)["megatron-lm.args"]
            named |= set(re.findall(r"(?m)^(?:# )?(--[a-z0-9-]+)", text))
            named |= set(fsdp_settings(plan))
    for file in (*PAGES, *(file for file in SOURCES if "megatron" in file.name)):
        named |= named_flags(file) - own_flags() - OTHERS
    assert len(named) > 80
    assert named - known == set()
    assert "--no-such-flag" not in known


TITAN = ROOT / ".cache" / "torchtitan" / "torchtitan"

SECTIONS = {
    "parallelism": ("config/configs.py", "ParallelismConfig"),
    "training": ("config/configs.py", "TrainingConfig"),
    "compile": ("config/configs.py", "CompileConfig"),
}
"""Sections of TorchTitan's configuration and their classes."""


def titan_fields() -> set[str]:
    return {
        f"{section}.{name}"
        for section, (file, cls) in SECTIONS.items()
        for name in fields_of(TITAN / file, cls)
    }


def titan_keywords(tree: ast.Module) -> Iterator[str]:
    """The keywords of the configurations in an exported module, with their sections."""
    classes = {cls: section for section, (_, cls) in SECTIONS.items()}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in classes:
            yield from (f"{classes[node.func.id]}.{word.arg}" for word in node.keywords)


@pytest.mark.xdist_group("torchtitan")
def test_keys_of_torchtitan_exist() -> None:
    known, named = titan_fields(), set()
    for plan in random_titan_plans(12, seed=3):
        named |= set(titan_keywords(ast.parse(EXPORTERS["torchtitan-0.3"].files(plan)["torchtitan_0_3.py"])))
        named |= {key for key in titan_settings(plan) if "." in key}
    pattern = rf"\b({'|'.join(SECTIONS)})\.(\w+)"
    for file in (*PAGES, *(file for file in SOURCES if "torchtitan" in file.name)):
        if file.suffix == ".md":
            named |= {".".join(match) for match in re.findall(pattern, file.read_text())}
    bare = set(re.findall(r"`(\w+_(?:parallel|degree|schedule|microbatch)\w*)`", PAGES[1].read_text()))
    assert len(named) > 15
    assert named - known == set()
    fields = {name.partition(".")[2] for name in known}
    assert {name for name in bare if name not in fields} <= {"local_batch_size"}


ACCELERATE = """
import json
from accelerate.commands.launch import launch_command_parser
print(json.dumps(sorted(vars(launch_command_parser().parse_args(["train.py"])))))
"""


@pytest.mark.xdist_group("accelerate")
def test_keys_of_accelerate_exist() -> None:
    known, named = set(printed(ACCELERATE, environment_with("accelerate"))), set()
    for plan in replica_plans("fsdp2", 10, seed=4):
        settings = yaml.safe_load(EXPORTERS["fsdp2"].files(plan)["accelerate.yaml"])
        for key, value in settings.items():
            named |= set(value) if isinstance(value, dict) else {key}
        named |= {key.rpartition(".")[2] for key in accelerate_settings(plan) if "." in key}
    for page in PAGES:
        named |= set(re.findall(r"\b(?:parallelism_config|fsdp)_(?:\w+_)*(?:size|strategy|params|version)\b",
                                page.read_text()))  # fmt: skip
    # Keys of the file that are no arguments, and the example of a key that Accelerate ignores.
    named -= {"compute_environment", "distributed_type", "parallelism_config_pp_size"}
    assert len(named) > 10
    assert named - known == set()


DEEPSPEED = """
import json, re, inspect
from deepspeed.runtime import config, constants
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
top = [value for value in vars(constants).values() if isinstance(value, str)]
top += re.findall(r'"([a-z0-9_]+)"', inspect.getsource(config))
print(json.dumps(sorted({*top, *DeepSpeedZeroConfig.model_fields})))
"""


@pytest.mark.xdist_group("deepspeed")
def test_keys_of_deepspeed_exist() -> None:
    known = set(printed(DEEPSPEED, {**environment_with("deepspeed"), "DS_ACCELERATOR": "cpu"}))
    named: set[str] = set()
    for plan in replica_plans("deepspeed-0.19", 10, seed=4):
        written = json.loads(EXPORTERS["deepspeed-0.19"].files(plan)["deepspeed.json"])
        named |= {key for key in written if key != "shardwise"} | set(written["zero_optimization"])
        named |= {key.rpartition(".")[2] for key in zero_settings(plan) if " " not in key}
    assert len(named) > 8
    assert named - known == set()


def test_a_page_with_a_wrong_flag_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("`--tensor-model-parallel-size 2 --tensor-parallel-degree` and a--dash, --out")
    assert named_flags(page) - own_flags() == {"--tensor-model-parallel-size", "--tensor-parallel-degree"}
    plan = plan_of_text("llama-2-7b", "tp=1,pp=1,dp=8,zero_stage=2")
    text = EXPORTERS["torchtitan-0.3"].files(plan)["torchtitan_0_3.py"]
    broken = text.replace("tensor_parallel_degree=", "tensor_parallel_size=")
    assert set(titan_keywords(ast.parse(broken))) - titan_fields() == {"parallelism.tensor_parallel_size"}
