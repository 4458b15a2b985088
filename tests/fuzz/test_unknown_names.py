"""A misspelt key or name is never taken for a default: each reader refuses it with what was found, what is
allowed and the likely name. In files of other training software it is a finding."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.fuzz.readers import ROOT, Reader, readers
from tests.fuzz.runner import judged

from shardwise.inputs import misspelt, unknown
from shardwise.targets.imports import IMPORTERS

READERS = readers()

MISSPELT: Mapping[str, tuple[str, str, str]] = {
    "config": ("tie_word_embeddings", "tie_word_embedings", "did you mean tie_word_embeddings?"),
    "dimensions": ("hidden:", "hiden:", "hidden: is missing; found hiden"),
    "graph": ("operators:", "operatrs:", "operators: is missing; found operatrs"),
    "cluster": ("bandwidth:", "bandwith:", "bandwidth: is missing; found bandwith"),
    "shorthand": ("H100-SXM", "H10O-SXM", "did you mean H100-SXM?"),
    "events": ('"slow"', '"slo"', "did you mean slow?"),
    "event words": ("slow", "slo", "did you mean slow?"),
    "availability": ("add", "ad", "found '0,ad,a'; allowed: ms,add|remove,node"),
    "plan": ('"schema"', '"schem"', "schema: is not a plan file"),
    "rehashed plan": ('"objective"', '"objectiv"', "objective: is missing; found objectiv"),
    "checked plan": ('"recompute"', '"recomput"', "recompute: is missing; found recomput"),
    "calibration": ("device:", "devic:", "device: is missing; found devic"),
    "measurements": (
        "  time  algbw  busbw #wrong    time",
        "  tmie  algbw  busbw #wrong    tmie",
        "has not all columns",
    ),
    "logs of train": ("predicted_s", "predictd_s", "predicted_s: is missing; found predictd_s"),
    "rows": ("micro_batch", "micro_bach", "did you mean micro_batch?"),
    "space": ("axes:", "axs:", "did you mean axes?"),
    "schedule": ("microbatches=", "microbatchs=", "allowed: schedule=NAME microbatches=N"),
    "trace": ("traceEvents", "traceEvent", "traceEvents: is missing; found traceEvent"),
    "manifest": ('"optimizer"', '"optimizr"', "optimizer: is missing; found optimizr"),
    "files of a cluster": ("SwitchName=leaf1 Nodes", "SwitchName=leaf1 Nods", "Nods"),
    "strategy": ("zero_stage=", "zero_stag=", "did you mean zero_stage?"),
}
"""For each reader: a text, as it is misspelt, and a part of the error."""

UNREAD: Mapping[str, tuple[str, str, str]] = {
    "megatron-lm-0.19": (
        "--tensor-model-parallel-size", "--tensor-model-paralel-size", "tensor_model_parallel_size",
    ),
    "megatron-fsdp-0.19": ("--global-batch-size", "--global-bach-size", "global_batch_size"),
    "torchtitan-0.3": ("global_batch_size", "global_bach_size", "global_batch_size"),
    "deepspeed-0.19": ('"stage"', '"stag"', "stage"),
    "trainer": ('"gradient_checkpointing"', '"gradient_chekpointing"', "gradient_checkpointing"),
    "fsdp2": ("fsdp_offload_params", "fsdp_offload_param", "fsdp_offload_params"),
}  # fmt: skip
"""For each format of training software: a key, as it is misspelt, and the key that the finding names."""


def test_every_reader_is_here() -> None:
    """Without transformers-5: there every argument that is not read is a finding."""
    assert {*MISSPELT, *UNREAD, "transformers-5"} == {*READERS}
    assert {*UNREAD, "transformers-5"} == {*IMPORTERS, "trainer"}


def misspelt_text(reader: Reader, right: str, wrong: str) -> str:
    return next(text for text in reader.seeds() if right in text).replace(right, wrong, 1)


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_name_is_refused_with_the_likely_one(tmp_path: Path, name: str) -> None:
    right, wrong, words = MISSPELT[name]
    fault, refused = judged(READERS[name], misspelt_text(READERS[name], right, wrong), tmp_path)
    assert fault == ""
    assert words in refused and "; allowed: " in refused


@pytest.mark.parametrize("name", UNREAD)
def test_a_misspelt_key_of_training_software_is_a_finding(tmp_path: Path, name: str) -> None:
    right, wrong, meant = UNREAD[name]
    path = tmp_path / "file.txt"
    hints = []
    for text in (misspelt_text(READERS[name], right, right), misspelt_text(READERS[name], right, wrong)):
        path.write_text(text)
        run = READERS[name].read(str(path))
        hints.append([one.text for one in run.findings if "did you mean" in one.text])  # type: ignore[attr-defined]
    assert hints == [[], [f"is not a known key (did you mean {meant}?)"]]


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("zero_stag", ["zero_stage"], "zero_stage"),  # a letter less
        ("zero_stagee", ["zero_stage"], "zero_stage"),  # a letter more
        ("zero_stane", ["zero_stage"], "zero_stage"),  # another letter
        ("zero_satge", ["zero_stage"], "zero_stage"),  # two letters swapped
        ("Zero_Stage", ["zero_stage"], "zero_stage"),  # only the case differs
        ("zero_stga", ["zero_stage"], None),
        ("fp8_recipe", ["fp4_recipe"], None),  # a digit is another name
        ("bf16_", ["fp16"], None),
        ("tpp", ["tp"], None),  # too short: any short word is one letter from another
    ],
)
def test_a_name_is_misspelt_where_one_letter_differs(word: str, known: list[str], meant: str | None) -> None:
    assert misspelt(word, known) == meant


def test_one_helper_names_the_likely_name() -> None:
    """Readers that write their own hint forget what is allowed, or compare by rules of their own."""
    own = {
        path.relative_to(ROOT / "src/shardwise").as_posix()
        for path in (ROOT / "src/shardwise").rglob("*.py")
        if re.search(r"did you mean \{|get_close_matches", path.read_text("utf-8"))
    }
    assert own == {"inputs/messages.py", "targets/imports/imported.py"}


def test_an_unknown_name_has_what_was_found_what_is_allowed_and_the_likely_name() -> None:
    error = unknown("is not a colour", "gren", ("green", "red"), key="paint", file="f.yaml")
    assert str(error) == (
        "f.yaml: paint: is not a colour (did you mean green?); found 'gren'; allowed: green, red"
    )
    assert str(unknown("is not known", 7, ["mlp"], prefix="graph:")) == (
        "is not known; found 7; allowed: graph:mlp"
    )
    assert str(unknown("is not known", "x", [])) == "is not known; found 'x'; allowed: none"
    many = unknown("is not known", "n7", [f"n{index}" for index in range(10**5)])
    assert (many.allowed or "").endswith("n39, ...") and "did you mean" not in many.message
