"""A child process with a pipeline stage of PyTorch: `python -m tests.targets.fsdp_stage STAGE DTYPE`.

Runs the backward passes of three micro-batches on the last of two stages, whose block is sharded by
`fully_shard` over four ranks as ZeRO stage 2 or 3, in bf16 with gradients that are reduced in DTYPE. After
the first forward pass, after each backward pass, and after the reduction at the end, it writes a line: the
bytes of whole parameters, of whole gradients and of sharded gradients. The process group is a fake one, so
that nothing is sent; stage and shards are PyTorch's own.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

WIDTH, MICROBATCHES = 64, 3


def main(zero_stage: str, dtype: str) -> None:
    torch.distributed.init_process_group("fake", rank=4, world_size=8, store=FakeStore())
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("pp", "dp"))
    block = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=getattr(torch, dtype))
    for layer in block:
        fully_shard(layer, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=zero_stage == "3")
    fully_shard(block, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=zero_stage == "3")
    stage = PipelineStage(block, 1, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    for chunk in range(MICROBATCHES):
        loss = block(torch.randn(2, WIDTH)).sum()
        if chunk == 0:
            sys.stdout.write(" ".join(str(each) for each in _held(block)) + "\n")
        inputs: dict[str, Any] = {"stage_output": loss, "output_grads": None, "input_values": []}
        stage.backward_maybe_with_nosync("full", inputs, last_backward=chunk == MICROBATCHES - 1)
        sys.stdout.write(" ".join(str(each) for each in _held(block)) + "\n")
    stage.perform_reduce_grad(grad_scale_factor=1)
    sys.stdout.write(" ".join(str(each) for each in _held(block)) + "\n")


def _held(block: nn.Module) -> tuple[int, int, int]:
    whole = gradients = sharded = 0
    for layer in block:
        for weight in layer._get_fsdp_state()._fsdp_param_group.fsdp_params:
            if weight.sharded_state.name == "UNSHARDED":
                whole += _bytes(weight.unsharded_param)
                gradients += _bytes(weight.unsharded_param.grad)
            gradients += _bytes(weight.unsharded_accumulated_grad)
            if weight.sharded_param.grad is not None:
                sharded += _bytes(weight.sharded_param.grad.to_local())
    return whole, gradients, sharded


def _bytes(tensor: Any) -> int:
    return 0 if tensor is None else tensor.numel() * tensor.element_size()


if __name__ == "__main__":
    main(*sys.argv[1:])
