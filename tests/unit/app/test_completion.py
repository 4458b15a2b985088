"""What shells complete: values of options and arguments, through the parser that the shell asks."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from shardwise.app.cli import completion
from shardwise.cluster import device_names, load_cluster
from shardwise.model import catalogue_names
from shardwise.strategy import FIELDS, is_value, parse_fields


def completed(words: str) -> list[str]:
    """What bash offers for the last word of a command line."""
    environment = {
        **os.environ,
        "_SHARDWISE_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    command = [sys.executable, "-m", "shardwise"]
    return subprocess.run(command, env=environment, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("shardwise plan llama-3.1-8", ["llama-3.1-8b"]),
        ("shardwise frontier graph:vgg", ["graph:vgg16"]),
        ("shardwise plan m --target megatron-l", ["megatron-lm-0.19"]),
        ("shardwise plan m --cluster 8x8xH100-S", ["8x8xH100-SXM"]),
        ("shardwise plan m --objective d", ["devices"]),
        ("shardwise launch p.yaml --with t", ["torchrun"]),
        ("shardwise plan m --fix tp=8,zero", ["tp=8,zero_stage="]),
        ("shardwise plan graph:vgg", []),
    ],
)
def test_the_shell_gets_values(words: str, expected: list[str]) -> None:
    assert completed(words) == expected


def test_every_model_device_and_field_is_offered() -> None:
    assert completion.models("") == list(catalogue_names())
    assert completion.clusters("1x4x") == [f"1x4x{name}" for name in device_names()]
    assert completion.clusters("4x") == [f"4x{name}" for name in device_names()]
    assert completion.clusters("1x8xA100-80G+1x8xV100-16") == ["1x8xA100-80G+1x8xV100-16G"]
    assert "two-classes" in completion.clusters("two")
    assert {one.removesuffix("=") for one in completion.strategy_fields("")} >= set(FIELDS)
    for name in completion.clusters(""):
        load_cluster(name)


def test_offered_values_of_fields_are_values() -> None:
    for name in (*FIELDS, "zero_stage"):
        for pair in completion.strategy_fields(f"tp=2,{name}=" if name != "tp" else "tp="):
            field, value = pair.split(",")[-1].split("=")
            assert field == name and is_value(name, parse_fields(f"{name}={value}")[name])
    assert completion.strategy_fields("schedule=inter") == ["schedule=interleaved_1f1b"]
    # Where the shell splits words at =, it asks for the value alone.
    assert completion.strategy_fields("interl") == ["interleaved_1f1b"]
    assert completion.software_options("moment_dtype=") == ["moment_dtype=fp32", "moment_dtype=bf16"]
    assert completion.changes("inter_node_b") == ["inter_node_bandwidth="]


def test_every_completer_finds_values_and_refuses_others() -> None:
    for name in ("MODEL", "--cluster", "--target", "--to", "--software", "--strategy", "--set", "--dtype",
                 "--optimizer", "--mode", "--space", "--with", "--price", "--what-if"):  # fmt: skip
        complete = completion.completer(name)
        assert complete is not None and complete("") and complete("no such value") == []
    assert completion.completer("--save") is None
