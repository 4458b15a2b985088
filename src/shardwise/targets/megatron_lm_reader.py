"""Child process in which Megatron-LM reads its own flags: `python -m shardwise.targets.megatron_lm_reader`.

Each line of standard input is a request, `{"flags": [...], "world_size": 64}`. Each line of standard output
answers one request with these keys:

- `arguments`: the namespace after `validate_args`.
- `config`: the fields of the TransformerConfig.
- `layout`: the layers of `--pipeline-model-parallel-layout`, by pipeline rank and chunk, or null.
- `layers`: numbers of decoder layers that Megatron-LM builds, by pipeline rank and chunk.
- `padded_vocab_size`.

A rejected request has only `error`, one line; where Megatron-LM cannot be imported, also `is_missing`.
Enumerations and functions are their names, data types their text; other objects are omitted.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import fields
from enum import Enum
from typing import Any, TextIO

_FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions by which Megatron-LM rejects flags or fails to import."""

_DEVICES_PER_NODE = 8
"""Processes that torchrun would start on a node; no flag depends on it."""


def main() -> None:
    """Answer requests until the input ends."""
    replies = _own_output()
    try:
        with _silence():
            import megatron.training.arguments  # noqa: F401 - is it there?
        missing = None
    except _FAILURES as error:
        missing = _line_of(error)
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"error": missing, "is_missing": True} if missing is not None else _answer(request)
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def _own_output() -> TextIO:
    """Standard output for answers only; everything that Megatron-LM writes to it goes to standard error."""
    sys.stdout.flush()
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    output = io.StringIO()
    try:
        with _silence(output), _command_line(request):
            return _read()
    except SystemExit:
        # argparse prints the usage, and then one line with its reason.
        lines = output.getvalue().strip().splitlines() or ["Megatron-LM exited while it read the flags"]
        return {"error": lines[-1]}
    except _FAILURES as error:
        return {"error": _line_of(error)}


def _read() -> dict[str, Any]:
    """Megatron-LM's reading of the command line of this process."""
    from megatron.training.argument_utils import (
        core_transformer_config_from_args,
        pretrain_cfg_container_from_args,
    )
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.vocab_utils import calculate_padded_vocab_size

    arguments = validate_args(parse_args(ignore_unknown_args=False))
    pretrain_cfg_container_from_args(arguments)
    config = core_transformer_config_from_args(arguments)
    padded = arguments.padded_vocab_size
    if padded is None and arguments.vocab_size is not None:
        padded = calculate_padded_vocab_size(
            arguments.vocab_size,
            arguments.make_vocab_size_divisible_by,
            arguments.tensor_model_parallel_size,
            logging_enabled=False,
        )
    return {
        "arguments": dict(_plain_items(vars(arguments))),
        "config": dict(_plain_items({field.name: getattr(config, field.name) for field in fields(config)})),
        "layout": _layout(config),
        "layers": _layers(config),
        "padded_vocab_size": padded,
    }


def _layout(config: Any) -> list[list[list[str]]] | None:
    """Names of layers by pipeline rank and chunk."""
    layout = config.pipeline_model_parallel_layout
    if layout is None:
        return None
    return [[[layer.name for layer in chunk] for chunk in rank] for rank in layout.layout]


def _layers(config: Any) -> list[list[int]]:
    """Numbers of decoder layers by pipeline rank and chunk."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build

    layout = _layout(config)
    if layout is not None:
        return [[chunk.count("decoder") for chunk in rank] for rank in layout]
    chunks = range(config.virtual_pipeline_model_parallel_size or 1)
    ranks = range(config.pipeline_model_parallel_size)
    return [[get_num_layers_to_build(config, chunk, rank) for chunk in chunks] for rank in ranks]


@contextmanager
def _command_line(request: Mapping[str, Any]) -> Iterator[None]:
    """Set the flags as those of this process, and the variables that torchrun sets for its first rank."""
    world_size = int(request["world_size"])
    os.environ.update(
        RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_RANK="0",
        LOCAL_WORLD_SIZE=str(min(world_size, _DEVICES_PER_NODE)),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    before, sys.argv = sys.argv, ["megatron-lm", *request["flags"]]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _silence(output: io.StringIO | None = None) -> Iterator[None]:
    """Capture the output of Python code (Megatron-LM prints all arguments)."""
    captured = output or io.StringIO()
    with redirect_stdout(captured), redirect_stderr(captured):
        yield


def _plain_items(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        is_plain, plain = _plain(value)
        if is_plain:
            yield name, plain


def _plain(value: Any) -> tuple[bool, Any]:
    """Whether JSON can represent the value, and its representation."""
    if isinstance(value, Enum):
        return True, value.name
    if value is None or isinstance(value, bool | int | float | str):
        return True, value
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return all(is_plain for is_plain, _ in parts), [part for _, part in parts]
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return True, str(value)
    name = getattr(value, "__name__", None)
    return isinstance(name, str), name


def _line_of(error: BaseException) -> str:
    """The type and the message of an exception on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


if __name__ == "__main__":
    main()
