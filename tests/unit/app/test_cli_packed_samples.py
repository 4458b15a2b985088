"""`--mean-sample-len`: samples that are packed into a sequence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.unit.app.conftest import Run

QUESTION = (
    "evaluate", "llama-3.1-8b", "--cluster", "1x8xH100-SXM", "--seq-len", "32768", "--global-batch-size", "8",
    "--strategy", "zero_stage=3,micro_batch_size=1,recompute=full",
)  # fmt: skip


def document(run: Run, *options: str) -> Any:
    found = run(*QUESTION, *options, "--json")
    assert found.code == 0, found.err
    return json.loads(found.out)


def test_attention_is_computed_within_samples(run: Run) -> None:
    whole, equal, packed = (document(run, *more) for more in ((), sample(32768), sample(2048)))
    assert equal["result"] == whole["result"]
    assert whole["job"].get("mean_sample_len") is None and packed["job"]["mean_sample_len"] == 2048
    result, other = packed["result"], whole["result"]
    assert result["step_time_s"] < 0.75 * other["step_time_s"]
    assert result["peak_memory_bytes"]["device"] == other["peak_memory_bytes"]["device"]
    gone = other["breakdown"]["attention"] - result["breakdown"]["attention"]
    assert gone > 0.85 * other["breakdown"]["attention"]


def sample(length: int) -> tuple[str, ...]:
    return "--mean-sample-len", str(length)


def test_the_card_names_the_samples(run: Run) -> None:
    packed = run(*QUESTION, *sample(2048)).out
    assert "packed samples of 2,048 tokens" in packed
    assert "attention: within samples of 2,048 tokens (--mean-sample-len)" in packed
    shorter = ["4096" if word == "32768" else word for word in QUESTION]
    masked = " ".join(run(*shorter, *sample(2048), "--attention", "unfused").out.split())
    assert "scores of the whole sequence, masked between packed samples (--attention)" in masked
    assert "packed" not in run(*QUESTION).out


def test_the_checker_recomputes_a_plan_with_samples(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    assert run(*QUESTION, *sample(2048), "--save", str(path)).code == 0
    assert run("check", str(path)).code == 0
    text = path.read_text("utf-8")
    assert yaml.safe_load(text)["job"]["mean_sample_len"] == 2048
    # The time of other samples is another time, and samples are no longer than the sequence.
    for other in ("1024", "32769"):
        path.write_text(text.replace("mean_sample_len: 2048", f"mean_sample_len: {other}"), "utf-8")
        assert run("check", str(path)).code != 0


@pytest.mark.parametrize("length", ["0", "32769", "1.5", "many"])
def test_a_length_out_of_range_is_one_line(run: Run, length: str) -> None:
    found = run(*QUESTION, "--mean-sample-len", length)
    assert found.code == 2
    assert found.err.startswith("shardwise: error: --mean-sample-len: is not a whole number in range")


def test_graphs_have_no_samples(run: Run) -> None:
    words = ("frontier", "graph:mlp", "--cluster", "1x2xV100-32G", "--global-batch-size", "64")
    found = run(*words, *sample(8))
    assert found.code == 2 and "--mean-sample-len: is for models" in found.err


@pytest.mark.parametrize("target", ["shardwise", "torchtitan"])
def test_targets_that_attend_over_whole_sequences_refuse_them(run: Run, target: str) -> None:
    found = run(*QUESTION, "--target", target, *sample(2048))
    assert found.code == 2 and "packed samples" in found.err


def test_an_export_says_where_boundaries_come_from(run: Run, tmp_path: Path) -> None:
    path, out = tmp_path / "plan.yaml", tmp_path / "files"
    assert run(*QUESTION, *sample(2048), "--save", str(path), "--target", "megatron-fsdp").code == 0
    assert run("export", str(path), "--to", "megatron-fsdp", "--out", str(out)).code == 0
    text = "".join(file.read_text("utf-8") for file in out.iterdir())
    assert "Attention is predicted within packed samples of 2048 tokens:" in text and "--sft" in text
