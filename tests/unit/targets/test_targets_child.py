"""The child process that reads flags, with a stand-in for Megatron-LM that prints as much as the real one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardwise.errors import ConfigError, InternalError
from shardwise.targets.megatron_lm_read_back import ReaderRequest, Reading, read_by_megatron_lm

ARGUMENTS = """
import argparse, enum, os, sys
Backend = enum.Enum("Backend", ["flash", "auto"])
print("noise of an import")
def parse_args(ignore_unknown_args):
    assert not ignore_unknown_args
    parser = argparse.ArgumentParser("pretrain")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--vocab-size", type=int)
    parser.add_argument("--die", action="store_true")
    args = parser.parse_args()
    args.world_size = int(os.environ["WORLD_SIZE"])
    return args
def validate_args(args):
    print("noise of Python")
    os.write(1, b"noise of C\\n")
    if args.die:
        os._exit(3)
    assert args.layers % 2 == 0, f"layers {args.layers} are\\n  odd"
    args.backend, args.pairs, args.log = Backend.flash, (1, 2), sys.stdin
    args.padded_vocab_size, args.make_vocab_size_divisible_by = None, 8
    args.tensor_model_parallel_size = 2
    return args
"""

UTILS = """
import enum
from dataclasses import dataclass
from types import SimpleNamespace
Layer = enum.Enum("Layer", ["embedding", "decoder", "loss"])
def silu(x): ...
@dataclass
class Config:
    activation_func: object
    pipeline_model_parallel_layout: object
    pipeline_model_parallel_size: int = 2
    virtual_pipeline_model_parallel_size: object = None
def pretrain_cfg_container_from_args(args):
    if args.layers == 6:
        raise KeyError("six")
def core_transformer_config_from_args(args):
    halves = [[Layer.embedding, Layer.decoder], []], [[Layer.decoder], [Layer.loss]]
    return Config(silu, SimpleNamespace(layout=halves) if args.layers == 2 else None)
"""

VOCAB = """
def calculate_padded_vocab_size(size, by, tp, logging_enabled):
    return -(-size // (by * tp)) * by * tp
"""

BLOCK = """
def get_num_layers_to_build(config, chunk, rank):
    return 10 * rank + chunk
"""

MODULES = {
    "training/arguments.py": ARGUMENTS,
    "training/argument_utils.py": UTILS,
    "training/vocab_utils.py": VOCAB,
    "core/transformer/transformer_block.py": BLOCK,
}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    for name, text in MODULES.items():
        path = tmp_path / "megatron" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    own = str(Path(__file__).resolve().parents[3] / "src")
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), own))}


def _read(environment: dict[str, str], *flags: str) -> Reading:
    (reading,) = read_by_megatron_lm([ReaderRequest(flags=flags, world_size=16)], environment=environment)
    return reading


@pytest.mark.slow
def test_arguments_and_configuration_are_returned_as_plain_values(environment: dict[str, str]) -> None:
    reading = _read(environment, "--layers", "4", "--vocab-size", "50")
    assert reading.error is None
    assert reading.arguments == {
        "layers": 4, "vocab_size": 50, "die": False, "world_size": 16, "backend": "flash", "pairs": [1, 2],
        "padded_vocab_size": None, "make_vocab_size_divisible_by": 8, "tensor_model_parallel_size": 2,
    }  # fmt: skip
    assert reading.config["activation_func"] == "silu"
    assert reading.padded_vocab_size == 64  # the next multiple of 8 * 2
    assert reading.layout is None
    assert reading.layers == ((0,), (10,))  # 10 * rank + chunk, of 2 ranks with a chunk each


@pytest.mark.slow
def test_a_layout_is_returned_by_rank_and_chunk(environment: dict[str, str]) -> None:
    reading = _read(environment, "--layers", "2")
    assert reading.layout == ((("embedding", "decoder"), ()), (("decoder",), ("loss",)))
    assert reading.layers == ((1, 0), (1, 0))
    assert reading.padded_vocab_size is None


@pytest.mark.slow
def test_each_refusal_is_one_line_and_the_next_request_is_read(environment: dict[str, str]) -> None:
    texts = ("--layers 3", "--layers 6", "--depth 1", "--layers 8")
    requests = [ReaderRequest(flags=tuple(text.split()), world_size=8) for text in texts]
    odd, six, unknown, read = read_by_megatron_lm(requests, environment=environment)
    assert odd.error == "AssertionError: layers 3 are odd"
    assert six.error == "KeyError: 'six'"
    assert unknown.error == "pretrain: error: unrecognized arguments: --depth 1"
    assert read.error is None and read.arguments["world_size"] == 8


def test_a_killed_child_is_an_error(environment: dict[str, str]) -> None:
    with pytest.raises(InternalError, match="answered 0 of 1 requests"):
        _read(environment, "--layers", "4", "--die")


@pytest.mark.slow
def test_a_failed_import_names_the_package_to_install(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "megatron" / "training" / "arguments.py").write_text("import no_such_kernels\n")
    with pytest.raises(ConfigError, match=r"no_such_kernels.*pip install megatron-core==0\.19") as refused:
        _read(environment, "--layers", "4")
    assert refused.value.key == "--validate"


def test_no_process_starts_without_a_request() -> None:
    assert read_by_megatron_lm([], environment={}) == []
