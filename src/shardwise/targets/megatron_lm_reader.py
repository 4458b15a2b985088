"""Child process in which Megatron-LM reads its own flags: `python -m shardwise.targets.megatron_lm_reader`.

Each line of standard input is a request, `{"flags": [...], "world_size": 64}`. Each line of standard output
answers one request with these keys:

- `arguments`: the namespace after `validate_args`.
- `config`: the fields of the TransformerConfig.
- `layout`: the layers of `--pipeline-model-parallel-layout`, by pipeline rank and chunk, or null.
- `layers`: numbers of decoder layers that Megatron-LM builds, by pipeline rank and chunk.
- `padded_vocab_size`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from shardwise.targets.child_loop import plain_items, serve

_DEVICES_PER_NODE = 8
"""Processes that torchrun would start on a node; no flag depends on it."""


def main() -> None:
    """Answer requests until the input ends."""
    serve(_import, _answer)


def _import() -> None:
    import megatron.training.arguments  # noqa: F401 - is it there?


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    with _command_line(request):
        return _read()


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
        "arguments": dict(plain_items(vars(arguments))),
        "config": dict(plain_items({field.name: getattr(config, field.name) for field in fields(config)})),
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
    if "--use-megatron-fsdp" in request["flags"]:
        del os.environ["CUDA_DEVICE_MAX_CONNECTIONS"]  # which refuses this value
    before, sys.argv = sys.argv, ["megatron-lm", *request["flags"]]
    try:
        yield
    finally:
        sys.argv = before


if __name__ == "__main__":
    main()
