"""A child process in which Megatron-LM builds its model: `python -m tests.targets.model_builder`.

Each line of the standard input is a request, `{"flags": [...], "world_size": 64}`. Each line of the standard
output is its answer: `{"parameters": [...]}`, the elements of all parameters on the first rank of each
pipeline stage, or `{"error": "one line"}`. The process group is a fake one and tensors are on the meta
device, so that nothing is computed or sent; process groups and modules are Megatron-LM's own.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

LOCAL = (
    "--transformer-impl", "local", "--attention-backend", "unfused", "--no-persist-layer-norm",
    "--no-rope-fusion", "--no-gradient-accumulation-fusion",
)  # fmt: skip
"""Flags for Megatron-LM's own modules instead of those of Transformer Engine and Apex, which need a GPU; both
have the same parameters."""

REFUSALS = (AssertionError, LookupError, NotImplementedError, RuntimeError, SystemExit, TypeError, ValueError)
"""Exceptions by which Megatron-LM refuses flags or sizes."""

WITHOUT = (
    "--moe-grouped-gemm", "--recompute-granularity", "--recompute-modules", "--recompute-method",
    "--recompute-num-layers",
)  # fmt: skip
"""Flags of Transformer Engine's kernels, without which experts are separate modules; and of recomputation,
which changes no parameter and may need these kernels."""


def main() -> None:
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    _stand_in_for_a_device()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"parameters": _parameters(request["flags"], request["world_size"])}
        except REFUSALS as error:
            answer = {"error": f"{type(error).__name__}: {' '.join(str(error).split())}"}
        replies.write(json.dumps(answer) + "\n")
        replies.flush()


def _stand_in_for_a_device() -> None:
    """Replaces functions of a GPU that modules call while they are built."""
    import torch

    # Tied embeddings move to the current device; routers of experts create a stream.
    torch.cuda.current_device = lambda: torch.device("meta")
    torch.Tensor.cuda = lambda tensor, *_: tensor
    torch.cuda.Stream = lambda *_: None
    # torch.nn initialises learned positions; on the meta device this would import the compiler.
    torch.nn.init.normal_ = lambda weight, *_: weight


def _parameters(flags: Sequence[str], world_size: int) -> list[int]:
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args

    os.environ.update(RANK="0", WORLD_SIZE=str(world_size), LOCAL_RANK="0", CUDA_DEVICE_MAX_CONNECTIONS="1")
    sys.argv = ["megatron-lm", *_remaining(flags), *LOCAL]
    arguments = validate_args(parse_args(ignore_unknown_args=False))
    config = core_transformer_config_from_args(arguments)
    # Neither changes a parameter, but modules would need Transformer Engine or a GPU for them.
    config.sequence_parallel, config.context_parallel_size = False, 1
    config.use_cpu_initialization, config.perform_initialization = True, False
    return [_on_rank(arguments, config, stage) for stage in range(arguments.pipeline_model_parallel_size)]


def _remaining(flags: Sequence[str]) -> Iterator[str]:
    """The flags with their values, except those of WITHOUT."""
    is_left_out = False
    for word in flags:
        if word.startswith("--"):
            is_left_out = word in WITHOUT
        if not is_left_out:
            yield word


def _on_rank(arguments: Any, config: Any, stage: int) -> int:
    """Parameter elements of the model chunks that the first rank of a pipeline stage builds."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import gpt_config_from_args
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before_it = arguments.tensor_model_parallel_size * arguments.context_parallel_size
    if not arguments.use_tp_pp_dp_mapping:
        before_it *= arguments.data_parallel_size
    torch.distributed.init_process_group(
        "fake", rank=stage * before_it, world_size=arguments.world_size, store=FakeStore()
    )
    try:
        parallel_state.initialize_model_parallel(
            arguments.tensor_model_parallel_size,
            arguments.pipeline_model_parallel_size,
            arguments.virtual_pipeline_model_parallel_size,
            context_parallel_size=arguments.context_parallel_size,
            expert_model_parallel_size=arguments.expert_model_parallel_size,
            num_distributed_optimizer_instances=arguments.num_distributed_optimizer_instances,
            expert_tensor_parallel_size=arguments.expert_tensor_parallel_size,
            order="tp-cp-ep-pp-dp" if arguments.use_tp_pp_dp_mapping else "tp-cp-ep-dp-pp",
            create_gloo_process_groups=False,
        )
        if parallel_state.get_pipeline_model_parallel_rank() != stage:
            raise ValueError(f"rank {stage * before_it} is not on pipeline stage {stage}")
        model = gpt_config_from_args(arguments, config)
        builder = model.get_builder_cls()(model)
        groups = ProcessGroupCollection.use_mpu_process_groups()
        chunks = arguments.virtual_pipeline_model_parallel_size
        with torch.device("meta"):
            models = [
                builder.build_model(groups, vp_stage=None if chunks is None else chunk)
                for chunk in range(chunks or 1)
            ]
        return sum(weight.numel() for model in models for weight in model.parameters())
    finally:
        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
