"""The commands that write files, and what judges the files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import yaml
from tests.fuzz.readers import NCCL

from shardwise.cluster import load_events
from shardwise.graph import load_graph
from shardwise.inputs import read_mapping
from shardwise.plans import read_plan
from shardwise.runtime.checkpoint import finished, newest
from shardwise.sim import read_trace
from shardwise.strategy import read_calibration

ROOT = Path(__file__).resolve().parents[2]
TINY = str(ROOT / "examples" / "tiny.yaml")
JOB = ("--seq-len", "64", "--global-batch-size", "8")
LARGE = ("--seq-len", "2048", "--global-batch-size", "64", "--target", "megatron-lm-0.19")
MODULE = """
import torch


class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(20)))

    def forward(self, given):
        return self.layers(given).square().mean()


def module():
    return Chain(), (torch.zeros(8, 64),)
"""
PLAN, TARGET_PLAN, TRACE = "plan.yaml", "megatron.yaml", "events.jsonl"
"""Inputs of some commands."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command in a folder that has the inputs. `judge` takes the folder, and fails where a file that the
    command has written is not complete."""

    name: str
    arguments: Sequence[str]
    judge: Callable[[Path], None]


def write_inputs(folder: Path) -> None:
    """Writes the plans and the trace that commands read."""
    plans = {
        PLAN: ("plan", TINY, "--cluster", "1x2xcpu", *JOB, "--use-all"),
        TARGET_PLAN: (
            "plan",
            "llama-3.1-8b",
            "--cluster",
            "2x8xH100-SXM",
            *LARGE,
            "--target",
            "megatron-lm-0.19",
        ),
    }
    for name, arguments in plans.items():
        _run(folder, *arguments, "--save", name)
    (folder / "module.py").write_text(MODULE)
    (folder / "nccl.txt").write_text(NCCL)
    rows = (
        (ROOT / "src/shardwise/accuracy/data/measurements.csv").read_text("utf-8").splitlines(keepends=True)
    )
    (folder / "rows.csv").write_text("".join(rows[:150]), "utf-8")
    _run(folder, "events", "generate", "preemption", "--cluster", "2x8xH100-SXM", "--out", TRACE)


def _run(folder: Path, *arguments: str) -> None:
    command = [sys.executable, "-m", "shardwise", *arguments]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def _each(pattern: str, read: Callable[[str], object]) -> Callable[[Path], None]:
    def judge(folder: Path) -> None:
        for path in sorted(folder.glob(pattern)):
            read(str(path))

    return judge


def _text_with(end: str) -> Callable[[str], None]:
    def read(path: str) -> None:
        assert Path(path).read_text("utf-8").rstrip().endswith(end), f"{path} is torn"

    return read


def _yaml_with(key: str) -> Callable[[str], None]:
    def read(path: str) -> None:
        assert key in yaml.safe_load(Path(path).read_text("utf-8")), f"{path} is torn"

    return read


def _frontier(folder: Path) -> None:
    """Plans are complete, and the index names none that is not there or has another hash."""
    _each("out/*.yaml", read_plan)(folder)
    for index in folder.glob("out/*.json"):
        listed = read_mapping(str(index))
        names, hashes = listed["plans"], listed["plan_hashes"]
        assert isinstance(names, list) and isinstance(hashes, list)
        for name, stated in zip(names, hashes, strict=True):
            if name is not None:
                assert yaml.safe_load((folder / "out" / name).read_text("utf-8"))["hash"] == stated, name


def _training(folder: Path) -> None:
    """The newest checkpoint verifies, and all complete lines of the log are JSON."""
    root = str(folder / "checkpoints")
    if finished(root):
        newest(root)
    for log in folder.glob("out.log"):
        lines = log.read_text("utf-8").split("\n")
        for line in lines[:-1]:
            json.loads(line)
    _each("out.json", read_trace)(folder)


def commands() -> list[Command]:
    """All commands that write files, without those that need a cluster or a measurement of minutes."""
    search = ("llama-3.1-8b", "--cluster", "8x8xH100-SXM", "--seq-len", "4096", "--global-batch-size", "512")
    on_four = ("frontier", TINY, "--cluster", "1x4xcpu", *JOB)
    generate = ("events", "generate", "diurnal", "--cluster", "64x8xH100-SXM", "--length", "7d")
    checkpoint = ("--checkpoint", "checkpoints", "--checkpoint-every", "2")
    small = ("gpt2", "--cluster", "2x8xA100-80G", "--seq-len", "1024", "--global-batch-size", "64")
    search_in_two = ("plan", *small, "--exhaustive", "--workers", "2", "--save", "out.yaml")
    train = ("train", PLAN, "--steps", "6", *checkpoint, "--log", "out.log", "--trace", "out.json")
    export = ("export", TARGET_PLAN, "--to", "megatron-lm-0.19", "--out", "out")
    calibrate = ("calibrate", "--from", "nccl.txt", "--cluster", "1x2xH100-SXM", "--out", "out.yaml")
    replan = ("replan", TARGET_PLAN, "--events", "lost n1", "--save", "out.yaml")
    replay = ("replay", TARGET_PLAN, "--events", TRACE, "--plot", "out.svg")
    capture = ("capture", "module.py:module", "--out", "out.yaml")
    return [
        Command("plan", ("plan", *search, "--save", "out.yaml"), _each("out.yaml", read_plan)),
        Command("plan with workers", search_in_two, _each("out.yaml", read_plan)),
        Command("frontier", (*on_four, "--save", "out"), _frontier),
        Command("frontier plot", (*on_four, "--plot", "out.html"), _each("out.html", _text_with("</html>"))),
        Command("simulate", ("simulate", PLAN, "--trace", "out.json"), _each("out.json", read_trace)),
        Command("export", export, _each("out/*.yaml", _yaml_with("num_layers"))),
        Command("capture", capture, _each("out.yaml", load_graph)),
        Command("replan", replan, _each("out.yaml", read_plan)),
        Command("replay", replay, _each("out.svg", _text_with("</svg>"))),
        Command("events", (*generate, "--out", "out.jsonl"), _each("out.jsonl", load_events)),
        Command("fit", ("fit", "rows.csv", "--out", "out.yaml"), _each("out.yaml", _yaml_with("schema"))),
        Command("calibrate", calibrate, _each("out.yaml", read_calibration)),
        Command("train", train, _training),
    ]
