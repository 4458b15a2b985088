"""Child process in which TorchTitan reads its own configuration: `python -m
shardwise.targets.torchtitan_reader`.

Each line of standard input is a request, `{"files": {...}, "module": "...", "config": "...", "world_size":
64}`. TorchTitan's `ConfigManager` imports the module from a folder of its own. Then, for the first rank of
each pipeline stage, TorchTitan builds the model on the meta device, divides it into stages and shards it; the
process groups are fake, so nothing is computed or sent. Each line of standard output answers one request with
these keys:

- `config`: the fields of the `Trainer.Config`, without the model.
- `model`: the fields of the model's configuration.
- `degrees`: sizes of the axes of the device mesh; `groups`: the ranks of each axis that rank 0 is in.
- `parts`: the model parts of each pipeline rank (`_part`).
- `ring`: how keys and values are sent among context-parallel ranks.
- `schedule`: the class of the pipeline schedule; `microbatches`: those of a pass; `orders`: the actions of
  each pipeline rank, or nulls.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shardwise.targets.child_loop import plain_items, serve

_MODEL_AXES = ("tp", "ep")
"""Axes that divide parameters among ranks for good; those of data parallelism share and gather them."""


def main() -> None:
    """Answer requests until the input ends."""
    serve(_import, _answer)


def _import() -> None:
    import torch
    import torchtitan.tools.utils as utils

    # Nothing runs on a device; TorchTitan's modules copy these two names when they are imported.
    utils.device_type, utils.device_module = "cpu", torch.cpu
    import torchtitan.trainer  # noqa: F401 - is it there?


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    with _folder_of(request["files"], request["module"]) as folder:
        return _read(request, folder)


def _read(request: Mapping[str, Any], folder: str) -> dict[str, Any]:
    from torchtitan.config import ConfigManager

    config = ConfigManager().parse_args(["--module", request["module"], "--config", request["config"]])
    described = _model(config.model_spec)
    whole = _whole(config)
    pp, world_size = config.parallelism.pipeline_parallel_degree, int(request["world_size"])
    ranks = [stage * (world_size // pp) for stage in range(pp)]
    answers = [_on_rank(config, whole, folder, rank, world_size) for rank in ranks]
    return {
        **answers[0],
        "config": dict(plain_items(_without_model(config))),
        "model": described,
        "ring": _ring(sys.modules[request["module"]]),
        "parts": [answer["parts"] for answer in answers],
        "orders": [answer["orders"] for answer in answers],
    }


def _ring(module: Any) -> str | None:
    """How keys and values are sent by PyTorch, which an imported configuration may have set."""
    rotate = getattr(module, "set_rotate_method", None)
    if rotate is None:
        return None
    found = str(rotate.__globals__["_cp_options"].rotate_method.name)
    rotate("allgather")  # PyTorch's default, for the next request
    return found


def _whole(config: Any) -> Any:
    """The model before it is divided, on the meta device."""
    import torch
    from torchtitan.config import TORCH_DTYPE_MAP
    from torchtitan.distributed.utils import set_spmd_backend
    from torchtitan.tools.utils import set_default_dtype

    set_spmd_backend(config.parallelism.spmd_backend)
    model = config.model_spec.model
    model.update_from_config(config=config)
    config._validate_cuda_graphs()
    with torch.device("meta"), set_default_dtype(TORCH_DTYPE_MAP[config.training.dtype]):
        return model.build()


def _without_model(config: Any) -> dict[str, Any]:
    """The fields of a `Trainer.Config` as plain values."""
    from dataclasses import asdict

    names = ("training", "parallelism", "compile", "optimizer", "debug")
    return {
        **{name: asdict(getattr(config, name)) for name in names},
        "loss": {"class": type(config.loss).__qualname__, **dict(plain_items(_plain_fields(config.loss)))},
    }


def _model(spec: Any) -> dict[str, Any]:
    """The fields of the model's configuration. Layers that are all alike are listed one by one."""
    model = spec.model
    return {
        "name": spec.name,
        "class": type(model).__qualname__,
        "dim": model.dim,
        "vocab_size": model.vocab_size,
        "embeddings": [model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim],
        "output": [model.lm_head.in_features, model.lm_head.out_features, model.lm_head.bias],
        "norm": dict(plain_items(_plain_fields(model.norm))),
        "enable_weight_tying": model.enable_weight_tying,
        "init_std": model.lm_head.param_init["weight"].keywords["std"],
        "layers": [_layer(layer) for layer in model.layers],
    }


def _layer(layer: Any) -> dict[str, Any]:
    attention, moe = layer.attention, layer.moe
    answer = {
        "norms": [dict(plain_items(_plain_fields(norm))) for norm in (layer.attention_norm, layer.ffn_norm)],
        "attention": {
            name: getattr(attention, name) for name in ("dim", "n_heads", "n_kv_heads", "head_dim")
        },
        "qkv_bias": attention.qkv_linear.wqkv.bias,
        "output_bias": attention.wo.bias,
        "qk_norm": attention.qk_norm and dict(plain_items(_plain_fields(attention.qk_norm))),
        "inner_attention": type(attention.inner_attention).__qualname__,
        "rope": {
            "class": type(attention.rope).__qualname__,
            **dict(plain_items(_plain_fields(attention.rope))),
        },
        "ffn": None,
        "moe": None,
    }
    if layer.feed_forward is not None:
        answer["ffn"] = _linears(layer.feed_forward)
    if moe is not None:
        experts, dispatcher = moe.routed_experts.inner_experts, moe.routed_experts.token_dispatcher
        answer["moe"] = {
            "num_experts": [part.num_experts for part in (moe, moe.router, experts, dispatcher)],
            "top_k": [moe.router.top_k, dispatcher.top_k],
            "hidden_dim": experts.hidden_dim,
            "dims": [moe.router.gate.in_features, experts.dim],
            "router": dict(plain_items(_plain_fields(moe.router))),
            "router_bias": moe.router.gate.bias,
            "shared": moe.shared_experts and _linears(moe.shared_experts),
            "dispatcher": type(dispatcher).__qualname__,
        }
    return answer


def _linears(feed_forward: Any) -> list[list[Any]]:
    """Inputs, outputs and bias of the linear layers of an MLP."""
    linears = (feed_forward.w1, feed_forward.w2, feed_forward.w3)
    return [[linear.in_features, linear.out_features, linear.bias] for linear in linears]


def _plain_fields(config: Any) -> dict[str, Any]:
    return {field.name: getattr(config, field.name) for field in fields(config)}


def _on_rank(config: Any, whole: Any, folder: str, rank: int, world_size: int) -> dict[str, Any]:
    """What TorchTitan makes of the whole model on one rank."""
    import torch
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed.utils import init_fake_mode

    init_fake_mode(world_size, rank=rank)
    try:
        dims = ParallelDims.from_config(config.parallelism, world_size)
        dims.build_mesh()
        _check_as_trainer(config, dims)
        schedule, models = _divided(config, whole, dims, folder)
        stages = _stages(schedule) if schedule is not None else [0]
        if len(stages) < len(models):
            raise ValueError(
                f"{type(schedule).__name__} runs {len(stages)} of the {len(models)} model parts of a rank"
            )
        meshes = {name: dims.get_optional_mesh(name) for name in _AXES}
        return {
            "degrees": {name: 1 if mesh is None else mesh.size() for name, mesh in meshes.items()},
            "groups": {
                name: [rank] if mesh is None else mesh.mesh.flatten().tolist()
                for name, mesh in meshes.items()
            },
            "parts": [_part(model, stage) for model, stage in zip(models, stages, strict=True)],
            "schedule": None if schedule is None else type(schedule).__name__,
            "microbatches": 1 if schedule is None else schedule._n_microbatches,
            "orders": _order(schedule, dims),
        }
    finally:
        torch.distributed.destroy_process_group()


_AXES = ("pp", "dp_replicate", "fsdp", "cp", "tp", "ep", "batch")
"""Axes of TorchTitan's meshes."""


def _order(schedule: Any, dims: Any) -> list[str] | None:
    """The actions of the rank; None for schedules of a single part, which do not run in the order that they
    show."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti

    if not isinstance(schedule, PipelineScheduleMulti):
        return None
    rank = dims.get_mesh("pp").get_local_rank()
    return [str(action) for action in schedule.pipeline_order[rank] if action is not None]


def _check_as_trainer(config: Any, dims: Any) -> None:
    """The checks in the constructor of TorchTitan's trainer, which itself needs a device and data."""
    training, parallelism = config.training, config.parallelism
    divisor = dims.tp if parallelism.enable_sequence_parallel else 1
    if dims.cp > 1:
        divisor *= 2 * dims.cp
    if training.seq_len % divisor:
        raise ValueError(f"sequence length {training.seq_len} is not divisible by {divisor}")
    rows = training.local_batch_size * dims.dp_replicate * dims.dp_shard
    if training.global_batch_size % rows:
        raise ValueError(
            f"global batch size must be multiple of local batch size times data-parallel degree"
            f" ({training.global_batch_size} % {rows} != 0)"
        )


def _divided(config: Any, whole: Any, dims: Any, folder: str) -> tuple[Any, list[Any]]:
    """The pipeline schedule (None: no pipeline) and the model parts, as TorchTitan's trainer makes them."""
    import torch

    spec = config.model_spec
    common = {
        "parallel_dims": dims,
        "training": config.training,
        "parallelism": config.parallelism,
        "compile_config": config.compile,
        "ac_config": config.activation_checkpoint,
        "dump_folder": folder,
    }
    if not dims.pp_enabled:
        models, schedule = [spec.parallelize_fn(whole, **common)], None
    else:
        schedule, models, _, _ = spec.pipelining_fn(
            whole,
            device=torch.device("cpu"),
            model_config=spec.model,
            parallelize_fn=spec.parallelize_fn,
            loss_fn=config.loss.build(compile_config=config.compile),
            **common,
        )
    config.optimizer.build(model_parts=models)
    return schedule, models


def _stages(schedule: Any) -> list[int]:
    """The stages of the rank, in the order of its model parts."""
    found = schedule._stages if hasattr(schedule, "_stages") else [schedule._stage]
    return [stage.stage_index for stage in found]


def _part(model: Any, stage: int) -> dict[str, Any]:
    """A model part: its `stage`; its decoder `layers`, and the `recomputed` ones (`is_selective`: with a
    policy by operators); other `modules`; elements of its `parameters` that this rank computes with, and that
    it holds with FSDP (`local`); how its FSDP units treat them."""
    from torchtitan.distributed.fsdp import FSDPModule

    if model.enable_weight_tying:  # sharding has made two of them; so does `Decoder.init_states`
        model.tok_embeddings.weight = model.lm_head.weight
    layers = dict(model.layers.named_children())
    groups = [
        group
        for module in model.modules()
        if isinstance(module, FSDPModule)
        for group in module._get_fsdp_state()._fsdp_param_groups
    ]
    wrapped = {
        name: "context_fn" in layer.checkpoint_fn.keywords
        for name, layer in layers.items()
        if hasattr(layer, "checkpoint_fn")
    }
    return {
        "stage": stage,
        "layers": [int(name) for name in layers],
        "modules": [
            name for name in ("tok_embeddings", "norm", "lm_head") if getattr(model, name) is not None
        ],
        "recomputed": [int(name) for name in wrapped],
        "is_selective": any(wrapped.values()),
        "parameters": sum(_computed(weight) for weight in model.parameters()),
        "local": sum(_held(weight) for weight in model.parameters()),
        "reshards": sorted({bool(group._reshard_after_forward) for group in groups}),
        "offloads": sorted({type(group.offload_policy).__name__ for group in groups}),
        "dtypes": sorted({str(group.mp_policy.param_dtype) for group in groups}),
        "reduce_dtypes": sorted({str(group.mp_policy.reduce_dtype) for group in groups}),
        "weight_dtypes": sorted({str(weight.dtype) for weight in model.parameters()}),
    }


def _held(weight: Any) -> int:
    """Elements of a parameter on this rank."""
    return int(weight.to_local().numel() if hasattr(weight, "to_local") else weight.numel())


def _computed(weight: Any) -> int:
    """Elements of a parameter on this rank where data parallelism has gathered it."""
    if not hasattr(weight, "to_local"):
        return int(weight.numel())
    count, mesh = int(weight.numel()), weight.device_mesh
    for name, size, placement in zip(mesh.mesh_dim_names, mesh.shape, weight.placements, strict=True):
        if name in _MODEL_AXES and not placement.is_replicate():
            count //= size
    return count


@contextmanager
def _folder_of(files: Mapping[str, str], module: str) -> Iterator[str]:
    """A folder with these files, from which `module` is imported."""
    with TemporaryDirectory() as folder:
        for name, text in files.items():
            Path(folder, name).write_text(text, encoding="utf-8")
        sys.path.insert(0, folder)
        importlib.invalidate_caches()
        try:
            yield folder
        finally:
            sys.path.remove(folder)
            sys.modules.pop(module, None)


if __name__ == "__main__":
    main()
