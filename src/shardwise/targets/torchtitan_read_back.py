"""Read-back: TorchTitan parses an exported module and builds the sharded model in a child process
(`torchtitan_reader`), and its values are compared with those of the plan.

The values come from the objects that TorchTitan built, or from its parsed configuration, never from the
exported text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from shardwise.plans import Plan
from shardwise.schedule import generate, legal_mask
from shardwise.strategy import SCHEDULES, Strategy, strategy_record
from shardwise.targets.child_process import Reader
from shardwise.targets.read_back import ReadBack, compared, rejected
from shardwise.targets.torchtitan import (
    CONFIG,
    DTYPES,
    MODULE,
    NARROW,
    has_narrow_moments,
    is_async,
    is_compiled,
    microbatches_of,
    stage_parts,
)
from shardwise.targets.torchtitan_code import NAMES
from shardwise.targets.torchtitan_model import Scaling, TitanExperts, TitanModel, titan_model

TITAN_READER = Reader(
    module="shardwise.targets.torchtitan_reader",
    software="TorchTitan",
    install="pip install torchtitan==0.3.*, with PyTorch 2.13",
)

RING = ("headtail", "ALL_TO_ALL")
"""TorchTitan's balance of work among context-parallel ranks, and PyTorch's way of a ring."""

AXIS_ORDER = "tp-cp-dp-pp"
"""The order of ranks of TorchTitan's meshes."""


def titan_request(plan: Plan, files: Mapping[str, str]) -> dict[str, Any]:
    """The request for TorchTitan to read these files as those of `plan`."""
    return {"files": dict(files), "module": MODULE, "config": CONFIG, "world_size": plan.cluster.devices}


def read_titan_files_back(
    plan: Plan, files: Mapping[str, str], *, environment: Mapping[str, str] | None = None
) -> ReadBack:
    """Compare `plan` with what TorchTitan reads in its files. Raises as `Reader.answers`."""
    (answer,) = TITAN_READER.answers([titan_request(plan, files)], environment=environment)
    return titan_read_back(plan, answer)


def titan_read_back(plan: Plan, answer: Mapping[str, Any]) -> ReadBack:
    """Compare every exported value of `plan` with the value in an answer of the reader."""
    if "error" in answer:
        return rejected(answer["error"])
    return compared(_of_plan(plan), _of_answer(plan, answer))


def _of_plan(plan: Plan) -> dict[str, object]:
    job, strategy = plan.job, plan.best.strategy
    model = titan_model(plan.model, seq_len=job.seq_len)
    counts = stage_parts(strategy, model.layers)
    return {
        **_values(model),
        "job.seq_len": job.seq_len,
        "job.global_batch_size": job.global_batch_size,
        "job.dtype": job.dtype,
        "job.optimizer": job.optimizer,
        "loss": ("CrossEntropyLoss.Config", model.vocab_size),
        "attention": (
            "ScaledDotProductAttention.Config" if strategy.cp > 1 else "FlexAttention.Config",
            f"{NAMES[model.module]['rope']}.Config",
        ),
        "context parallelism": RING if strategy.cp > 1 else None,
        "CUDA graphs": False,
        "compiled layers": is_compiled(plan),
        "async tensor parallelism": is_async(plan),
        "moments in 16 bits": has_narrow_moments(plan),
        "devices": plan.cluster.devices,
        "micro-batches": microbatches_of(plan),
        **{f"strategy.{name}": value for name, value in strategy_record(strategy).items()},
        "layers of stages": _layers_of(counts),
        "recomputed layers": _recomputed_of(counts, strategy),
        "embedding": (0,),
        "output": (len(counts) - 1,),
    }


def _layers_of(counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The layers of each stage, by their index in the model."""
    starts = [sum(counts[:stage]) for stage in range(len(counts))]
    return tuple(tuple(range(start, start + count)) for start, count in zip(starts, counts, strict=True))


def _recomputed_of(counts: Sequence[int], strategy: Strategy) -> tuple[tuple[int, ...], ...]:
    most = strategy.recompute_layers if strategy.recompute == "full" else 0
    return tuple(layers[:most] for layers in _layers_of(counts))


def _of_answer(plan: Plan, answer: Mapping[str, Any]) -> dict[str, object]:
    config, training = answer["config"], answer["config"]["training"]
    strategy = _strategy(plan, answer)
    stages = sorted((part for rank in answer["parts"] for part in rank), key=lambda part: part["stage"])
    return {
        **_values(_model(answer["model"])),
        "job.seq_len": training["seq_len"],
        "job.global_batch_size": training["global_batch_size"],
        "job.dtype": _dtype(stages),
        "job.optimizer": _optimizer(config["optimizer"]),
        "loss": (config["loss"]["class"], config["loss"].get("global_vocab_size")),
        "attention": _attention(answer["model"]["layers"]),
        "context parallelism": (
            (config["parallelism"]["context_parallel_load_balancer"], answer["ring"])
            if answer["degrees"]["cp"] > 1
            else None
        ),
        "CUDA graphs": not training["disable_cuda_graphs"],
        "compiled layers": config["compile"]["enable"] and "model" in config["compile"]["components"],
        "async tensor parallelism": config["compile"]["enable_async_tensor_parallel"],
        "moments in 16 bits": config["optimizer"]["implementation"] == NARROW,
        "devices": _devices(answer["degrees"]),
        "micro-batches": _microbatches(answer, training["global_batch_size"]),
        **{f"strategy.{name}": value for name, value in strategy.items()},
        "layers of stages": tuple(tuple(part["layers"]) for part in stages),
        "recomputed layers": tuple(tuple(part["recomputed"]) for part in stages),
        "embedding": tuple(part["stage"] for part in stages if "tok_embeddings" in part["modules"]),
        "output": tuple(part["stage"] for part in stages if {"norm", "lm_head"} <= set(part["modules"])),
    }


def _attention(layers: Sequence[Mapping[str, Any]]) -> tuple[Any, Any]:
    """The classes of attention and of rotary embeddings."""
    return _same(layer["inner_attention"] for layer in layers), _same(
        layer["rope"]["class"] for layer in layers
    )


def _devices(degrees: Mapping[str, int]) -> int:
    return degrees["pp"] * degrees["batch"] * degrees["cp"] * degrees["tp"]


def _microbatches(answer: Mapping[str, Any], batch: int) -> object:
    """Micro-batches of a step. A pipeline passes over all of them at once."""
    passes = batch / (answer["config"]["training"]["local_batch_size"] * answer["degrees"]["batch"])
    found = passes * answer["microbatches"]
    return found if answer["degrees"]["pp"] == 1 or passes == 1 else f"{passes:g} x {answer['microbatches']}"


def _dtype(stages: Sequence[Mapping[str, Any]]) -> str:
    """The dtype of computations, where weights and reductions are in fp32."""
    found = {
        name: _one_of(part[name] for part in stages) for name in ("dtypes", "weight_dtypes", "reduce_dtypes")
    }
    ours = {f"torch.{name}": dtype for dtype, name in DTYPES.items()}
    if found["weight_dtypes"] == found["reduce_dtypes"] == "torch.float32":
        return ours.get(found["dtypes"], found["dtypes"])
    return ", ".join(f"{name} {value}" for name, value in found.items())


def _one_of(found: Any) -> str:
    """The value that all parts have; several are joined."""
    return ", ".join(sorted({str(value) for values in found for value in values}))


def _optimizer(config: Mapping[str, Any]) -> str:
    names = [group["optimizer_name"] for group in config["param_groups"]]
    return "adamw" if names == ["AdamW"] else ", ".join(names)


def _strategy(plan: Plan, answer: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Strategy. A schedule with the actions of the plan's is shown as the plan's."""
    planned = plan.best.strategy
    config, degrees, parts = answer["config"], answer["degrees"], answer["parts"]
    parallelism, training = config["parallelism"], config["training"]
    stages = sorted((part for rank in parts for part in rank), key=lambda part: part["stage"])
    is_piped = degrees["pp"] > 1
    has_experts = any(layer["moe"] for layer in answer["model"]["layers"])
    recomputed = [part["recomputed"] for part in stages]
    most = max(map(len, recomputed))
    return {
        "tp": degrees["tp"],
        "pp": degrees["pp"],
        "vpp": _one_of([len(rank)] for rank in parts) if len({*map(len, parts)}) > 1 else len(parts[0]),
        "cp": degrees["cp"],
        "cp_kind": "ring",
        "ep": degrees["ep"],
        # Without ep, TorchTitan divides experts over the ranks of tp.
        "etp": degrees["tp"] if has_experts and degrees["ep"] == 1 else 1,
        "dp": degrees["batch"],
        **_titan_shards(degrees, stages),
        "micro_batch_size": (
            parallelism["pipeline_parallel_microbatch_size"] if is_piped else training["local_batch_size"]
        ),
        "schedule": _schedule(planned, answer) if is_piped else planned.schedule,
        "sequence_parallel": parallelism["enable_sequence_parallel"] and degrees["tp"] > 1,
        "recompute": _recomputation(stages, most),
        # A stage with fewer layers than the plan says recomputes all of its layers.
        "recompute_layers": planned.recompute_layers if recomputed == _planned(plan) else most,
        "offload": "none"
        if _one_of(part["offloads"] for part in stages) == "OffloadPolicy"
        else "all states",
        "axis_order": _order(planned, answer["groups"]),
        "first_stage_layers": len(stages[0]["layers"]),
        "last_stage_layers": len(stages[-1]["layers"]),
    }


def _recomputation(stages: Sequence[Mapping[str, Any]], most: int) -> str:
    if any(part["is_selective"] for part in stages):
        return "selective"
    return "full" if most else "none"


def _planned(plan: Plan) -> list[list[int]]:
    counts = stage_parts(plan.best.strategy, plan.model.layers)
    return [list(layers) for layers in _recomputed_of(counts, plan.best.strategy)]


def _titan_shards(degrees: Mapping[str, int], stages: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """Sharding degrees of parameters, gradients and optimizer states."""
    shard = degrees["fsdp"]
    reshards = {value for part in stages for value in part["reshards"]}
    params: object = shard if reshards == {True} else 1
    if len(reshards) > 1:
        params = f"1 or {shard}"
    return {"param_shard": 1 if shard == 1 else params, "grad_shard": shard, "optim_shard": shard}


_SINGLE = {"Schedule1F1B": "1f1b", "ScheduleGPipe": "gpipe"}


def _schedule(planned: Strategy, answer: Mapping[str, Any]) -> str:
    """The name of the plan's schedule where every rank has its stages, and its actions in their order; else
    PyTorch's class."""
    parts, found = answer["parts"], str(answer["schedule"])
    if found in _SINGLE:
        return _SINGLE[found]
    pp, microbatches, vpp = len(parts), answer["microbatches"], len(parts[0])
    if not legal_mask(SCHEDULES.index(planned.schedule), pp, microbatches, vpp):
        return found
    table = generate(planned.schedule, pp=pp, microbatches=microbatches, vpp=vpp)
    placed = [[part["stage"] for part in rank] for rank in parts]
    owned = [
        [stage for stage, owner in enumerate(table.stage_rank) if owner == rank] for rank in range(len(parts))
    ]
    orders = [_compute(order) for order in answer["orders"]]
    is_same = orders == [[str(action) for action in row] for row in table.ranks]
    return planned.schedule if is_same and placed == owned else found


def _compute(order: Sequence[str]) -> list[str]:
    """The actions that compute, one by one; pairs that PyTorch overlaps are written as `(0F1;3B0)...`."""
    found = []
    for action in order:
        for one in action.partition(")")[0].strip("(").split(";"):
            if not one.endswith("REDUCE_GRAD"):
                found.append(one)
    return found


def _order(planned: Strategy, groups: Mapping[str, Sequence[int]]) -> str:
    """The axes by the distance of their ranks; axes without other ranks as the plan has them."""
    ranks = {"tp": groups["tp"], "cp": groups["cp"], "dp": groups["batch"], "pp": groups["pp"]}
    steps = {axis: group[1] - group[0] for axis, group in ranks.items() if len(group) > 1}
    found, inner = sorted(steps, key=lambda axis: steps[axis]), 1
    for axis in found:
        if steps[axis] != inner:
            return f"{axis} over every {steps[axis]}th rank"
        inner *= len(ranks[axis])
    same = [axis for axis in planned.axis_order.split("-") if axis in steps]
    return planned.axis_order if same == found else "-".join(found)


def _values(model: TitanModel) -> dict[str, object]:
    """The fields of a model, including those of its experts."""
    own = {f"model.{field.name}": getattr(model, field.name) for field in fields(TitanModel)}
    experts = own.pop("model.experts")
    for size in fields(TitanExperts):
        own[f"model.experts.{size.name}"] = None if experts is None else getattr(experts, size.name)
    return own


def _model(read: Mapping[str, Any]) -> TitanModel:
    """The model that TorchTitan builds. Where layers differ in a value that all layers share, the value is
    the text of all."""
    layers = read["layers"]
    rope = _same_fields(layer["rope"] for layer in layers)
    moes = [layer["moe"] for layer in layers]
    dims = {read["dim"], read["embeddings"][1], read["output"][0]}
    dims |= {layer["attention"]["dim"] for layer in layers}
    dims |= {dim for moe in moes if moe for dim in moe["dims"]}
    dims |= {layer["ffn"][0][0] for layer in layers if layer["ffn"]}
    vocab = {read["vocab_size"], read["embeddings"][0], read["output"][1]}
    has_other = read["output"][2] or any(layer["output_bias"] for layer in layers)
    norms = [
        read["norm"],
        *(norm for layer in layers for norm in (*layer["norms"], layer["qk_norm"]) if norm),
    ]
    scaling: Scaling | None = None
    if rope["scaling"] != "none":
        scaling = (
            rope["scaling_factor"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
            rope["original_max_position_embeddings"],
        )
    return TitanModel(
        module=read["name"],
        layers=len(layers),
        dim=_only(dims),
        vocab_size=_only(vocab),
        enable_weight_tying=read["enable_weight_tying"],
        n_heads=_same(layer["attention"]["n_heads"] for layer in layers),
        n_kv_heads=_same(layer["attention"]["n_kv_heads"] for layer in layers),
        head_dim=_same([rope["dim"], *(layer["attention"]["head_dim"] for layer in layers)]),
        qkv_bias=_same([*(layer["qkv_bias"] for layer in layers), *([None] if has_other else [])]),
        qk_norm=_same(layer["qk_norm"] is not None for layer in layers),
        norm_eps=_same(norm["eps"] for norm in norms),
        init_std=read["init_std"],
        theta=rope["theta"],
        scaling=scaling,
        max_seq_len=rope["max_seq_len"],
        ffn_hidden_dim=_ffn([layer["ffn"] for layer in layers if layer["ffn"]]),
        experts=_titan_experts(moes) if any(moes) else None,
    )


def _same(values: Any) -> Any:
    """The value that all have; the text of all where they differ."""
    found = list(values)
    return found[0] if all(value == found[0] for value in found) else str(found)


def _same_fields(values: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The same, field by field."""
    found = list(values)
    return {name: _same(each[name] for each in found) for name in found[0]}


def _only(values: set[int]) -> Any:
    return next(iter(values)) if len(values) == 1 else str(sorted(values))


def _ffn(mlps: Sequence[Sequence[Sequence[Any]]]) -> Any:
    """The width of dense MLPs; None without any. Biases of theirs are shown."""
    if not mlps:
        return None
    width = _same(mlp[0][1] for mlp in mlps)
    plain = [[mlp[0][0], width, False] for mlp in mlps]
    is_plain = all(
        [*mlp] == [one, [one[1], one[0], False], one] for mlp, one in zip(mlps, plain, strict=True)
    )
    return width if is_plain else str(mlps[0])


_DISPATCHER = "AllToAllTokenDispatcher.Config"


def _titan_experts(moes: Sequence[Mapping[str, Any] | None]) -> TitanExperts:
    routed = [moe for moe in moes if moe]
    router = _same_fields(moe["router"] for moe in routed)
    is_plain = router["score_func"] == "softmax" and router["route_scale"] == 1
    is_plain &= not router["num_expert_groups"] and not any(
        moe["shared"] or moe["router_bias"] or moe["dispatcher"] != _DISPATCHER for moe in routed
    )
    return TitanExperts(
        num_experts=_only({count for moe in routed for count in moe["num_experts"]}),
        top_k=_same([*(count for moe in routed for count in moe["top_k"]), *([] if is_plain else [router])]),
        hidden_dim=_same(moe["hidden_dim"] for moe in routed),
        pattern=tuple(int(bool(moe)) for moe in moes),
        route_norm=router["route_norm"],
    )
